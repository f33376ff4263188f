"""Board: notes in a store, without waiting."""

import os
import threading
import time

import pytest
from torch import distributed

from hookcb.processes.board import Board


@pytest.fixture
def host():
    return distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def boards(host):
    def connect():
        return distributed.TCPStore("localhost", host.port, wait_for_workers=False)

    return [Board("test", rank, 3, connect) for rank in range(3)]


def test_each_rank_reads_what_the_others_have_posted(boards):
    for board in boards:
        board.post("seen", {"rank": board.rank})
    assert boards[0].wait("seen", range(3), seconds=30) == {rank: {"rank": rank} for rank in range(3)}
    boards[1].post("seen", "later").result(30)
    assert boards[2].read("seen", [1]).result(30) == {1: "later"}
    assert boards[2].read("other").result(30) == {}


def test_what_is_missing_is_waited_for_only_so_long(boards):
    boards[1].post("seen", 1).result(30)
    began = time.monotonic()
    assert boards[0].wait("seen", range(3), seconds=0.3) == {1: 1}
    assert 0.3 <= time.monotonic() - began < 30
    assert boards[0].wait("seen", [1], seconds=0) in ({}, {1: 1})


def test_a_slow_store_delays_nobody(host):
    answers = threading.Event()

    def connect():
        assert answers.wait(30)
        return host

    board = Board("test", 0, 1, connect)
    written = board.post("seen", 1)
    assert not board.flush(seconds=0.01)
    assert board.wait("seen", [0], seconds=0.01) == {}
    answers.set()  # nothing has waited until now
    written.result(30)
    assert board.flush(seconds=30)
    assert board.wait("seen", [0], seconds=30) == {0: 1}


def test_a_store_that_is_gone_is_told_and_asked_no_more():
    class Gone:
        def set(self, key, value):
            raise RuntimeError("Broken pipe\nmore")

    board = Board("test", 0, 2, Gone)
    board.post("seen", 1).result(30)
    assert board.failure == "the store through which ranks meet does not answer: Broken pipe"
    assert board.wait("seen", range(2), seconds=60) == {}
    assert not board.flush(seconds=30)


def test_notes_of_another_board_or_of_processes_before_a_restart_are_not_read(boards, host, monkeypatch):
    boards[0].post("seen", "old").result(30)
    assert Board("other", 1, 3, lambda: host).read("seen").result(30) == {}
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert Board("test", 1, 3, lambda: host).read("seen").result(30) == {}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_in_a_forked_process_nothing_is_posted(boards):
    boards[0].post("seen", 1).result(30)
    if not (child := os.fork()):
        done = boards[0].post("seen", 2).done() and boards[0].failure
        os._exit(0 if done else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert boards[0].read("seen", [0]).result(30) == {0: 1}
