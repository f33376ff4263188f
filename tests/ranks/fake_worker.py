"""Rank 0 of ranks that do not exist: counts what it sends: `fake_worker.py FOLDER WORLD [CALLBACKS]`."""

import json
import os
import pickle
import sys
import warnings
from pathlib import Path

import torch
import torch.testing._internal.distributed.fake_pg  # which registers the backend
from torch import distributed
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from hookcb import Learner
from hookcb.processes import exchange
from tests.ranks.support import small_model
from tests.ranks.trace_worker import ALL, SLOW, Trace, make, sharded

N_BATCHES, N_EPOCHS = 6, 2


class Cost(Trace):
    """Counts calls and bytes as well."""

    def __init__(self):
        super().__init__()
        self.n_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            self.n_bytes += sum(x.nbytes for x in tree_leaves(args) if isinstance(x, torch.Tensor))
        return super().__torch_dispatch__(func, types, args, kwargs)


def batches(n):
    return [(torch.randn(4, 4), torch.randint(2, (4,))) for _ in range(n)]


def gather(self, item):
    """Communicates as much as `Ranks.gather`, whose other ranks would give the same."""
    self.sum([0.0] * self.world)
    self.wait(self.start(torch.zeros(self.world * len(pickle.dumps(item)), dtype=torch.uint8)))
    return [item] * self.world


def replicated(model):
    """As DDP does, but by a hook, because the works of a fake group have no results."""

    def reduce(_, bucket):
        distributed.all_reduce(bucket.buffer())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    wrapped.register_comm_hook(None, reduce)
    return wrapped


def cost_of(cls, wrap):
    torch.manual_seed(0)
    learn = Learner((batches(N_BATCHES), batches(2)), wrap(small_model()), cross_entropy, lr=0.1)
    with warnings.catch_warnings(action="ignore"), learn.no_logging(), Cost() as cost:
        try:
            learn.fit(N_EPOCHS, cbs=[make(cls)] if cls else [])
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
    return {"n": len(cost.ops), "bytes": cost.n_bytes, "ops": cost.ops}


def main():
    folder, world, *names = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    distributed.init_process_group("fake", rank=0, world_size=world, store=distributed.HashStore())
    exchange.Exchange.are_all_at = lambda self, mark: True
    exchange.Exchange.find_failure = exchange.Exchange.answer_alarm = lambda self: ""
    exchange.Exchange.report_failure = lambda self, text: None
    exchange.Exchange.gather = gather
    os.chdir(folder)
    counted = [cls for cls in ALL if cls.__name__ not in SLOW and (not names or cls.__name__ in names)]
    facts = {}
    for how, wrap in {"ddp": replicated, "fsdp2": sharded}.items():
        facts[how] = {"none": cost_of(None, wrap)} | {cls.__name__: cost_of(cls, wrap) for cls in counted}
    (folder / "0.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
