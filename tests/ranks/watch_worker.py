"""One of several ranks; its own loop is watched, and asked to stop by one rank: `watch_worker.py FOLDER`."""

import io
import json
import sys
import warnings
from contextlib import nullcontext, redirect_stdout
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from torch import distributed
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from hookcb import Callback, CancelFitException, watch
from hookcb.cli.main import main as main_of_hookcb
from tests.ranks.support import digest, join_group, run_cases, small_model

RANK, WORLD = 0, 1
N_BATCHES = 60


class StopAt(Callback):
    """Requests the end at an event of batch `i`, on one rank."""

    def __init__(self, event, i, rank=1):
        super().__init__()
        setattr(self, event, self._stop)
        self.i, self.rank = i, rank

    def _stop(self):
        if self.train_iter == self.i and self.rank == RANK:
            raise CancelFitException


def train(cbs, accumulate=1, watching=True):
    """Batches trained until a stop, and the weights."""
    torch.manual_seed(0)
    model = DistributedDataParallel(small_model())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    n = 0
    with watch(model, opt, cbs=cbs) if watching else nullcontext() as w:
        for i in range(N_BATCHES):
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(2 * i + RANK))
            is_last = (i + 1) % accumulate == 0
            with nullcontext() if is_last else model.no_sync():
                cross_entropy(model(x), (x.sum(1) > 0).long()).backward()
            if is_last:
                opt.step()
                opt.zero_grad()
            n += 1
            if watching and w.stop_requested:
                break
    return [n, digest(model)]


def stopping(*args, accumulate=1):
    def case():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return train(StopAt(*args), accumulate)

    return case


def both_ask():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return train([StopAt("after_batch", 4 + 3 * RANK, rank=RANK)])


def only_one_watches():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        n, _ = train(StopAt("after_loss", 3, rank=0), watching=RANK == 0)
    return [n, [str(w.message) for w in caught if "would not notice" in str(w.message)]]


DIAGNOSED = """
import json, sys, torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from tests.ranks.support import digest, small_model

torch.manual_seed(0)
model = DistributedDataParallel(small_model())
opt = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(torch.distributed.get_rank())
n = 0
try:
    while n < 60:
        n += 1
        x = torch.randn(4, 4)
        cross_entropy(model(x), (x.sum(1) > 0).long()).backward()
        opt.step()
        opt.zero_grad()
finally:
    open(sys.argv[1], "w").write(json.dumps([n, digest(model)]))
"""


def diagnosed(*options):
    """A script under `hookcb diagnose`; the time of rank 1 is over at its sixth look at the clock."""

    def case():
        looks = count()
        clock = SimpleNamespace(monotonic=lambda: 100.0 * (RANK == 1 and next(looks) > 5))
        script, made = Path(sys.argv[1], f"script-{RANK}.py"), Path(sys.argv[1], f"made-{RANK}.json")
        script.write_text(DIAGNOSED)
        out = io.StringIO()
        with mock.patch("hookcb.cli.limits.time", clock), redirect_stdout(out):
            code = main_of_hookcb(["diagnose", *options, str(script), str(made)])
        return [code, *json.loads(made.read_text()), out.getvalue()]

    return case


CASES = {
    f"{event}, {k}": stopping(event, 7, accumulate=k)
    for event in ("before_batch", "after_pred", "after_loss", "after_backward", "before_step", "after_step")
    for k in (1, 4)
} | {"both ask": both_ask, "never": stopping("after_batch", 99)}
CASES |= {"steps": diagnosed("--steps", "9"), "minutes": diagnosed("--minutes", "1")}
CASES["only one watches"] = only_one_watches  # the last, as ranks then count their loops differently


def main():
    global RANK, WORLD
    RANK, WORLD = join_group()
    run_cases(CASES, sys.argv[1])
    distributed.barrier()


if __name__ == "__main__":
    main()
