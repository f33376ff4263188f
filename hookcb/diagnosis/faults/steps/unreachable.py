"""param.unreachable: layers that are called and get no gradient."""

from collections.abc import Iterator, Sequence

from hookcb.core.text import as_layer, join_names
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.frame import Frame
from hookcb.diagnosis.measurements.parameters import Parameters
from hookcb.diagnosis.measurements.steps import ClearedGradients, Steps
from hookcb.diagnosis.rules import records_needed
from hookcb.diagnosis.run import Param, Passed, Run, Series, Skipped
from hookcb.diagnosis.verdict import Finding


@fault(
    "param.unreachable",
    Site.BACKWARD,
    needs="gradients",
    leads_to="loss.flat loss.trivial",
    exact=True,
    shown_by="params.norm",
)
class Unreachable(Fault):
    """A layer that was called in the forward and never received a gradient.

    Formula: `requires_grad`, and `.grad` is None in at least five inspected steps, or after one backward
    without a training. Left out are parameters that are frozen, had a gradient at some step, or belong to a
    layer that was not called, or in less than half of the inspected batches, as a branch that is switched
    off. A warning if the calls of layers were not recorded. Nothing is said if no backward was seen at all.
    """

    headline = "A layer gets no gradient"
    uses = (Parameters, ClearedGradients, Steps)

    def findings(self, run: Run) -> Iterator[Result]:
        steps, needed = run.steps.get("total_norm", Series()), records_needed(run)
        has_gradients = any(p.stats for p in run.params.values())
        has_backward = run.measured(Steps).n_backward > 0 or run.measured(Steps).is_beside
        ungraded = [p for p in run.params.values() if not p.stats and p.n_without >= needed]
        without = [p for p in ungraded if p.layer in run.layers and _takes_part(run, p.layer)]
        known = run.layers.keys() | run.measured(Frame).silent.keys()
        unknown = [p for p in ungraded if p.layer not in known]
        if len(steps) < needed:
            yield Skipped(f"fewer than {needed} steps were inspected")
        elif run.measured(ClearedGradients).has_found:
            yield Skipped("gradients were cleared between the backward and the step")
        elif run.measured(ClearedGradients).are_moved:
            yield Skipped("gradients were taken away in the backward, for an optimizer of other parameters")
        elif "batches" in run.sources and not has_backward and not has_gradients:  # it would have been seen
            yield Skipped("no backward was seen")
        elif unknown and "activations" not in run.sources and has_gradients:
            yield self._may_be_unused(unknown, steps)
        elif without:
            yield self._cut_off(run, without, steps)
        elif unknown:
            why = "had no gradient, and it is not known whether its layer is used"
            yield Skipped(f"{unknown[0].name} {why}")
        else:
            yield Passed("layers without gradient")

    def _cut_off(self, run: Run, without: Sequence[Param], steps: Series) -> Finding:
        last = max(without, key=lambda p: run.layers[p.layer].place)  # nearest to where the graph was cut
        layers = list(dict.fromkeys(p.layer for p in without if p.layer != last.layer))
        more = f", nor did {join_names(map(as_layer, layers), 3)}" if layers else ""
        of = as_layer(last.layer) or "the model"
        return self.finding(
            f"Parameter {last.name} received no gradient in {len(steps)} steps{more}, although its layer "
            "is used in the forward.",
            at=last,
            when=steps,
            value=float(len(without)),
            limit=0.0,
            causes=(
                "a .detach(), .data, no_grad or NumPy operation after this layer cuts it off from the loss",
            ),
            next_steps=(f"Follow the output of {of} to the loss; find where it is cut",),
        )

    def _may_be_unused(self, params: Sequence[Param], steps: Series) -> Finding:
        first, looks = params[0], "one backward" if len(steps) == 1 else f"{len(steps)} steps"
        s, it = ("", "it") if len(params) == 1 else ("s", "them")
        names = join_names([p.name for p in params], 4)
        return self.finding(
            f"Parameter{s} {names} received no gradient in {looks}; the loss may not depend on {it}.",
            "warning",
            at=first,
            when=steps,
            value=float(len(params)),
            limit=0.0,
            causes=("a layer that is not used in the forward, or an output that does not reach the loss",),
            next_steps=(f"Check that the forward uses {as_layer(first.layer) or first.name}, or freeze it",),
        )


def _takes_part(run: Run, layer: str) -> bool:
    """Whether a layer was called in most of the batches in which any layer was."""
    n_calls = {name: max(map(len, x.stats.values()), default=0) for name, x in run.layers.items()}
    return 2 * n_calls[layer] > max(n_calls.values()) or not any(n_calls.values())
