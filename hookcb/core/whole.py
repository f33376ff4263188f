"""Files that are written whole or not at all; the other files of a rank."""

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from shutil import disk_usage
from typing import IO

SUFFIX = ".partial"
_NUMBERS = count()  # numbers of the files that this process writes


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
