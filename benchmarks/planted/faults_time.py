"""Faults that cost time: of the loader, of what is done between steps, and of one layer."""

import gc
import inspect
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from case import Callbacks, Case, Run, fault, fit, follow
from data import digit_batches, digits, recall_batches
from nets import Mlp, Recurrent
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

from hookcb import Callback, Checkpoint, watch

TIME_FAULTS: list[Case] = []


def place(function: Callable[..., Any], text: str) -> str:
    """How a finding names the line of a function that begins with `text`."""
    lines, first = inspect.getsourcelines(function)
    found = next(i for i, line in enumerate(lines) if line.strip().startswith(text))
    return f"{Path(__file__).name}:{first + found}, {lines[found].strip()}"


class SomeSlow(TensorDataset):
    """Samples of which each 640th takes 60 ms."""

    def __getitem__(self, i: int) -> tuple[Tensor, ...]:
        if i % 640 == 639:
            time.sleep(0.06)
        return super().__getitem__(i)


@fault(TIME_FAULTS, "one batch in twenty takes 60 ms to read", codes=["time.data_bound"])
def some_slow(seed: int, cbs: Callbacks) -> Run:
    x, y = digits(seed)
    model, data = Mlp(), DataLoader(SomeSlow(x.repeat(4, 1), y.repeat(4)), batch_size=32)
    return follow(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), data, cbs, seed)


@fault(
    TIME_FAULTS,
    "a generator that takes 8 ms for a batch, in a plain loop",
    codes=["time.data_bound"],
    note_suffices=True,
)
def slow_generator(seed: int, cbs: Callbacks) -> Run:
    def read() -> Iterator[Any]:
        for batch in digit_batches(seed):
            time.sleep(8e-3)
            yield batch

    model, run = Mlp(), Run(None, [])  # type: ignore[arg-type]  # set below
    opt = Adam(model.parameters(), lr=2e-3)
    with watch(model, opt, *cbs) as w:
        run.loop, run.model = w, model
        for x, y in read():
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
            run.losses.append(loss.item())
    return run


@fault(
    TIME_FAULTS,
    "a callback that waits for a log",
    codes=["time.other"],
    layers=["the callback Callback('remote')"],
    note_suffices=True,
)
def slow_callback(seed: int, cbs: Callbacks) -> Run:
    model = Mlp()
    remote = Callback(name="remote", after_loss=lambda cb: time.sleep(4e-3))
    opt = Adam(model.parameters(), lr=2e-3)
    return fit(model, F.cross_entropy, opt, digit_batches(seed), [*cbs, remote], seed)


def send(loss: float) -> None:
    """Stands for a request over the network, every tenth step."""
    time.sleep(0.04)


def logged_loop(seed: int, cbs: Callbacks) -> Run:
    model = Mlp()
    opt = Adam(model.parameters(), lr=2e-3)
    with watch(model, opt, *cbs) as w:
        run = Run(w, [], model=model)
        for step, (x, y) in enumerate(digit_batches(seed)):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
            run.losses.append(loss.item())
            if step % 10 == 9:
                send(run.losses[-1])
    return run


fault(
    TIME_FAULTS,
    "a line of a plain loop that waits for 40 ms every tenth step",
    codes=["time.other"],
    layers=[place(logged_loop, "send(")],
    note_suffices=True,
)(logged_loop)


