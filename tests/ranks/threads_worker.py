"""Threads as ranks: what `Ranks` and `Votes` do with many of them. Run by test_many.py."""

import json
import random
import sys
import threading
import traceback
from pathlib import Path

import torch
from torch import distributed
from torch.testing._internal.distributed import multi_threaded_pg

from hookcb import CancelEpochException, CancelFitException, CancelTrainException, Event
from hookcb.processes.exchange import Exchange, RankError
from hookcb.processes.votes import Votes

CANCELS = (CancelFitException, CancelEpochException, CancelTrainException)


def joined(name):
    ranks = Exchange(distributed.group.WORLD)
    ranks.join(name)
    return ranks


def merge(ranks):
    """Every method that merges numbers or objects, with what is right."""
    rank, world = ranks.rank, ranks.world
    ns = [r % 3 for r in range(world)]
    items = ranks.gather({"rank": rank, "text": "x" * rank})
    lengths = [3 + (r * 7) % 5 for r in range(world)]
    x = torch.tensor([float(rank)])
    ranks.average([x])
    return {
        "sum": ranks.sum([rank, 1.0]) == [world * (world - 1) / 2, world],
        "max": ranks.max([rank, -rank]) == [world - 1, 0],
        "mean": abs(ranks.mean(float(rank), ns[rank]) - sum(r * n for r, n in enumerate(ns)) / sum(ns))
        < 1e-9,
        "mean of none": str(ranks.mean(1.0, 0)) == "nan",
        "gather": [(item["rank"], len(item["text"])) for item in items] == [(r, r) for r in range(world)],
        "until one ends": len(list(ranks.until_one_ends(range(lengths[rank])))) == min(lengths),
        "average": x.item() == (world - 1) / 2,
        "alike": ranks.check_alike({"colour": "red"}) is None,
    }


def differ(ranks):
    try:
        ranks.check_alike({"colour": "red" if ranks.rank != 5 else "blue"})
    except RankError as error:
        return str(error)
    return "no error"


def decide(ranks, seed):
    """Batches until ranks decide to end: when they do, by which level, and the signal that they know."""
    together, votes = random.Random(seed), Votes(ranks)
    asked = {
        (together.randrange(ranks.world), together.randrange(2, 9)): together.choice(CANCELS)
        for _ in range(2)
    }
    signal = together.randrange(ranks.world) if seed % 2 else -1
    for batch in range(12):
        if ranks.rank == signal and batch == 1:
            votes.signal = 15
        cancel = asked.get((ranks.rank, batch))
        assert votes.decide(Event.AFTER_BATCH, [], [cancel()] if cancel else [], True) == []
        try:
            votes.end_batch(is_last=batch == 11)
        except CANCELS as error:
            first = min(at for _, at in asked)
            levels = {cls for (_, at), cls in asked.items() if at == first}
            return [
                batch,
                type(error).__name__,
                votes.agreed_signal,
                first,
                sorted(cls.__name__ for cls in levels),
            ]
    return [-1, "", votes.agreed_signal, -1, []]


def outside(ranks):
    """A cancel outside of batches, by one rank: of all, and at once."""
    votes = Votes(ranks)
    cancels = [CancelEpochException()] if ranks.rank == 3 else []
    return [type(cancel).__name__ for cancel in votes.decide(Event.AFTER_TRAIN, [], cancels, True)]


def body(rank, world, store, found):
    distributed.init_process_group("threaded", rank=rank, world_size=world, store=store)
    try:
        ranks = joined("test")
        found[rank] = {
            "merged": merge(ranks),
            "differ": differ(ranks),
            "decided": [decide(ranks, seed) for seed in range(6)],
            "outside": outside(ranks),
        }
    except BaseException as error:
        found[rank] = {"error": "".join(traceback.format_exception(error)[-3:])}
        multi_threaded_pg.ProcessLocalGroup.exception_handle(error)


def main():
    facts = {}
    for world in map(int, sys.argv[2].split(",")):
        torch._C._distributed_c10d._set_thread_isolation_mode(True)
        multi_threaded_pg._install_threaded_pg()
        store, found = distributed.HashStore(), {}
        multi_threaded_pg.ProcessLocalGroup.reset()
        threads = [
            threading.Thread(target=body, args=(r, world, store, found), daemon=True) for r in range(world)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        multi_threaded_pg._uninstall_threaded_pg()
        facts[str(world)] = [found.get(rank, {"error": "hangs"}) for rank in range(world)]
    (Path(sys.argv[1]) / "0.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
