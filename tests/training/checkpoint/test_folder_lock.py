"""A folder of checkpoints is for one fit at a time; that it can be written to is known before training."""

import copy
import errno
import importlib.util
import os
import pickle
import signal
import socket
import sys
import threading
import types

import pytest

from hookcb import Callback, CancelFitException, Checkpoint
from hookcb.training.checkpoint import folder_lock
from hookcb.training.checkpoint.folder_lock import FolderLock
from tests.core.support import files_limited_to, in_child, names
from tests.support import make_batches
from tests.training.checkpoint.support import (
    acting,
    differing,
    go_on,
    learner,
    outcome,
    raising,
    train,
    uninterrupted,
)

LOCK = "in-use.lock"


def plain(cbs=()):
    return learner(make_batches(4), cbs)


def refused(folder, match, error=RuntimeError):
    """Asserts that a fit is refused before its first batch."""
    seen = []
    with pytest.raises(error, match=match) as caught:
        train(plain, 1, Checkpoint(folder), Callback(name="seen", before_batch=lambda cb: seen.append(1)))
    assert seen == []
    return caught.value


def killed_while_holding(folder):
    """A process that has taken the lock and is killed; its number."""
    read, write = os.pipe()
    if not (child := os.fork()):
        FolderLock().open(folder)
        os.write(write, b"1")
        threading.Event().wait()
    os.read(read, 1)
    os.close(read)
    os.close(write)
    in_use = in_child(lambda: FolderLock().open(folder))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return child, in_use


# ---- in use


def test_a_folder_that_another_process_writes_into_is_refused_by_its_host_and_number(tmp_path):
    lock = FolderLock()
    assert lock.open(tmp_path)
    said = in_child(lambda: FolderLock().open(tmp_path))
    assert "RuntimeError" in said
    assert f"in use by process {os.getpid()} on {socket.gethostname()} since 20" in said
    assert "give this run its own folder" in said
    lock.close()
    assert in_child(lambda: FolderLock().open(tmp_path)) == "True"


def test_a_fit_of_another_process_in_the_same_folder_is_refused_and_the_first_goes_on(tmp_path):
    whole, said = uninterrupted(plain, 2), []
    (tmp_path / "epoch-0007.pt.partial").write_bytes(b"PK")  # of a fit that was killed
    other = acting(
        "after_batch", lambda cb: said.append(in_child(lambda: train(plain, 1, Checkpoint(tmp_path))))
    )
    changed = differing(whole, outcome(train(plain, 2, Checkpoint(tmp_path, every=1, keep=2), other)))
    assert changed == []
    assert f"in use by process {os.getpid()} on" in said[0]
    assert names(tmp_path) == ["epoch-0002-batch-000004.pt", "epoch-0002.pt"]


def test_a_second_fit_of_this_process_in_the_same_folder_is_refused_and_the_first_goes_on(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "run")
    within = acting("after_batch", lambda cb: refused(tmp_path / "link", "in use by another fit of this"))
    train(plain, 2, Checkpoint(tmp_path / "run"), within)
    assert names(tmp_path / "run") == ["epoch-0001.pt", "epoch-0002.pt"]


def test_one_of_two_threads_is_refused(tmp_path):
    results = []

    def other():
        try:
            FolderLock().open(tmp_path)
        except RuntimeError as error:
            results.append(str(error))

    def start(cb):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    train(plain, 1, Checkpoint(tmp_path), acting("after_batch", start))
    assert len(results) == 1
    assert "in use" in results[0]


def test_a_process_that_is_forked_in_a_fit_may_write_there_when_the_fit_has_ended(tmp_path):
    lock, read_write = FolderLock(), os.pipe()
    lock.open(tmp_path)
    said, answer = os.pipe()
    if not (child := os.fork()):
        os.read(read_write[0], 1)
        os.write(answer, str(FolderLock().open(tmp_path)).encode())
        os._exit(0)
    lock.close()
    os.write(read_write[1], b"1")
    os.waitpid(child, 0)
    assert os.read(said, 100) == b"True"


@pytest.mark.parametrize("error", [None, CancelFitException, KeyboardInterrupt, ValueError])
def test_however_a_fit_ends_its_folder_is_free_again(tmp_path, error):
    act = acting("after_batch", raising(error()) if error else lambda cb: None, k=1)
    try:
        train(plain, 1, Checkpoint(tmp_path), act)
    except (KeyboardInterrupt, ValueError):
        assert error in (KeyboardInterrupt, ValueError)
    assert not (tmp_path / LOCK).exists()
    train(plain, 1, Checkpoint(tmp_path))


