"""adam.state: a state of Adam that a program changes between two steps, as one of another training."""

import math
from collections.abc import Iterator

from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.moments import FAR, Moments, StateChange
from hookcb.diagnosis.rules import Rise, format_factor, rise_of_loss
from hookcb.diagnosis.run import Absent, Run
from hookcb.diagnosis.verdict import Finding


@fault(
    "adam.state",
    Site.OPTIMIZER,
    needs="batches",
    leads_to="loss.* update.* act.* grad.exploding train.unfinished",
    subject="second moments",
    exact=True,
)
class StateChanged(Fault):
    """A state of Adam that is replaced or written to while it trains: of another or older run, or reset.

    Exact: between the end of a step and the beginning of the next one, the second moment of the first or the
    last parameter is another tensor or was written to in place, and its number of steps has fallen or
    jumped, or all sampled elements are 0, or their root mean square is a tenth or ten times that of its root
    at the last noted step, at most 8 steps before. A note, as a program may mean it. A warning if that
    parameter was not written to as well, as it is when a checkpoint is loaded, and the second moment is 0
    after more than one step, or has another size and a smaller number of steps. Not told is a checkpoint
    that is loaded with its weights, if the second moment has about the same size.

    Source: Kingma & Ba, "Adam: A Method for Stochastic Optimization", 2015, algorithm 1: m, v and the number
    of steps t belong together, and only a step changes them.
    """

    headline = "Adam's state is replaced while it trains"
    severity = "warning"
    uses = (Moments,)
    passed = "a state of Adam that changes between its steps"

    def findings(self, run: Run) -> Iterator[Result]:
        moments = run.measured(Moments)
        changes = [x for x in moments.changes if is_foreign(x) or not x.has_moved]
        if changes:
            yield self._found(run, next(filter(is_foreign, changes), changes[0]), len(changes))
        else:
            unless = Absent("no optimizer has a second moment and counts its steps")
            yield from self.told(run, [], "" if moments.has_seen else unless)

    def _found(self, run: Run, change: StateChange, n: int) -> Finding:
        rise = rise_of_loss(run, change.step)
        again = f" So it does {n - 1} more times." if n > 1 else ""
        return self.finding(
            f"Before step {change.step:,}, {what_changed(change)}; no step has done that.{_harm(rise)}{again}",
            "warning" if is_foreign(change) else "info",
            param=change.param,
            at=change.param.rpartition(".")[0],
            when=(change.step, None),
            value=change.after,
            limit=change.before,
            causes=(
                "load_state_dict() of an optimizer, with the state of another or an older run",
                "code that resets or scales optimizer.state",
            ),
            next_steps=(
                "Load weights and the state of the optimizer from the same checkpoint, before the training",
                "To reset Adam, create it anew, so that its steps are counted from 0",
            ),
        )


def is_foreign(change: StateChange) -> bool:
    """Whether a state cannot be that of these weights, or contradicts itself."""
    is_empty = change.ratio == 0 and change.after > 1
    is_far = not 1 / FAR < change.ratio < FAR and 0 < change.after < change.before
    return not change.has_moved and (is_empty or (is_far and math.isfinite(change.ratio)))


def what_changed(change: StateChange) -> str:
    """A clause on what is new in a state."""
    kind, where = change.kind, f" of {change.param}" if change.param else ""
    if change.is_gone:
        return f"the state of {kind} was reset after {change.before:,.0f} steps"
    said = []
    if change.after != change.before:
        way = "falls" if change.after < change.before else "jumps"
        said.append(f"the step count of {kind} {way} from {change.before:,.0f} to {change.after:,.0f}")
    if change.ratio == 0:
        kept = f", while it counts {change.after:,.0f} steps" if not said else ""
        said.append(f"exp_avg_sq{where} became all zero{kept}")
    elif not 1 / FAR < change.ratio < FAR and math.isfinite(change.ratio):
        factor = change.ratio**2
        size = f"{format_factor(factor)} times as large" if factor > 1 else f"{factor:.2g} of its size"
        said.append(f"exp_avg_sq{where} is {size}")
    return " and ".join(said)


def _harm(rise: Rise | None) -> str:
    if rise is None:
        return ""
    return f" The loss then rises from {rise.before:.3g} to {rise.after:.3g}{' for a while' * rise.has_healed}."
