from types import SimpleNamespace

import pytest

from hookcb import (
    CancelBatchException,
    CancelEpochException,
    CancelFitException,
    CancelTrainException,
    CancelValidException,
    Event,
)
from hookcb.core.callback import Callback
from hookcb.processes import votes as module
from hookcb.processes.exchange import Exchange, RankError
from hookcb.processes.votes import Votes
from tests.support import in_turn


class MayCancel(Callback):
    may_cancel = frozenset({"batch"})


class OtherRanks(Exchange):
    """Ranks whose votes are those of this one, and what `others` gives, a list of numbers for each vote."""

    def __init__(self, others=(), missing=()):
        super().__init__()
        self.world, self.others, self.missing, self.n_votes = 2, list(others), list(missing), 0

    def start(self, x, op=None):
        self.n_votes += 1
        if self.others:
            x[:] = x.maximum(x.new_tensor(self.others.pop(0)))

    def are_all_at(self, mark):
        return not self.missing

    def missing_at(self, mark):
        return self.missing


def flags(**asked):
    """What a rank votes: one number for each level, its signal, whether it is alarmed, and seconds."""
    levels = [*module.LEVELS, "signal", "alarm", "seconds"]
    return [float(asked.get(level, 0)) for level in levels]


def test_a_cancel_after_a_batch_waits_for_the_end_of_the_next():
    votes = Votes(OtherRanks())
    assert votes.decide(Event.AFTER_BATCH, [], [CancelFitException()], True) == []
    votes.end_batch()
    assert votes.decide(Event.AFTER_BATCH, [], [], True) == []
    with pytest.raises(CancelFitException):
        votes.end_batch()


def test_what_another_rank_asks_for_is_done_here():
    votes = Votes(OtherRanks([flags(epoch=1)]))
    votes.end_batch()
    with pytest.raises(CancelEpochException) as raised:
        votes.end_batch()
    assert raised.value.raised_in == "a callback of another rank"


def test_the_outermost_cancel_is_done():
    votes = Votes(OtherRanks([flags(epoch=1, fit=1)]))
    (cancel,) = votes.vote([CancelTrainException()])
    assert type(cancel) is CancelFitException


def test_a_cancel_keeps_its_reason():
    (cancel,) = Votes(OtherRanks()).vote([CancelFitException("it is enough")])
    assert str(cancel) == "it is enough"


def test_outside_of_batches_a_vote_decides_at_once_and_takes_along_what_was_asked_before():
    votes = Votes(OtherRanks())
    votes.decide(Event.AFTER_BATCH, [], [CancelEpochException()], True)
    (cancel,) = votes.decide(Event.AFTER_TRAIN, [], [], True)
    assert type(cancel) is CancelEpochException


def test_a_vote_that_still_runs_is_not_lost():
    votes = Votes(OtherRanks([flags(fit=1), flags()]))
    votes.end_batch()
    (cancel,) = votes.vote()
    assert type(cancel) is CancelFitException


def test_no_vote_begins_after_the_last_batch():
    ranks = OtherRanks()
    votes = Votes(ranks)
    votes.end_batch()
    votes.end_batch(is_last=True)
    assert ranks.n_votes == 1


def test_a_declared_cancel_is_voted_on_where_its_callback_acts():
    ranks = OtherRanks([flags(batch=1)])
    (cancel,) = Votes(ranks).decide(Event.AFTER_LOSS, [MayCancel()], [], True)
    assert type(cancel) is CancelBatchException


def test_events_inside_of_a_batch_cost_nothing_without_a_declaration():
    ranks = OtherRanks()
    assert Votes(ranks).decide(Event.AFTER_LOSS, [Callback()], [], True) == []
    assert ranks.n_votes == 0


def test_an_undeclared_cancel_of_all_ranks_is_done():
    cancel = CancelBatchException()
    assert Votes(OtherRanks()).decide(Event.AFTER_LOSS, [Callback()], [cancel], True) == [cancel]


