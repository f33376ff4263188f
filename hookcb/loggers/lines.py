"""LineFile: a file that grows by whole lines, and can be read however its writer ended."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

BLOCK = 65_536


@dataclass(frozen=True, slots=True)
class LineFile:
    """A file of lines, to which are added whole ones only.

    It is opened for each addition, so that there is nothing to close, to copy or to lose: what `append` has
    written is with the operating system, and stays there if the process is killed; after a power failure the
    last seconds may be missing. What is left of a line that was never finished is cut off when the file goes
    on, and not read.

    Args:
        path: of the file; its folder is made where it is missing.
        start: what such a file begins with, by which a foreign one is told.
        header: its first line, where it has one.
    """

    path: Path
    start: bytes
    header: bytes = b""

    def check(self) -> None:
        """Refuses what is there already, if it is something else.

        Raises:
            ValueError: for a folder, or a file that begins otherwise.
        """
        if self.path.is_dir():
            raise ValueError(f"{self.path} is a folder; give a file")
        if self.path.exists():
            with self.path.open("rb") as file:
                self._check_start(file)

    def append(self, lines: str) -> None:
        """Adds `lines`, each with its line break, in one write."""
        try:
            file = self.path.open("a+b", buffering=0)
        except FileNotFoundError:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = self.path.open("a+b", buffering=0)
        with file:
            size = _cut_half_line(file)
            left = (lines if size else self.header.decode() + lines).encode()
            while left:  # a write may take a part, as on a disk that is nearly full
                left = left[file.write(left) :]

    def read(self) -> Iterator[tuple[int, str]]:
        """The whole lines and their numbers, from 1, without the header.

        Raises:
            FileNotFoundError: where there is none.
            ValueError: where it is something else.
        """
        with self.path.open("rb") as file:
            self._check_start(file)
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n") and (number > 1 or not self.header):
                    if b"\0" in line:  # as of a block that was never written, or is lost
                        raise self.broken(number)
                    try:
                        yield number, line.decode()
                    except UnicodeDecodeError as error:
                        raise self.broken(number) from error

    def broken(self, number: int) -> ValueError:
        """The error that a line is not as it was written."""
        return ValueError(f"line {number} of {self.path} cannot be read; delete it to read the others")

    def _check_start(self, file: BinaryIO) -> None:
        there = file.read(len(self.start))
        file.seek(0)
        if not self.start.startswith(there):  # less than that is a first line that was never finished
            raise ValueError(
                f"{self.path} was not written by this logger, it begins with {there!r}; give another path"
            )


def _cut_half_line(file: BinaryIO) -> int:
    """Ends `file` behind its last line break; its size."""
    size = end = file.seek(0, os.SEEK_END)
    if size:
        file.seek(-1, os.SEEK_END)
    if not size or file.read(1) == b"\n":
        return size
    while end:
        begin = max(0, end - BLOCK)
        file.seek(begin)
        end = begin + 1 + file.read(end - begin).rfind(b"\n")
        if end > begin:
            break
    return file.truncate(end)
