"""SequenceAxis: layers that take the samples of a batch for the steps of a sequence."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from hookcb.core.batch import n_samples, parts
from hookcb.core.text import as_layer
from hookcb.diagnosis.run import Observation

MIN_BATCHES = 3


class SequenceAxis:
    """Compares the input of recurrent and attention layers with the number of samples, by their shapes.

    Read are layers of torch without `batch_first`, which expect (steps, samples, features), in batches with
    one target for each sample: then the number of samples is known.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[str, int, int]] = []  # of the current batch, with the first two sizes
        self._n_right: Counter[str] = Counter()
        self._wrong: dict[str, list[tuple[int, int]]] = {}

    def begin_batch(self) -> None:
        """Begins an inspected batch."""
        self._calls = []

    def see_output(self, name: str, m: nn.Module, output: Tensor) -> None:
        """Notes a recurrent layer by its output, of which the first two sizes are those of its input."""
        if isinstance(m, nn.RNNBase) and not m.batch_first and output.ndim == 3:
            self._calls.append((name, output.shape[0], output.shape[1]))

    def see_attention(self, name: str, m: nn.Module | None, weights: Tensor) -> None:
        """Notes an attention layer by its weights, `(…, heads, queries, keys)` or the first two as one."""
        if isinstance(m, nn.MultiheadAttention) and not m.batch_first and weights.ndim > 2:
            n = len(weights) // (m.num_heads if weights.ndim == 3 else 1)
            self._calls.append((name, weights.shape[-1], n))

    def compare(self, xb: Any, yb: Any) -> None:
        """Compares them with the inputs and targets of the batch."""
        given = n_samples(xb if isinstance(xb, tuple) else tuple(x for _, x in parts(xb)))
        targets = next((x for _, x in parts(yb) if isinstance(x, Tensor)), None)
        if targets is None or not targets.ndim or targets.numel() != (n := len(targets)):
            return
        for name, first, second in self._calls:
            if first == n == given and second not in (1, n):
                self._wrong.setdefault(name, []).append((first, second))
            elif second == n != first:
                self._n_right[name] += 1

    @property
    def has_compared(self) -> bool:
        """Whether a layer was compared in enough batches."""
        return any(len(x) >= MIN_BATCHES for x in self._wrong.values()) or bool(self._n_right)

    def observations(self) -> Iterator[Observation]:
        """Layers that were given samples for steps in all batches."""
        for name, sizes in self._wrong.items():
            if len(sizes) >= MIN_BATCHES and not self._n_right[name]:
                n, second = sizes[-1]
                yield Observation(
                    "layer.batch_first",
                    name,
                    value=float(n),
                    text=f"Layer {name} takes the {n} samples of the batch for the steps of a sequence, and "
                    f"the {second} steps for samples: its input is {n}×{second}×…, but without batch_first "
                    "it expects (steps, samples, features).",
                    causes=("batch_first=True is missing",),
                    next_steps=(
                        f"Create {as_layer(name)} with batch_first=True, or transpose its input and output",
                    ),
                )
