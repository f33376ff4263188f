"""param.frozen_between, param.frozen: layers, or a whole model, without a gradient."""

import math
from collections.abc import Collection, Iterable, Iterator

from hookcb.core.text import join_names
from hookcb.diagnosis.fault import EVERYTHING, Fault, Result, Site, fault
from hookcb.diagnosis.frame import Frame
from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.run import Passed, Run, Skipped
from hookcb.hooks.modules import names_around


@fault("param.frozen_between", Site.BACKWARD, needs="gradients activations", exact=True)
class FrozenBetween(Fault):
    """A frozen layer with trained layers before and after it: a note, as it may be on purpose.

    Exact: `requires_grad` is False for all parameters of a linear, convolutional or recurrent layer, called
    after a layer whose weight gets gradients and before another one. Left out are layers whose neighbors in
    the same module are all frozen, as in a frozen network inside the model, and models in which more than
    half of the layers, or several layers with more than half of the weights, are frozen, as in fine-tuning.
    """

    headline = "A layer between trained ones is frozen"
    severity = "info"

    def findings(self, run: Run) -> Iterator[Result]:
        trained = {p.layer: p for p in run.params.values() if p.is_weight and p.stats}
        if not (places := [p.place_of_layer for p in trained.values() if p.place_of_layer is not None]):
            yield Skipped("no layer with gradients was called")
            return
        frozen = run.measured(Frame).frozen
        n_frozen, n_trained = sum(frozen.values()), sum(math.prod(p.shape) for p in trained.values())
        is_tuning = len(frozen) > len(trained) or (len(frozen) > 1 and n_frozen > n_trained)
        layers = [run.layers[name] for name in frozen if name in run.layers and not is_tuning]
        layers = [x for x in layers if min(places) < x.place < max(places)]
        if not (between := [x for x in layers if _is_beside(x.name, trained, frozen)]):
            yield Passed("a frozen layer between trained ones")
            return
        names, is_one = [layer.name for layer in between], len(between) == 1
        yield self.finding(
            f"{'Layer' if is_one else 'Layers'} {join_names(names, 4)} {'is' if is_one else 'are'} "
            "frozen (requires_grad is False), while layers before and after are trained.",
            at=between[0],
            value=float(len(between)),
            limit=0.0,
            causes=("a layer frozen by mistake, or not unfrozen",),
            next_steps=(f"If it should be trained: model.get_submodule({names[0]!r}).requires_grad_(True)",),
        )


@fault("param.frozen", Site.MODULES, needs="batches", leads_to=EVERYTHING, exact=True)
class FrozenModel(Fault):
    """A model without a parameter that requires a gradient, whose loss has a graph, say, to the inputs.

    Exact: `requires_grad` of all parameters is False after the backwards and at the end.
    """

    headline = "No parameter of the model is trained"
    uses = (Steps,)
    passed = "a model that is frozen as a whole"
    unless = "too little was seen of the backward"

    def on_end(self, run: Run) -> None:
        params, steps = list(run.loop.model.parameters()), run.measured(Steps)
        n = steps.n_backward
        if steps.first_param is not None or not (n and params) or any(p.requires_grad for p in params):
            return
        held = {id(p) for opt in steps.optimizers.values() for x in opt.param_groups for p in x["params"]}
        self.see(
            f"Backward ran {n} time{'s' * (n != 1)}, but none of the {len(params)} parameters of the model "
            f"requires a gradient, so nothing is trained; the optimizer holds "
            f"{sum(id(p) in held for p in params)} of them.",
            value=float(len(params)),
            causes=("weights that are frozen on purpose, with adapters that were loaded frozen, too",),
            next_steps=(
                "Call requires_grad_() on what is to be trained, before the optimizer is created; PEFT does "
                "it with from_pretrained(…, is_trainable=True)",
            ),
        )

    def tell(self, run: Run) -> None:
        self.unless = "" if run.measured(Steps).n_backward else self.unless


def _is_beside(name: str, trained: Collection[str], frozen: Iterable[str]) -> bool:
    """Whether the innermost module that has other layers too has a trained one among them."""
    others = [*trained, *(other for other in frozen if other != name)]
    for outer in names_around(name):
        if inside := [x for x in others if not outer or x.startswith(f"{outer}.")]:
            return any(x in trained for x in inside)
    return False
