"""init.zero: a hidden layer of zeros, which stays so."""

from collections.abc import Iterator

from hookcb.core.text import join_names
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.rules import LATEST, has_learned
from hookcb.diagnosis.run import Param, Passed, Run, Skipped


@fault(
    "init.zero",
    Site.MODULES,
    needs="gradients",
    leads_to="loss.flat loss.trivial unit.dead grad.attenuated act.collapse",
    exact=True,
    shown_by="params.norm",
)
class ZeroLayer(Fault):
    """A hidden layer whose weight is all zero and gets no gradient, so it stays zero.

    Formula: the norms of the weight and of its gradient are 0 in each of at least five inspected steps, and
    it is not the last weight. A note if the loss falls by a fifth and the model is better than a constant, as
    a branch may be masked to zero on purpose.

    A branch that begins with zeros on purpose gets gradients.
    """

    headline = "A hidden layer of zeros stays zero"

    def findings(self, run: Run) -> Iterator[Result]:
        weights = [p for p in run.params.values() if p.is_weight and p.stats and 0 not in p.shape]
        if not any(len(p.series("norm")) >= LATEST for p in weights):
            yield Skipped(f"no weight had a gradient in {LATEST} inspected steps")
            return
        if not (zero := [p for p in weights[:-1] if _is_zero(p, "weight_norm") and _is_zero(p, "norm")]):
            yield Passed("layers of zeros that stay so")
            return
        first, *others = zero
        also = f"; the same is true of {join_names([p.name for p in others], 3)}" if others else ""
        yield self.finding(
            f"{first.name} and its gradient are all zero, so it stays zero{also}.",
            "info" if has_learned(run, run.first_loss) else "error",
            at=first,
            when=first.series("norm"),
            value=0.0,
            causes=("all weights were initialized with zeros", "a branch that is masked to zero"),
            next_steps=(
                "Initialize weights randomly, torch.nn.init.kaiming_normal_(layer.weight); zeros are for "
                "biases",
            ),
        )


def _is_zero(param: Param, stat: str) -> bool:
    series = param.series(stat)
    return len(series) >= LATEST and not any(series.values)
