"""Runs a script a second time, and follows its operations to where its first NaN or infinity is made.

`python -m hookcb.cli.traced_script PLAN SCRIPT ARGS…` is started by `hookcb diagnose --trace-nan`.
"""

import json
import os
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hookcb.cli.limits import Limit
from hookcb.cli.model_tracker import ModelTracker
from hookcb.cli.script import run_watched
from hookcb.cli.second_run import MARGIN, Plan
from hookcb.cli.tracked_model import TrackedModel, kind_of
from hookcb.core import orders
from hookcb.core.callback import Callback
from hookcb.core.randomness import set_random_state
from hookcb.diagnosis.failures import describe_failure
from hookcb.nans.nonfinite import kinds, tensors_in
from hookcb.nans.origins import Made, Origins, shown_line


class Trace:
    """Follows the operations of a script, until a loss, gradient or weight has a NaN or infinity.

    Args:
        plan: what to look for.

    Attributes:
        limit: ends the script once there is nothing more to look for.
        result: what was found, or the reason why nothing was, for `second_run`.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.limit = plan, Until()
        self.result: dict[str, Any] = {"reason": "ended before its first batch"}
        self._origins = Origins()
        self._stack = ExitStack()

    def begin(self) -> None:
        """Begins to follow operations."""
        before = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
        self._stack.callback(torch.autograd.set_detect_anomaly, *before)
        torch.autograd.set_detect_anomaly(True, check_nan=False)  # each node keeps the lines that made it
        self._stack.enter_context(self._origins)

    def close(self) -> None:
        """Ends it."""
        self._stack.close()

    def at_batch(self, step: int) -> None:
        """Begins and ends at certain batches of the model."""
        if self.limit.is_over:
            return
        self.result = {"reason": f"had none in {step + 1:,} batches"}
        if step == self.plan.first and step > 0:
            self.begin()
        if step > self.plan.step + MARGIN:
            self._end(self.result, "as it has no NaN so far")

    def look(self, noticed: str, tensors: Iterable[Tensor], step: int) -> None:
        """Looks for NaN and infinity in these tensors, and for what has made them."""
        if self.limit.is_over or step < self.plan.first:
            return
        bad = [x for _, x in tensors_in(list(tensors)) if not kinds(x).clean]
        if not bad:
            return
        if self._origins.failure is not None:
            why = describe_failure("following the operations", self._origins.failure)
            return self._end({"reason": f"could not be followed: {why}"}, "as it cannot be followed")
        made = self._origins.origin(bad)
        if made is None:
            when = f", before batch {step}" if self.plan.first else ""
            return self._end(
                {"reason": f"had it in a {noticed} that no operation has made{when}"}, "too early"
            )
        self._end({"op": made.to_blame.op, "told": _told(made)}, "as the line is known")

    def _end(self, result: dict[str, Any], why: str) -> None:
        self.result, self.limit.reached = result, why
        write_result(self.plan, result)


def _told(made: Made) -> str:
    """The origin as a sentence without its period."""
    blamed = made.to_blame
    line, code = shown_line(blamed.line)
    at = f", at {line}: {code}" if line and code else ""
    if blamed.how == "came":
        return f"In a second run of the script, it was in a tensor before {blamed.op} took it{at}"
    where = f"{blamed.op}, in the backward of this line" if blamed.in_backward else blamed.op
    masked = "" if blamed is made else shown_line(made.line)[0]
    mask = f", of the -inf at {masked}" if masked else ""
    given = ", whose argument is NaN or infinite" if blamed.how == "given" else ""
    return f"A second run of the script shows that it comes from {where}{mask}{given}{at}"


def write_result(plan: Plan, result: dict[str, Any]) -> None:
    """Writes the result at once, as the script may end in any way."""
    Path(plan.result).write_text(json.dumps(result), encoding="utf-8")


class Until(Limit):
    """Limit that ends the script when there is nothing more to look for."""

    def __bool__(self) -> bool:
        return True

    def _count(self, opt: Any) -> None:
        """Does nothing: no number of steps ends the script."""

    def _reached(self) -> str:
        return self.reached


class LookForNan(Callback):
    """Shows the losses, gradients and weights of a model to a `Trace`."""

    order = orders.NONFINITE
    run_valid = False
    run_lr_find = False

    def __init__(self, trace: Trace) -> None:
        super().__init__(name="look_for_nan")
        self._trace = trace

    def before_batch(self) -> None:
        if self._is_meant:
            self._trace.at_batch(self.train_iter)

    def after_loss(self) -> None:
        self._look("loss", [self.loss])

    def after_backward(self) -> None:
        scaler = self.learn.scaler
        if scaler is None or not scaler.is_enabled():  # else an overflow is normal
            self._look("gradient", [p.grad for p in self.model.parameters() if p.grad is not None])

    def after_step(self) -> None:
        self._look("weight", self.model.parameters())

    def _look(self, noticed: str, tensors: Iterable[Tensor]) -> None:
        if self._is_meant:
            self._trace.look(noticed, tensors, self.train_iter)

    @property
    def _is_meant(self) -> bool:
        return kind_of(self.model) == self._trace.plan.kind


class NanTracker(ModelTracker):
    """Finds each model that a script trains, as `hookcb diagnose` does, and shows it to a `Trace`."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(limit=trace.limit)
        self._trace = trace

    def _observer(self, name: str | None = None) -> Callback:
        return LookForNan(self._trace)

    def _observes(self, cb: Any) -> bool:
        return isinstance(cb, LookForNan)

    def _close(self, model: TrackedModel, error: BaseException | None = None) -> None:
        self._open.remove(model)
        if model.watch is not None:
            model.watch.close(error)
        model.watch = model.model = None


def run_traced(plan: Plan, script: str, args: list[str]) -> int:
    """Runs the script, and writes the result; returns an exit code."""
    trace = Trace(plan)
    trace.limit.give_up = lambda: os._exit(0)
    set_random_state(torch.load(plan.random, weights_only=True))
    if plan.cuda_seed is not None:
        torch.cuda.manual_seed_all(plan.cuda_seed)
    if not plan.first:
        trace.begin()
    try:
        code, has_failed = run_watched(script, args, NanTracker(trace), plan.is_module)
    finally:
        trace.close()
    if not trace.limit.is_over:
        has_none = trace.result["reason"].replace("had none in", "failed after") if has_failed else ""
        write_result(plan, {"reason": has_none or trace.result["reason"]})
    return code


def main(argv: list[str]) -> int:
    """Runs what `second_run` has asked for."""
    plan = Plan(**json.loads(Path(argv[0]).read_text(encoding="utf-8")))
    return run_traced(plan, argv[1], argv[2:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
