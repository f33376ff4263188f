"""What two processes have seen of their replicas; and ranks that are threads."""

import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hookcb.core.ranks import Ranks
from hookcb.diagnosis.dispatcher import Dispatcher
from hookcb.diagnosis.ranks import Together, of_all, states_of
from hookcb.diagnosis.run import Run
from tests.ranks.support import shared
from tests.support import run_ranks


def replicas(tmp_path_factory):
    """What each of two ranks has observed, by case; for all tests of a session."""

    def make(folder):
        folder.mkdir()
        files = run_ranks(Path(__file__).with_name("replica_worker.py"), folder)
        return [json.loads(file.read_text()) for file in files]

    results = shared(tmp_path_factory, "replicas", make)
    assert not [result["error"] for result in results if "error" in result]
    return results


class Meeting:
    """Where threads give an item each, and get those of all."""

    def __init__(self, world):
        self.items, self.barrier = [None] * world, threading.Barrier(world, timeout=20)
        self.n_meetings = 0

    def exchange(self, rank, item):
        self.items[rank] = item
        self.barrier.wait()
        items = list(self.items)
        self.n_meetings += rank == 0
        self.barrier.wait()
        return items


class ThreadRanks(Ranks):
    """Ranks of threads that meet."""

    def __init__(self, meeting, rank):
        super().__init__()
        self.meeting, self.rank, self.world = meeting, rank, len(meeting.items)

    def gather(self, item):
        return self.meeting.exchange(self.rank, item)

    def of_main(self, make):
        return self.gather(make())[0]

    def sum(self, values):
        return [math.fsum(xs) for xs in zip(*self.gather(list(values)), strict=True)]

    def max(self, values):
        return [max(xs) for xs in zip(*self.gather(list(values)), strict=True)]


def on_ranks(function, items):
    """What `function(item, ranks)` returns on each rank, and in how many collectives."""
    meeting = Meeting(len(items))
    ranks = [ThreadRanks(meeting, rank) for rank in range(len(items))]
    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(function, items, ranks)), meeting.n_meetings


def merged(*runs):
    """The run of all ranks, on each of them, of runs that each has."""
    return on_ranks(run_of_all, runs)[0]


def run_of_all(run, ranks):
    """The run of all ranks, on one of them."""
    together, dispatcher = Together(ranks), Dispatcher(Run(), (), 0.0)
    return of_all(run, together.states(states_of(run, dispatcher)), together, dispatcher)
