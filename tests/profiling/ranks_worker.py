"""One of two ranks, which are timed, profiled and logged: `ranks_worker.py FOLDER`."""

import contextlib
import io
import os
import pickle
import sys
import time
import warnings
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from hookcb import (
    Callback,
    Diagnose,
    GradientAccumulation,
    Log,
    MemoryStats,
    ProfilerCallback,
    StepTimer,
    TerminateOnNaN,
    watch,
)
from hookcb.core.console import show, warn
from hookcb.loggers import JSONLLogger
from hookcb.processes import stragglers
from tests.ranks.support import OwnTime, answer, join_group, make_learner
from tests.ranks.trace_worker import Trace

RANK = 0
LAG = 0.01  # seconds
LONG = 0.05  # by the real clock, whatever else the machine does
OWN = OwnTime()


class Lags(nn.Module):
    """Takes longer on one rank."""

    def __init__(self, rank, lag=OWN.lag):
        super().__init__()
        self.rank, self.lag = rank, lag

    def forward(self, x):
        if self.rank == RANK:
            self.lag(LAG)
        return x


class LagsInData:
    """Batches that one rank gets late."""

    def __init__(self, dl, rank):
        self.dl, self.rank = dl, rank

    def __len__(self):
        return len(self.dl)

    def __iter__(self):
        for batch in self.dl:
            if self.rank == RANK:
                OWN.lag(LAG)
            yield batch


class WithoutLength:
    def __init__(self, dl):
        self.dl = dl

    def __iter__(self):
        return iter(self.dl)


def net(*layers):
    return nn.Sequential(nn.Linear(4, 8), *layers, nn.ReLU(), nn.Linear(8, 2))


def sharded(model):
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer)
    return fully_shard(model)


def timed(*layers, cbs=(), late=None, n_epoch=1, has_length=True, clock=OWN.patched, **kwargs):
    """A fit of 50 batches an epoch, in which ranks are compared after 20, 40 and 50 of them."""
    learn = make_learner(n_train=400, model=net(*layers), **kwargs)
    train = learn.dls.train if late is None else LagsInData(learn.dls.train, late)
    learn.dls = type(learn.dls)(train if has_length else WithoutLength(train), None)
    with learn.no_logging(), clock():
        learn.fit(n_epoch, cbs=[StepTimer(), *cbs])
    return learn


def about(learn):
    ranks, found = learn.step_timer.records.ranks, learn.step_timer.straggler
    return {
        "straggler": None if found is None else [found.rank, found.phase, found.excess, found.is_chronic],
        "blocks": ranks.n_blocks,
        "steps": ranks.n_steps,
        "slowest": ranks.n_slowest,
        "phases": ranks.phases,
        "report": str(learn.step_timer.report()),
        "data": learn.step_timer.percentiles()["data"].share,
    }


# ---- StepTimer


def forward():
    with Trace() as trace:
        found = about(timed(Lags(1)))
    return found | {"ops": trace.ops}


def data():
    return about(timed(late=1))


def callbacks():
    return about(timed(cbs=[Callback(before_batch=lambda cb: OWN.lag(LAG * RANK))]))


def buffers_and_data_of_rank_0():
    return about(timed(nn.BatchNorm1d(8), late=0))


def buffers_and_forward_of_rank_1():
    return about(timed(nn.BatchNorm1d(8), Lags(1)))


def sharded_data():
    return about(timed(late=1, wrap=sharded))


def sharded_forward():
    return about(timed(Lags(1), wrap=sharded))


def votes():
    """All ranks wait in votes for the one that lags, not in the backward."""
    return about(by_real_clock(cbs=[TerminateOnNaN(), GradientAccumulation(4)]))


def without_length():
    return about(by_real_clock(has_length=False))


def by_real_clock(**kwargs):
    """Waits of hookcb for the other rank take time."""
    return timed(Lags(1, lag=lambda _: time.sleep(LONG)), clock=contextlib.nullcontext, **kwargs)


def pickled_while_it_runs():
    sizes = []
    pickles = Callback(after_train=lambda cb: sizes.append(len(pickle.dumps(cb.learn.step_timer))))
    learn = timed(cbs=[pickles])
    return {"n": len(sizes), "again": pickle.loads(pickle.dumps(learn.step_timer)).records.ranks.n_blocks}


def too_short():
    learn = make_learner(n_train=48)
    with learn.no_logging():
        learn.fit(1, cbs=StepTimer())
    return about(learn)


def ends_early():
    """Ends in the middle of a block by an error of one rank."""

    class Fails(Callback):
        def after_batch(self):
            if self.training and self.train_iter == 30 and RANK == 1:
                raise ValueError("of rank 1")

    learn = make_learner(n_train=400)
    error = ""
    try:
        with learn.no_logging():
            learn.fit(1, cbs=[StepTimer(), Fails()])
    except Exception as e:
        error = f"{type(e).__name__}: {e}"
    return {"error": error, "blocks": learn.step_timer.records.ranks.n_blocks}


