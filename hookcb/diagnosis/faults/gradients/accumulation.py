"""accum.divisor: losses of several backwards that are summed to one step."""

import math
from contextlib import suppress

from torch import Tensor

from hookcb.core.optim import detached_scalar, is_adaptive, mark_of
from hookcb.diagnosis.fault import EVERY, Fault, Site, fault
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.steps import Steps, is_there
from hookcb.diagnosis.run import Absent, Run

MIN_STEPS = MAX_FACTORS = 3


@fault("accum.divisor", Site.GRADIENTS, needs="batches steps", subject="accumulation", exact=True)
class Accumulation(Fault):
    """Losses of several backwards that are summed to one step: a note, as they may be losses of their own.

    Exact: each step of the only optimizer adds up the same number of backwards, two or more, and gradients
    are neither cleared nor changed, as by clipping, between them and before the step; backward is called on a
    mean over samples that is not divided. Read from the graph of a watched loop's loss; if that was reported,
    from its gradient. Not for optimizers like Adam, which undo the factor.
    """

    headline = "Accumulated losses are not divided"
    # It follows one small gradient. One that is gone, or zero on a CPU, before a later backward was cleared,
    # so that what came before does not count; if it was changed otherwise, the number is unknown.

    cadence = EVERY
    uses = (Steps, Loss)
    severity = "info"
    passed = "accumulated losses that are not divided"
    unless = "it is not known by what number the loss is divided"

    def __init__(self) -> None:
        super().__init__()
        self._counts: set[int] = set()  # of the backwards of each step, 0 if unknown
        self._n, self._is_known = 0, True  # since the last step
        self._mark: tuple[int, int] | None = None  # of the gradient when the last backward had ended
        self._factors: list[float | Tensor] = []  # gradients of the first losses that were reported
        self._is_external = True

    def on_model(self, run: Run) -> None:
        self._is_external = run.loop.is_external
        self.done = not self._is_external

    def on_loss(self, run: Run) -> None:
        loop = run.loop
        is_due = loop.facts.n_losses_reported > 0 and len(self._factors) < MAX_FACTORS
        if is_due and loop.loss_node is not None:
            loop.loss_node.register_prehook(self._add_factor)

    def _add_factor(self, grads: tuple[Tensor, ...]) -> None:
        """Records the gradient of a loss: what it is multiplied by before backward is called."""
        with suppress(Exception):  # else it raises in the user's backward
            self._factors.append(detached_scalar(grads[0]))

    def on_backward(self, run: Run) -> None:
        param = run.measured(Steps).first_param
        if param is not None and self._mark is not None and not is_there(param.grad):
            self._n, self._is_known = 0, True
        else:
            self.on_step(run)

    def on_gradients(self, run: Run) -> None:
        param = run.measured(Steps).first_param
        self._n += 1
        self._mark = None if param is None else mark_of(param.grad)

    def on_step(self, run: Run) -> None:
        """Checks whether the gradient is as the backward has left it; loops may divide or clip it."""
        param = run.measured(Steps).first_param
        if param is not None and self._mark is not None and mark_of(param.grad) != self._mark:
            self._is_known = False

    def on_between(self, run: Run) -> None:
        self._counts.add(self._n if self._is_known else 0)
        self._n, self._is_known, self._mark = 0, True, None

    def on_end(self, run: Run) -> None:
        """Compares backwards with steps, and with what the loss is multiplied by."""
        loop, graph = run.loop, run.measured(Loss).graph
        is_scaled = loop.scaler is not None and loop.scaler.is_enabled()
        if graph is None or len(run.measured(Steps).optimizers) > 1 or is_scaled or run.n_steps < MIN_STEPS:
            return
        factors = {float(x) for x in self._factors} if loop.facts.n_losses_reported else {1.0}
        scale = graph.scale * (factors.pop() if len(factors) == 1 else math.nan)
        n = min(self._counts, default=0)
        self.unless = self.unless if math.isnan(scale) else ""
        if n > 1 and self._counts == {n} and scale == 1:
            self.see(
                f"Each step adds up the gradients of {n} backwards, and each of their losses is a whole "
                f"mean over its samples, so gradients are {n} times those of the mean over all.",
                value=float(n),
                causes=("losses that are accumulated without a divisor",),
                next_steps=(
                    f"If these are parts of one batch, call (loss / {n}).backward(); SGD and clipping depend "
                    "on the scale of the gradients, Adam does not",
                ),
            )

    def tell(self, run: Run) -> None:
        if not self._is_external:
            run.lack(Absent("GradientAccumulation divides the loss itself"), "accumulation")
        elif self.done:
            return  # it has failed
        elif self._counts == {1}:
            run.lack(Absent("each step has the gradients of one backward"), "accumulation")
        elif any(map(is_adaptive, run.measured(Steps).optimizers.values())):
            run.lack(Absent("the optimizer divides by the size of gradients"), "accumulation")

    def freeze(self) -> None:
        self._factors = []
