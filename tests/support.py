"""Helpers shared by the tests."""

import collections
import functools
import gc
import inspect
import io
import itertools
import math
import multiprocessing
import os
import random
import warnings
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from hookcb import (
    ActivationStats,
    Callback,
    CancelBackwardException,
    CancelBatchException,
    CancelEpochException,
    CancelFitException,
    CancelStepException,
    CancelTrainException,
    CancelValidException,
    Event,
    HookCallback,
    Learner,
    count_hooks,
)
from tests import fresh_worker
from tests.hooks import support as zoo

PARAM = type(pytest.param())
SLEEP = 1000.0  # seconds by which tests advance a `Clock`; everything else takes microseconds on it
FORKS = multiprocessing.get_context("forkserver")
PRELOADED = ["torch", "torch._dynamo", "torch._functorch.aot_autograd", "torch.distributed.fsdp"]
PRELOADED += ["torch.distributed.checkpoint", "hookcb.public", "pytest"]
# DistributedDataParallel imports dynamo, and the first public name all of hookcb: a second in each process
FORKS.set_forkserver_preload(PRELOADED)
ROOT = Path(__file__).parents[1]
EVENTS = [e.value for e in Event]
CANCELS = {
    "fit": CancelFitException,
    "epoch": CancelEpochException,
    "train": CancelTrainException,
    "validate": CancelValidException,
    "batch": CancelBatchException,
    "backward": CancelBackwardException,
    "step": CancelStepException,
}
DIAGNOSTICS = [
    lambda: ActivationStats(include_paramless=True),
    lambda: ActivationStats(every=2),
    lambda: HookCallback(hook=lambda m, i, o: o.mean(), name="means"),
]


def notice_waits(mode):
    """Have torch warn or raise, "warn" or "error", if something waits for a GPU; "default" ends it."""
    with warnings.catch_warnings(action="ignore"):  # that this is a prototype, once in a process
        torch.cuda.set_sync_debug_mode(mode)


@cache
def skip_unless_compiled_in_place():
    """Skip a test if `nn.Module.compile` compiles nothing, as of torch 2.11 on Python 3.12.1."""
    # a module of a class of ours, as torch compiles no forward in its own files in place (pytorch#150915)
    graphs, model = [], zoo.Plain(lambda s, x: x.relu())
    model.compile(backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    model(torch.ones(2))
    if not graphs:
        pytest.skip("this torch compiles no model in place")


class SaysSo(Exception):
    """Exception that cannot be constructed from a message alone."""

    def __init__(self, a, b, *, c=3):
        super().__init__(a, b)
        self.c = c


def make_batches(n=3, bs=4, d=2, seed=0, last=None):
    g = torch.Generator().manual_seed(seed)
    sizes = [bs] * (n - 1) + [last or bs]
    return [(torch.randn(k, d, generator=g), torch.randn(k, 1, generator=g)) for k in sizes]


def make_model(seed=0, d=2):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(d, 3), nn.ReLU(), nn.Linear(3, 1))


def make_learner(n_train=3, n_valid=2, cbs=(), model=None, opt_func=torch.optim.SGD, lr=0.1, **kwargs):
    train = make_batches(n_train)
    valid = make_batches(n_valid, seed=1) if n_valid else None
    kwargs.setdefault("loss_func", F.mse_loss)
    return Learner((train, valid), model or make_model(), opt_func=opt_func, lr=lr, cbs=cbs, **kwargs)


def fit(learn, n_epoch=1, **kwargs):
    with learn.no_logging():
        learn.fit(n_epoch, **kwargs)
    return learn


def weights(model):
    return [p.detach().clone() for p in model.state_dict().values()]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def train_by_hand(model, batches, n_epoch=1, opt=None, lr=0.1, loss_func=F.mse_loss):
    opt = opt or torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for _ in range(n_epoch):
        model.train()
        for x, y in batches:
            loss = loss_func(model(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
    return losses


def spy(log, name, plan=None, **attrs):
    """A callback that logs each event as (name, event), and raises `plan[event, k]` at its k-th call."""
    plan, counts = plan or {}, collections.Counter()

    def acting_at(event):
        def act(cb):
            log.append((name, event))
            k = counts[event]
            counts[event] += 1
            if (event, k) in plan:
                raise plan[event, k]

        return act

    cb = Callback(name=name, **{event: acting_at(event) for event in EVENTS})
    for key, value in attrs.items():
        setattr(cb, key, value)
    return cb


def events(log, name="a"):
    return [event for who, event in log if who == name]


def modes(model):
    return [m.training for m in model.modules()]


class Clock:
    """Clock that advances by a microsecond per call, and by `sleep`, in which `samplers` take samples."""

    def __init__(self):
        self.now, self.samplers = 0.0, []

    def __call__(self):
        self.now += 1e-6
        return self.now

    def sleep(self, seconds=SLEEP):
        self.now += seconds
        for lines in self.samplers:
            for _ in range(10):
                lines.sample(seconds / 10)

    def sample_lines(self, monkeypatch):
        """Has lines of loops sampled in `sleep`, and not by a thread."""

        def start(lines):
            lines.is_running = True
            self.samplers.append(lines)

        monkeypatch.setattr("hookcb.diagnosis.measurements.lines.LineSamples.start", start)


class NoSuper(Callback):
    """Callback that does not call super().__init__()."""

    def __init__(self, n=0):
        self.n = n

    def after_step(self):
        self.n += 1


class Net(nn.Module):
    """Model with blocks, a shared layer, a parameter of its own, and leaves without parameters."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(2, 2)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)])
        self.again = self.stem
        self.head = nn.Linear(2, 1)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.again(x)) * self.scale


Pair = collections.namedtuple("Pair", "x y")


class Takes(nn.Module):
    """Model that keeps its arguments; the output is linear in the first tensor among them."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 1)
        self.got = []

    def forward(self, *args, **kwargs):
        self.got.append((args, kwargs))
        x = args[0] if args else kwargs["x"]
        while not torch.is_tensor(x):
            x = next(iter(x.values())) if isinstance(x, dict) else x[0]
        return self.fc(x)


X, Y, Z = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0)).unbind()