def test_an_undeclared_cancel_of_some_ranks_is_an_error_that_names_its_callback(monkeypatch):
    monkeypatch.setattr(module, "MAX_APART", 0.0)
    cancel = CancelBatchException()
    cancel.raised_in = "Mine.after_loss"
    with pytest.raises(
        RankError, match=r"raised in Mine.after_loss by rank 0, but not by rank 1.*may_cancel"
    ):
        Votes(OtherRanks(missing=[1])).decide(Event.AFTER_LOSS, [Callback()], [cancel], True)


def test_a_cancel_of_another_level_than_declared_must_be_that_of_all_ranks(monkeypatch):
    monkeypatch.setattr(module, "MAX_APART", 0.0)
    cancel = CancelFitException()
    cancel.raised_in = "Mine.after_loss"
    (done,) = Votes(OtherRanks()).decide(Event.AFTER_LOSS, [MayCancel()], [cancel], True)
    assert done.level == "fit"
    with pytest.raises(RankError, match=r"raised in Mine.after_loss by rank 0, but not"):
        Votes(OtherRanks(missing=[1])).decide(Event.AFTER_LOSS, [MayCancel()], [cancel], True)


def test_ranks_may_validate_on_different_numbers_of_batches():
    cancel = CancelValidException()
    assert Votes(OtherRanks(missing=[1])).decide(Event.AFTER_LOSS, [], [cancel], False) == [cancel]


def test_a_signal_is_known_once_all_ranks_know():
    votes = Votes(OtherRanks([flags(signal=15)]))
    votes.signal = 2
    votes.end_batch()
    assert votes.agreed_signal == 0
    votes.end_batch()
    assert votes.agreed_signal == 15


def test_after_fit_is_not_voted_on():
    ranks, cancel = OtherRanks(), CancelFitException()
    assert Votes(ranks).decide(Event.AFTER_FIT, [], [cancel], True) == [cancel]
    assert ranks.n_votes == 0


def test_an_alarm_is_known_on_all_ranks_one_batch_later_and_then_forgotten():
    ranks = OtherRanks([flags(), flags(alarm=1), flags()])
    votes = Votes(ranks)
    votes.is_alarmed = True
    votes.end_batch()
    assert not votes.is_alarm_agreed  # the vote runs
    votes.end_batch()
    assert votes.is_alarm_agreed
    assert not votes.is_alarmed
    votes.is_alarm_agreed = False
    votes.end_batch()
    assert votes.is_alarm_agreed  # that of another rank
    votes.is_alarm_agreed = False
    votes.end_batch(is_last=True)
    assert not votes.is_alarm_agreed


@in_turn(
    ("seconds", "every"), [(3.0, 1), (0.025, 1), (0.024, 2), (0.0125, 2), (0.01, 4), (0.002, 16), (1e-5, 16)]
)
def test_fast_batches_are_voted_on_less_often_as_the_slowest_rank_says(seconds, every, monkeypatch):
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    ranks = OtherRanks([flags()] * 15 + [flags(seconds=seconds)])
    votes = Votes(ranks)
    votes.end_batch()
    counts = []
    for _ in range(15 + 64):
        before = ranks.n_votes
        votes.end_batch()
        counts.append(ranks.n_votes - before)
    assert counts[:15] == [1] * 15
    assert [i for i, n in enumerate(counts, 2) if n][15:] == [i for i in range(17, 81) if i % every == 0]


def test_a_cancel_between_votes_is_not_lost(monkeypatch):
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    votes = Votes(OtherRanks([flags()] * 15 + [flags(seconds=0.01)]))
    for _ in range(16):
        votes.end_batch()
    assert votes.decide(Event.AFTER_BATCH, [], [CancelFitException()], True) == []
    for _ in range(4):  # up to batch 20, whose vote begins
        votes.end_batch()
    with pytest.raises(CancelFitException):
        votes.end_batch()
