"""Numerical faults: values that are not finite or not precise enough, and values kept in memory."""

from collections import OrderedDict

import torch
from case import Callbacks, Case, Run, fault, fit, follow
from data import (
    batched,
    digit_batches,
    digits,
    image_batches,
    images,
    padded_batches,
    raw_digits,
    table,
)
from nets import Cnn, Mlp, Siamese, TextClassifier, contrastive_loss, stack
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW

from hookcb import MixedPrecision, watch

NUMBER_FAULTS: list[Case] = []


class Log(nn.Module):
    """Logarithm of features that are assumed to be positive."""

    def forward(self, x: Tensor) -> Tensor:
        return x.log()


@fault(NUMBER_FAULTS, "log(0) at step 40", codes=["nonfinite.first"], layers=["log"], planted_at=40)
def log_of_zero(seed: int, cbs: Callbacks) -> Run:
    x, y = table(seed)
    batches = batched(x.exp(), y, seed=seed)
    batches[40][0][5, 3] = 0
    model = nn.Sequential(OrderedDict(log=Log(), net=Mlp(n_in=16, n_out=1)))
    return fit(model, F.mse_loss, Adam(model.parameters(), lr=3e-3), batches, cbs, seed)


@fault(NUMBER_FAULTS, "sqrt(0) in backward", codes=["nonfinite.first"], layers=["distance"], planted_at=25)
def sqrt_of_zero(seed: int, cbs: Callbacks) -> Run:
    """Pairs of digits; one pair is the same image twice: its distance is 0, and the gradient 0/0."""
    x, y = digits(seed)
    batches = batched(x, x.roll(1, 0), (y == y.roll(1)).float(), seed=seed, n_step=100)
    a, b, same = batches[25]
    b[3], same[3] = a[3], 1
    model = Siamese(stack(64, 64, 8))
    return fit(model, contrastive_loss, Adam(model.parameters(), lr=2e-3), batches, cbs, seed)


@fault(NUMBER_FAULTS, "bfloat16 weights with SGD 1e-3", codes=["update.lost_to_rounding", "update.too_small"])
def low_precision(seed: int, cbs: Callbacks) -> Run:
    model = Mlp().bfloat16()
    batches = [(x.bfloat16(), y) for x, y in digit_batches(seed)]
    return follow(model, F.cross_entropy, SGD(model.parameters(), lr=1e-3), batches, cbs, seed)


@fault(
    NUMBER_FAULTS,
    "mask row all -inf",
    codes=["nonfinite.first"],
    layers=["blocks.0.attn", "blocks.0.attn.attn_drop"],
    planted_at=20,
)
def empty_sequence(seed: int, cbs: Callbacks) -> Run:
    """One sequence is all padding, so attention has no token."""
    batches = padded_batches(seed, n_step=80)
    batches[20][0][2] = 0
    model = TextClassifier()
    return follow(model, F.cross_entropy, AdamW(model.parameters(), lr=3e-3), batches, cbs, seed)


class Power(nn.Module):
    """Square of an amplitude."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square()


class Log1p(nn.Module):
    """log(1 + x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.log1p()


@fault(
    NUMBER_FAULTS,
    "fp16 overflow",
    codes=["nonfinite.first", "act.scale", "amp.scale_collapse"],
    layers=["power"],
)
def fp16_overflow(seed: int, cbs: Callbacks) -> Run:
    """Squares of amplitudes in the hundreds, which overflow float16."""
    x, y = raw_digits(seed)
    layers = {"filters": nn.Linear(64, 32), "power": Power(), "log": Log1p(), "head": nn.Linear(32, 10)}
    model = nn.Sequential(OrderedDict(layers))
    batches = batched(40 * x, y, seed=seed, n_step=100)
    opt = Adam(model.parameters(), lr=1e-3)
    return fit(model, F.cross_entropy, opt, batches, [*cbs, MixedPrecision("fp16")], seed)


def in_float16(model: nn.Module, seed: int, cbs: Callbacks, lr: float, scale: float = 1.0) -> Run:
    """Train a model in float16, with a loss that is multiplied."""
    opt = SGD(model.half().parameters(), lr=lr / scale)
    batches = [(x.half(), y) for x, y in digit_batches(seed, n_step=100)]
    return follow(model, lambda pred, y: scale * F.cross_entropy(pred.float(), y), opt, batches, cbs, seed)


@fault(NUMBER_FAULTS, "float16 and a loss of 1e-4", codes=["precision.underflow", "update.lost_to_rounding"])
def small_loss(seed: int, cbs: Callbacks) -> Run:
    return in_float16(Mlp(), seed, cbs, lr=0.1, scale=1e-4)


@fault(
    NUMBER_FAULTS,
    "float16 features that all but overflow",
    codes=["precision.overflow", "act.scale"],
    layers=["0"],
)
def large_features(seed: int, cbs: Callbacks) -> Run:
    """Frozen features on a scale of their own, which a norm takes back."""
    features = nn.Linear(64, 64, bias=False).requires_grad_(False)
    (x, _), *_ = digit_batches(seed, n_step=1)
    features.weight.data *= 42_000 / features(x).abs().max()
    model = nn.Sequential(features, nn.LayerNorm(64), nn.Linear(64, 10))
    return in_float16(model, seed, cbs, lr=0.05)


@fault(NUMBER_FAULTS, "GradScaler at 2^24", codes=["amp.scale_collapse"])
def large_scale(seed: int, cbs: Callbacks) -> Run:
    """A loss scale that is too large, and grows again after every other step."""
    model = Mlp()
    mixed = MixedPrecision("fp16", init_scale=2.0**24, growth_interval=2)
    opt = Adam(model.parameters(), lr=1e-3)
    return fit(model, F.cross_entropy, opt, digit_batches(seed, n_step=120), [*cbs, mixed], seed)


@fault(NUMBER_FAULTS, "a list of losses that keeps graphs", codes=["memory.growth", "memory.graphs_kept"])
def kept_graphs(seed: int, cbs: Callbacks) -> Run:
    """The loss on held-out images is kept after each step, with its graph, to plot a curve."""
    held_out = images(seed, n=256)
    model = Cnn()
    opt = Adam(model.parameters(), lr=2e-3)
    torch.manual_seed(seed)
    curve = []
    with watch(model, opt, *cbs) as w:
        run = Run(w, [], model=model)
        for x, y in image_batches(seed, n_step=100):
            loss = w.report_loss(F.cross_entropy(model(x), y))
            run.losses.append(loss.item())
            loss.backward()
            opt.step()
            opt.zero_grad()
            model.eval()
            curve.append(F.cross_entropy(model(held_out[0]), held_out[1]))
            model.train()
    return run