@fault(
    TIME_FAULTS,
    "a checkpoint after each batch",
    codes=["time.other"],
    layers=["checkpoints (Checkpoint)"],
    note_suffices=True,
)
def checkpoint_each_batch(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(width=256)
    opt = Adam(model.parameters(), lr=2e-3)
    with tempfile.TemporaryDirectory() as folder:
        batches = digit_batches(seed, n_step=60)
        return fit(model, F.cross_entropy, opt, batches, [*cbs, Checkpoint(folder, every=1)], seed)


@fault(
    TIME_FAULTS,
    "a validation after every five batches, in a plain loop",
    codes=["time.other"],
    layers=["validation"],
    note_suffices=True,
)
def many_validations(seed: int, cbs: Callbacks) -> Run:
    model, (x, y) = Mlp(width=256), digits(seed)

    def validate(step: int) -> None:
        if step % 5 == 4:
            model.eval()
            with torch.no_grad():
                for part in range(20):
                    F.cross_entropy(model(x), y + 0 * part)
            model.train()

    opt = Adam(model.parameters(), lr=2e-3)
    return follow(model, F.cross_entropy, opt, digit_batches(seed), cbs, seed, after_step=validate)


@fault(TIME_FAULTS, "a garbage collection in each step", codes=["time.garbage"])
def collections(seed: int, cbs: Callbacks) -> Run:
    model = Mlp()
    opt = Adam(model.parameters(), lr=2e-3)

    def collect(step: int) -> None:
        gc.collect()

    batches = digit_batches(seed, n_step=40)
    return follow(model, F.cross_entropy, opt, batches, cbs, seed, after_step=collect)


class OneByOne(nn.Module):
    """A ReLU that is computed sample by sample, and feature by feature."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([torch.stack([part.relu() for part in row.split(8)]).flatten() for row in x])


@fault(
    TIME_FAULTS,
    "a layer that loops over samples and features",
    codes=["time.layer"],
    layers=["1"],
    note_suffices=True,
)
def layer_loops(seed: int, cbs: Callbacks) -> Run:
    model = nn.Sequential(nn.Linear(64, 256), OneByOne(), nn.Linear(256, 10))
    opt = Adam(model.parameters(), lr=2e-3)
    return fit(model, F.cross_entropy, opt, digit_batches(seed, n_step=60), cbs, seed)


@fault(TIME_FAULTS, "inputs that are added to those before", codes=["time.growing"], note_suffices=True)
def growing_inputs(seed: int, cbs: Callbacks) -> Run:
    """Sequences that begin with those of the batches before, as if a list were never emptied."""
    model = Recurrent(nn.LSTM(5, 32, batch_first=True), 4)
    batches, kept = [], []
    for x, y in recall_batches(seed, length=8, n_step=60):
        kept.append(x)
        batches.append((torch.cat(kept, 1), y))
    return follow(model, F.cross_entropy, Adam(model.parameters(), lr=1e-2), batches, cbs, seed)


class OneByOneBackward(torch.autograd.Function):
    """The identity, with a backward that goes through the batch in Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]  # of one gradient
        return torch.stack([torch.stack([part.clone() for part in row.split(4)]).flatten() for row in grad])


class SlowBackward(nn.Module):
    """A layer whose backward loops."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = OneByOneBackward.apply(x)
        return out


def line_of(function: Callable[..., Any]) -> str:
    """How a finding names a function."""
    code = function.__code__
    return f"{Path(__file__).name}:{code.co_firstlineno}, {code.co_qualname}()"


@fault(
    TIME_FAULTS,
    "a backward that loops over samples and features",
    codes=["time.other"],
    layers=[f"the backward of {line_of(OneByOneBackward.backward)}"],
    note_suffices=True,
)
def backward_loops(seed: int, cbs: Callbacks) -> Run:
    model = nn.Sequential(nn.Linear(64, 256), SlowBackward(), nn.ReLU(), nn.Linear(256, 10))
    opt = Adam(model.parameters(), lr=2e-3)
    return fit(model, F.cross_entropy, opt, digit_batches(seed, n_step=60), cbs, seed)


def keep_histogram(m: nn.Module, i: Any, o: Tensor) -> None:
    """A hook that waits for a disk."""
    o.detach().histc(40).tolist()
    time.sleep(2e-3)


@fault(
    TIME_FAULTS,
    "forward hooks that wait for 2 ms, in a plain loop",
    codes=["time.other"],
    layers=[f"the forward hook {line_of(keep_histogram)}"],
    note_suffices=True,
)
def slow_hooks(seed: int, cbs: Callbacks) -> Run:
    model = Mlp()
    for m in model.modules():
        if isinstance(m, nn.Linear):
            m.register_forward_hook(keep_histogram)
    opt = Adam(model.parameters(), lr=2e-3)
    return follow(model, F.cross_entropy, opt, digit_batches(seed), cbs, seed)
