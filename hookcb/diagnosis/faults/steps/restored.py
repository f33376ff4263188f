"""param.restored: weights that something puts back after each step."""

from collections.abc import Iterator

from hookcb.core.text import join_names
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.parameters import Parameters
from hookcb.diagnosis.rules import LATEST, VISIBLE_UPDATE
from hookcb.diagnosis.run import Param, Passed, Run, Skipped

MIN_STEPS = 20  # of the run


@fault(
    "param.restored",
    Site.OPTIMIZER,
    needs="gradients batches",
    leads_to="loss.flat loss.trivial",
    exact=True,
    shown_by="params.update_ratio",
)
class Restored(Fault):
    """A weight that steps change, but that ends bit-identical to how it began.

    Formula: the median update ratio of at least five inspected steps is above 1e-6, there were twenty steps
    or more, and none of 1,024 elements has changed.
    """

    headline = "A weight is put back after each step"
    uses = (Parameters,)

    def findings(self, run: Run) -> Iterator[Result]:
        moving = [p for p in run.params.values() if p.is_weight and _steps_move(p)]
        if run.n_steps < MIN_STEPS or not moving:
            yield Skipped(f"fewer than {MIN_STEPS} steps, or no inspected step changed a weight")
            return
        unchanged = [p for p in moving if not p.has_moved]
        if not unchanged:
            yield Passed("weights that are put back after each step")
            return
        first, *others = unchanged
        also = f"; the same is true of {join_names([p.name for p in others], 3)}" if others else ""
        yield self.finding(
            f"Steps change {first.name}, but after {run.n_steps} steps it is bit-identical to how "
            f"it began{also}.",
            at=first,
            when=(first.series("update_ratio").steps[0], None),
            value=0.0,
            limit=0.0,
            causes=("something puts the old value back after each step",),
            next_steps=("Look for code that copies or loads weights inside the loop",),
        )


def _steps_move(param: Param) -> bool:
    ratios = param.series("update_ratio")
    return len(ratios) >= LATEST and ratios.median() > max(VISIBLE_UPDATE, param.resolution)
