"""The tensor operations of our statistics with nothing around them: what is below cannot be reached.

They keep no records, name nothing, and trust that each tensor is finite, dense, float32 and of the same shape
in every batch. What a callback adds beyond them is Python, in a loop whose layers have emptied the caches.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import count
from math import isfinite
from pathlib import Path

import torch
from peers import Install, by_hooks
from torch import Tensor, nn

from hookcb import Callback
from hookcb.activations.bins import Bins
from hookcb.activations.buffer import MAX_BATCHES, MAX_ELEMENTS
from hookcb.activations.stats import SAMPLED, WHOLE, _strata, shares
from hookcb.gradients.records import MAX_STEPS
from hookcb.gradients.samples import SKETCH, flat, sketch, tracked_places
from hookcb.gradients.stats import WHOLE as MIDDLE

DETAIL_EVERY = 10  # the default of GradientHealth
BINS = Bins(60)


def of_outputs(
    model: nn.Module, folder: Path, stack: ExitStack, with_hist: bool = False
) -> Callable[[], object]:
    """Exact moments, extremes and shares of small outputs; of large ones shares of a sample.

    A small output is copied, and reduced together with those of other batches. Histograms have a range that
    fits each record.
    """
    samples: dict[str, list[Tensor]] = {}
    small: set[str] = set()

    def act(name: str, o: Tensor) -> None:
        x = o.detach().view(-1)
        n = len(x)
        if n <= WHOLE:
            small.add(name)
            kept = x.clone()
        else:
            x.sum().item(), torch.dot(x, x).item()
            low, high = torch.aminmax(x)
            low.item(), high.item()
            kept = x.index_select(0, _strata(n, SAMPLED, x.device))
        samples.setdefault(name, []).append(kept)

    def look() -> None:
        waiting = list(samples.values())
        if sum(len(same) * len(same[0]) for same in waiting) > MAX_ELEMENTS or len(waiting[0]) == MAX_BATCHES:
            for name, same in samples.items():
                rows = torch.stack(same)
                if name in small:
                    rows.sum(1), torch.linalg.vector_norm(rows, dim=1), rows.amin(1), rows.amax(1)
                shares(rows, 0.05)
                if with_hist:
                    for some in rows.split(16):
                        BINS.counts_of(some)
            samples.clear()

    by_hooks(act)(model, folder, stack)
    return look


def of_gradients(model: nn.Module, folder: Path, stack: ExitStack) -> Callable[[], object]:
    """Row norms of each gradient, details in each tenth step, and tracked weights around each step.

    Weights are read before and after a step: nothing tells whether they were changed in between, by `.data`.
    """
    params = list(model.parameters())
    views = [flat(p.detach()) for p in params]
    places = [tracked_places(len(x)) if len(x) > SKETCH else None for x in views]
    weights: list[Tensor] = []
    n_steps = count()

    def tracked() -> Tensor:
        return torch.cat(
            [x if k is None else x.index_select(0, k) for x, k in zip(views, places, strict=True)]
        )

    def look() -> None:
        is_detailed = next(n_steps) % DETAIL_EVERY == 0
        for p in params:
            g = p.grad
            if g is None:
                continue
            if g.numel() <= SKETCH:
                g.clone()
                continue
            rows = torch.linalg.vector_norm(g.view(len(g), -1), dim=1)
            isfinite(torch.linalg.vector_norm(rows).item())
            if is_detailed:
                g.amin().item(), g.amax().item(), (g if g.numel() <= MIDDLE else sketch(g)).abs().mean()
            if g.numel() <= MIDDLE:
                torch.linalg.vector_norm(p.detach()).item(), p.detach().sum().item()
        weights.extend([tracked(), tracked()])
        if len(weights) > 2 * MAX_STEPS:
            before, after = torch.stack(weights[::2]), torch.stack(weights[1::2])
            for x in (after, after - before, after - before[0]):
                torch.linalg.vector_norm(x, dim=1)
            weights.clear()

    return look


class OfBatch(Callback):
    """What Diagnose must see of a batch that it does not look at: loss, one gradient's sum, times."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.marks: list[float] = []

    def before_fit(self) -> None:
        self.first = min(next(iter(self.model.children())).parameters(), key=torch.numel)

    def before_batch(self) -> None:
        self.marks.append(time.perf_counter())

    after_pred = before_backward = before_step = after_step = after_batch = before_batch

    def after_loss(self) -> None:
        self.before_batch()
        self.losses.append(self.loss.item())

    def after_backward(self) -> None:
        self.before_batch()
        isfinite(self.first.grad.sum().item())


FLOORS: dict[str, Install] = {
    "operations of ActivationStats alone": of_outputs,
    "operations of its histograms too": partial(of_outputs, with_hist=True),
    "operations of GradientHealth alone": of_gradients,
}
