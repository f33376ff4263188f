"""label.scaled: class indices that were scaled as the pixels."""

from collections.abc import Iterator

from torch import Tensor

from hookcb.core.batch import parts
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.targets import Targets
from hookcb.diagnosis.run import Run

MIN_BRIGHTEST, MAX_CLASSES = 0.5, 100  # of the pixels beside them; classes divided by 255


@fault("label.scaled", Site.INPUT, needs="batch", leads_to="head.* loss.* update.* unit.*", exact=True)
class ScaledLabels(Fault):
    """Class indices that were divided by 255 together with the pixels.

    Exact: all inputs and targets of the first batch are multiples of 1/255 in 0 to 1, with one target per
    sample; the largest target is below 100/255, and not 0, while the largest input is above a half.
    """

    headline = "Labels were scaled like the inputs"
    uses = (Targets,)
    severity = "warning"
    passed = "labels that were scaled as the inputs"

    def on_first_graph(self, run: Run) -> None:
        batch = run.loop.xb, run.measured(Targets).of_batch(run)
        floats = [[x.detach() for _, x in parts(b) if isinstance(x, Tensor)] for b in batch]
        if not all(len(x) == 1 and x[0].is_floating_point() and x[0].numel() > 1 for x in floats):
            return
        pixels, y = floats[0][0], floats[1][0]
        is_bright = y.numel() == len(y) and float(pixels.max()) >= MIN_BRIGHTEST
        if not (is_bright and _is_255th(pixels) and _is_255th(y)):
            return
        largest = round(float(y.max()) * 255)
        if 0 < largest < MAX_CLASSES:
            self.see(
                f"The targets are whole numbers from 0 to {largest}, divided by 255 as the inputs are.",
                when=run.step,
                value=float(y.max()),
                causes=("class indices that are scaled together with the pixels",),
                next_steps=("Divide the inputs alone by 255",),
            )

    def findings(self, run: Run) -> Iterator[Result]:
        return self.told(run, self.seen, "" if run.measured(Targets).is_known else run.why_not("targets"))


def _is_255th(x: Tensor) -> bool:
    """Whether all numbers are 0/255, 1/255 … 255/255."""
    whole = 255 * x.float()
    return bool((((whole - whole.round()).abs() < 1e-2) & (x >= 0) & (x <= 1)).all())