def test_a_copy_of_a_checkpoint_does_not_free_its_folder(tmp_path):
    saving = Checkpoint(tmp_path)
    copies = []

    def copy_it(cb):
        learn, saving.__dict__["learn"] = saving.learn, None
        copies.extend([copy.deepcopy(saving), pickle.loads(pickle.dumps(saving))])
        saving.learn = learn
        for copied in copies:
            copied._lock.close()
        refused(tmp_path, "in use")

    train(plain, 1, saving, acting("after_batch", copy_it))
    assert len(copies) == 2


# ---- left behind


def test_a_folder_of_a_process_that_was_killed_is_taken_over_silently(tmp_path):
    whole = uninterrupted(plain, 3)
    train(plain, 1, Checkpoint(tmp_path))
    child, in_use = killed_while_holding(tmp_path)
    assert f"process {child} on" in in_use
    assert str(child) in (tmp_path / LOCK).read_text()
    resumed = go_on(plain, 3, Checkpoint(tmp_path), resume="latest")
    assert differing(whole, outcome(resumed)) == []
    assert not (tmp_path / LOCK).exists()


def test_a_lock_of_another_host_is_taken_over_with_a_warning_that_says_what_to_do(tmp_path):
    (tmp_path / LOCK).write_text("process 12 on elsewhere since 2026-01-02 03:04:05\n")
    partial = tmp_path / "epoch-0003.pt.elsewhere-12-0.partial"
    partial.write_bytes(b"PK")
    with pytest.warns(UserWarning, match="process 12 on elsewhere since .*If it still runs, end one"):
        train(plain, 1, Checkpoint(tmp_path))
    assert names(tmp_path) == ["epoch-0001.pt", partial.name]
    train(plain, 1, Checkpoint(tmp_path))
    assert names(tmp_path) == ["epoch-0001.pt"]


def test_a_file_system_without_locks_is_used_with_a_warning_where_a_lock_is_left(tmp_path, monkeypatch):
    def lack(file):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(folder_lock, "_lock", lack)
    train(plain, 1, Checkpoint(tmp_path))
    (tmp_path / LOCK).write_text(f"process 1 on {socket.gethostname()} since 2026-01-02 03:04:05\n")
    with pytest.warns(UserWarning, match="process 1 on .*this process cannot check"):
        train(plain, 1, Checkpoint(tmp_path))
    assert names(tmp_path) == ["epoch-0001.pt"]


def test_unfinished_files_of_any_version_are_removed_by_the_next_fit(tmp_path):
    mine = ["epoch-0001.pt.partial", "best.pt.partial", "epoch-0009.pt.other-3-0.partial"]
    others = ["model.pt.partial", "notes.partial"]
    for name in (*mine, *others):
        (tmp_path / name).write_bytes(b"PK")
    train(plain, 1, Checkpoint(tmp_path))
    assert names(tmp_path) == ["epoch-0001.pt", *others]


# ---- folders that cannot be written


def test_a_folder_that_cannot_be_made_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("mine")
    refused(tmp_path / "file" / "run", r"cannot write checkpoints there.*file", NotADirectoryError)
    refused(tmp_path / "file", r"cannot write checkpoints there.*file", FileExistsError)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_full_disk_is_found_out_before_training(tmp_path):
    with files_limited_to(0):
        refused(tmp_path, r"cannot write checkpoints there: .*File too large", OSError)
    assert names(tmp_path) == []


def test_a_folder_without_permission_is_found_out_before_training(tmp_path, monkeypatch):
    """As root may write everywhere, the refusal is simulated."""

    def refuse(*args):
        raise PermissionError(errno.EACCES, "Permission denied", args[0])

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        refused(tmp_path, r"cannot write checkpoints there: .*Permission denied", PermissionError)
    train(plain, 1, Checkpoint(tmp_path))


# ---- Windows, simulated


def test_windows_locks_with_what_it_has(tmp_path, monkeypatch):
    locked = []
    fake = types.SimpleNamespace(LK_NBLCK=2, locking=lambda file, mode, n: locked.append((mode, n)))
    monkeypatch.setitem(sys.modules, "msvcrt", fake)
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setattr(sys, "platform", "win32")
    spec = importlib.util.spec_from_file_location("folder_lock_of_windows", folder_lock.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    lock = module.FolderLock()
    assert lock.open(tmp_path)
    assert locked == [(2, 1)]
    assert f"process {os.getpid()} on" in (tmp_path / LOCK).read_text()
    lock.close()
    assert names(tmp_path) == []
