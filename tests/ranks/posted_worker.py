"""One of several ranks that watch a loop of their own: what the verdict of all of them says.

Run by test_posted.py: `posted_worker.py FOLDER [CASE]`; by default all cases but those that end the process.
"""

import gc
import io
import os
import signal
import sys
import time
import warnings
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from unittest import mock

import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from hookcb import Diagnose, watch
from hookcb.processes.patience import Patience
from tests.ranks.support import answer, digest, join_group, run_cases, small_model
from tests.ranks.trace_worker import Trace

RANK, WORLD = 0, 1
N_WATCHED = 0
SHORT = 3.0  # seconds that a rank waits for one that does not come


def labels_of_one_class(i, x, y):
    return x, torch.zeros_like(y)


def scaled(i, x, y):
    return x * 255, y


def nan(i, x, y):
    return torch.where(torch.tensor(i == 30), torch.nan, x), y


def fails(i, x, y):
    if i == 30:
        raise ValueError("mine")
    return x, y


def killed(i, x, y):
    if i == 30:
        os.kill(os.getpid(), signal.SIGKILL)
    return x, y


def training(fault=None, lr=0.1):
    """A model, its optimizer, and a function that trains them; rank 1 has the fault."""
    torch.manual_seed(0)
    model = DistributedDataParallel(small_model())
    opt = torch.optim.SGD(model.parameters(), lr=lr)

    def train(w=None):
        for i in range(40):
            x = torch.randn(16, 4, generator=torch.Generator().manual_seed(2 * i + RANK))
            y = (x.sum(1) > 0).long()
            if fault is not None and RANK == 1:
                x, y = fault(i, x, y)
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
            if w is not None and w.stop_requested:
                break
        return i + 1

    return model, opt, train


def watched(fault=None, cbs=None, before_close=lambda: None, is_here=True, lr=0.1):
    """What the watch of a training shows and says, and how long it takes to close."""
    global N_WATCHED
    N_WATCHED += 1
    distributed.barrier()
    model, opt, train = training(fault, lr)
    out, ended = io.StringIO(), ""
    diagnose = Diagnose() if cbs is None else cbs
    with (
        warnings.catch_warnings(record=True) as caught,
        redirect_stdout(out),
    ):
        warnings.simplefilter("always")
        w = watch(model, opt, cbs=diagnose) if is_here else nullcontext()
        n, began = 0, time.monotonic()
        try:
            with w as loop:
                n = train(loop)
                before_close()
                began = time.monotonic()
        except (ValueError, RuntimeError) as error:
            ended = type(error).__name__
        seconds = time.monotonic() - began
    closed_by(RANK).touch()
    told = [str(x.message) for x in caught if "ERROR" in str(x.message)]
    return described(diagnose) | {
        "shown": out.getvalue(),
        "seconds": seconds,
        "told": told,
        "n": n,
        "digest": digest(model),
        "ended": ended,
    }


def described(diagnose):
    if (verdict := diagnose.verdict) is None:
        return {}
    found = [[f.code, list(f.ranks)] for f in verdict.findings]
    return {"head": verdict.headline, "looked": verdict.looked, "found": found, "of": verdict.of_rank}


def late(rank):
    """A rank that ends only when the other one has, which waits for it in vain."""

    def wait():
        closed, until = closed_by(1 - rank), time.monotonic() + 60
        while rank == RANK and not closed.exists() and time.monotonic() < until:
            time.sleep(0.05)

    return lambda: watched(before_close=wait)


def closed_by(rank):
    """File that is there once a rank has closed its latest watch."""
    return Path(sys.argv[1], f"closed-{rank}-{N_WATCHED}")


def freed():
    """The model is freed, and nobody has closed the watch."""
    distributed.barrier()
    model, opt, train = training()
    with redirect_stdout(io.StringIO()):
        diagnose = Diagnose()
        w = watch(model, opt, cbs=diagnose)
        train()
        del model, opt, train
        gc.collect()
    return described(diagnose) | {"fitting": w.fitting}


class Other(nn.Sequential):
    """A model of another class."""


def another_model():
    distributed.barrier()
    torch.manual_seed(0)
    model = (Other if RANK else nn.Sequential)(nn.Linear(4, 2))
    opt, diagnose = torch.optim.SGD(model.parameters(), lr=0.1), Diagnose(show=False)
    with watch(model, opt, cbs=diagnose):
        for _ in range(30):
            x = torch.randn(16, 4)
            cross_entropy(model(x), (x.sum(1) > 0).long()).backward()
            opt.step()
            opt.zero_grad()
    return described(diagnose)


def traced(fault):
    """The collectives of a loop alone, and of the same one that is watched."""

    def case():
        found = []
        for is_here in (False, True):
            with Trace() as trace:
                result = watched(fault, is_here=is_here)
            found.append([trace.ops, result["digest"]])
        return found

    return case


def left_group():
    """The group is left before the watch ends, and with it the store of rank 0."""
    return watched(before_close=distributed.destroy_process_group)


def of_its_own():
    torch.manual_seed(1)
    own = small_model()
    opt = torch.optim.SGD(own.parameters(), lr=0.1)
    with watch(own, opt, cbs=Diagnose(show=False)):
        for _ in range(3):
            x = torch.randn(16, 4)
            cross_entropy(own(x), (x.sum(1) > 0).long()).backward()
            opt.step()
            opt.zero_grad()


def others_beside():
    """Rank 1 alone trains and watches a model of its own before that of all ranks."""
    if RANK:
        patiently(of_its_own, 1.0)()
    return watched(scaled)


def absent():
    return watched(is_here=not RANK)


def live():
    """Rank 1 alone sees its inputs, and tells nothing itself; steps are too small to be noticed."""
    return watched(scaled, Diagnose("ignore" if RANK else "warn"), lr=1e-3)


CASES = {
    "healthy": watched,
    "class": lambda: watched(labels_of_one_class),
    "nan": lambda: watched(nan),
    "scale": lambda: watched(scaled),
    "live": live,
    "stop": lambda: watched(scaled, Diagnose("stop")),
    "rank 1 is late": late(1),
    "rank 0 is late": late(0),
    "freed": freed,
    "another model": another_model,
    **{f"trace, {x.__name__ if x else None}": traced(x) for x in (None, scaled, nan)},
    "others beside": others_beside,  # now loops without a group have other numbers on rank 1
    "absent": absent,
}
ENDING = {
    "left": left_group,
    "killed": lambda: watched(killed),
    "fails": lambda: watched(fails),
}


IN_VAIN = ("rank 1 is late", "rank 0 is late", "another model", "absent")  # a rank waits for the other


def patiently(case, seconds):
    """A case in which a rank waits for at most so many seconds, whatever it has waited before."""

    def run():
        with (
            mock.patch("hookcb.diagnosis.ranks.PATIENCE", patience := Patience(seconds)),
            mock.patch("hookcb.processes.board.PATIENCE", patience),
        ):
            return case()

    return run


def main():
    global RANK, WORLD
    RANK, WORLD = join_group()
    if len(sys.argv) == 2:
        # on a busy machine a rank may be late by seconds without any fault of its own
        cases = {name: patiently(case, SHORT if name in IN_VAIN else 30.0) for name, case in CASES.items()}
        run_cases(cases, sys.argv[1])
        return distributed.barrier()
    result = patiently(ENDING[sys.argv[2]], SHORT)()
    with mock.patch.object(distributed, "get_rank", return_value=RANK):  # the group may be left
        return answer(sys.argv[1], result)


if __name__ == "__main__":
    main()
