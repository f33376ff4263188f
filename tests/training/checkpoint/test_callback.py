"""Checkpoint writes whole files, keeps what it was asked to keep, and changes nothing about the fit."""

import os
import pickle

import pytest
import torch

from hookcb import Callback, check_callback
from hookcb.training.checkpoint.callback import Checkpoint
from tests.support import fit, make_batches
from tests.training.checkpoint.support import acting, differing, learner, names, outcome, train

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


def test_a_file_is_written_after_each_epoch(tmp_path):
    saving = Checkpoint(tmp_path)
    train(plain, 3, saving)
    assert names(tmp_path) == FIRST_THREE
    assert [file.name for file in saving.files] == FIRST_THREE


def test_with_every_a_file_is_written_after_each_so_many_batches_of_the_fit(tmp_path):
    saving = Checkpoint(tmp_path, every=3, keep=100)
    train(plain, 2, saving)
    expected = ["epoch-0001-batch-000003.pt", "epoch-0001.pt", "epoch-0002-batch-000002.pt", "epoch-0002.pt"]
    assert [file.name for file in saving.files] == expected
    assert names(tmp_path) == expected


def test_every_counts_all_batches_of_the_fit_and_not_those_of_an_epoch(tmp_path):
    saving = Checkpoint(tmp_path, every=6, keep=100)
    train(plain, 4, saving)
    batches = [file.name for file in saving.files if "batch" in file.name]
    assert batches == ["epoch-0002-batch-000002.pt", "epoch-0003-batch-000004.pt"]


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
    assert differing(outcome(train(plain, 3)), outcome(resumed)) == []


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


@pytest.mark.parametrize(
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


def test_it_keeps_the_contract_of_callbacks(tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda file: None)  # takes most of the time
    check_callback(lambda: Checkpoint(tmp_path / "a", every=2))


def test_writing_changes_neither_weights_nor_random_numbers(tmp_path):
    saving = Checkpoint(tmp_path, every=1, monitor="valid_loss")
    assert differing(outcome(train(learner, 3)), outcome(train(learner, 3, saving))) == []


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
