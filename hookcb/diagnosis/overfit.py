"""Whether a model can learn one batch by heart, which tells labels that mean nothing from a broken model."""

import copy
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hookcb.diagnosis.evidence import Sighting
from hookcb.diagnosis.verdict import Finding
from hookcb.modules import is_compiled, total_params, unwrapped

STEPS, RATE = 60, 3e-3
LEARNED = 0.5  # of the loss at the beginning
MOST_PARAMS = 5_000_000  # above that the look would take too long


def look_at_labels_by_heart(learn: Any, findings: tuple[Finding, ...], n_batches: int) -> Iterator[Sighting]:
    """Where the loss is flat and nothing else is wrong, trains a copy of the model on the batch at hand.

    Args:
        learn: a learner at the end of its fit; it is left as it is.
        findings: of the verdict so far.
        n_batches: that the training has had.
    """
    others = [f for f in findings if f.severity != "info" and f.code not in ("loss.flat", "loss.init")]
    is_flat = any(f.code == "loss.flat" and f.severity != "info" for f in findings)
    model = unwrapped(learn.model)
    if others or not is_flat or total_params(model).n > MOST_PARAMS or any(map(is_compiled, model.modules())):
        return
    with _aside(learn):
        first, last = _train(learn)
    if last < LEARNED * first:
        yield Sighting(
            "data.labels",
            step=0,
            value=last / first,
            text=f"the loss is flat over {n_batches:,} batches, and a copy of the model learns one batch by "
            f"heart, from {first:.3g} to {last:.3g}: it can learn, but labels do not follow from inputs.",
            causes=("labels that were shuffled apart from their inputs, or are mostly noise",),
            next_steps=("look at ten samples with their labels, as the loader gives them",),
        )


@contextmanager
def _aside(learn: Any) -> Iterator[None]:
    """In the block the learner has a copy of its model; random numbers go on afterwards as if nothing was."""
    model, numbers = learn.model, random.getstate()
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices), torch.enable_grad(), learn.restored():
        learn.model = copy.deepcopy(unwrapped(model)).train()
        try:
            yield
        finally:
            learn.model = model
            random.setstate(numbers)


def _train(learn: Any) -> tuple[float, float]:
    """The loss on the batch before and after some steps."""
    opt = torch.optim.Adam([p for p in learn.model.parameters() if p.requires_grad], lr=RATE)
    first = last = math.nan
    for i in range(STEPS + 1):
        learn.pred = learn.predict()
        loss = learn.get_loss()
        last = float(loss.detach())
        first = last if i == 0 else first
        opt.zero_grad()
        loss.backward()
        opt.step()
    return first, last
