"""Checkpoint writes whole files, keeps what it was asked to keep, and changes nothing about the fit."""

import collections
import enum
import errno
import os
import pathlib
import pickle
import signal
import threading

import numpy as np
import pytest
import torch

from hookcb import EMA, Callback, CancelBatchException, CancelFitException, Checkpoint, Event
from hookcb.training.max_time import MaxTime
from tests.core.support import FULL, files_limited_to, names
from tests.support import fit, in_turn, make_batches
from tests.training.checkpoint.support import (
    Net,
    Stop,
    acting,
    differing,
    handler,
    learner,
    outcome,
    raising,
    seed_all,
    train,
    uninterrupted,
)

FIRST_THREE = ["epoch-0001.pt", "epoch-0002.pt", "epoch-0003.pt"]


def plain(cbs=()):
    """Four batches an epoch, without shuffling."""
    return learner(make_batches(4), cbs)


def monitored(values):
    """Puts `values`, one an epoch, into the row as `score`."""
    return Callback(name="scores", after_epoch=lambda cb: cb.learn.row.update(score=values[cb.epoch]))


def best_epoch(folder, values):
    """The epoch that ended with `best.pt`."""
    state = torch.load(folder / "best.pt", weights_only=True)
    twins = [f for f in folder.glob("epoch-*.pt") if alike_files(state, torch.load(f, weights_only=True))]
    assert len(twins) == 1
    return int(twins[0].stem.removeprefix("epoch-"))


def alike_files(a, b):
    models = [next(v for v in s.values() if isinstance(v, dict) and "stem.weight" in v) for s in (a, b)]
    return torch.equal(models[0]["stem.weight"], models[1]["stem.weight"])


# ---- which files


def test_with_every_a_file_is_written_after_each_so_many_batches_of_the_fit(tmp_path):
    saving = Checkpoint(tmp_path, every=3, keep=100)
    train(plain, 2, saving)
    expected = ["epoch-0001-batch-000003.pt", "epoch-0001.pt", "epoch-0002-batch-000002.pt", "epoch-0002.pt"]
    assert [file.name for file in saving.files] == expected
    assert names(tmp_path) == expected


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_stay(tmp_path, keep):
    train(plain, 4, Checkpoint(tmp_path, keep=keep))
    assert names(tmp_path) == [f"epoch-{n:04}.pt" for n in range(5 - keep, 5)]


def test_the_newest_stay_whether_of_batches_or_epochs(tmp_path):
    train(plain, 2, Checkpoint(tmp_path, every=1, keep=3))
    expected = ["epoch-0002-batch-000003.pt", "epoch-0002-batch-000004.pt", "epoch-0002.pt"]
    assert names(tmp_path) == expected


def test_never_more_than_keep_and_the_one_being_written_are_there(tmp_path):
    seen = []
    look = Callback(name="look", after_batch=lambda cb: seen.append(len(list(tmp_path.glob("*.p*")))))
    look.order = 1000
    train(plain, 2, Checkpoint(tmp_path, every=1, keep=2), look)
    assert max(seen) == 2


def test_other_files_in_the_folder_are_left_alone(tmp_path):
    others = ["notes.txt", "epoch.pt", "model.pt", "epoch-0001.pt.txt", "my-epoch-0001.pt"]
    for other in others:
        (tmp_path / other).write_text("mine")
    train(plain, 3, Checkpoint(tmp_path, keep=1))
    assert all((tmp_path / other).read_text() == "mine" for other in others)


def test_the_folder_and_its_parents_are_made(tmp_path):
    saving = Checkpoint(str(tmp_path / "a" / "b"))
    assert list(saving.files) == []
    train(plain, 1, saving)
    assert names(tmp_path / "a" / "b") == ["epoch-0001.pt"]


def test_a_new_fit_over_an_older_longer_one_keeps_its_own_files(tmp_path):
    train(plain, 5, Checkpoint(tmp_path))
    train(plain, 2, Checkpoint(tmp_path))
    resumed = train(plain, 3, Checkpoint(tmp_path), resume="latest", seed=5)
    assert differing(uninterrupted(plain, 3), outcome(resumed)) == []


def test_a_relative_folder_is_that_of_the_fit_when_the_process_goes_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    away = acting("after_epoch", lambda cb: os.chdir(tmp_path / "elsewhere"), order=1000)
    train(plain, 2, Checkpoint("checkpoints"), away)
    assert names(tmp_path / "checkpoints") == FIRST_THREE[:2]


