"""head.stuck: a ReLU as the head of a regression that holds outputs at 0."""

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from hookcb.core.optim import detached_scalar
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.curves import Curve, Curves
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.loss_graph import LossGraph
from hookcb.diagnosis.measurements.output import compared
from hookcb.diagnosis.measurements.targets import Targets
from hookcb.diagnosis.rules import MIN_BATCHES, before
from hookcb.diagnosis.run import Absent, Passed, Run, Series

TINY = 1e-12  # of errors, so that none are no division by 0
MAX_STUCK, ALL_STUCK, N_STUCK = 0.4, 0.999, 3  # shares of the error; batches


@fault(
    "head.stuck",
    Site.LOSS,
    needs="loss batch graph",
    leads_to="loss.* update.* grad.* unit.dead act.collapse",
    shown_by="run.loss",
)
class StuckHead(Fault):
    """A ReLU as the head of a regression that holds outputs at 0 although their targets are larger.

    Formula: squared errors of these outputs, which get no gradient / all squared errors, the least of the
    last three inspected batches after 50 batches. Limit: 0.4; counts of rare events with such a head had up
    to 0.36. Before 50 batches, all of the error in each inspected batch, as healthy models begin with up to
    0.7.

    Source: Lu et al., "Dying ReLU and Initialization: Theory and Numerical Examples", 2020.
    """

    headline = "A ReLU holds outputs at zero"
    severity = "warning"
    uses = (Curves, Loss, Targets)

    def __init__(self) -> None:
        super().__init__()
        self._shares = Curve()
        self.shares = Series()  # of the error, for each inspected batch

    def on_loss(self, run: Run) -> None:
        if (loss := run.measured(Loss).graph) is None:
            return
        yb = run.measured(Targets).of_batch(run)
        if (share := stuck_share(loss, run.loop.loss_node, run.loop.pred, yb)) is not None:
            self._shares.add((run.step, detached_scalar(share)))

    def tell(self, run: Run) -> None:
        self.shares = self._shares.series()

    def freeze(self) -> None:
        self._shares = Curve()

    def findings(self, run: Run) -> Iterator[Result]:
        shares = before(self.shares, math.inf)
        n, limit = (0, ALL_STUCK) if len(run.loss) < MIN_BATCHES else (N_STUCK, MAX_STUCK)
        share = min(shares.values[-n:], default=math.nan)  # of all before 50 batches
        if not len(shares):
            yield Absent("no ReLU is the head of a regression")
        elif share <= limit:
            yield Passed(f"outputs that a ReLU holds at 0 ({share:.0%} of the error)", share, limit)
        else:
            yield self.finding(
                f"The model ends in a ReLU, and {share:.0%} of the error comes from outputs that are 0 "
                f"although their targets are larger (limit {limit:.0%}). They get no gradient, so they "
                "cannot learn.",
                when=shares,
                value=share,
                limit=limit,
                causes=("a ReLU as the last operation",),
                next_steps=(
                    "Remove the ReLU, so that a linear layer is last; use a Softplus if no output may be "
                    "below 0",
                ),
            )


def stuck_share(graph: LossGraph, node: Any, pred: Any, yb: Any) -> Tensor | None:
    """Share of the squared error from outputs that a ReLU holds at 0, below their targets; None if unknown.

    For absolute errors, 0 may be the best output nevertheless: the median.
    """
    seen = compared(node, pred, yb) if graph.head == "Relu" and graph.kind == "mse" else None
    if seen is None or seen.is_broadcast:
        return None
    x, y = seen.output.detach(), seen.target.detach()
    x = x.reshape(seen.term.given_shape) if seen.term.given_shape else x
    errors = (x - y).float().square()
    return (errors * ((x == 0) & (y > 0))).sum() / errors.sum().clamp_min(TINY)
