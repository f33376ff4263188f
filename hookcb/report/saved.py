"""Reading what a page shows from files: pages, saved records, and checkpoints."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hookcb.activations.records import ActivationRecords
from hookcb.core.alone import ALONE
from hookcb.core.files import read_saved
from hookcb.gradients.records import GradientRecords
from hookcb.records.recording import Recording
from hookcb.records.records import SavedRecords, without_schema
from hookcb.report.collect import of_records
from hookcb.report.data import PageData
from hookcb.report.page import load_report
from hookcb.training.checkpoint.resume import read_any
from hookcb.training.checkpoint.state import KEYS, checkpoints_in
from hookcb.training.recorder import Recorder

KINDS: tuple[type[Recorder | SavedRecords], ...] = (ActivationRecords, GradientRecords, Recorder)  # in files
NO_VERDICT = "No verdict: files have numbers, but not what a verdict needs; a page of report() has it."
POSSIBLE = "a page, what records.save() has written, a checkpoint, or a folder of these"


def load_run(path: str | Path) -> PageData:
    """Reads what files have of a run: a page, saved records, a checkpoint, or a folder of these.

    Of the checkpoints in a folder, the newest is read. Only a page has a verdict.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If there is nothing to show, or a file is damaged or of another version.
    """
    path = Path(path)
    if path.suffix == ".html":
        return load_report(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}; give {POSSIBLE}")
    records = list(_in_folder(path) if path.is_dir() and not _is_checkpoint(path) else _in_file(path))
    if not records:
        raise ValueError(f"{path} has nothing to show; give {POSSIBLE}")
    data = of_records(records)
    data.headline, data.title = NO_VERDICT, path.stem
    return data


def is_saved(state: dict[str, Any]) -> bool:
    """Whether this is what a file of hookcb has: a checkpoint, or saved records."""
    return "schema" in state or set(state) in (KEYS, *(kind.keys for kind in KINDS))


def _is_checkpoint(folder: Path) -> bool:
    return folder in checkpoints_in(folder.parent)


def _in_folder(folder: Path) -> Iterator[Recording]:
    checkpoints = checkpoints_in(folder)
    others = [file for file in sorted(folder.glob("*.pt")) if file not in checkpoints]
    for file in [*checkpoints[-1:], *others]:
        try:
            found = list(_in_file(file))
        except ValueError:
            if file in checkpoints:
                raise
            continue  # another kind of file
        yield from found


def _in_file(file: Path) -> Iterator[Recording]:
    """Records that a file has."""
    cpu = torch.device("cpu")
    state = read_any(file, cpu, ALONE) if file.is_dir() else read_saved(file, cpu)
    if not isinstance(state, dict):
        return
    if set(state) == KEYS:
        for of_callback in state["cbs"].values():
            yield from _with_records(of_callback.get("recorded", of_callback))
    else:
        yield from _with_records(without_schema(state, file))


def _with_records(state: dict[str, Any]) -> Iterator[Recording]:
    for kind in KINDS:
        if set(state) == kind.keys:
            yield kind.from_state(state)
