"""LineFile: a file that grows by whole lines, and stays readable if its writer is killed."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

BLOCK = 65_536


@dataclass(frozen=True, slots=True)
class LineFile:
    """A text file that grows by whole lines only.

    It is opened for each addition, so there is nothing to close or to copy: when `append` returns, the
    operating system has the lines, and they survive if the process is killed; after a power failure the last
    seconds may be missing. An incomplete last line is not read, and is cut off by the next `append`.

    Args:
        path: path of the file; its folder is created if it is missing.
        start: first bytes of such a file, to recognize foreign ones.
        header: the first line, if there is one.
    """

    path: Path
    start: bytes
    header: bytes = b""

    def check(self) -> None:
        """Checks that an existing file can be continued.

        Raises:
            ValueError: If the path is a folder, or a file with another start.
        """
        if self.path.is_dir():
            raise ValueError(f"{self.path} is a folder; give a file")
        if self.path.exists():
            with self.path.open("rb") as file:
                self._check_start(file)

    def append(self, lines: str) -> None:
        """Appends `lines`, which end in a line break, in one write."""
        try:
            file = self.path.open("a+b", buffering=0)
        except FileNotFoundError:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = self.path.open("a+b", buffering=0)
        with file:
            size = _cut_half_line(file)
            left = (lines if size else self.header.decode() + lines).encode()
            while left:  # a call may write only a part, as on a disk that is nearly full
                left = left[file.write(left) :]

    def read(self) -> Iterator[tuple[int, str]]:
        """Yields the number, from 1, and the text of each complete line, without the header.

        Raises:
            FileNotFoundError: If the file does not exist.
            ValueError: If it is another kind of file, or a line cannot be read.
        """
        with self.path.open("rb") as file:
            self._check_start(file)
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n") and (number > 1 or not self.header):
                    if b"\0" in line:  # a block that was never written, or is lost
                        raise self.broken(number)
                    try:
                        yield number, line.decode()
                    except UnicodeDecodeError as error:
                        raise self.broken(number) from error

    def broken(self, number: int) -> ValueError:
        """The error to raise for a damaged line."""
        return ValueError(f"line {number} of {self.path} cannot be read; delete it to read the others")

    def _check_start(self, file: BinaryIO) -> None:
        beginning = file.read(len(self.start))
        file.seek(0)
        if not self.start.startswith(beginning):  # a shorter one is an incomplete first line
            raise ValueError(
                f"{self.path} was not written by this logger, it begins with {beginning!r}; give another path"
            )


def _cut_half_line(file: BinaryIO) -> int:
    """Truncates `file` after its last line break; returns its size."""
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