def test_two_checkpoints_of_a_fit_write_what_each_was_asked(tmp_path):
    newest, all_of_them = Checkpoint(tmp_path / "a", keep=1), Checkpoint(tmp_path / "b", keep=9, name="all")
    learn = train(plain, 3, newest, all_of_them)
    assert (names(tmp_path / "a"), names(tmp_path / "b")) == (FIRST_THREE[2:], FIRST_THREE)
    assert learn.all is all_of_them


def test_validating_and_predicting_write_nothing(tmp_path):
    learn = train(lambda: plain([Checkpoint(tmp_path, every=1)]), 1)
    before = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    with learn.no_logging():
        learn.validate()
        learn.get_preds()
        learn.one_batch()
    assert {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == before


# ---- the best


@pytest.mark.parametrize(
    ("mode", "values", "best"),
    [
        ("min", [3.0, 1.0, 2.0], 1.0),
        ("max", [1.0, 3.0, 2.0], 3.0),
        (None, [1.0, 3.0, 2.0], 3.0),
        ("max", [float("nan"), 1.0, float("nan")], 1.0),
        ("min", [2.0, 2.0, 2.0], 2.0),
    ],
)
def test_the_best_epoch_stays_as_best(tmp_path, mode, values, best):
    saving = Checkpoint(tmp_path, monitor="score", mode=mode, keep=3)
    train(plain, 3, saving, monitored(values))
    assert saving.best == best
    assert best_epoch(tmp_path, values) == values.index(best) + 1
    assert "best.pt" not in [file.name for file in saving.files]


@pytest.mark.parametrize("is_of_ranks", [True, False])
def test_the_best_replaces_that_of_several_ranks_but_no_other_folder(tmp_path, is_of_ranks):
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / ("hookcb.json" if is_of_ranks else "mine")).touch()
    fit(plain(), 1, cbs=Checkpoint(tmp_path, monitor="train_loss"))
    assert (tmp_path / "best.pt").exists()
    assert (tmp_path / "best").exists() == (not is_of_ranks)


def test_the_best_stays_when_its_epoch_has_gone(tmp_path):
    train(plain, 4, Checkpoint(tmp_path, monitor="score", keep=1), monitored([9, 1, 2, 3]))
    assert names(tmp_path) == ["best.pt", "epoch-0004.pt"]


def test_the_best_is_of_the_loss_where_that_is_least_without_a_mode(tmp_path):
    saving = Checkpoint(tmp_path, monitor="valid_loss")
    learn = train(plain, 3, saving)
    assert saving.best == min(row["valid_loss"] for row in learn.recorder.rows)


def test_nothing_but_nan_makes_no_best(tmp_path):
    saving = Checkpoint(tmp_path, monitor="score")
    train(plain, 2, saving, monitored([float("nan")] * 2))
    assert saving.best is None
    assert names(tmp_path) == FIRST_THREE[:2]


def test_a_second_fit_begins_with_no_best(tmp_path):
    saving, scores = Checkpoint(tmp_path, monitor="score"), monitored([9.0])
    learn = train(lambda: plain([saving, scores]), 1)
    scores.after_epoch = lambda: learn.row.update(score=1.0)
    learn.build_dispatch()
    fit(learn)
    assert saving.best == 1.0


# ---- arguments


