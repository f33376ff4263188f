"""data.labels: labels that do not follow from the inputs, as overfitting a single batch tells."""

import copy
import math
import statistics
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hookcb.core.restore import preserve_attribute, preserve_random
from hookcb.diagnosis.fault import FAULTS, Fault, Result, Site, fault
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.rules import falls_slowly
from hookcb.diagnosis.run import Passed, Run, Skipped
from hookcb.diagnosis.verdict import Finding
from hookcb.hooks.modules import is_compiled, total_params, unwrapped
from hookcb.processes.groups import is_sharded

MAX_STEPS, RATE = 60, 3e-3
LEARNED = 0.5  # share of the loss at the beginning
N_ORDERS, N_STEPS, FASTER = 9, 20, 3.0  # permutations of labels, steps with each, standard deviations
MIN_PAIRS = 32  # of samples of one class, and one for each sample at least
MAX_PARAMS = 5_000_000  # a larger model would take too long
BELOW = 0.95  # of the loss of the best constant, which a model reaches without looking at the inputs
NOT_LEARNED = {"loss.flat", "loss.trivial", "loss.init"}


@fault("data.labels", Site.INPUT, needs="loss", leads_to="loss.flat loss.trivial")
class UnrelatedLabels(Fault):
    """The model can overfit a single batch but learns nothing: the labels do not follow from the inputs.

    Formula: a flat loss and no other finding, and 60 steps of a copy of the model on one batch bring its loss
    below half of its first value there, but no faster, by three standard deviations, than with the labels in
    nine shuffled orders; orders are compared only for classes that occur several times in a batch. A note; a
    warning if the loss falls by less than 5 % and is near guessing, as it does if labels are memorized. It
    is ruled out only if the loss falls 5 % below that of the best constant prediction.

    Source: A. Karpathy, "A Recipe for Training Neural Networks", 2019, "overfit one batch"; Arpit et al., "A
    Closer Look at Memorization in Deep Networks", 2017: real labels are fitted faster than random ones.
    """

    headline = "The labels do not follow from the inputs"
    uses = (Loss,)
    severity = "info"
    passed = "labels that do not follow from the inputs"
    _live: Run | None = None

    def on_model(self, run: Run) -> None:
        self._live = run

    def on_doubt(self, run: Run, findings: tuple[Finding, ...]) -> bool:
        """Tries to overfit a batch, if the loss is flat and nothing else is wrong.

        If the loss is not flat but falls slowly, only the comparison with permuted labels counts. A model
        whose forward needs other ranks is left out.
        """
        live, alarms = self._live, {f.code for f in findings if f.severity != "info"}
        is_flat = "loss.flat" in alarms
        if live is None or live.loop.is_external or alarms - NOT_LEARNED:
            return False
        if not (is_flat or "loss.trivial" in alarms or falls_slowly(run)) or not _can_copy(live.loop.model):
            return False
        losses, follow = _overfitted(live.loop)
        if not losses[-1] < LEARNED * losses[0] or follow or (follow is None and not is_flat):
            return False
        n = live.n_batches
        overfits = f"a copy of the model can overfit a single batch, from {losses[0]:.3g} to {losses[-1]:.3g}"
        self.see(
            f"The loss is flat over {n:,} batches, but {overfits}: it can learn, so the labels may not "
            "follow from the inputs."
            if is_flat
            else f"The loss has barely fallen in {n:,} batches, and {overfits}, but no faster than with "
            "permuted labels: the labels do not follow from the inputs, so it can only memorize them.",
            "info" if is_flat else "warning",
            when=0,
            value=losses[-1] / losses[0],
            causes=(
                "labels that were shuffled separately from their inputs, or are mostly noise",
                *(("steps that are too small or too few",) if is_flat else ()),
            ),
            next_steps=("Look at ten samples with their labels, as the loader yields them",),
        )
        return True

    def freeze(self) -> None:
        self._live = None

    def findings(self, run: Run) -> Iterator[Result]:
        if self.seen:
            yield from self.told(run, self.seen)
            return
        for result in run.measured(FAULTS["loss.flat"]).findings(run):
            if falls_slowly(run):
                yield Skipped("the loss falls too little to tell learning from memorized labels")
            elif isinstance(result, Passed):
                yield from self._passed(run)
            elif isinstance(result, Skipped):
                yield result
            else:
                why = "no copy of the model was trained on a single batch, or it could not overfit that"
                yield Skipped(why)

    def _passed(self, run: Run) -> Iterator[Result]:
        """A loss that falls below that of a constant prediction has something to learn from in the inputs."""
        constant, last = run.measured(Loss).constant, run.smooth_loss().values
        if math.isnan(constant):
            yield Skipped("it is not known what a prediction that is the same for all samples would give")
        elif last and last[-1] < BELOW * constant:
            yield Passed(self.passed)
        else:
            yield Skipped(f"a prediction that is the same for all samples gives a loss of {constant:.3g} too")


def _can_copy(model: nn.Module) -> bool:
    model = unwrapped(model)
    is_special = any(is_compiled(m) or isinstance(m, nn.SyncBatchNorm) for m in model.modules())
    return not (is_special or is_sharded(model) or total_params(model).n > MAX_PARAMS)


def _overfitted(learn: Any) -> tuple[list[float], bool | None]:
    """Losses of a copy trained on a batch, and `_follow_from_inputs` if it learned that; leaves no trace."""
    with preserve_random(), preserve_attribute([learn], "model"), torch.enable_grad(), learn.restored():
        losses = _train(learn, MAX_STEPS)
        return losses, _follow_from_inputs(learn, losses) if losses[-1] < LEARNED * losses[0] else None


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
