"""One of several ranks; writes which collectives it takes part in: `trace_worker.py FOLDER HOW PART`.

Clocks, data, sizes of batches and signals are random, and differ by rank. Run by test_trace.py.
"""

import itertools
import os
import random
import signal
import sys
import time
import traceback
import warnings
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hookcb import Callback, Checkpoint, Diagnose, Freeze, SaveModelCallback
from hookcb.processes import failures
from tests.contract.test_every_callback import ARGUMENTS, PUBLIC
from tests.ranks.support import TIMEOUT, answer, join_group, make_learner

CHOSEN = {  # instead of those that are quick to check, those that have something to do
    "EarlyStopping": [{"patience": 1}],
    "GradientAccumulation": [{"n": 2}],
    "MaxTime": [{"seconds": 0.03}],
    "ReduceLROnPlateau": [{"patience": 0}],
}
SLOW = {"Compile", "ProfilerCallback"}
SIZE = (
    8  # callbacks in a training: enough for each pair in few of these, and the few that end it are elsewhere
)
ENDS = {"MaxTime", "TerminateOnNaN"}  # a fit, long before others in it have done what they do
HAS_NO_NAN = {"DetectAnomaly"}  # which raises at a NaN
ALL = [cls for cls in PUBLIC if cls.__name__ not in ("Metrics", "Recorder")]  # these two are attached anyway
OF_ONE_ROOT = {"gather_", "scatter_"}  # only one rank has a list of tensors
PACES = (0.0, 1e-4, 1e-2)  # seconds that clocks jump
ENDINGS = (KeyboardInterrupt, SystemExit, Exception)


class Trace(TorchDispatchMode):
    """Notes each collective: its name, shapes and group."""

    def __init__(self, file=None):
        super().__init__()
        self.ops, self.file = [], file

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.__name__.split(".")[0]
            self.ops.append(" ".join([name, *described(args, has_shapes=name not in OF_ONE_ROOT)]))
            if self.file is not None:  # as the process may be aborted
                self.file.write(self.ops[-1] + "\n")
                self.file.flush()
        return func(*args, **(kwargs or {}))


def described(args, has_shapes):
    for arg in tree_leaves(args):
        if isinstance(arg, torch.Tensor):
            if has_shapes:
                yield f"{arg.dtype}{list(arg.shape)}"
        elif isinstance(arg, str):
            yield arg
        elif isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            yield distributed.ProcessGroup.unbox(arg).group_name


@contextmanager
def hasty_clocks(chance, pace):
    """Let each clock jump ahead whenever it is read, by up to `pace` seconds."""
    ahead = [0.0]

    def hasty(clock):
        def read():
            ahead[0] += pace * chance.random()
            return clock() + ahead[0]

        return read

    with ExitStack() as stack:
        for name in ("perf_counter", "monotonic", "time"):
            stack.enter_context(mock.patch.object(time, name, hasty(getattr(time, name))))
        yield


def batches(n, chance, nan_at):
    return [
        (torch.randn(size, 4) * (float("nan") if i == nan_at else 1.0), torch.randint(2, (size,)))
        for i in range(n)
        for size in [chance.randint(1, 6)]
    ]


class SignalsAt(Callback):
    """Sends Ctrl-C to its own process at one batch; all ranks have it."""

    def __init__(self, batch):
        super().__init__()
        self.batch = batch

    def after_pred(self):
        if self.training and self.train_iter == self.batch:
            os.kill(os.getpid(), signal.SIGINT)


class DiagnosesByClock(Diagnose):
    """Looks at a batch if its rank has time for that, as Diagnose under FSDP2 once did."""

    def before_fit(self):
        super().before_fit()
        schedule, looks = self._dispatcher.schedule, itertools.count()
        is_due = schedule.is_due
        # the first look agrees on more, and would end both at once
        schedule.is_due = lambda: is_due() and (not next(looks) or time.perf_counter() % 0.02 < 0.01)


class SumsIfItsLossIsHigh(Callback):
    """Communicates behind an `if` on what its rank alone knows."""

    def after_loss(self):
        if self.training and self.loss > 0.7:
            self.learn.ranks.sum([1.0, 2.0, 3.0, 4.0])


BAD = {"sharded,diagnosis": DiagnosesByClock, "loss": SumsIfItsLossIsHigh}


def sharded(model):
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer)
    return fully_shard(model)


