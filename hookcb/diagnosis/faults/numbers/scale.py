"""amp.scale_collapse: a GradScaler that skips many steps, or whose scale is below 1."""

from collections.abc import Iterator

from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.rules import ratio
from hookcb.diagnosis.run import Passed, Run, Series, Skipped

# share and number of skipped steps; a scaler that begins too high skips a few, as it should
MAX_SKIPPED, MAX_SKIPPED_STEPS = 0.1, 4


@fault(
    "amp.scale_collapse",
    Site.GRADIENTS,
    needs="gradients",
    leads_to="param.not_stepped update.too_small loss.flat loss.trivial",
    subject="scaler",
    exact=True,
    shown_by="run.scale",
)
class CollapsedScale(Fault):
    """A GradScaler that skips many steps or whose scale is below 1: gradients overflow at any scale.

    Formula: more than 10 % of steps and at least five are skipped (a scaler that begins too high skips a
    few), or the scale is below 1.

    Source: torch.amp.GradScaler, which begins at 65,536 and halves at each overflow.
    """

    headline = "The GradScaler skips too many steps"
    uses = (Steps,)

    def findings(self, run: Run) -> Iterator[Result]:
        scales, n_skipped = run.steps.get("scale", Series()), run.measured(Steps).n_skipped
        low = next(((step, x) for step, x in scales if 0 <= x < 1), None)
        share = ratio(n_skipped, run.n_steps)
        step = next((step for step, x in run.steps.get("skipped", Series()) if x > 0), None)
        value, limit = share, MAX_SKIPPED
        if low:
            (step, value), limit = low, 1.0
            what = f"'s scale has fallen to {value:.2g} (limit 1): gradients overflow at any scale."
        elif n_skipped > MAX_SKIPPED_STEPS and share > MAX_SKIPPED:
            what = (
                f" has skipped {n_skipped:,} of {run.n_steps:,} steps ({share:.0%}; limit "
                f"{MAX_SKIPPED:.0%}), because gradients were NaN or infinite."
            )
        else:
            is_known = run.n_steps or len(scales)
            yield Passed(f"skipped steps ({n_skipped:,})") if is_known else Skipped("no step was inspected")
            return
        yield self.finding(
            f"The GradScaler{what}",
            when=(step, None),
            value=value,
            limit=limit,
            causes=("activations or gradients above 65,504, the maximum of float16", "NaN in the loss"),
            next_steps=(
                "Use bfloat16, which has the range of float32",
                *(("Start with GradScaler(init_scale=2**12)",) if limit == MAX_SKIPPED else ()),
            ),
        )
