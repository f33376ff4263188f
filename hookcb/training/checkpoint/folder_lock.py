"""FolderLock: at most one fit writes into a folder."""

import errno
import os
import socket
import sys
import warnings
from contextlib import suppress
from datetime import datetime
from pathlib import Path

NAME = "in-use.lock"

if sys.platform == "win32":
    import msvcrt

    def _lock(file: int) -> None:
        # beyond the text, as no other process can read a locked byte
        os.lseek(file, 1 << 30, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        os.lseek(file, 0, os.SEEK_SET)

else:
    import fcntl

    def _lock(file: int) -> None:
        # not flock, whose locks are inherited: a loader's worker may outlive a killed process by seconds
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


class FolderLock:
    """Marks a folder as in use, for other processes, other hosts, and other fits of this process.

    It is a lock of the operating system, on a file that names the process and its host: it ends with the
    process, however that ends, and a file left behind by a kill does not lock anything.
    """

    def __init__(self) -> None:
        self._key = (0, "")  # process and folder of the lock, while it is held
        self._file = Path()
        self._opened = -1

    def open(self, folder: Path) -> bool:
        """Takes the lock of a folder, which also checks that the folder can be written to.

        Args:
            folder: created if it is missing.

        Returns:
            Whether it is certain that no other run uses the folder. If not, there was a warning.

        Raises:
            RuntimeError: If the folder is in use; the message says by whom.
            OSError: If the folder cannot be written to.
        """
        key = (os.getpid(), os.path.realpath(folder))
        if _HELD.setdefault(key, self) is not self:
            raise RuntimeError(_in_use(folder, "another fit of this process"))
        if self._key == key:
            return True
        self._key, self._file = key, folder / NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            is_locked = self._open_locked()
            return self._note_owner(is_locked)
        except OSError as error:
            self.close()
            message = f"cannot write checkpoints there: {error.strerror}"
            raise OSError(error.errno, message, error.filename or str(self._file)) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Releases the lock if it is held, and removes its file."""
        if _HELD.get(self._key) is not self:  # the lock is not held, or this is a copy
            return
        if self._opened >= 0:
            # before it is closed, as then it may be another's; a file that is left does not lock anything
            with suppress(OSError):
                if os.name == "posix" and _is_at(self._opened, self._file):
                    self._file.unlink()
            os.close(self._opened)
            with suppress(OSError):  # Windows cannot remove a file that is open, here or in another process
                if os.name != "posix":
                    self._file.unlink()
        del _HELD[self._key]
        self._key, self._opened = (0, ""), -1

    def _open_locked(self) -> bool:
        """Opens the file and locks it; returns False if the file system has no locks."""
        while True:
            opened = os.open(self._file, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
            try:
                _lock(opened)
                is_locked = True
            except OSError as error:
                is_locked = False
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    owner = _read(opened) or "another run"
                    os.close(opened)
                    raise RuntimeError(_in_use(self._file.parent, owner)) from None
            if not is_locked or _is_at(opened, self._file):
                self._opened = opened
                return is_locked
            os.close(opened)  # its owner has removed the file since we opened it

    def _note_owner(self, is_locked: bool) -> bool:
        """Writes this process into the file; returns whether the previous owner has certainly ended."""
        host, previous = socket.gethostname(), _read(self._opened)
        is_certain = not previous or (is_locked and f" on {host} " in previous)
        if not is_certain:
            warnings.warn(
                f"{self._file} says that {previous} writes into this folder, and this process cannot check "
                "whether that run has ended; assuming that it has. If it still runs, end one of the two",
                stacklevel=2,
            )
        now = datetime.now().isoformat(" ", "seconds")
        os.ftruncate(self._opened, 0)
        os.lseek(self._opened, 0, os.SEEK_SET)
        os.write(self._opened, f"process {os.getpid()} on {host} since {now}\n".encode())
        return is_certain


# by process and folder; the process, because a fork inherits this dict but not the locks
_HELD: dict[tuple[int, str], FolderLock] = {}


def _read(opened: int) -> str:
    """Owner that the file names; through the same descriptor, as closing another would release the lock."""
    os.lseek(opened, 0, os.SEEK_SET)
    return os.read(opened, 1000).decode(errors="replace").strip()


def _is_at(opened: int, file: Path) -> bool:
    """Whether the open file is still the one at that path."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(opened), file.stat())
    return False


def _in_use(folder: Path, owner: str) -> str:
    return (
        f"{folder} is in use by {owner}; give this run its own folder, or wait until the other one ends "
        "(in distributed training, attach Checkpoint on one rank, or give each rank its own folder)"
    )
