"""Files that are written whole or not at all, and are read only if they are intact."""

import os
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from itertools import count
from pathlib import Path
from shutil import disk_usage
from typing import IO, Any

import torch
from torch import Tensor

from hookcb.core.checked_zip import compare_storages, names_of_changed

# types beside tensors, lists, tuples and dicts that torch.load(weights_only=True) reads
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)

SUFFIX = ".partial"
_NUMBERS = count()  # numbers of the files that this process writes


def save_whole(state: Any, file: str | Path) -> Path:
    """Writes `state` with `torch.save`, checksums included; see `write_whole`."""
    with _checksums():
        return write_whole(file, lambda opened: torch.save(state, opened))


def rank_file(path: Path, rank: int) -> Path:
    """Path of the file that a rank writes instead of `path`; that of rank 0 is `path` itself.

    >>> rank_file(Path("run.jsonl"), 3).name, rank_file(Path("trace.json.gz"), 3).name
    ('run.rank3.jsonl', 'trace.rank3.json.gz')
    """
    suffix = "".join(path.suffixes[-2:] if path.suffix == ".gz" else path.suffixes[-1:])
    stem = path.name.removesuffix(suffix)
    return path if not rank or stem.endswith(f".rank{rank}") else path.with_name(f"{stem}.rank{rank}{suffix}")


def write_whole(file: str | Path, write: Callable[[IO[bytes]], object]) -> Path:
    """Writes a file by `write`; an existing one stays unchanged until the new one is complete on disk.

    Args:
        file: the path; its folder is created if it is missing.
        write: called with an open file.

    Returns:
        The path written.

    Raises:
        OSError: If it cannot be written; the message says how many bytes are needed and free.
    """
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_partials(path.parent, path.name)
    owner = f"{socket.gethostname()}-{os.getpid()}-{next(_NUMBERS)}"
    partial = path.with_name(f"{path.name}.{owner}{SUFFIX}")
    try:
        _write_partial(partial, path, write)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return path


def _write_partial(partial: Path, path: Path, write: Callable[[IO[bytes]], object]) -> None:
    with partial.open("wb", buffering=0) as opened:  # a buffer would fail again when it is closed
        counted = _Counted(opened)
        write(counted)  # type: ignore[arg-type]  # torch.save and pickle.dump need no other methods
        try:
            if counted.error is not None:
                raise counted.error
            os.fsync(opened.fileno())  # else the name may exist without the content after a power failure
        except OSError as error:
            opened.truncate(0)  # else the bytes written so far would not count as free
            raise _with_bytes(error, path, counted.n_bytes) from error


class _Counted:
    """Writes to a file and counts bytes; goes on counting if writing fails, to know how many are needed."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.n_bytes = 0
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Writes all of `data`; an error is stored, as torch would replace one that is raised here."""
        left = memoryview(data)
        n_bytes = left.nbytes
        self.n_bytes += n_bytes
        try:
            while left and self.error is None:
                left = left[self.file.write(left) :]  # a call may write only a part
        except OSError as error:
            self.error = error
        return n_bytes

    def flush(self) -> None:
        """Does nothing: nothing is buffered."""


def _with_bytes(error: OSError, path: Path, n_bytes: int) -> OSError:
    """Adds the bytes that are needed, and those that are free, to the message of an error."""
    message = f"{error.strerror}; {n_bytes:,} bytes are needed, and {disk_usage(path.parent).free:,} are free"
    return OSError(error.errno, message, str(path))


@contextmanager
def _checksums() -> Iterator[None]:
    """Has torch write checksums, even if its option `set_crc32_options` is off."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def remove_partials(folder: Path, name: str) -> None:
    """Removes the partial files `name` that killed processes of this host have left."""
    start = f"{name}.{socket.gethostname()}-"
    for left in os.listdir(folder):
        pid, _, rest = left.removeprefix(start).partition("-")
        if left.startswith(start) and rest.endswith(SUFFIX) and pid.isdecimal() and not _runs(int(pid)):
            with suppress(OSError):  # another process was faster, or on Windows the file is open
                (folder / left).unlink()


def _runs(pid: int) -> bool:
    """Whether a process is running; on Windows, only this one counts, as `os.kill` would end others."""
    if os.name != "posix":
        return pid == os.getpid()
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # it belongs to another user
    return True


def sync_folder(folder: Path) -> None:
    """Syncs the folder, so that the new name is on disk too."""
    if os.name == "posix":  # elsewhere a folder cannot be opened
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def as_plain(item: Any) -> Any:
    """Converts `item` to values that `torch.load(weights_only=True)` reads; other objects become their repr.

    Tensors are moved to the CPU; NumPy arrays become lists, mappings and dataclasses become dicts.
    """
    if isinstance(item, Tensor):
        return item.detach().cpu()
    if isinstance(item, Mapping):
        return {as_plain(key): as_plain(x) for key, x in item.items()}
    if isinstance(item, tuple | list):
        return [as_plain(x) for x in item] if isinstance(item, list) else tuple(as_plain(x) for x in item)
    if is_dataclass(item) and not isinstance(item, type):
        return {field.name: as_plain(getattr(item, field.name)) for field in fields(item)}
    if type(item).__module__ == "numpy" and hasattr(item, "tolist"):
        return item.tolist()
    return item if type(item) in PLAIN else repr(item)


def read_saved(file: str | Path, device: torch.device) -> Any:
    """Reads a file of `save_whole`, with its tensors on `device`; runs no code from the file.

    The whole file is compared with its checksums first.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is truncated, damaged, or another kind of file; the message names the file, and the
            part that is damaged.
    """
    with Path(file).open("rb") as opened:
        storages = compare_storages(opened, file)
        opened.seek(0)
        # torch warns about foreign files; the error below says enough
        with warnings.catch_warnings(action="ignore"):
            try:
                state = torch.load(opened, map_location=device, weights_only=True, mmap=False)
            except Exception as error:  # torch's unpickler may raise any error
                raise ValueError(f"{file} cannot be read; it is damaged, or not a file of weights") from error
    if not all(storages.values()):
        changed = names_of_changed(storages, state)
        raise ValueError(f"{file} is damaged: {changed} does not match its checksum; take another file")
    return state


def check_saved(state: Any, file: str | Path, keys: set[str]) -> None:
    """Checks that `state` is a dict with these keys.

    Raises:
        ValueError: If it is not; the message names the file.
    """
    if not isinstance(state, dict) or set(state) != keys:
        raise ValueError(f"{file} was not written by save; read it with torch.load")
