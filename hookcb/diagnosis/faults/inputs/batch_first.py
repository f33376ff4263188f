"""layer.batch_first: samples taken for steps of a sequence."""

from collections.abc import Iterator

from hookcb.core.text import as_layer
from hookcb.diagnosis.fault import EVERYTHING, Fault, Result, Site, fault
from hookcb.diagnosis.measurements.sequence_axis import SequenceAxis
from hookcb.diagnosis.run import Run

MIN_BATCHES = 3


@fault(
    "layer.batch_first", Site.MODULES, needs="batches", leads_to=EVERYTHING, subject="sequences", exact=True
)
class BatchFirst(Fault):
    """A recurrent or attention layer that takes the samples of a batch for the steps of a sequence.

    Exact: shapes in three inspected batches, with one target for each sample: a layer of torch without
    `batch_first` gets as many steps as there are samples, and another number of samples.

    Source: torch.nn.LSTM and torch.nn.MultiheadAttention, `batch_first`.
    """

    headline = "A layer takes samples for steps"
    uses = (SequenceAxis,)
    severity = "warning"
    passed = "samples taken for steps of a sequence"

    def findings(self, run: Run) -> Iterator[Result]:
        axis = run.measured(SequenceAxis)
        often = {name: sizes for name, sizes in axis.wrong.items() if len(sizes) >= MIN_BATCHES}
        found = [
            self.finding(
                f"Layer {name} takes the {n} samples of the batch for the steps of a sequence, and the "
                f"{second} steps for samples: its input is {n}×{second}×…, but without batch_first it "
                "expects (steps, samples, features).",
                at=name,
                value=float(n),
                causes=("batch_first=True is missing",),
                next_steps=(
                    f"Create {as_layer(name)} with batch_first=True, or transpose its input and output",
                ),
            )
            for name, [*_, (n, second)] in often.items()
            if not axis.n_right[name]
        ]
        is_known = often or axis.n_right
        return self.told(run, found, "" if is_known else run.why_not("order of samples and steps"))
