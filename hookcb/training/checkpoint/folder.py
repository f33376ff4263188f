"""Checkpoints of several ranks: folders that are whole or not there, to which each rank writes its part."""

import copy
import json
import os
import pickle
import shutil
import warnings
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from hookcb.core.alone import Ranks
from hookcb.core.files import read_saved, save_whole
from hookcb.core.text import join_names
from hookcb.core.whole import SUFFIX, sync_folder, write_whole
from hookcb.processes.shards import divided_like, is_dtensor

MARKER = "hookcb.json"  # written last; what it is, and sizes and checksums of the other files
REPLACED = f".replaced{SUFFIX}"
MAX_NAMED = 3  # damaged files in a message
CHUNK = 1 << 24  # bytes that are read at once
TENSORS = {"model", "opt", "grads"}  # parts of a state whose tensors all go into torch's files


def is_folder_of_ranks(path: str | Path) -> bool:
    """Whether a path is a checkpoint of several ranks."""
    return (Path(path) / MARKER).is_file()


def check_not_part(file: Path) -> None:
    """Checks that a file is not one of those in a checkpoint of several ranks.

    Raises:
        ValueError: If it is one.
    """
    if is_folder_of_ranks(file.parent):
        raise ValueError(f"{file} is a part of a checkpoint of several ranks; give its folder, {file.parent}")


def open_shared(folder: Path, ranks: Ranks, open_main: Callable[[], None]) -> None:
    """Checks, on all ranks, that they share a folder and can write to it.

    Each creates a file there of a name that no file system can have cached, and rank 0 looks for all of them.

    Args:
        folder: created if it is missing.
        ranks: those that will write to it.
        open_main: called first, on rank 0.

    Raises:
        RankError: On all ranks; the message says what each of them has.
        OSError: If nobody can write to it.
    """
    failure = _failure_of(open_main) if ranks.is_main else None
    token = ranks.of_main(lambda: uuid4().hex)  # only now, as `open_main` removes such files
    seen = [folder / f"shared-{token}-{rank}{SUFFIX}" for rank in range(ranks.world)]
    try:
        failure = failure or _failure_of(lambda: _create(seen[ranks.rank]))
        failed = ranks.gather(failure is not None)
        unseen = ranks.of_main(
            lambda: [] if any(failed) else [rank for rank, file in enumerate(seen) if not file.exists()]
        )
    finally:
        with suppress(OSError):
            seen[ranks.rank].unlink()
    if unseen or any(failed):
        why = f", but {type(failure).__name__}: {failure}" if failure is not None else ""
        why += ", which rank 0 does not see" * (ranks.rank in unseen)
        ranks.check_alike({"shared folder for checkpoints": f"{folder}{why}"})
    if failure is not None:
        raise failure


