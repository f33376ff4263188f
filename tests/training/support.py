"""What the tests of training callbacks share: data, models and learners, and plain loops as oracles."""

import copy
import io
import math
import random
from contextlib import contextmanager, redirect_stdout

import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Callback, Learner
from tests.support import CANCELS, EVENTS, make_model, primary_plan, spy

nan, inf = math.nan, math.inf
CURVES = [  # of a number that is watched
    [3.0, 2.0, 1.0, 1.0, 1.0, 1.0],
    [1.0, 2.0, 0.5, 2.0, 2.0, 0.4, 3.0],
    [nan, nan, 1.0, nan, 0.5, nan, nan],
    [1.0, nan, nan, nan],
    [inf, 2.0, inf, -inf, 1.0],
    [0.5, 0.45, 0.41, 0.36, 0.30, 0.1],
    *[[random.Random(seed).choice([0.1, 0.2, 0.3, 0.35, nan]) for _ in range(9)] for seed in range(3)],
]

DEVIL = [ValueError, KeyboardInterrupt]
ENDS = [KeyboardInterrupt, *(CANCELS[level] for level in ("fit", "validate", "batch", "step"))]


class Unsized:
    """A loader of which nothing is known but that it can be iterated."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def batches_of(sizes, d=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, d, generator=g), torch.randn(n, 1, generator=g)) for n in sizes]


class Wide(nn.Module):
    """Batch norm, dropout, a tied weight, a parameter never used, a buffer that is not saved."""

    def __init__(self, seed=0):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.stem = nn.Linear(2, 4)
            self.norm = nn.BatchNorm1d(4)
            self.drop = nn.Dropout(0.25)
            self.mid = nn.Linear(4, 4)
            self.again = nn.Linear(4, 4)
            self.head = nn.Linear(4, 1)
        self.again.weight = self.mid.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        if self.training:
            self.calls += 1
        return self.head(self.again(self.mid(self.drop(self.norm(self.stem(x)).relu())).tanh()))


class TwoInputs(nn.Module):
    """Takes two inputs by position or by name."""

    def __init__(self):
        super().__init__()
        self.body = make_model()

    def forward(self, a, b):
        return self.body(a * b)


class TakesDict(nn.Module):
    """A model in the way of Hugging Face: gives its loss itself."""

    def __init__(self):
        super().__init__()
        self.body = make_model()

    def forward(self, x, labels):
        class Output(dict):
            __getattr__ = dict.__getitem__

        pred = self.body(x)
        return Output(logits=pred, loss=F.mse_loss(pred, labels))


def sgd(params, lr):
    return torch.optim.SGD(params, lr=lr)


def momentum(params, lr):
    return torch.optim.SGD(params, lr=lr, momentum=0.9, weight_decay=0.01)


OPTS = [sgd, momentum, torch.optim.AdamW, torch.optim.Adam]


def two_groups(kind=torch.optim.SGD, **kwargs):
    """A way to make an optimizer of two parameter groups that differ in their rates."""

    def make(model, lr=0.1):
        params = list(model.parameters())
        return kind([{"params": params[:2], "lr": lr / 4}, {"params": params[2:], "lr": lr}], **kwargs)

    return make


def quiet(train, valid=None, model=None, opt=sgd, lr=0.1, cbs=(), loss_func=F.mse_loss, **kwargs):
    """A learner that prints nothing."""
    learn = Learner((train, valid), model or make_model(), loss_func, opt, lr=lr, cbs=cbs, **kwargs)
    learn.remove_cbs([learn.progress])
    return learn


def groups(opt):
    """What each parameter group says, apart from its parameters."""
    return [{k: v for k, v in group.items() if k != "params"} for group in opt.param_groups]


def rates(learn):
    """A callback that notes the rate of every group at each training batch, and a list it notes it in."""
    seen = []

    def note(cb):
        if cb.training:
            seen.append([float(group["lr"]) for group in cb.opt.param_groups])

    return Callback(name="rates", before_batch=note), seen


def raising(event, error, nth=0, order=0):
    """Callbacks that bring the loop to `event` and raise there."""
    return spy([], "devil", {**primary_plan(event), (event, nth): error}, order=order)


def validating(event, order=0, every=1):
    """A callback that validates inside the fit at each `event` there is."""
    inside, count = [], [0]

    def act(cb):
        count[0] += 1
        if not inside and count[0] % every == 0:
            inside.append(1)
            try:
                cb.learn.validate()
            finally:
                inside.pop()

    cb = Callback(name="nested", **{event: act})
    cb.order = order
    return cb


# where a nested validation makes sense: after_cancel_… need a cancel to come about
NESTED_AT = [event for event in EVENTS if not event.startswith("after_cancel")]


def train_plainly(model, train, n_epoch, opt, after_batch=None, after_epoch=None, loss_func=F.mse_loss):
    """The plain loop, with a place after each batch and after each epoch."""
    for _ in range(n_epoch):
        model.train()
        for x, y in train:
            loss = loss_func(model(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
            if after_batch:
                after_batch()
        if after_epoch:
            after_epoch()
    return model


def scripted(values, column="score"):
    """A callback that puts `values[epoch]` into the epoch's row."""

    def put(cb):
        cb.learn.row[column] = values[cb.epoch]

    return Callback(name="scripted", after_epoch=put)


def state_of(model):
    """Everything of a model that training can move, as copies."""
    return {
        "state_dict": copy.deepcopy(model.state_dict()),
        "buffers": {name: b.clone() for name, b in model.named_buffers()},
        "grads": {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        "requires_grad": {name: p.requires_grad for name, p in model.named_parameters()},
        "modes": [m.training for m in model.modules()],
        "identity": [id(p) for p in model.parameters()],
    }


def equal(a, b):
    """Whether two nests of tensors and plain values are the same to the bit, NaN equal to NaN."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same_kind = a.dtype == b.dtype and a.shape == b.shape
        return same_kind and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and (a == b or a != a)


def all_flags():
    """The switches of torch and the random states that a fit may not leave changed."""
    return {
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "modes": (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
    }


@contextmanager
def nothing_printed():
    out = io.StringIO()
    with redirect_stdout(out):
        yield
    assert out.getvalue() == ""


@contextmanager
def flags_kept():
    before = all_flags()
    yield
    assert all_flags() == before


def seeded(seed=0):
    torch.manual_seed(seed)
    random.seed(seed)
