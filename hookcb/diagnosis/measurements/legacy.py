"""Legacy: calls the probes that are not yet parts."""

from typing import Any

from hookcb.diagnosis.fault import EVERY, Measurement
from hookcb.diagnosis.guard import Guard
from hookcb.diagnosis.measurements.clock import Clock
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.measurements.dead_units import DeadUnits
from hookcb.diagnosis.measurements.layer_rows import LayerRows
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.operations import Operations
from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.probed import add_probed
from hookcb.diagnosis.probes.suite import Probes
from hookcb.diagnosis.rules import falls_slowly
from hookcb.diagnosis.run import Run


class Legacy(Measurement):
    """Calls the probes that are not yet parts."""

    cadence = EVERY
    uses = (Clock, Steps, Curves, LayerRows, Loss, Operations, DeadUnits)

    def __init__(self) -> None:
        self.guard = Guard()
        self.probes: Probes | None = None

    def on_model(self, run: Run) -> None:
        self.probes = Probes(run, self.guard)

    def _call(self, name: str, run: Run, *args: Any) -> None:
        if self.probes is not None:
            getattr(self.probes, name)(run.loop, run.looking, *args)

    def on_batch(self, run: Run) -> None:
        self._call("begin_batch", run)

    def on_output(self, run: Run, name: str, m: Any, output: Any) -> None:
        if self.probes is not None:
            self.probes.see_output(name, m, output)

    def on_prediction(self, run: Run) -> None:
        self._call("record_pred", run)

    def on_loss(self, run: Run) -> None:
        self._call("record_loss", run)

    def on_backward(self, run: Run) -> None:
        self._call("begin_backward", run)

    def on_gradients(self, run: Run) -> None:
        self._call("end_backward", run)

    def on_step(self, run: Run) -> None:
        self._call("begin_step", run)

    def on_between(self, run: Run) -> None:
        self._call("end_step", run)

    def on_batch_end(self, run: Run) -> None:
        self._call("end_batch", run)

    def on_epoch(self, run: Run) -> None:
        self._call("end_epoch", run)

    def on_cancel(self, run: Run, level: str) -> None:
        self._call("cancel_step" if level == "step" else "drop_batch", run)

    def on_error(self, run: Run, error: BaseException) -> None:
        self._call("observe_error", run, error)

    def on_end(self, run: Run) -> None:
        self._call("observe_end", run)

    def on_doubt(self, run: Run, findings: Any) -> bool:
        probes = self.probes
        return probes is not None and probes.try_to_overfit(probes.run.loop, findings, falls_slowly(run))

    def tell(self, run: Run) -> None:
        if self.probes is not None:
            add_probed(self.probes, run)
        for note in self.guard.notes:
            run.note(note)
        run.partial |= self.guard.partial

    def freeze(self) -> None:
        self.probes = None