def _create(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()


def _failure_of(call: Callable[[], None]) -> OSError | None:
    try:
        call()
    except OSError as error:
        return error
    return None


def write_folder(state: dict[str, Any], mine: dict[str, Any], folder: Path, ranks: Ranks) -> None:
    """Writes a checkpoint, on all ranks; it gets its name once all of it is on disk.

    Args:
        state: what all ranks have in common, and their parts of sharded tensors.
        mine: what only this rank has.
        folder: replaced if it exists.
        ranks: those that write.
    """
    tensors: dict[str, Tensor] = {}
    partial = _partial(folder)
    rest = _apart(state, tensors)
    if ranks.is_main:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    ranks.max([0])  # until the folder is there
    _write_tensors(tensors, partial, ranks)
    name = rank_name(ranks.rank)
    save_whole(mine, partial / name)
    own = [partial / name, *partial.glob(f"__{ranks.rank}_*.distcp")]
    everyone = ranks.gather({file.name: _sum_of(file) for file in own})
    if ranks.is_main:
        files = {name: x for theirs in everyone for name, x in theirs.items()}
        save_whole(rest, partial / "state.pt")
        for other in (partial / "state.pt", partial / ".metadata"):
            files[other.name] = _sum_of(other)
        about = {"format": state["format"], "world": ranks.world, "epoch": state["epoch"], "files": files}
        text = json.dumps(about, indent=1).encode()
        write_whole(partial / MARKER, lambda opened: opened.write(text))
        _put_in_place(partial, folder)
    ranks.max([0])  # until the folder has its name


def rank_name(rank: int) -> str:
    """Name of the file with what only this rank has."""
    return f"rank-{rank}.pt"


def _partial(folder: Path) -> Path:
    return folder.with_name(folder.name + SUFFIX)


def _put_in_place(partial: Path, folder: Path) -> None:
    """Renames a whole folder; one of its name is removed once the new one is there."""
    replaced = folder.with_name(folder.name + REPLACED)
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        os.replace(folder, replaced)  # if this process is killed now, `remove_unfinished` undoes it
    os.replace(partial, folder)
    sync_folder(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def copy_checkpoint(source: Path, target: Path) -> None:
    """Copies a file, or a folder by links to its files where the file system has them."""
    if not source.is_dir():
        with source.open("rb") as opened:
            write_whole(target, lambda copied: shutil.copyfileobj(opened, copied))
        return
    partial = _partial(target)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        shutil.copytree(source, partial, copy_function=os.link)
    except (OSError, shutil.Error):
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(source, partial)
    _put_in_place(partial, target)


def remove_checkpoint(path: Path) -> None:
    """Removes a file or folder if it is there; never leaves a part of a folder under its name."""
    if is_folder_of_ranks(path):
        shutil.rmtree(_partial(path), ignore_errors=True)
        os.replace(path, _partial(path))
        shutil.rmtree(_partial(path), ignore_errors=True)
    elif not path.is_dir():
        path.unlink(missing_ok=True)


def remove_unfinished(folder: Path) -> None:
    """Removes what a killed process has left unfinished; only safe if no one else uses the folder."""
    for left in folder.glob(f"*{REPLACED}"):
        whole = left.with_name(left.name.removesuffix(REPLACED))
        if not whole.exists():
            os.replace(left, whole)
    for kind in ("epoch-*", "best", "best.pt*", "shared-*"):
        for left in folder.glob(kind + SUFFIX):
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink()


def read_folder(folder: Path, ranks: Ranks, is_joint: bool = False) -> dict[str, Any]:
    """Reads what all ranks have in common; of model, optimizer and gradients only shapes, on "meta".

    Each rank compares a part of the files with their checksums.

    Args:
        folder: the checkpoint.
        ranks: those that read.
        is_joint: whether all of them read it now, so that they agree on whether it is whole.

    Raises:
        ValueError: If a part is missing or damaged; the message names it.
    """
    try:
        about: dict[str, Any] = json.loads((folder / MARKER).read_bytes())
        files: dict[str, list[int]] = about["files"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} is damaged: {MARKER} cannot be read") from error
    damaged = [name for name, (size, _) in files.items() if _size_of(folder / name) != size]
    if not damaged:
        share = list(files)[ranks.rank :: ranks.world]
        damaged = [name for name in share if _sum_of(folder / name) != files[name]]
    if is_joint and ranks.max([len(damaged)])[0]:
        damaged = sorted({name for found in ranks.gather(damaged) for name in found})
    if damaged:
        what = join_names(damaged, MAX_NAMED)
        raise ValueError(f"{folder} is damaged: {what} is missing, or does not match its checksum")
    state: dict[str, Any] = read_saved(folder / "state.pt", torch.device("cpu"))
    return state


def _read_tensors(folder: Path, wanted: dict[str, Tensor]) -> None:
    """Reads into tensors by name, of sharded ones this rank's part; does not communicate."""
    if not wanted:
        return
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    planner, reader = DefaultLoadPlanner(), _reader(folder)
    contents = reader.read_metadata()
    with torch.no_grad():
        planner.set_up_planner(wanted, contents, is_coordinator=True)
        reader.set_up_storage_reader(contents, is_coordinator=True)
        plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
        (plan,) = reader.prepare_global_plan(plans)
        reader.read_data(planner.finish_plan(plan), planner).wait()


def _write_tensors(tensors: dict[str, Tensor], folder: Path, ranks: Ranks) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    # a plain tensor is that of rank 0, whose buffers DistributedDataParallel gives to the others
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    writer = FileSystemWriter(folder)

    def call(group: Any) -> None:
        with warnings.catch_warnings(action="ignore"):  # that there is no group
            save(tensors, storage_writer=writer, planner=planner, process_group=group)

    try:
        ranks.run(call)
    except CheckpointException as error:
        raise _first_of(error, folder) from error


def _first_of(error: Any, folder: Path) -> OSError | ValueError:
    """The first rank's error among those that torch has collected, as an ordinary error."""
    rank, (cause, _) = min(error.failures.items())
    text = f"{folder}, rank {rank}: {type(cause).__name__}: {cause}"
    return OSError(getattr(cause, "errno", None), text) if isinstance(cause, OSError) else ValueError(text)


def _apart(state: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """A copy with tensors on "meta" in place of those that are put into `tensors` by their place."""

    def put(place: str, x: Any) -> Any:
        if not isinstance(x, Tensor) or not (place.partition(".")[0] in TENSORS or is_dtensor(x)):
            return x
        tensors[place] = x.detach()
        return torch.empty(x.shape, dtype=x.dtype, device="meta")

    changed: dict[str, Any] = mapped(state, put)
    return changed


def with_tensors(
    saved: Any, place: str, folder: Path, like: Callable[[str], Any] = lambda place: None
) -> Any:
    """A copy of a part of a state with the tensors that are in torch's files of a folder.

    Args:
        saved: as it was read, also from a file, which has its tensors.
        place: the keys to it, "opt.state".
        folder: from which it was read.
        like: returns a tensor of this model for a place; if it has the shape of the one there, that is
            divided as it is.
    """
    wanted: dict[str, Tensor] = {}

    def filled(place: str, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        own = like(place)
        is_divided = isinstance(own, Tensor) and is_dtensor(own) and own.shape == x.shape
        if not x.is_meta:
            return divided_like(x, own) if is_divided else x
        wanted[place] = (
            torch.empty_like(own.detach(), dtype=x.dtype) if is_divided else torch.empty_like(x, device="cpu")
        )
        return wanted[place]

    whole = mapped(saved, filled, place)
    _read_tensors(folder, wanted)
    return whole


def mapped(value: Any, change: Callable[[str, Any], Any], place: str = "") -> Any:
    """A copy of nested dicts, lists and tuples with what is in them changed, keys too.

    Args:
        value: as in a state.
        change: called with the place of each item, such as "opt.state.0", and the item.
        place: that of `value`.
    """
    if type(value) in (dict, OrderedDict, Counter):
        same = copy.copy(value)  # not a new one, as the state of a model has attributes
        same.clear()
        for key, x in value.items():
            inner = mapped(x, change, f"{place}.{key}" if place else str(key))
            same[mapped(key, change, f"a key of {place}")] = inner
        return same
    if type(value) in (list, tuple):
        if set(map(type, value)) <= {int, float}:  # faster for long lists, which are of numbers
            return value
        return type(value)(mapped(x, change, f"{place}.{i}") for i, x in enumerate(value))
    return change(place, value)


def _size_of(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return -1


def _sum_of(file: Path) -> list[int]:
    """Size and CRC-32 of a file."""
    size = crc = 0
    with file.open("rb") as opened:
        while chunk := opened.read(CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return [size, crc]


def _reader(folder: Path) -> Any:
    """A reader of torch's files that runs no code from them; torch's own unpickles the table of contents."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            with (folder / ".metadata").open("rb") as opened:
                return _Unpickler(opened).load()

    return Reader(folder)


class _Unpickler(pickle.Unpickler):
    """Reads the table of contents of torch's files, and no other objects."""

    def find_class(self, module: str, name: str) -> Any:
        """Finds a class of a table of contents.

        Raises:
            UnpicklingError: If it is any other object.
        """
        found = super().find_class(module, name) if module.split(".")[0] in ("torch", "pathlib") else None
        of_contents = module in (
            "torch.distributed.checkpoint.metadata",
            "torch.distributed.checkpoint.filesystem",
        )
        is_safe = (of_contents or module.startswith("pathlib")) and isinstance(found, type)
        is_safe |= module == "torch" and (
            found is torch.Size or isinstance(found, torch.dtype | torch.layout)
        )
        if not is_safe and (module, name) not in SAFE:
            raise pickle.UnpicklingError(f"{module}.{name} does not belong into a checkpoint")
        return super().find_class(module, name)


SAFE = {
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
    ("builtins", "frozenset"),
}
