"""param.unregistered: parameters that the forward uses, and that the model does not have."""

from hookcb.core.text import join_names
from hookcb.diagnosis.fault import Fault, Site, fault
from hookcb.diagnosis.measurements.outside import Outside, OutsideParameters
from hookcb.diagnosis.run import Run

UNSEEN = "too little was seen of the graph of the output"
OPERATION = "an operation on an nn.Parameter before it was assigned, as in nn.Parameter(x).to(device)"


@fault(
    "param.unregistered",
    Site.MODULES,
    needs="batches",
    leads_to="param.not_in_optimizer loss.* update.*",
    exact=True,
)
class Unregistered(Fault):
    """Parameters that the forward uses and that are not in `model.parameters()`, so no optimizer gets them.

    Exact: an nn.Parameter in the autograd graph of the output, up to the inputs, which is neither the model's
    nor in any optimizer, and has not changed in twenty steps, as in a layer in a plain list; or three graphs,
    each with other such parameters than the one before, as of a layer that is created in forward; or one from
    which an attribute of the model was computed, if torch's error of a second backward ended the training.

    Source: torch.nn.Module, "Submodules assigned in this way will be registered"; torch.nn.ModuleList.
    """

    headline = "The forward uses parameters that the model lacks"
    uses = (OutsideParameters,)
    passed = "parameters that the model does not have"
    unless = UNSEEN

    def tell(self, run: Run) -> None:
        outside, n_steps = run.measured(OutsideParameters), run.n_steps
        why = f"{outside.hidden_by} hides a part of the graph of the output" if outside.hidden_by else UNSEEN
        self.unless = "" if outside.is_known(n_steps) else why
        self.seen = []
        if found := outside.made_anew():
            message = (
                f"The forward makes {_counted(found)} anew in each call, so that training changes nothing in "
                f"{'it' if len(found) == 1 else 'them'}"
            )
            cause = "a layer or nn.Parameter that is created in forward"
            advice = "Create it in __init__, and only use it in forward"
        elif found := outside.freed():
            message = (
                "Tensors of the model were computed from an nn.Parameter when it was built, and the first "
                "backward has freed their graph"
            )
            cause, advice = OPERATION, "Assign the nn.Parameter itself, and compute from it in forward"
        elif found := outside.untrained(n_steps):
            are, them = ("is", "it") if len(found) == 1 else ("are", "them")
            message = (
                f"{_counted(found)} that the forward uses {are} not in model.parameters(), and no optimizer "
                f"has changed {them} in {n_steps} steps"
            )
            cause = "layers in a plain list or dict, or in an object that is not an nn.Module"
            advice = "Put the layers into an nn.ModuleList or nn.ModuleDict before the optimizer is created"
            if any(x.is_computed for x in found):
                cause, advice = OPERATION, "Assign the nn.Parameter itself, and move the model as a whole"
            advice += "; what is meant to stay, freeze with requires_grad_(False)"
        else:
            return
        self.see(
            f"{message}: {_named(found)}.",
            at=found[0].name.rpartition(".")[0],
            param=found[0].name,
            value=float(len(found)),
            causes=(cause,),
            next_steps=(advice,),
        )


def _counted(found: list[Outside]) -> str:
    return f"{len(found)} parameter{'s' * (len(found) != 1)}"


def _named(found: list[Outside]) -> str:
    if all(x.name for x in found):
        return join_names([x.name for x in found], 4)
    shapes = ["×".join(map(str, x.shape)) or "()" for x in found]
    return f"of shape{'s' * (len(found) != 1)} {join_names(shapes, 4)}"
