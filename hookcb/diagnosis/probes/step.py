"""What gradients and weights tell around a step, beyond what GradientHealth records."""

from collections.abc import Iterator
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookcb.diagnosis.evidence import Observation
from hookcb.gradients.stats import sketch, sketch_copy

LOW = (torch.bfloat16, torch.float16)
SWALLOWED = 0.5  # share of weights
FEWEST = 3  # steps that must swallow


class LostUpdates:
    """How many weights in low precision a step leaves as they were, of those with a gradient."""

    def __init__(self, model: nn.Module) -> None:
        self._params = [(name, p) for name, p in model.named_parameters() if p.dtype in LOW and p.ndim > 1]
        self._before: list[tuple[str, nn.Parameter, Tensor, Tensor]] = []
        self.shares: dict[str, list[tuple[int, Tensor]]] = {}

    def before_step(self) -> None:
        """Gradients are there."""
        self._before = [
            (name, p, _elements(p), _elements(p.grad) != 0) for name, p in self._params if p.grad is not None
        ]

    def drop_step(self) -> None:
        """The step is not made."""
        self._before = []

    def after_step(self, step: int) -> None:
        """Weights are updated."""
        for name, p, before, asked in self._before:
            same = (_elements(p) == before) & asked
            share = same.sum() / asked.sum().clamp(min=1)
            self.shares.setdefault(name, []).append((step, share.float()))
        self._before = []

    @property
    def has_looked(self) -> bool:
        """Whether a weight was looked at around enough steps."""
        return any(len(shares) >= FEWEST for shares in self.shares.values())

    def observations(self) -> Iterator[Observation]:
        """Weights that lose most of their updates, each time."""
        for name, shares in self.shares.items():
            values = [(step, float(share)) for step, share in shares]
            if len(values) >= FEWEST and all(share > SWALLOWED for _, share in values):
                usual = sorted(share for _, share in values)[len(values) // 2]
                dtype = str(next(p.dtype for of, p in self._params if of == name)).removeprefix("torch.")
                yield Observation(
                    "update.lost_to_rounding",
                    name.rpartition(".")[0],
                    name,
                    values[0][0],
                    usual,
                    f"{usual:.0%} of the weights of {name} that have a gradient stay exactly as they are in "
                    f"a step (limit {SWALLOWED:.0%}): {dtype} has no number that near.",
                    (f"weights are kept in {dtype}, and the learning rate is small beside them",),
                    ("keep weights in float32 and use autocast for the forward, MixedPrecision('bf16')",),
                )


def _elements(x: Tensor) -> Tensor:
    view = sketch(x)
    return sketch_copy(x) if view is None else view.clone()


class _Of(NamedTuple):
    """What is followed of one optimizer."""

    dirty: Tensor | float | None  # largest gradient found at the cleanest backward since its last step
    n_steps: int
    n_stale: Tensor | float
    n_seen: int = 0  # steps before which a backward was seen
    grads: tuple[int, ...] = ()  # ids of the gradients found at the last of these backwards


class StaleGradients:
    """Whether gradients of the last step are still there when the next backward adds to them.

    Told by a few parameters of each optimizer. Where any backward between two steps of it finds them zero or
    None, somebody has cleared them. If the step finds other tensors there, they were replaced, say by those
    of torch.autograd.grad, and nothing was added.
    """

    def __init__(self, model: nn.Module) -> None:
        self._ids = {id(p) for p in model.parameters()}  # others may have gradients when ours has none yet
        self._of: WeakKeyDictionary[Optimizer, _Of] = WeakKeyDictionary()

    def before_backward(self) -> None:
        """A backward begins."""
        for opt, of in self._of.items():
            if of.n_steps and of.dirty != 0.0:
                found = _dense(opt, self._ids)
                now = _smaller(_largest(found), of.dirty)
                self._of[opt] = of._replace(dirty=now, grads=tuple(map(id, found)))

    def after_step(self, opt: Optimizer) -> None:
        """It has made a step."""
        dirty, n_steps, n_stale, n_seen, grads = self._of.get(opt, _Of(None, 0, 0.0))
        if dirty is not None and not set(grads).isdisjoint(map(id, _dense(opt, self._ids))):
            n_stale = n_stale + (dirty > 0)
        self._of[opt] = _Of(None, n_steps + 1, n_stale, n_seen + (dirty is not None))

    @property
    def has_looked(self) -> bool:
        """Whether enough backwards were seen between the steps of an optimizer."""
        return any(of.n_seen >= FEWEST - 1 for of in self._of.values())

    def observations(self) -> Iterator[Observation]:
        """Where each step since the first found them."""
        for _, n_steps, n_stale, *_ in list(self._of.values()):
            if n_steps >= FEWEST and float(n_stale) >= n_steps - 1:
                yield Observation(
                    "grad.stale",
                    step=1,
                    value=float(n_stale),
                    text=f"in {float(n_stale):.0f} of {n_steps} steps the gradients of the step before were "
                    "still there, and the new ones were added to them.",
                    causes=("nobody clears gradients after a step",),
                    next_steps=("call optimizer.zero_grad() after each optimizer.step()",),
                )


def _smaller(found: Tensor | float, before: Tensor | float | None) -> Tensor | float:
    if isinstance(found, Tensor) and isinstance(before, Tensor):
        return torch.minimum(found, before)
    return found if before is None or not isinstance(found, Tensor) else before


def _dense(opt: Optimizer, ids: set[int]) -> list[Tensor]:
    """The dense gradients of its parameters that are among these."""
    params = [p for group in opt.param_groups for p in group["params"] if id(p) in ids]
    grads = [p.grad for p in params if p.grad is not None]
    return [g for g in grads if g.layout is torch.strided and g.numel()]


def _largest(dense: list[Tensor]) -> Tensor | float:
    """The largest value of the first and the last of these gradients; 0.0 if there is none."""
    if not dense:
        return 0.0
    ends = [dense[0], dense[-1]] if dense[0].device == dense[-1].device else dense[:1]
    found = torch.stack([g.detach().abs().amax().float() for g in ends]).amax()
    return float(found) if found.is_cpu else found
