"""loss.detached: a loss that does not depend on any parameter."""

from collections.abc import Iterator

from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.run import Run


@fault("loss.detached", Site.LOSS, needs="batch", leads_to="param.* loss.flat loss.trivial", exact=True)
class DetachedLoss(Fault):
    """A loss that does not depend on any parameter.

    Formula: it has no `grad_fn`.
    """

    headline = "The loss depends on no parameter"
    passed = "a loss without gradients"
    uses = (Loss,)

    def on_first_graph(self, run: Run) -> None:
        if run.loop.loss_node is None:
            self.see(
                "The loss does not depend on any parameter, so there is nothing to train.",
                when=run.step,
                causes=(
                    "a .detach(), .item() or no_grad between the model and the loss",
                    "all parameters are frozen",
                ),
                next_steps=("Follow the model's output to the loss, and print .requires_grad on the way",),
            )

    def findings(self, run: Run) -> Iterator[Result]:
        return self.told(run, self.seen, "" if run.measured(Loss).is_seen else run.why_not("loss"))
