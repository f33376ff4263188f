"""A file of a checkpoint is whole, of a whole batch, and can be read again; or it is not there."""

import collections
import enum
import errno
import io
import os
import pathlib
import re
import resource
import shutil
import signal
import threading
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from hookcb import Callback, CancelBatchException, CancelFitException, Event
from hookcb.core.files import read_saved, save_whole
from hookcb.training.checkpoint.callback import Checkpoint
from hookcb.training.max_time import MaxTime
from tests.support import fit, make_batches
from tests.training.checkpoint.support import (
    Net,
    Stop,
    acting,
    differing,
    handler,
    learner,
    names,
    outcome,
    raising,
    seed_all,
    train,
)


def plain(cbs=()):
    """Four batches an epoch, without shuffling."""
    return learner(make_batches(4), cbs)


@contextmanager
def files_limited_to(n_bytes):
    """As on a disk that is full: no file of this process grows beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# ---- whole files

FULL = r"; ([\d,]+) bytes are needed, and ([\d,]+) are free"


def test_a_disk_that_is_full_is_told_by_path_bytes_needed_and_bytes_free(tmp_path, monkeypatch):
    state = {"x": torch.rand(50_000)}
    size = save_whole(state, tmp_path / "file.pt").stat().st_size
    free = []
    monkeypatch.setattr(
        "hookcb.core.files.disk_usage", lambda folder: free.append(left(folder)) or usage(folder)
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


def test_files_are_read_without_running_code(tmp_path):
    train(plain, 1, Checkpoint(tmp_path, every=1, keep=100))
    for file in tmp_path.iterdir():
        assert torch.load(file, weights_only=True)["format"]


def test_a_full_disk_leaves_the_last_file_whole_and_no_part_of_the_new_one(tmp_path):
    limited = files_limited_to(3000)
    fill = acting("before_epoch", lambda cb: limited.__enter__(), k=1)
    try:
        with pytest.raises(OSError, match=FULL) as caught:
            train(plain, 3, Checkpoint(tmp_path), fill)
    finally:
        limited.__exit__(None, None, None)
    assert names(tmp_path) == ["epoch-0001.pt"]
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == str(tmp_path / "epoch-0002.pt")
    assert torch.load(tmp_path / "epoch-0001.pt", weights_only=True)
    resumed = train(plain, 3, Checkpoint(tmp_path), resume="latest", seed=1)
    assert differing(outcome(train(plain, 3)), outcome(resumed)) == []


def test_a_file_has_its_name_only_when_it_can_be_read(tmp_path):
    """Someone else looks all the time."""
    failures, done, looked = [], threading.Event(), []

    def look():
        while not done.is_set():
            for file in tmp_path.glob("*.pt"):
                try:
                    looked.append(torch.load(file, weights_only=True)["format"])
                except FileNotFoundError:
                    pass
                except Exception as error:
                    failures.append((file.name, error))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        train(plain, 8, Checkpoint(tmp_path, every=1, keep=2, monitor="valid_loss"))
    finally:
        done.set()
        watcher.join()
    assert looked
    assert failures == []


def test_a_file_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    calls, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (calls.append("fsync"), fsync(file))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("replace"), replace(a, b))[1])
    fit(plain(), cbs=Checkpoint(tmp_path))
    assert calls[:2] == ["fsync", "replace"]


@pytest.mark.parametrize("n_signals", [1, 2])
def test_a_signal_while_a_file_is_written_leaves_only_whole_files(tmp_path, monkeypatch, n_signals):
    calls, fsync = [], os.fsync

    def interrupted(file):
        calls.append(file)
        for _ in range(
            n_signals * (len(calls) == 3)
        ):  # in the second file; the first was a file and a folder
            os.kill(os.getpid(), signal.SIGINT)
        fsync(file)

    seed_all(0)
    learn = plain()
    with handler(signal.SIGINT, signal.default_int_handler), monkeypatch.context() as patched:
        patched.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fit(learn, 2, cbs=Checkpoint(tmp_path, every=1))
    assert 1 <= len(list(tmp_path.glob("*.pt"))) <= 2
    resumed = train(plain, 2, Checkpoint(tmp_path), resume="latest", seed=1)
    assert differing(outcome(train(plain, 2)), outcome(resumed)) == []
    assert not list(tmp_path.glob("*.partial"))


def test_leftovers_of_a_kill_are_removed_by_the_next_fit(tmp_path):
    for left in ("epoch-0001.pt.partial", "epoch-0007-batch-000002.pt.partial", "best.pt.partial"):
        (tmp_path / left).write_bytes(b"PK")
    train(plain, 1, Checkpoint(tmp_path))
    assert names(tmp_path) == ["epoch-0001.pt"]


def test_a_crash_writes_nothing_of_the_batch_it_came_in(tmp_path):
    crash = acting("after_backward", raising(Stop()), k=2)
    with pytest.raises(Stop):
        train(plain, 1, Checkpoint(tmp_path, every=1), crash)
    assert names(tmp_path) == ["epoch-0001-batch-000001.pt", "epoch-0001-batch-000002.pt"]


# ---- a fit that is cancelled


def test_a_fit_cancelled_between_batches_leaves_a_file_of_that_batch(tmp_path):
    train(plain, 2, Checkpoint(tmp_path), acting("after_batch", raising(CancelFitException()), k=1))
    assert names(tmp_path) == ["epoch-0001-batch-000002.pt"]


def test_a_fit_out_of_time_leaves_a_file_of_its_batch(tmp_path):
    train(plain, 2, Checkpoint(tmp_path), MaxTime(1e-9))
    assert names(tmp_path) == ["epoch-0001-batch-000001.pt"]


def test_a_fit_cancelled_after_an_epoch_leaves_that_epoch(tmp_path):
    train(plain, 3, Checkpoint(tmp_path), acting("after_epoch", raising(CancelFitException()), k=1))
    assert names(tmp_path) == ["epoch-0001.pt", "epoch-0002.pt"]


@pytest.mark.parametrize("event", ["after_loss", "before_step", "after_step"])
def test_a_fit_cancelled_inside_a_batch_leaves_no_file_of_half_a_batch(tmp_path, event):
    saving = Checkpoint(tmp_path, every=1, keep=100)
    train(plain, 2, saving, acting(event, raising(CancelFitException()), k=2))
    resumed = train(plain, 2, Checkpoint(tmp_path), resume="latest", seed=1)
    assert differing(outcome(train(plain, 2)), outcome(resumed)) == []


def test_cancelled_batches_count_among_every(tmp_path):
    skip = Callback(name="skip", before_batch=raising(CancelBatchException()))
    skip.run_valid = False
    train(plain, 1, Checkpoint(tmp_path, every=2, keep=100), skip)
    batches = ["epoch-0001-batch-000002.pt", "epoch-0001-batch-000004.pt"]
    assert names(tmp_path) == [*batches, "epoch-0001.pt"]


# ---- state that cannot be read again

Pair = collections.namedtuple("Pair", "x y")
Colour = enum.IntEnum("Colour", "RED GREEN")
ODD = {
    "an object": object(),
    "a NumPy float": np.float64(0.5),
    "a NumPy int": np.int64(2),
    "a NumPy text": np.str_("a"),
    "an array": np.zeros(2),
    "an int enum": Colour.RED,
    "a text enum": Event.AFTER_BATCH,
    "a named tuple": Pair(1, 2),
    "a set": {1, 2},
    "a path": pathlib.Path("a"),
    "a function": raising,
    "a class": Net,
    "bytes": b"a",
    "a defaultdict": collections.defaultdict(list, a=[1]),
    "a counter": collections.Counter("aab"),
    "a dict with odd keys": {np.int64(1): 1},
    "a deque": collections.deque([1]),
    "a complex number": 1j,
    "a range": range(3),
}


@pytest.mark.parametrize("what", ODD)
def test_state_that_could_not_be_read_again_is_refused_by_its_place(tmp_path, what):
    class Odd(Callback):
        def state_dict(self):
            return {"plain": 1, "nested": [1, {"deep": ODD[what]}]}

    refused = []
    try:
        train(plain, 1, Checkpoint(tmp_path, every=1), Odd())
    except TypeError as error:
        refused.append(str(error))
    if refused:
        assert all(part in refused[0] for part in ("odd", "nested", "1", "deep"))
        assert names(tmp_path) == []
    else:
        assert torch.load(tmp_path / "epoch-0001.pt", weights_only=True)
