"""hook.silent: layers that are not called."""

from collections.abc import Iterator

from hookcb.core.text import as_layer, join_names
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.frame import Frame
from hookcb.diagnosis.run import Param, Passed, Run, Skipped
from hookcb.hooks.coverage import NOT_CALLED, USED


@fault("hook.silent", Site.MODULES, needs="activations", exact=True)
class SilentLayer(Fault):
    """Layers that were not called in any inspected batch, so nothing is known of their outputs: a note.

    Formula: number of calls = 0, and no parameter of the layer had a gradient. Not noted are layers with a
    parameter that had one, as they are used without a call; frozen layers, which may be; kinds of layers that
    are never called themselves; and layers without parameters if another layer is used without a call.
    """

    headline = "A layer is never called"
    severity = "info"

    def findings(self, run: Run) -> Iterator[Result]:
        silent = run.measured(Frame).silent
        unused = [name for name, why in silent.items() if why == NOT_CALLED and _is_unused(run, name)]
        if not (run.layers and unused):
            yield Passed("unused layers") if run.layers else Skipped("no call of any layer was seen")
            return
        first, *others = unused
        were = "were" if len(others) > 1 else "was"
        more = f", nor {were} {join_names(map(as_layer, others), 3)}" if others else ""
        # the forward may read the settings of a layer without parameters, which no hook sees
        may_be_read = not {p.layer for p in run.params.values()}.issuperset(unused)
        reads = ("a forward that reads only its settings, as in F.dropout(x, self.dropout.p)",)
        yield self.finding(
            f"Layer {first} was not called in any of the {run.n_looked} inspected batches{more}.",
            at=first,
            value=float(len(unused)),
            limit=0.0,
            causes=("a layer that the forward skips, always or in most batches", *reads[:may_be_read]),
            next_steps=(
                "If it should take part, call it in forward; if not"
                f"{', and its settings are not read there,' if may_be_read else ','} remove it",
            ),
        )


def _is_unused(run: Run, layer: str) -> bool:
    """Whether a layer that was not called is not used in another way either, judging by its parameters."""
    if params := [p for p in run.params.values() if p.layer == layer]:
        is_known = "gradients" in run.sources  # else a hook has already looked for a gradient
        return not is_known or (any(p.n_without for p in params) and not any(map(_has_gradient, params)))
    silent = run.measured(Frame).silent
    used = {p.layer for p in run.params.values() if _has_gradient(p)} & silent.keys()
    return not used and USED not in silent.values()


def _has_gradient(param: Param) -> bool:
    return any(x > 0 for x in param.series("norm").values)
