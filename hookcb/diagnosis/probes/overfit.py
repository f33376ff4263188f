"""Whether a model can learn one batch by heart, which tells labels that mean nothing from a broken model."""

import copy
import statistics
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hookcb.core.restore import preserve_attribute, preserve_random
from hookcb.diagnosis.evidence import Observation
from hookcb.diagnosis.verdict import Finding
from hookcb.hooks.modules import is_compiled, total_params, unwrapped

STEPS, RATE = 60, 3e-3
LEARNED = 0.5  # of the loss at the beginning
ORDERS, FEW, FASTER = 9, 20, 3.0  # other orders of labels, steps with each, standard deviations
PAIRS = 32  # of samples of one class, one for each sample at least: fewer tell too little
MOST_PARAMS = 5_000_000  # above that the look would take too long


def observe_memorized_labels(
    learn: Any, findings: tuple[Finding, ...], n_batches: int, falls_slowly: bool = False
) -> Iterator[Observation]:
    """If the loss is flat and nothing else is wrong, trains a copy of the model on the batch at hand.

    Its labels are compared with the same labels in other orders: those that do not follow from inputs are
    learned by heart, in any order alike. If the loss falls slowly instead, that alone counts.

    Args:
        learn: a learner at the end of its fit; it is left as it is.
        findings: of the verdict so far.
        n_batches: that the training has had.
        falls_slowly: whether the loss falls, and is little better than guessing.
    """
    others = [f for f in findings if f.severity != "info" and f.code not in ("loss.flat", "loss.init")]
    is_flat = any(f.code == "loss.flat" and f.severity != "info" for f in findings)
    model = unwrapped(learn.model)
    is_large = total_params(model).n > MOST_PARAMS or any(map(is_compiled, model.modules()))
    if others or is_large or not (is_flat or falls_slowly):
        return
    with preserve_random(), preserve_attribute([learn], "model"), torch.enable_grad(), learn.restored():
        losses = _train(learn, STEPS)
        learned = losses[-1] < LEARNED * losses[0]
        follow = _follow_from_inputs(learn, losses) if learned else None
    if not learned or follow or (follow is None and not is_flat):
        return
    by_heart = f"a copy of the model learns one batch by heart, from {losses[0]:.3g} to {losses[-1]:.3g}"
    yield Observation(
        "data.labels",
        step=0,
        value=losses[-1] / losses[0],
        text=f"the loss is flat over {n_batches:,} batches, and {by_heart}: it can learn, but labels do not "
        "follow from inputs."
        if is_flat
        else f"the loss has hardly fallen in {n_batches:,} batches, and {by_heart}, but no faster than with "
        "its labels in another order: what is learned is not how labels follow from inputs.",
        causes=("labels that were shuffled apart from their inputs, or are mostly noise",),
        next_steps=("look at ten samples with their labels, as the loader gives them",),
        severity="" if is_flat else "warning",
    )


def _follow_from_inputs(learn: Any, own: list[float]) -> bool | None:
    """Whether labels are learned faster than in other orders; None if one batch cannot tell.

    Only of classes that come several times in the batch can a model learn from one sample for another.

    Source: Arpit et al., "A Closer Look at Memorization in Deep Networks", 2017: real labels are fitted
    faster than random ones.
    """
    y = learn.yb[0] if len(learn.yb) == 1 else None
    if not isinstance(y, Tensor) or y.ndim != 1 or y.is_floating_point():
        return None
    sizes = Counter(y.tolist()).values()
    n_pairs = sum(n * (n - 1) // 2 for n in sizes)
    if n_pairs < max(PAIRS, len(y)) or 2 * max(sizes) > len(y):
        return None
    falls = []
    for _ in range(ORDERS):
        learn.yb = (y[torch.randperm(len(y)).to(y.device)],)
        falls.append(_fall(_train(learn, FEW)))
    return _fall(own[: FEW + 1]) >= statistics.fmean(falls) + FASTER * statistics.stdev(falls)


def _fall(losses: list[float]) -> float:
    """By how much losses are below their first one on average, which leaves out what was known of it."""
    return losses[0] - statistics.fmean(losses)


def _train(learn: Any, n_steps: int) -> list[float]:
    """The losses of a copy of the model on the batch, before each step and after the last."""
    model, losses = learn.model, []
    learn.model = copy.deepcopy(unwrapped(model)).train()
    opt = torch.optim.Adam([p for p in learn.model.parameters() if p.requires_grad], lr=RATE)
    for _ in range(n_steps + 1):
        learn.pred = learn.predict()
        loss = learn.get_loss()
        losses.append(float(loss.detach()))
        opt.zero_grad()
        loss.backward()
        opt.step()
    learn.model = model
    return losses
