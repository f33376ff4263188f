"""clip.scaled: gradients that are clipped while a GradScaler still has them multiplied by its scale."""

import math
from collections.abc import Iterator
from typing import Any

from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.step_scales import StepScales
from hookcb.diagnosis.rules import LATEST, median, ratio
from hookcb.diagnosis.run import Passed, Run, Series, Skipped
from hookcb.diagnosis.verdict import Finding
from hookcb.records.store import read_numbers

MIN_SCALE, MAX_LIMIT = 128.0, 1e3  # of a GradScaler; of the limit that a loop clips to
EXACT = 2e-4  # relative difference of two numbers that are the same; clipping itself is exact to 1e-6
SAME = 1e-6  # relative difference of two elements that are clipped to the same number
MIN_SHARE = 0.9  # of the records
MIN_STEPS, N_END = 32, 16  # steps in a row, and batches at the end of which one was clipped like that
UNSCALE = "Call scaler.unscale_(optimizer) after the backward, before clipping"
MAX_CLIPPED_TO, MIN_CUT = 0.01, 10.0  # norm that is left; norm before / after


@fault(
    "clip.scaled",
    Site.GRADIENTS,
    needs="gradients",
    leads_to="clip.always update.* loss.flat loss.trivial param.not_stepped train.unfinished",
    subject="scaler",
    exact=True,
    shown_by="run.clip_coef",
)
class ScaledClipping(Fault):
    """Gradients that are clipped before `scaler.unscale_`, so that they end a scale of 65,536 too small.

    Exact: in nine of ten records, five or more, the norm (or the largest element) of all gradients at the
    step, multiplied by the scale, is the same number to 2e-4. For the largest element, several parameters
    have that very one, unless the norm is seen to be cut, as hooks of parameters clip during the backward.
    That number has two digits, as a limit that
    somebody has written, or stays the same while the scale changes; the norm itself has more digits. Also
    if in 32 steps in a row or more, the last that were clipped to a norm at all among them, torch's clipping
    to a norm of 1,000 or less came before `unscale_`, while the scale was 128 or more. A
    warning for optimizers like Adam, which divide by the size of gradients, else an error.

    Source: PyTorch, "Automatic Mixed Precision examples", Gradient clipping.
    """

    headline = "Gradients are clipped before they are unscaled"
    uses = (StepScales,)

    def findings(self, run: Run) -> Iterator[Result]:
        yield self._heard(run) or self._recorded(run)

    def _heard(self, run: Run) -> Finding | None:
        """A finding on the order in which clipping and a scaler were called."""
        if (heard := run.measured(StepScales).scaled) is None or heard.n < MIN_STEPS:
            return None
        (scale,) = read_numbers([heard.scale])
        if not (
            MIN_SCALE <= scale < math.inf and heard.limit <= MAX_LIMIT and heard.last >= run.n_batches - N_END
        ):
            return None
        return self._finding(
            run,
            f"In {heard.n:,} steps in a row, from step {heard.first:,} on, clip_grad_norm_ came before "
            f"scaler.unscale_: gradients were clipped to {heard.limit:g} while still multiplied by the "
            f"scale, now {scale:,.6g}, so that the step gets a norm of {heard.limit / scale:.3g} at most.",
            when=(heard.first, heard.last),
            value=heard.limit / scale,
            limit=heard.limit,
        )

    def _finding(self, run: Run, message: str, **about: Any) -> Finding:
        return self.finding(
            message,
            "warning" if any(p.is_adaptive for p in run.params.values()) else "error",
            causes=(
                "clip_grad_norm_() or clip_grad_value_() without scaler.unscale_() before it",
                "hooks of parameters that clamp gradients in the backward",
            ),
            next_steps=(UNSCALE,),
            **about,
        )

    def _recorded(self, run: Run) -> Result:
        """A finding on the norms of gradients."""
        scales = {step: x for step, x in run.steps.get("scale", Series()) if MIN_SCALE <= x < math.inf}
        norms = dict(run.steps.get("clipped_total_norm", Series()))
        before = dict(run.steps.get("total_norm", Series()))
        left = {step: x for step, x in norms.items() if step in scales and 0 < x < math.inf}
        if len(left) < LATEST:
            return Skipped(f"fewer than {LATEST} steps with a GradScaler were inspected")
        maxima = _maxima(run)
        largest = {step: max(maxima.get(step, [0.0])) for step in left}
        cut = median(ratio(before.get(step, math.nan), x) for step, x in left.items())
        may_be_cut = not cut < MIN_CUT
        for what, sizes, is_cut in (
            ("norm", left, may_be_cut),
            ("largest element", largest, may_be_cut or _are_shared(maxima, list(left))),
        ):
            limit = _limit(sizes, scales)
            if limit and median(sizes.values()) < MAX_CLIPPED_TO and is_cut:
                scale = median(scales[step] for step in left)
                return self._finding(
                    run,
                    f"The {what} of the gradients at the step is {median(sizes.values()):.3g} in each of "
                    f"{len(left)} inspected steps, which is {limit:.3g} / {scale:g}, the scale of the "
                    f"GradScaler: they were clipped to {limit:.3g} while still multiplied by it.",
                    when=(min(scales), max(scales)),
                    value=median(sizes.values()),
                    limit=limit,
                )
        return Passed("gradients that are clipped before they are unscaled")


def is_clipped_while_scaled(run: Run) -> bool:
    """Whether several parameters share the largest element in nearly all steps with a live GradScaler."""
    steps = [step for step, x in run.steps.get("scale", Series()) if MIN_SCALE <= x < math.inf]
    return len(steps) >= LATEST and _are_shared(_maxima(run), steps)


def _maxima(run: Run) -> dict[int, list[float]]:
    """Largest elements of the gradients of all parameters, by step."""
    found: dict[int, list[float]] = {}
    for param in run.params.values():
        for step, x in param.series("abs_max"):
            found.setdefault(step, []).append(x)
    return found


def _are_shared(maxima: dict[int, list[float]], steps: list[int]) -> bool:
    """Whether in nearly all of these steps several parameters have the very same largest element."""
    n = 0
    for step in steps:
        largest = max(sizes := maxima.get(step, [0.0]))
        n += largest > 0 and sum(x >= largest * (1 - SAME) for x in sizes) > 1
    return n >= MIN_SHARE * len(steps)


def _limit(sizes: dict[int, float], scales: dict[int, float]) -> float:
    """The limit to which gradients were clipped while they were scaled; 0.0 if that was not so."""
    scaled = {step: x * scales[step] for step, x in sizes.items()}
    limit = median(scaled.values())
    same = [step for step, x in scaled.items() if abs(x - limit) <= EXACT * limit]
    if not (0 < limit <= MAX_LIMIT and len(same) >= max(LATEST, MIN_SHARE * len(scaled))):
        return 0.0
    has_changed = len({scales[step] for step in same}) > 1
    return limit if has_changed or (_is_written(limit) and not _is_written(median(sizes.values()))) else 0.0


def _is_written(x: float) -> bool:
    """Whether it has two digits, as a number that somebody has written: 0.5, 1, 2.5, 10."""
    return abs(float(f"{x:.1e}") - x) <= EXACT * x
