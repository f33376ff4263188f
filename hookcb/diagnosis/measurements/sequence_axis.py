"""SequenceAxis: layers that take the samples of a batch for the steps of a sequence."""

from collections import Counter
from typing import Any

from torch import Tensor, nn

from hookcb.core.batch import n_samples, parts
from hookcb.diagnosis.fault import Measurement
from hookcb.diagnosis.measurements.layer_rows import float_output
from hookcb.diagnosis.measurements.operations import Operations
from hookcb.diagnosis.measurements.targets import Targets
from hookcb.diagnosis.run import Run


class SequenceAxis(Measurement):
    """Compares the input of recurrent and attention layers with the number of samples, by their shapes.

    Read are layers of torch without `batch_first`, which expect (steps, samples, features), in batches with
    one target for each sample: then the number of samples is known.
    """

    uses = (Operations, Targets)

    def __init__(self) -> None:
        self._calls: list[tuple[str, int, int]] = []  # of the current batch, with the first two sizes
        self.n_right: Counter[str] = Counter()  # batches in which a layer got both in their order
        self.wrong: dict[str, list[tuple[int, int]]] = {}  # first two sizes of its inputs in the others

    def on_model(self, run: Run) -> None:
        run.measured(Operations).listeners.append(self)

    def on_batch(self, run: Run) -> None:
        self._calls = []

    def on_output(self, run: Run, name: str, m: nn.Module, output: Any) -> None:
        if isinstance(m, nn.RNNBase) and not m.batch_first:
            x = float_output(name, output)  # whose first two sizes are those of the input
            if x is not None and x.ndim == 3:
                self._calls.append((name, x.shape[0], x.shape[1]))

    def see_attention(self, name: str, m: nn.Module | None, weights: Tensor) -> None:
        """Notes an attention layer by its weights, `(…, heads, queries, keys)` or the first two as one."""
        if isinstance(m, nn.MultiheadAttention) and not m.batch_first and weights.ndim > 2:
            n = len(weights) // (m.num_heads if weights.ndim == 3 else 1)
            self._calls.append((name, weights.shape[-1], n))

    def on_loss(self, run: Run) -> None:
        if not self._calls:
            return
        xb, yb = run.loop.xb, run.measured(Targets).of_batch(run)
        given = n_samples(xb if isinstance(xb, tuple) else tuple(x for _, x in parts(xb)))
        targets = next((x for _, x in parts(yb) if isinstance(x, Tensor)), None)
        if targets is None or not targets.ndim or targets.numel() != (n := len(targets)):
            return
        for name, first, second in self._calls:
            if first == n == given and second not in (1, n):
                self.wrong.setdefault(name, []).append((first, second))
            elif second == n != first:
                self.n_right[name] += 1
