"""Legacy: calls the probes that are not yet parts."""

from typing import Any

from hookcb.diagnosis.fault import EVERY, Measurement
from hookcb.diagnosis.guard import Guard
from hookcb.diagnosis.measurements.clock import Clock
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.measurements.dead_units import DeadUnits
from hookcb.diagnosis.measurements.layer_rows import LayerRows
from hookcb.diagnosis.measurements.layer_times import LayerTimes
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.probed import add_probed
from hookcb.diagnosis.probes.suite import Probes
from hookcb.diagnosis.run import Run


class Legacy(Measurement):
    """Calls the probes that are not yet parts."""

    cadence = EVERY
    uses = (Clock, Steps, Curves, LayerRows, LayerTimes, Loss, DeadUnits)

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

    def on_loss(self, run: Run) -> None:
        self._call("record_loss", run)

    def on_backward(self, run: Run) -> None:
        self._call("begin_backward", run)

    def on_gradients(self, run: Run) -> None:
        self._call("end_backward", run)

    def on_between(self, run: Run) -> None:
        self._call("end_step", run)

    def on_batch_end(self, run: Run) -> None:
        self._call("end_batch", run)

    def tell(self, run: Run) -> None:
        if self.probes is not None:
            add_probed(self.probes, run)
        for note in self.guard.notes:
            run.note(note)
        run.partial |= self.guard.partial

    def close(self, run: Run) -> None:
        if self.probes is not None:
            self.probes.close()

    def freeze(self) -> None:
        self.probes = None