@in_turn(
    "arguments",
    [
        {"every": 0},
        {"every": -1},
        {"keep": 0},
        {"keep": -2},
        {"mode": "least", "monitor": "valid_loss"},
    ],
    ids=["every=0", "every=-1", "keep=0", "keep=-2", "mode=least"],
)
def test_arguments_that_cannot_be_are_refused(tmp_path, arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        Checkpoint(tmp_path, **arguments)


def test_a_column_that_is_misspelt_is_refused_before_training(tmp_path):
    log = []
    seen = Callback(name="seen", before_batch=lambda cb: log.append(1))
    with pytest.raises((ValueError, LookupError), match="valid_loss"):
        train(plain, 1, Checkpoint(tmp_path, monitor="valid_los"), seen)
    assert log == []


def test_a_folder_that_is_a_file_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("mine")
    log = []
    seen = Callback(name="seen", before_batch=lambda cb: log.append(1))
    with pytest.raises((ValueError, OSError), match="file"):
        train(plain, 1, Checkpoint(tmp_path / "file"), seen)
    assert log == []


# ---- nothing else changes


def test_writing_changes_neither_weights_nor_random_numbers(tmp_path):
    saving = Checkpoint(tmp_path, every=1, monitor="valid_loss")
    assert differing(uninterrupted(learner, 3), outcome(train(learner, 3, saving))) == []


def test_it_can_be_pickled_and_used_again(tmp_path):
    saving = pickle.loads(
        pickle.dumps(Checkpoint(tmp_path, every=2, keep=5, monitor="valid_loss", mode="max"))
    )
    train(plain, 1, saving)
    again = pickle.loads(pickle.dumps(saving))
    assert again.best == saving.best
    train(plain, 1, again)
    assert [file.name for file in again.files] == [
        "epoch-0001-batch-000002.pt",
        "epoch-0001-batch-000004.pt",
        "epoch-0001.pt",
    ]


def trained(tmp_path, *cbs):
    seed_all(0)
    learn = learner(lr=0.1)
    with learn.no_logging():
        learn.fit(4, cbs=[*cbs, Checkpoint(tmp_path, keep=1, monitor="valid_loss")])
    return learn


@pytest.mark.parametrize("cbs", [[], [EMA(0.8)]], ids=["plain", "average"])
def test_the_best_file_gives_the_weights_whose_validation_was_best(tmp_path, cbs):
    best = trained(tmp_path, *cbs).checkpoint.best
    fresh = learner()
    fresh.load(tmp_path / "best.pt")
    fresh.model.calls.copy_(torch.load(tmp_path / "best.pt", weights_only=True)["buffers"]["calls"])
    if cbs:
        fresh.model.calls.copy_(
            torch.load(tmp_path / "best.pt", weights_only=True)["cbs"]["ema"]["averaged"]["calls"]
        )
    assert fresh.validate()[0] == pytest.approx(best, rel=1e-6)


def test_an_average_that_was_not_validated_is_not_taken(tmp_path):
    learn = trained(tmp_path, EMA(0.8, validate=False))
    fresh = learner()
    fresh.load(learn.checkpoint.files[-1])
    assert torch.equal(fresh.model.head.weight, learn.model.head.weight)


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
    assert differing(uninterrupted(plain, 3), outcome(resumed)) == []


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
    assert differing(uninterrupted(plain, 2), outcome(resumed)) == []
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
    assert differing(uninterrupted(plain, 2), outcome(resumed)) == []


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


# ---- the best k


def scores(values):
    """Puts these into the rows of the epochs."""
    return Callback(after_epoch=lambda cb: cb.learn.row.update(score=values[cb.epoch]), name="scores")


@pytest.mark.parametrize(
    ("values", "mode", "k", "kept"),
    [
        ([5.0, 1.0, 4.0, 2.0, 3.0], "min", 2, [2, 4, 5]),
        ([5.0, 1.0, 4.0, 2.0, 3.0], "max", 2, [1, 3, 5]),
        ([5.0, float("nan"), 4.0, 2.0, 3.0], "min", 1, [4, 5]),
        ([1.0, 2.0, 3.0, 4.0, 5.0], "max", 3, [3, 4, 5]),
        ([1.0, 2.0, 3.0, 4.0, 5.0], "min", 0, [5]),
    ],
)
def test_the_best_epochs_stay_beside_the_newest(tmp_path, values, mode, k, kept):
    cb = Checkpoint(tmp_path, keep=1, monitor="score", mode=mode, save_top_k=k)
    fit(plain(), 5, cbs=[cb, scores(values)])
    assert [path.name for path in cb.files] == [f"epoch-{epoch:04d}.pt" for epoch in kept]
    assert (tmp_path / "best.pt").exists()


def test_a_resumed_fit_knows_the_best_epochs(tmp_path):
    values = [2.0, 1.0, 4.0, 3.0, 0.5]
    for n in (3, 5):
        cb = Checkpoint(tmp_path, keep=1, monitor="score", mode="min", save_top_k=2)
        fit(plain(), n, cbs=[cb, scores(values)], resume="latest")
    assert [path.name for path in cb.files] == ["epoch-0002.pt", "epoch-0005.pt"]


def test_the_best_epochs_need_a_monitor():
    with pytest.raises(ValueError, match="save_top_k is 2, but there is no monitor"):
        Checkpoint(save_top_k=2)
    with pytest.raises(ValueError, match="save_top_k must be"):
        Checkpoint(monitor="valid_loss", save_top_k=-1)
