import threading
import time

import pytest
from torch import distributed

from hookcb import CancelFitException
from hookcb.core.alone import ALONE
from hookcb.processes import failures
from hookcb.processes.exchange import Exchange, RankError
from hookcb.processes.failures import blame, shared_failures


class TwoRanks(Exchange):
    """Two ranks, of which the other may have failed."""

    def __init__(self, of_other=""):
        super().__init__()
        self.world, self.of_other, self.reported = 2, of_other, []

    def report_failure(self, text):
        self.failure = f"rank 0 {text}"
        self.reported.append(text)

    def find_failure(self):
        self.failure = self.failure or self.of_other
        return self.failure

    answer_alarm = find_failure

    def describe_loss(self):
        return self.of_other or "rank 1 did not take part"


def here():
    return "in the backward, epoch 0, batch 5"


def _threads():
    return {thread for thread in threading.enumerate() if thread.name == "hookcb ranks"}


def test_alone_an_error_stays_as_it_is():
    error, before = ValueError("mine"), _threads()
    assert ALONE.blame(error, here()) is error
    with pytest.raises(ValueError, match="mine"), shared_failures(Exchange(), here):
        raise error
    assert _threads() <= before  # a test before may have left one that ends by itself


def test_an_own_error_is_reported_once():
    ranks, error = TwoRanks(), ValueError("mine")
    assert blame(ranks, error, here()) is error
    assert blame(ranks, error, here()) is error
    assert ranks.reported == ["raised ValueError in the backward, epoch 0, batch 5: mine"]


def test_the_note_of_an_error_says_better_where_it_was_raised():
    ranks, error = TwoRanks(), ValueError("mine")
    error.add_note("in Mine.after_pred, epoch 0, batch 5")
    blame(ranks, error, here())
    assert ranks.reported == ["raised ValueError in Mine.after_pred, epoch 0, batch 5: mine"]


def test_a_long_error_is_cut():
    ranks = TwoRanks()
    blame(ranks, ValueError("x" * 10_000), here())
    assert len(ranks.reported[0]) < 400


@pytest.mark.parametrize(
    "error",
    [RuntimeError("[…/pair.cc:553] Connection closed by peer"), distributed.DistNetworkError("timed out")],
)
def test_an_error_of_a_collective_is_that_of_the_rank_that_failed(error):
    ranks = TwoRanks("rank 1 raised ValueError in epoch 0: theirs")
    cause = blame(ranks, error, here())
    assert isinstance(cause, RankError)
    assert (
        str(cause)
        == "rank 1 raised ValueError in epoch 0: theirs; rank 0 was in the backward, epoch 0, batch 5"
    )
    assert ranks.reported == []


def test_an_error_of_a_collective_names_who_is_missing():
    cause = blame(TwoRanks(), RuntimeError("Connection reset by peer"), here())
    assert str(cause).startswith("rank 1 did not take part; rank 0 was in the backward")


def test_in_a_block_the_cause_is_raised_and_the_thread_ends():
    with (
        pytest.raises(RankError, match=r"^rank 1 raised") as raised,
        shared_failures(TwoRanks("rank 1 raised"), here),
    ):
        raise RuntimeError("Connection closed by peer")
    assert "Connection closed" in str(raised.value.__cause__)
    for thread in _threads():
        thread.join(30)
        assert not thread.is_alive()


def test_a_thread_that_cannot_look_for_failures_says_so_and_ends(monkeypatch, capsys):
    def broken():
        raise KeyError("odd")

    monkeypatch.setattr(failures, "POLL", 0.001)
    ranks = TwoRanks()
    ranks.answer_alarm = broken
    with shared_failures(ranks, here):
        for thread in _threads():
            thread.join(30)
    told = "hookcb: rank 0 looks for failures of others no more: KeyError('odd')\n"
    assert capsys.readouterr().err == told


def test_a_cancel_is_no_failure():
    ranks = TwoRanks()
    with pytest.raises(CancelFitException), shared_failures(ranks, here):
        raise CancelFitException
    assert ranks.reported == []


def test_a_rank_that_cannot_be_freed_says_why_and_ends(monkeypatch, capsys):
    codes = []
    monkeypatch.setattr(failures, "POLL", 0.01)
    monkeypatch.setattr(failures, "GRACE", 0.05)
    monkeypatch.setattr(failures.os, "_exit", codes.append)
    with shared_failures(TwoRanks("rank 1 raised ValueError"), here):
        until = time.monotonic() + 30
        while not codes and time.monotonic() < until:
            time.sleep(0.01)
    assert codes == [1]
    said = "hookcb: rank 1 raised ValueError; rank 0 was in the backward, epoch 0, batch 5, and ends\n"
    assert capsys.readouterr().err == said


def test_a_rank_that_ends_in_time_is_left_alone(monkeypatch):
    codes = []
    monkeypatch.setattr(failures, "POLL", 0.01)
    monkeypatch.setattr(failures.os, "_exit", codes.append)
    with shared_failures(TwoRanks("rank 1 raised ValueError"), here):
        time.sleep(0.05)
    time.sleep(0.05)
    assert codes == []
