"""Tries to overfit a single batch, to distinguish meaningless labels from a broken model."""

import copy
import statistics
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hookcb.core.ranks import is_sharded
from hookcb.core.restore import preserve_attribute, preserve_random
from hookcb.diagnosis.run import Observation
from hookcb.diagnosis.verdict import Finding
from hookcb.hooks.modules import is_compiled, total_params, unwrapped

MAX_STEPS, RATE = 60, 3e-3
LEARNED = 0.5  # share of the loss at the beginning
N_ORDERS, N_STEPS, FASTER = 9, 20, 3.0  # permutations of labels, steps with each, standard deviations
MIN_PAIRS = 32  # of samples of one class, and one for each sample at least
MAX_PARAMS = 5_000_000  # a larger model would take too long
NOT_LEARNED = {"loss.flat", "loss.trivial", "loss.init"}


def observe_memorized_labels(
    learn: Any, findings: tuple[Finding, ...], n_batches: int, falls_slowly: bool = False
) -> Iterator[Observation]:
    """Labels that do not follow from the inputs; tested only if the loss is flat and nothing else is wrong.

    A copy of the model is trained on the current batch, then on the same batch with permuted labels: labels
    that do not follow from the inputs are memorized equally fast in any order. If the loss is not flat but
    falls slowly, only that comparison counts. A model whose forward needs other ranks is left out.

    Args:
        learn: learner at the end of its fit; it is left as it was.
        findings: findings so far.
        n_batches: number of training batches.
        falls_slowly: whether the loss falls, but is little better than guessing.
    """
    alarms = {f.code for f in findings if f.severity != "info"}
    is_flat = "loss.flat" in alarms
    model = unwrapped(learn.model)
    is_large = total_params(model).n > MAX_PARAMS or any(map(is_compiled, model.modules()))
    is_joint = is_sharded(model) or any(isinstance(m, nn.SyncBatchNorm) for m in model.modules())
    if (
        alarms - NOT_LEARNED
        or is_large
        or is_joint
        or not (is_flat or falls_slowly or "loss.trivial" in alarms)
    ):
        return
    with preserve_random(), preserve_attribute([learn], "model"), torch.enable_grad(), learn.restored():
        losses = _train(learn, MAX_STEPS)
        learned = losses[-1] < LEARNED * losses[0]
        follow = _follow_from_inputs(learn, losses) if learned else None
    if not learned or follow or (follow is None and not is_flat):
        return
    overfits = f"a copy of the model can overfit a single batch, from {losses[0]:.3g} to {losses[-1]:.3g}"
    yield Observation(
        "data.labels",
        step=0,
        value=losses[-1] / losses[0],
        text=f"The loss is flat over {n_batches:,} batches, but {overfits}: it can learn, so the labels may "
        "not follow from the inputs."
        if is_flat
        else f"The loss has barely fallen in {n_batches:,} batches, and {overfits}, but no faster than with "
        "permuted labels: the labels do not follow from the inputs, so it can only memorize them.",
        causes=(
            "labels that were shuffled separately from their inputs, or are mostly noise",
            *(("steps that are too small or too few",) if is_flat else ()),
        ),
        next_steps=("Look at ten samples with their labels, as the loader yields them",),
        severity="" if is_flat else "warning",
    )


def _follow_from_inputs(learn: Any, losses: list[float]) -> bool | None:
    """Whether labels are learned faster than permuted labels; None if one batch cannot decide.

    A model can learn from one sample about another only if their class occurs several times in the batch.

    Source: Arpit et al., "A Closer Look at Memorization in Deep Networks", 2017: real labels are fitted
    faster than random ones.
    """
    y = learn.yb[0] if len(learn.yb) == 1 else None
    if not isinstance(y, Tensor) or y.ndim != 1 or y.is_floating_point():
        return None
    sizes = Counter(y.tolist()).values()
    n_pairs = sum(n * (n - 1) // 2 for n in sizes)
    if n_pairs < max(MIN_PAIRS, len(y)) or 2 * max(sizes) > len(y):
        return None
    falls = []
    for _ in range(N_ORDERS):
        learn.yb = (y[torch.randperm(len(y), device="cpu").to(y.device)],)
        falls.append(_fall(_train(learn, N_STEPS)))
    return _fall(losses[: N_STEPS + 1]) >= statistics.fmean(falls) + FASTER * statistics.stdev(falls)


def _fall(losses: list[float]) -> float:
    """First loss minus the mean of all losses, which leaves out what the model knew before."""
    return losses[0] - statistics.fmean(losses)


def _train(learn: Any, n_steps: int) -> list[float]:
    """Losses of a copy of the model trained on the batch, before each step and after the last."""
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
