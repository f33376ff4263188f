"""Lookout: a thread that tells where ranks are once they train no batch any more, and nothing before."""

import threading
import time
from concurrent.futures import Future

import pytest
import torch
from torch import distributed, nn

from hookcb.core.threads import this_thread
from hookcb.processes import hangs
from hookcb.processes.board import Board
from hookcb.processes.hangs import Followed, Lookout, Terminated

LIMIT = 1.0


class Loop:
    """What a lookout reads of a loop, whose thread calls `act`."""

    def __init__(self, act):
        self.training, self.train_iter, self.model = True, 3, nn.Linear(2, 2)
        ready = Future()
        self.thread = threading.Thread(target=lambda: (ready.set_result(this_thread()), act(self)))
        self.thread.start()
        self._thread = ready.result(30)


def waits(loop):
    while not over.wait(0.02):  # it waits
        pass


def steps(loop):
    while not over.wait(0.3):
        loop.train_iter += 1


def validates(loop):
    loop.training = False
    waits(loop)


def evaluates(loop):
    loop.model.eval()
    waits(loop)


def begins(loop):
    loop.train_iter = 0  # before the second batch all may be compiled
    waits(loop)


def moves_on(loop):
    over.wait(2 * LIMIT)
    steps(loop)


def compiles(loop):
    torch.compile(loop.model, backend=lambda graph, inputs: (waits(loop), graph)[1])(torch.ones(1, 2))


over = threading.Event()


@pytest.fixture
def told(monkeypatch):
    """What is told by the lookouts of two ranks whose loops do these things, within some seconds.

    It is waited for `n` things that are told, and then for as long as a hang takes, in which no more may be.
    """
    said, lookouts, hosts = [], [], []

    def begin(*acts):
        host = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        hosts.append(host)

        def connect():
            return distributed.TCPStore("localhost", host.port, wait_for_workers=False)

        monkeypatch.setattr(hangs, "Board", lambda name, rank, world: Board(name, rank, world, connect))
        for rank, loop in enumerate([Loop(act) for act in acts]):
            lookout = Lookout(rank, 2, lambda: LIMIT)
            lookout.add(Followed(lambda loop=loop: loop, lambda loop=loop: loop.model, {}, lambda: None))
            lookouts.append(lookout)

    def run(*acts, n=0, seconds=2 * LIMIT):
        begin(*acts)
        until = time.monotonic() + 20 * LIMIT
        while len(said) < n and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(seconds)
        return said

    over.clear()
    monkeypatch.setattr(hangs, "show_error", said.append)
    # one of the ranks has to wait in a collective, which is not what this is about
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    run.lookouts, run.begin = lookouts, begin
    yield run
    over.set()
    for lookout in reversed(lookouts):
        lookout.close()


def test_two_ranks_that_wait_are_told_once_with_their_lines(told):
    (text,) = told(waits, waits, n=1, seconds=LIMIT)
    assert text.startswith(
        "hookcb: no training batch for 1 s: ranks 0, 1 are at tests/processes/test_hangs.py:"
    )
    assert text.endswith("`while not over.wait(0.02):  # it waits`, after 3 batches")


def test_a_rank_that_goes_on_is_known_to_do_so(told):
    (text,) = told(steps, waits, n=1, seconds=0)
    assert "rank 0 was last seen after" in text
    assert "rank 1 is at tests/processes/test_hangs.py:" in text


@pytest.mark.parametrize("acts", [[steps, validates, evaluates, begins], [compiles]])
def test_a_rank_that_may_take_long_is_waited_for(acts, told):
    # the first time imports modules for a second, in which nothing is compiled
    torch.compile(nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
    for act in acts:
        told.begin(act, act if act in (steps, begins) else waits)
    assert told() == []


def test_code_that_waits_for_nobody_is_no_hang(told, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert told(waits, waits) == []


def test_a_training_that_goes_on_is_no_hang_any_more(told):
    said = told(moves_on, moves_on, n=3, seconds=0)
    assert said[0].startswith("hookcb: no training batch for 1 s: ranks 0, 1 are at")
    assert sorted(said[1:]) == [f"hookcb: rank {rank} goes on, in batch 4" for rank in range(2)]
    loops = [lookout._followed[0].loop() for lookout in told.lookouts]
    assert [x.end(loop, KeyboardInterrupt()) for x, loop in zip(told.lookouts, loops, strict=True)] == [
        "",
        "",
    ]


def test_an_error_of_a_rank_explains_what_the_other_one_misses(told):
    told(steps, steps, seconds=0.5)
    first, second = told.lookouts
    loops = [lookout._followed[0].loop() for lookout in told.lookouts]
    assert second.end(loops[1], ValueError("planted")) == ""
    text = first.end(loops[0], RuntimeError("[gloo] Connection closed by peer"))
    assert text.startswith("rank 1 raised ValueError: planted, after")
    assert "; rank 0 has waited in vain, after" in text


def test_a_rank_that_nothing_is_known_of_is_waited_for_a_moment_only(told):
    told(steps, steps, seconds=0.3)
    began = time.monotonic()
    text = told.lookouts[0].end(told.lookouts[0]._followed[0].loop(), RuntimeError("Timed out waiting"))
    assert time.monotonic() - began < 3
    assert "rank 1 was last seen after" in text


def test_a_loader_that_timed_out_is_no_collective(told):
    told(steps, steps, seconds=0.3)
    first = told.lookouts[0]
    loader = torch.utils.data.DataLoader([1, 2], collate_fn=fail)
    with pytest.raises(RuntimeError) as caught:
        next(iter(loader))
    assert first.end(first._followed[0].loop(), caught.value) == ""


def fail(batch):
    raise RuntimeError("DataLoader timed out after 5 seconds")


def test_what_sigterm_ends_is_told_as_it_was_found(told):
    told(steps, steps, seconds=0.3)
    first = told.lookouts[0]
    first._is_leaving, first._report = True, "rank 1 sleeps"
    assert first.end(first._followed[0].loop(), Terminated("SIGTERM")) == "rank 1 sleeps"
    first._is_leaving = False
