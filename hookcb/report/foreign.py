"""Reading files that other programs have written: weights, tables of numbers, and events of TensorBoard."""

import csv
import json
import math
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hookcb.diagnosis.measurements.state_dicts import dicts_in, is_optimizer, tensors
from hookcb.diagnosis.rules import series_of
from hookcb.loggers.base import import_extra
from hookcb.records.series import Series
from hookcb.report.saved import is_saved

SAFE = ".safetensors"
OF_TORCH = (".pt", ".pth", ".bin", ".ckpt", ".th", ".tar")
PLACES = ("step", "global_step", "iteration", "iter", "epoch")  # columns that number the rows, best first
DELIMITERS = ",;\t"


def read_index(path: Path) -> tuple[list[Path], dict[str, str]]:
    """Files that are there of those in an index such as `model.safetensors.index.json`, and the index.

    Raises:
        ValueError: If it is damaged, or names no files in its folder.
    """
    try:
        index = json.loads(path.read_text("utf-8"))["weight_map"]
        files = sorted(set(index.values()))
        is_known = all(isinstance(x, str) for x in (*index, *files))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged, or has no 'weight_map' of names and files") from error
    if not (files and is_known):
        raise ValueError(f"{path} has an empty 'weight_map', or one that is not of names and files")
    if any(Path(x).name != x for x in files):
        raise ValueError(f"{path} names files outside of its folder: {files[0]!r}")
    return [path.parent / x for x in files if (path.parent / x).is_file()], index


def is_of_torch(file: Path) -> bool:
    """Whether `torch.save` may have written a file."""
    with file.open("rb") as opened:
        begin = opened.read(4)
    return begin[:2] in (b"PK", b"\x80\x02") or file.suffix.lower() in OF_TORCH


def is_ours(file: Path) -> bool:
    """Whether it is a checkpoint, or has saved records, of hookcb."""
    try:
        state = read_torch(file)
    except ValueError:
        return False  # the message comes as it is read
    return isinstance(state, dict) and is_saved(state)


def read_torch(file: Path) -> Any:
    """Content of a file of `torch.save`; runs no code from it, and reads tensors as they are used.

    Raises:
        ValueError: If it is damaged, or has objects other than tensors and plain values.
    """
    given: dict[str, Any] = {"map_location": "cpu", "weights_only": True}
    with warnings.catch_warnings(action="ignore"):
        try:
            try:
                return torch.load(file, mmap=True, **given)
            except RuntimeError:  # a file of before torch 1.6
                return torch.load(file, mmap=False, **given)
        except Exception as error:  # torch's unpickler may raise any error
            if found := re.search(r"GLOBAL ([\w.]+)", str(error)):
                raise ValueError(_refused(file, found[1])) from error
            raise ValueError(f"{file} cannot be read; it is damaged, or not a file of torch.save") from error


def _refused(file: Path, name: str) -> str:
    return (
        f"{file} has objects of the class {name}, and hookcb runs no code from a file. If you trust it, "
        f"convert it: torch.save(torch.load({str(file)!r}, weights_only=False).state_dict(), 'weights.pt'), "
        "or save only the entry with the weights"
    )


def read_weights(file: Path) -> Iterator[tuple[str, Tensor, bool]]:
    """Names and tensors of a file, one after the other, and whether it is a state of an optimizer.

    Raises:
        ValueError: If it is damaged, or has no tensors.
        ModuleNotFoundError: If it needs safetensors, and that is not installed.
    """
    if file.suffix == SAFE:
        yield from _read_safe(file)
        return
    n = 0
    for key, x, is_state in _named(read_torch(file)):
        n += 1
        yield key, x, is_state
    if not n:
        raise ValueError(f"{file} has no tensors by name")


def _read_safe(file: Path) -> Iterator[tuple[str, Tensor, bool]]:
    library = import_extra("safetensors", "safetensors", "safetensors")
    try:
        with library.safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # it has no other iterator
                yield name, opened.get_tensor(name), False
    except library.SafetensorError as error:
        raise ValueError(f"{file} cannot be read; it is truncated or damaged: {error}") from error


def _named(state: Any) -> Iterator[tuple[str, Tensor, bool]]:
    if isinstance(state, Tensor):
        yield "the tensor", state, False
    several = sum(bool(tensors(x)) for _, x, _ in dicts_in(state)) > 1
    for key, found, _ in dicts_in(state):
        if is_optimizer(found):
            for i, of_param in found["state"].items():
                for name, x in tensors(of_param).items() if isinstance(of_param, dict) else ():
                    yield f"{key or 'optimizer'}: {name} of parameter {i}", x, True
            continue
        for name, x in tensors(found).items():
            yield f"{key}: {name}" if several and key else name, x, False


def read_table(file: Path) -> tuple[dict[str, Series], str]:
    """Columns of a CSV file with numbers, over its column of steps or epochs; empty cells are left out.

    Raises:
        ValueError: If it has no such column, or no numbers.
    """
    try:
        text = file.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not a text file") from error
    lines = text.splitlines()
    head = lines[0] if lines else ""
    rows = list(csv.reader(lines, delimiter=max(DELIMITERS, key=head.count)))
    names = [name.strip() for name in rows[0]] if rows else []
    by_name = {name.lower(): i for i, name in enumerate(names)}
    if (unit := next((x for x in PLACES if x in by_name), "")) == "":
        has = ", ".join(names[:8]) or "no header"
        raise ValueError(f"{file} has no column {', '.join(PLACES[:-1])} or {PLACES[-1]}; it has: {has}")
    place, columns = by_name[unit], dict[str, dict[int, float]]()
    for row in rows[1:]:
        if (at := _number(row, place)) is None or not math.isfinite(at):
            continue
        for i, name in enumerate(names):
            if i != place and name and (x := _number(row, i)) is not None:
                columns.setdefault(name, {})[int(at)] = x  # of a training that was resumed, the later row
    columns = {name: x for name, x in columns.items() if name.lower() not in PLACES}
    if not columns:
        raise ValueError(f"{file} has no numbers beside its column {names[place]}")
    curves = {name: series_of(sorted(x.items())) for name, x in columns.items()}
    return curves, "epoch" if unit == "epoch" else "step"


def _number(row: list[str], i: int) -> float | None:
    try:
        return float(row[i])
    except (IndexError, ValueError):
        return None


def read_events(path: Path) -> dict[str, Series]:
    """Scalars in a file, or a folder, of events of TensorBoard.

    Raises:
        ValueError: If there are none.
        ModuleNotFoundError: If tensorboard is not installed.
    """
    name = "tensorboard.backend.event_processing.event_accumulator"
    library = import_extra(name, "tensorboard", "tensorboard")
    accumulator = library.EventAccumulator(str(path), size_guidance={library.SCALARS: 0, library.TENSORS: 0})
    try:
        accumulator.Reload()
    except Exception as error:  # of a damaged file
        raise ValueError(f"{path} cannot be read; it is damaged, or has no events") from error
    tags = accumulator.Tags()
    found = {tag: [(x.step, x.value) for x in accumulator.Scalars(tag)] for tag in tags["scalars"]}
    for tag in tags["tensors"]:
        values = [(x.step, x.tensor_proto.float_val) for x in accumulator.Tensors(tag)]
        found[tag] = [(step, x[0]) for step, x in values if len(x) == 1]
    curves = {tag: series_of(sorted(dict(x).items())) for tag, x in found.items() if x}
    if not curves:
        raise ValueError(f"{path} has no scalars")
    return curves
