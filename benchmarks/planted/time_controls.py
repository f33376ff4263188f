"""Healthy training runs whose times a diagnosis might misread."""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from case import Callbacks, Case, Run, control, fit, follow
from data import batched, digit_batches, digits, generator, recall_batches
from nets import Mlp, Recurrent, stack
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, TensorDataset

from hookcb import Checkpoint, Log

TIME_CONTROLS: list[Case] = []


@control(TIME_CONTROLS, "a tiny net that fetches for as long as it steps", target=0.9)
def tiny_steps(seed: int, cbs: Callbacks) -> Run:
    """A step of 0.4 ms and a fetch of 0.4 ms: nothing can be gained."""
    model = stack(64, 10)
    data = DataLoader(TensorDataset(*digits(seed)), batch_size=32, shuffle=True, generator=generator(seed))
    return fit(model, F.cross_entropy, SGD(model.parameters(), lr=0.1), data, cbs, seed, n_epoch=4)


@control(TIME_CONTROLS, "a second core that is busy", target=0.9)
def busy_core(seed: int, cbs: Callbacks) -> Run:
    model = Mlp()
    data = DataLoader(TensorDataset(*digits(seed)), batch_size=32, shuffle=True, generator=generator(seed))
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        opt = Adam(model.parameters(), lr=2e-3)
        return follow(model, F.cross_entropy, opt, data, cbs, seed)
    finally:
        busy.kill()
        busy.wait()


@control(TIME_CONTROLS, "a validation and a checkpoint after each epoch, and a log", target=0.9)
def usual_epochs(seed: int, cbs: Callbacks) -> Run:
    model, (x, y) = Mlp(width=128), digits(seed)
    train, valid = batched(x, y, seed=seed, n_step=200), batched(x[:320], y[:320], seed=seed, n_step=10)
    opt = Adam(model.parameters(), lr=2e-3)
    with tempfile.TemporaryDirectory() as folder:
        more = [Checkpoint(folder), Log(Path(folder) / "log.csv")]
        return fit(model, F.cross_entropy, opt, (train, valid), [*cbs, *more], seed, n_epoch=2)


@control(TIME_CONTROLS, "sequences of any length, in random order", target=1.2)
def ragged(seed: int, cbs: Callbacks) -> Run:
    model = Recurrent(nn.LSTM(5, 32, batch_first=True), 4)
    lengths = torch.randint(4, 12, (250,), generator=generator(seed)).tolist()
    batches = [recall_batches(seed + i, length=n, n_step=1)[0] for i, n in enumerate(lengths)]
    opt = Adam(model.parameters(), lr=1e-2)
    return follow(model, F.cross_entropy, opt, batches, cbs, seed)


@control(TIME_CONTROLS, "wide activations between narrow layers", target=0.9)
def wide_activations(seed: int, cbs: Callbacks) -> Run:
    """Functions of elements take most of the time, as they have to."""
    model = nn.Sequential(
        nn.Linear(64, 1024), nn.GELU(), nn.Softmax(1), nn.LayerNorm(1024), nn.Linear(1024, 10)
    )
    return fit(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), digit_batches(seed), cbs, seed)


@control(TIME_CONTROLS, "a million objects beside the training", target=0.9)
def many_objects(seed: int, cbs: Callbacks) -> Run:
    """A dataset of lists, which the garbage collector looks through now and then."""
    kept = [[i] for i in range(1_000_000)]
    model = Mlp()
    opt = Adam(model.parameters(), lr=2e-3)
    run = follow(model, F.cross_entropy, opt, digit_batches(seed), cbs, seed)
    kept.clear()
    return run


class Gated(torch.autograd.Function):
    """x · sigmoid(x), with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]  # of one gradient
        (x,) = ctx.saved_tensors
        gate = x.sigmoid()
        return grad * gate * (1 + x * (1 - gate))


class GatedLayer(nn.Module):
    """SiLU by a function of its own."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Gated.apply(x)
        return out


@control(TIME_CONTROLS, "a function with a backward of its own, and hooks that store means", target=0.9)
def own_backward(seed: int, cbs: Callbacks) -> Run:
    model, means = nn.Sequential(nn.Linear(64, 256), GatedLayer(), nn.Linear(256, 10)), []
    model[1].register_forward_hook(lambda m, i, o: means.append(o.detach().mean().item()))
    opt = Adam(model.parameters(), lr=2e-3)
    return fit(model, F.cross_entropy, opt, digit_batches(seed), cbs, seed)