PRIMARY = {f"after_cancel_{level}": (f"before_{level}", cancel) for level, cancel in CANCELS.items()}


BATCH = ["before_batch", "after_pred", "after_loss", "before_backward"]
BATCH += ["after_backward", "before_step", "after_step", "after_batch"]


VALID = ["before_validate", "before_batch", "after_pred", "after_loss", "after_batch", "after_validate"]


def primary_plan(event):
    """Plan for `spy` that makes the loop reach an `after_cancel_…` event."""
    opener, cancel = PRIMARY.get(event, (None, None))
    return {(opener, k): cancel() for k in range(4)} if opener else {}


PACKED = pack_sequence([torch.ones(3, 2), torch.zeros(2, 2)])


def everything(model):
    """State, by description, that inspecting a model must not change."""
    params, buffers = list(model.named_parameters(remove_duplicate=False)), list(model.named_buffers())
    buffers = [(name, b) for name, b in buffers if not isinstance(b, nn.UninitializedBuffer)]
    material = [p for _, p in params if not isinstance(p, nn.UninitializedParameter)]
    here = torch.nn.modules.module
    return {
        "random state of torch": torch.get_rng_state(),
        "random state of Python": random.getstate(),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "flags": [
            torch.backends.mkldnn.enabled,
            torch.backends.cudnn.enabled,
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
            torch.backends.mha.get_fastpath_enabled(),
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_autocast_enabled("cpu"),
        ],
        "modes of dispatch": (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
        "hooks": count_hooks(model),
        "hooks of all modules": [
            len(getattr(here, f"_global_{kind}"))
            for kind in ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
        ],
        "names": [name for name, _ in model.named_modules(remove_duplicate=False)],
        "types": [type(m) for m in model.modules()],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "modes": [m.training for m in model.modules()],
        "parameters": [(name, id(p), p.requires_grad) for name, p in params],
        "weights": [p.detach().clone() for p in material],
        "versions of weights": [p._version for p in material],
        "gradients": [(id(p.grad), None if p.grad is None else p.grad.clone()) for _, p in params],
        "buffers": [(name, id(b), b.clone()) for name, b in buffers],
        "state_dict": list(model.state_dict()),
    }


def attributes(learn):
    return {
        f"{key} of the learner": (id(value), len(value) if isinstance(value, list | dict) else 0)
        for key, value in vars(learn).items()
        if not key.startswith("_")
    }


@contextmanager
def changes_in(what):
    """Yield a list that is filled, after the block, with the names of what changed in a model or learner."""

    def state():
        return attributes(what) | everything(what.model) if isinstance(what, Learner) else everything(what)

    changed, before = [], state()
    try:
        yield changed
    finally:
        after = state()
        changed += [k for k in {**before, **after} if not zoo.alike(before.get(k), after.get(k))]


@contextmanager
def no_collection():
    """Turn off garbage collection in the block, so that reference cycles are not freed."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def unsettle(model):
    """Give a model mixed train and eval modes, and gradients."""
    for k, m in enumerate(model.modules()):
        m.training = k % 3 != 1
    for p in model.parameters():
        p.grad = torch.ones_like(p)


def row(summary, name):
    return next(r for r in summary if r.name == name)


def row_of_type(summary, kind):
    return next(r for r in summary if r.type == kind)


def shown(text):
    """Remove thousands separators from a text, to find numbers in it."""
    for separator in (",", "_", "'", "\u2009", "\u202f"):
        text = text.replace(separator, "")
    return text


def in_terminal(summary, width=200):
    console = Console(file=io.StringIO(), width=width)
    console.print(summary)
    return console.file.getvalue()


def attention(b, q, k, d, dv=None):
    """Multiply-adds of `b` × `q` queries of width `d` on `k` keys, with values of width `dv`."""
    return b * q * k * (d + (d if dv is None else dv))


def covering(*lists, of=2):
    """Parameters from the product of `lists` in which any `of` values occur together; the rest is slow."""
    lists = [list(values) for values in lists]
    sizes, seen, taken = list(map(len, lists)), set(), set()
    longest = sizes.index(max(sizes))

    def offsets(row):  # from a diagonal, along which all values change at once
        return [(row[longest] - i) % n for i, n in zip(row, sizes, strict=True)]

    rows = sorted(itertools.product(*map(range, sizes)), key=offsets)
    groups = {row: set(itertools.combinations(enumerate(row), of)) for row in rows}
    for n_new in range(math.comb(len(lists), of), 0, -1):  # those first that bring most at once
        for row, group in groups.items():
            if len(group - seen) == n_new:
                taken.add(row)
                seen |= group
    return [
        pytest.param(
            *(values[i] for values, i in zip(lists, row, strict=True)),
            marks=() if row in taken else pytest.mark.slow,
        )
        for row in sorted(rows)
    ]


def pairs(*lists):
    """Parameters from the product of `lists` in which any two values occur together, and no others."""
    return [param for param in covering(*lists) if not param.marks]


def along(*lists):
    """Parameters along a diagonal of the product of `lists`: each value occurs, beside changing others."""
    lists = [list(values) for values in lists]
    return [tuple(values[i % len(values)] for values in lists) for i in range(max(map(len, lists)))]


def in_turn(names, rows, ids=None):
    """Run a test with each of `rows` in one case, which fails with all of those that fail.

    It stands in place of `pytest.mark.parametrize` where a row takes milliseconds, and the test no fixture
    that keeps something. Each row begins with the same random numbers, as a case does.
    """
    is_text, rows = isinstance(names, str), list(rows)
    names = [name.strip() for name in names.split(",")] if is_text else list(names)
    labels = list(map(ids or repr, rows)) if ids is None or callable(ids) else list(ids)
    assert rows, "without a row nothing is tested"
    assert not any(row.marks for row in rows if isinstance(row, PARAM)), "all rows run, whatever their marks"

    def repeated(test):
        @functools.wraps(test)
        def all_in_turn(**fixtures):
            errors, skipped = [], []
            for i, (row, label) in enumerate(zip(rows, labels, strict=True)):
                is_one = is_text and len(names) == 1
                values = row.values if isinstance(row, PARAM) else [row] if is_one else row
                torch.default_generator.manual_seed(0)
                random.seed(0)
                try:
                    test(**dict(zip(names, values, strict=True)), **fixtures)
                except pytest.skip.Exception as reason:
                    skipped.append(f"in row {i}, {reason}")
                except (Exception, pytest.fail.Exception, BaseExceptionGroup) as error:
                    error.add_note(f"in row {i}, with {', '.join(names)}: {label}")
                    errors.append(error)
            if errors:
                raise BaseExceptionGroup(f"{len(errors)} of {len(rows)} fail", errors)
            if skipped:
                pytest.skip("; ".join(skipped))

        signature = inspect.signature(test)
        left = [x for name, x in signature.parameters.items() if name not in names]
        all_in_turn.__signature__ = signature.replace(parameters=left)
        return all_in_turn

    return repeated


models = in_turn("make", zoo.SUMMED.values(), zoo.SUMMED)


def first(values):
    """Parameters of which the first is quick to know from; the others are slow."""
    return each(len(values), values)


def each(nth, values):
    """Parameters of which each `nth` is quick to know from; the others are slow."""
    params = []
    for i, x in enumerate(values):
        is_param = isinstance(x, PARAM)
        marks = [*(x.marks if is_param else ()), *([pytest.mark.slow] if i % nth else [])]
        given = x.values if is_param else x if isinstance(x, tuple) else (x,)
        params.append(pytest.param(*given, marks=marks, id=x.id if is_param else None))
    return params


def start(*argv, log):
    """Start a process that acts like `python *argv`, with its output in the file `log`.

    It is forked from a process that has imported torch and hookcb, which takes seconds.
    """
    with mock.patch.dict(os.environ, PYTHONPATH=str(ROOT)):  # where that process finds this hookcb
        process = FORKS.Process(target=fresh_worker.run, args=([*map(str, argv)], log, dict(os.environ)))
        process.start()
    return process


def run_ranks(worker, folder, n=2):
    """Run `worker RANK FOLDER` in `n` parallel processes; return the files `FOLDER/RANK.pt` they wrote."""
    with ExitStack() as stack:
        processes = []
        for rank in range(n):
            processes.append(start(worker, rank, folder, log=folder / f"{rank}.log"))
            stack.callback(processes[-1].kill)
        for process in processes:
            process.join(timeout=120)
    files = [folder / f"{rank}.pt" for rank in range(n)]
    assert all(file.exists() for file in files), [
        (folder / f"{rank}.log").read_text()[-2000:] for rank in range(n)
    ]
    return files
