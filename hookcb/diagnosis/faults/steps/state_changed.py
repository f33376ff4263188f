"""adam.state: a state of Adam that a program changes between two steps, as one of another training."""

from collections.abc import Iterator

from hookcb.diagnosis.causes import N_NEAR, impossible
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.moments import N_CHANGES, Moments, StateChange
from hookcb.diagnosis.measurements.spikes import Spike, Spikes
from hookcb.diagnosis.rules import Rise, rise_of_loss
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
    last parameter is another tensor or was written to in place, and its number of steps has fallen or jumped,
    or all sampled elements are 0, or their root mean square is a tenth or ten times that of its root at the
    last noted step, at most 8 steps before. A note, as a program may mean it. A warning if the second moment
    is 0 after more than one step, or, before the first step that is seen, in any sampled element of a
    parameter whose first moment is not 0 there, or has another size and a smaller number of steps, or the
    moments contradict each other in a spike of the loss within eight steps, see `loss.spike`. Not told if
    that parameter was written to as well, as by a checkpoint that is loaded with its weights, or has no
    gradient in that step, as while it is frozen. A new optimizer is another one, and no finding.

    Source: Kingma & Ba, "Adam: A Method for Stochastic Optimization", 2015, algorithm 1: m, v and the number
    of steps t belong together, and only a step changes them.
    """

    headline = "Adam's state is replaced while it trains"
    severity = "warning"
    uses = (Moments, Spikes)
    passed = "a state of Adam that changes between its steps"

    def findings(self, run: Run) -> Iterator[Result]:
        moments = run.measured(Moments)
        changes = [x for x in moments.changes if not x.has_moved]
        if changes:
            wrong = {x.step: spike for x in changes if (spike := _shown_by(run, x)) is not None}
            worst = max(changes, key=lambda x: (x.is_foreign, x.step in wrong))
            yield self._found(run, worst, wrong.get(worst.step), len(changes))
        else:
            unless = Absent("no optimizer has a second moment and counts its steps")
            yield from self.told(run, [], "" if moments.has_seen else unless)

    def _found(self, run: Run, change: StateChange, spike: Spike | None, n: int) -> Finding:
        rise = rise_of_loss(run, change.step)
        wrong = f" In step {spike.step:,}, {impossible(spike)}." if spike else ""
        at_least = "at least " * (n >= N_CHANGES)
        again = f" So it does {at_least}{n - 1} more time{'s' * (n > 2)}." if n > 1 else ""
        return self.finding(
            f"Before step {change.step:,}, {change.text}; no step has done that.{wrong}{_harm(rise)}{again}",
            "warning" if change.is_foreign or spike else "info",
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


def _shown_by(run: Run, change: StateChange) -> Spike | None:
    """A spike of the loss soon after a change, in which the moments contradict each other."""
    spikes = run.measured(Spikes).found
    return next((x for x in spikes if x.ratio > 1 and 0 < x.step - change.step <= N_NEAR), None)


def _harm(rise: Rise | None) -> str:
    if rise is None:
        return ""
    later = " for a while" * rise.has_healed
    return f" The loss then rises from {rise.before:.3g} to {rise.after:.3g}{later}."