def diagnosis():
    learn = make_learner(n_train=400, model=net(Lags(1)))
    with learn.no_logging(), OWN.patched():
        learn.fit(2, cbs=Diagnose(show=False, on_sick="ignore"))
    found = [f for f in learn.diagnose().findings if f.code == "time.straggler"]
    return {"messages": [f.message for f in found], "timer": type(learn.step_timer).__name__}


# ---- MemoryStats


def memory():
    learn = make_learner()
    small = [(x[: 4 - 2 * (RANK == 0)], y[: 4 - 2 * (RANK == 0)]) for x, y in learn.dls.train]
    learn.dls = type(learn.dls)(small, None)
    with learn.no_logging():
        learn.fit(2, cbs=MemoryStats(every=2))
    highest = learn.memory_stats.rank_peak
    return {
        "rank": highest.rank,
        "peak": highest.peak,
        "usual": highest.usual,
        "own": learn.memory_stats.totals.peak,
        "report": str(learn.memory_stats.report()),
    }


# ---- ProfilerCallback


def profiled(**kwargs):
    learn = make_learner()
    cb = ProfilerCallback(0, 1, 1, **kwargs)
    with learn.no_logging():
        learn.fit(1, cbs=cb)
    try:
        return {"steps": cb.profiled_steps, "layers": [row.name for row in cb.layers()]}
    except RuntimeError as e:
        return {"error": str(e)}


def profiler():
    folder = Path("traces")
    found = {
        "main": profiled(trace=folder / "main.json"),
        "both": profiled(trace=folder / "both.json.gz", ranks=(0, 1), repeat=2),
        "other": profiled(trace=folder / "other.json", ranks=[1]),
    }
    distributed.barrier()
    return found | {"files": sorted(path.name for path in folder.iterdir())}


# ---- Log


class Kept:
    def __init__(self):
        self.steps = []

    def log(self, values, step):
        self.steps.append(step)


def logs():
    learn, folder, kept = make_learner(), Path("logs"), Kept()
    with learn.no_logging():
        for _ in range(2):
            learn.fit(1, cbs=[Log([folder / "main.jsonl", folder / "main.csv", kept], every=2)])
        log = Log([folder / "all.jsonl", JSONLLogger(folder / "given.jsonl")], every=2, ranks="all")
        for _ in range(2):
            learn.fit(1, cbs=log)
        learn.fit(1, cbs=[Log(folder / "lacking.jsonl", every=2)] if RANK == 0 else [])
    distributed.barrier()
    files = {path.name: len(path.read_text().splitlines()) for path in folder.iterdir()}
    row = learn.recorder.rows[-1]["valid_loss"]
    return {"files": files, "kept": kept.steps, "valid_loss": row}


def log_of_a_watch():
    """Ranks do not communicate there, and yet only rank 0 writes."""
    learn = make_learner()
    opt = torch.optim.SGD(learn.model.parameters(), 0.1)
    folder = Path("watched")
    with watch(learn.model, opt, cbs=[Log(folder / "run.jsonl", every=1)]):
        for x, y in learn.dls.train:
            nn.functional.cross_entropy(learn.model(x), y).backward()
            opt.step()
            opt.zero_grad()
    distributed.barrier()
    return {"files": {path.name: len(path.read_text().splitlines()) for path in folder.iterdir()}}


# ---- what is shown


class Talks(Callback):
    def after_fit(self):
        show("shown")
        warn("of all")
        warn("of one", is_of_rank=True)


def shown():
    learn, output = make_learner(), io.StringIO()
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(output):
        warnings.simplefilter("always")
        learn.fit(1, cbs=Talks())
        during = output.getvalue()
        show("after")
    told = [str(w.message) for w in caught if "of " in str(w.message)]
    return {"told": told, "during": during, "after": output.getvalue()[len(during) :]}


CASES = [
    forward,
    data,
    callbacks,
    buffers_and_data_of_rank_0,
    buffers_and_forward_of_rank_1,
    sharded_data,
    sharded_forward,
    votes,
    without_length,
    pickled_while_it_runs,
    too_short,
    diagnosis,
    memory,
    profiler,
    logs,
    log_of_a_watch,
    shown,
    ends_early,  # the last one, as the ranks do not end together
]


def main():
    global RANK
    folder = Path(sys.argv[1])
    RANK, _ = join_group()
    os.chdir(folder)
    stragglers.BLOCK = 20
    warnings.simplefilter("ignore")
    facts = {}
    for case in CASES:
        facts[case.__name__] = case()
        answer(folder, facts)


if __name__ == "__main__":
    main()
