"""head.activation: an activation before the loss that does not suit it."""

from typing import Any

from hookcb.core import graph
from hookcb.diagnosis.fault import Fault, Site, fault
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.loss_terms import MAX_NODES
from hookcb.diagnosis.measurements.output import Output, name_of
from hookcb.diagnosis.run import Run

HEAD_ADVICE = {  # by the function that the loss applies itself
    "softmax": "pass the raw scores (logits) to the loss",
    "sigmoid": "pass the raw scores (logits) to the loss, or use binary_cross_entropy",
}


@fault(
    "head.activation",
    Site.LOSS,
    needs="batch graph",
    leads_to="loss.* grad.* unit.* update.too_small act.collapse",
    exact=True,
)
class HeadActivation(Fault):
    """A softmax, sigmoid or ReLU before a loss that applies its own, or no activation before one that needs it.

    Formula: the nodes of the autograd graph next to the loss.

    Source: torch.nn.CrossEntropyLoss and BCEWithLogitsLoss take unnormalized logits, NLLLoss
    log-probabilities.
    """  # noqa: E501

    headline = "An activation does not suit the loss"
    passed = "an activation before the loss"
    uses = (Loss, Output)

    def on_first_graph(self, run: Run) -> None:
        loss, output = run.measured(Loss).graph, run.measured(Output)
        if loss is None or output.is_degenerate:
            return
        name, takes = name_of(loss.head), loss.takes
        ends = f"a {name}" if name else "a linear layer"
        end = f"The model ends in {ends}, and its output goes to {loss.kind}"
        layer, place = output.layer, "left in the model"
        if loss.head in _operations_between(run.loop.loss_node, run.loop.pred):
            layer, place = "", "between the model and the loss"
            end = f"The output of the model goes through {ends} to {loss.kind}"
        is_binary = loss.kind == "binary cross-entropy"
        logits = "BCEWithLogitsLoss" if is_binary else "CrossEntropyLoss"
        raw = f"End the model in a linear layer and use nn.{logits}"
        if loss.head and loss.applies:
            text = f"{end}, which applies a {loss.applies} itself."
            cause = f"a {name} {place}, which squeezes the scores and their gradients"
            advice = f"Remove the {name}: {HEAD_ADVICE[loss.applies]}"
        elif takes == "log-probabilities" and loss.head:
            text, cause = f"{end}, which expects log-probabilities.", f"a {name} in place of a log_softmax"
            advice = f"Remove the {name}: use log_softmax, or cross_entropy on the scores"
        elif takes == "probabilities" and (loss.is_raw or loss.head == "Relu"):
            takes = "takes its logarithm as if it were a probability; but it is not limited to 0 to 1"
            text = f"{end}, which {takes}."
            cause, advice = f"a missing {'sigmoid' if is_binary else 'softmax'}", raw
        elif takes == "probabilities" and loss.head == "Sigmoid" and not is_binary:
            text = f"{end} over several classes, whose probabilities must sum to 1."
            cause, advice = "a sigmoid, not a softmax", raw
        else:
            return
        self.see(text, at=layer, when=run.step, causes=(cause,), next_steps=(advice,))


def _operations_between(node: Any, pred: Any) -> list[str]:
    """Operations from the loss back to the model's output; none if they do not lead there."""
    ends = graph.roots(pred)
    between = list(graph.walk([node], ends, MAX_NODES))
    leads_there = any(behind in ends for at in between for behind in graph.inputs(at))
    return [graph.name(at) for at in between] if leads_there else []
