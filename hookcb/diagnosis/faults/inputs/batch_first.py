"""layer.batch_first: samples taken for steps of a sequence."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from hookcb.core.batch import n_samples, parts
from hookcb.core.text import as_layer
from hookcb.diagnosis.fault import EVERYTHING, Fault, Result, Site, fault
from hookcb.diagnosis.measurements.layer_rows import float_output
from hookcb.diagnosis.measurements.operations import Operations
from hookcb.diagnosis.measurements.targets import Targets
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
    uses = (Operations, Targets)
    severity = "warning"
    passed = "samples taken for steps of a sequence"

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[str, int, int]] = []  # of the current batch, with the first two sizes
        self._n_right = Counter[str]()  # batches in which a layer got both in their order
        self._wrong = defaultdict[str, list[tuple[int, int]]](list)  # first two sizes of inputs in the others

    def on_model(self, run: Run) -> None:
        run.measured(Operations).listeners.append(self)

    def on_batch(self, run: Run) -> None:
        self._calls = []

    def on_output(self, run: Run, name: str, m: nn.Module, output: Any) -> None:
        if isinstance(m, nn.RNNBase) and not m.batch_first:
            x = float_output(name, output)  # whose first two sizes are those of the input
            if x is not None and x.ndim == 3:
                self._calls.append((name, x.shape[0], x.shape[1]))

    on_compiled_output = on_output

    def see_attention(self, name: str, m: nn.Module | None, weights: Tensor) -> None:
        """Notes an attention layer by its weights, `(…, heads, queries, keys)` or the first two as one."""
        if isinstance(m, nn.MultiheadAttention) and not m.batch_first and weights.ndim > 2:
            n = len(weights) // (m.num_heads if weights.ndim == 3 else 1)
            self._calls.append((name, weights.shape[-1], n))

    def on_loss(self, run: Run) -> None:
        """Compares the calls with the number of samples, which is known if each has one target."""
        if not self._calls:
            return
        xb, yb = run.loop.xb, run.measured(Targets).of_batch(run)
        given = n_samples(xb if isinstance(xb, tuple) else tuple(x for _, x in parts(xb)))
        targets = next((x for _, x in parts(yb) if isinstance(x, Tensor)), None)
        if targets is None or not targets.ndim or targets.numel() != (n := len(targets)):
            return
        for name, first, second in self._calls:
            if first == n == given and second not in (1, n):
                self._wrong[name].append((first, second))
            elif second == n != first:
                self._n_right[name] += 1

    def findings(self, run: Run) -> Iterator[Result]:
        often = {name: sizes[-1] for name, sizes in self._wrong.items() if len(sizes) >= MIN_BATCHES}
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
            for name, (n, second) in often.items()
            if not self._n_right[name]
        ]
        is_known = often or self._n_right
        return self.told(run, found, "" if is_known else run.why_not("order of samples and steps"))