def make(cls):
    name = cls.__name__
    if cls is Checkpoint:
        return Checkpoint(Path(sys.argv[1]) / "checkpoints")
    if cls is SaveModelCallback:
        return SaveModelCallback(fname=Path(sys.argv[1]) / "models" / "best")
    options = CHOSEN.get(name) or ARGUMENTS.get(name, [{}])
    return cls(**options[0])


def trace_of(classes, seed, rank, world, is_sharded, n_batches=12, file=None):
    """Train with callbacks, while all that may differ by rank does.

    Returns:
        The collectives, and how the fit ended.
    """
    name = "-".join(cls.__name__ for cls in classes)
    together, chance = random.Random(f"{name} {seed}"), random.Random(f"{name} {seed} {rank}")
    torch.manual_seed(chance.randrange(2**31))
    nan_on, signal_on = together.choice([-1, -1, together.randrange(world)]), together.randrange(2 * world)
    nan_at, batch = together.randrange(n_batches), together.randrange(2 * n_batches)
    first_pace = together.randrange(3) if file is None else 2  # 0.01 on rank 0, and 0 on rank 1
    train = batches(
        n_batches, chance, nan_at if nan_on == rank and not HAS_NO_NAN & set(name.split("-")) else -1
    )
    valid = batches(chance.randint(1, 3), chance, -1)
    wrap = (
        sharded if is_sharded else partial(DistributedDataParallel, find_unused_parameters=Freeze in classes)
    )
    learn = make_learner(wrap=wrap)
    learn.dls = type(learn.dls)(train, valid)
    cbs = [make(cls) for cls in classes]
    if Checkpoint in classes:
        cbs.append(SignalsAt(batch if signal_on == rank else -1))
    trace, ending, text = Trace(file), "ended", ""
    pace = PACES[(first_pace + rank) % len(PACES)]
    with hasty_clocks(chance, pace), warnings.catch_warnings(action="ignore"), trace:
        try:
            with learn.no_logging():
                learn.fit(2, cbs=cbs)
        except ENDINGS as error:
            ending = type(error).__name__
            text = "".join(traceback.format_exception(error)[-6:])
    return {"ops": trace.ops, "ending": ending, "text": text}


def groups_of_callbacks(how):
    if how in BAD:
        return [(BAD[how],)]
    if "long" in how:
        return [(Diagnose,)]
    slow = [(cls,) for cls in ALL if cls.__name__ in SLOW]
    ending = [cls for cls in ALL if cls.__name__ in ENDS]
    lasting = [cls for cls in ALL if cls.__name__ not in SLOW | ENDS]
    parts = [tuple(lasting[i : i + SIZE]) for i in range(0, len(lasting), SIZE)]
    if "parts" in how:
        return [*slow, *((cls,) for cls in ending), *parts]
    if "pairs" in how:
        each = [(end, *part) for end in ending for part in parts]
        return [*groups_with_each_pair(lasting), *each, tuple(ending)]
    return [(cls,) for cls in ending + lasting]


def groups_with_each_pair(classes, size=SIZE):
    """Few groups of callbacks, such that each two are together in one of them."""
    left, groups = set(itertools.combinations(range(len(classes)), 2)), []
    while left:
        group = list(min(left))
        while len(group) < size:
            others = [i for i in range(len(classes)) if i not in group]
            group.append(max(others, key=lambda i: sum((min(i, j), max(i, j)) in left for j in group)))
        left -= set(itertools.combinations(sorted(group), 2))
        groups.append(tuple(classes[i] for i in sorted(group)))
    return groups


def main():
    folder, how, part = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    rank, world = join_group(3.0 if how in BAD else TIMEOUT)
    failures.GRACE = 60.0
    first, n_parts = map(int, part.split("/"))
    (folder / f"rank{rank}").mkdir()
    os.chdir(folder / f"rank{rank}")
    facts = {}
    file = (folder / f"{rank}.ops").open("w") if how in BAD else None
    for i, classes in enumerate(groups_of_callbacks(how)[first::n_parts]):
        name = "-".join(cls.__name__ for cls in classes)
        began = time.perf_counter()
        facts[name] = trace_of(classes, i, rank, world, "sharded" in how, 60 if "long" in how else 12, file)
        facts[name]["seconds"] = time.perf_counter() - began
        answer(folder, facts)
        if facts[name]["ending"] in ("RankError", "RuntimeError"):
            return  # the group is of no use


if __name__ == "__main__":
    main()
