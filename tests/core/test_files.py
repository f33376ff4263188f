"""A file is there whole or not at all, and what went wrong with it is told."""

import errno
import io
import os
import pathlib
import re
import shutil
import socket

import pytest
import torch

from hookcb.core.files import read_saved, save_whole
from tests.core.support import FULL, files_limited_to, in_child, names


def test_a_disk_that_is_full_is_told_by_path_bytes_needed_and_bytes_free(tmp_path, monkeypatch):
    state = {"x": torch.rand(50_000)}
    size = save_whole(state, tmp_path / "file.pt").stat().st_size
    free = []
    monkeypatch.setattr(
        "hookcb.core.whole.disk_usage", lambda folder: free.append(left(folder)) or usage(folder)
    )
    usage, left = shutil.disk_usage, lambda folder: [file.stat().st_size for file in folder.glob("*.partial")]
    with files_limited_to(100_000), pytest.raises(OSError, match=FULL) as caught:
        save_whole(state, tmp_path / "file.pt")
    needed, n_free = (int(n.replace(",", "")) for n in re.search(FULL, str(caught.value)).groups())
    assert needed == size
    assert abs(n_free - shutil.disk_usage(tmp_path).free) < 1 << 30  # others write too
    assert free == [[0]]  # what was written of it counts as free
    assert caught.value.filename == str(tmp_path / "file.pt")
    assert caught.value.errno == errno.EFBIG
    assert names(tmp_path) == ["file.pt"]
    assert torch.equal(read_saved(tmp_path / "file.pt", torch.device("cpu"))["x"], state["x"])


def test_a_disk_that_refuses_only_when_it_is_synced_is_told_too(tmp_path, monkeypatch):
    """As NFS and quotas do."""

    def refuse(file):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    save_whole([1], tmp_path / "file.pt")
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match=f"quota exceeded{FULL}"):
        save_whole([2], tmp_path / "file.pt")
    assert names(tmp_path) == ["file.pt"]
    assert torch.load(tmp_path / "file.pt", weights_only=True) == [1]


def test_an_error_of_the_state_itself_is_not_said_to_be_the_disks(tmp_path):
    class Odd:
        def __reduce__(self):
            raise FileNotFoundError("a shard")

    with pytest.raises(FileNotFoundError, match=r"^a shard$"):
        save_whole([Odd()], tmp_path / "file.pt")
    assert names(tmp_path) == []


def test_a_write_that_takes_only_a_part_is_gone_on_with(tmp_path, monkeypatch):
    """As Linux takes at most 2 GiB at once."""

    class Short(io.FileIO):
        def write(self, data):
            return super().write(memoryview(data)[:1000])

    monkeypatch.setattr(pathlib.Path, "open", lambda path, mode="r", buffering=-1: Short(path, mode))
    state = {"x": torch.rand(5_000)}
    assert torch.equal(torch.load(save_whole(state, tmp_path / "file.pt"))["x"], state["x"])


def test_a_file_is_written_under_a_name_of_this_process_while_another_writes_the_same(tmp_path):
    inside = []

    class Slow:
        def __reduce__(self):
            inside.extend(path.name for path in tmp_path.iterdir())
            if len(inside) == 1:
                assert in_child(lambda: save_whole([2], tmp_path / "file.pt")).endswith("file.pt")
                assert names(tmp_path) == ["file.pt", *inside]
            return (int, ())

    save_whole([Slow()], tmp_path / "file.pt")
    assert str(os.getpid()) in inside[0]
    assert names(tmp_path) == ["file.pt"]


def test_what_a_killed_process_has_left_of_a_file_is_removed_by_the_next_to_write_it(tmp_path):
    dead, host = in_child(os.getpid), socket.gethostname()
    stay = [f"file.pt.{host}-{os.getppid()}-0.partial", f"file.pt.elsewhere-{dead}-0.partial"]
    for name in (*stay, f"file.pt.{host}-{dead}-0.partial"):
        (tmp_path / name).write_bytes(b"PK")
    save_whole([1], tmp_path / "file.pt")
    assert names(tmp_path) == sorted(["file.pt", *stay])
