"""BatchHashes: by which it is seen that ranks or epochs train on the same batches."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from hookcb.diagnosis.fault import EVERY, Measurement
from hookcb.diagnosis.measurements.replicas import can_compare, hash_of
from hookcb.diagnosis.run import Run

N_EPOCHS, N_BATCHES = 4, 20  # epochs, and first batches of each, that are hashed
MIN_COMPARED, N_COMPARED = 4, 8  # batches that are compared between ranks


class BatchHash(NamedTuple):
    """Hashes of the inputs and of the targets of a batch; None if they have no tensors."""

    inputs: int | None
    targets: int | None


class BatchHashes(Measurement):
    """Hashes the first batches of each epoch, on replicas; on a GPU, it waits for nothing."""

    cadence = EVERY

    def __init__(self) -> None:
        self._epochs: list[list[tuple[Tensor | None, Tensor | None]]] = []
        self._is_open = False  # whether the current epoch is hashed from its beginning
        self.epochs: list[list[BatchHash]] = []
        # hashes of the inputs of the first batches of each rank, and how many of an epoch have come before in
        # it; empty in the verdict of a single rank
        self.of_ranks: Sequence[tuple[list[int], int]] = ()
        self.rank = 0

    def on_model(self, run: Run) -> None:
        self.done = not can_compare(run.loop)

    def on_batch(self, run: Run) -> None:
        self.add(run.loop.iter, run.loop.xb, run.loop.yb)

    def add(self, i: int, xb: Any, yb: Any) -> None:
        if i == 0:
            self._is_open = len(self._epochs) < N_EPOCHS
            self.done = not self._is_open
            self._epochs += [[]] if self._is_open else []
        if self._is_open and len(self._epochs[-1]) == i < N_BATCHES:
            self._epochs[-1].append((hash_of(xb), hash_of(yb)))

    def tell(self, run: Run) -> None:
        self.epochs = [[BatchHash(_number(x), _number(y)) for x, y in epoch] for epoch in self._epochs]

    def state(self, run: Run) -> tuple[list[int], int]:
        inputs = [batch.inputs for epoch in self.epochs for batch in epoch if batch.inputs is not None]
        n_repeated = max((len(epoch) - len(set(epoch)) for epoch in self.epochs), default=0)
        return inputs[:N_COMPARED], n_repeated

    def merge(self, run: Run, of_ranks: Sequence[tuple[list[int], int]], rank: int) -> None:
        self.of_ranks, self.rank = of_ranks, rank

    def freeze(self) -> None:
        self._epochs = []

    def inputs_of_ranks(self) -> list[list[int]]:
        """Hashes of as many batches of each rank."""
        n = min((len(inputs) for inputs, _ in self.of_ranks), default=0)
        return [inputs[:n] for inputs, _ in self.of_ranks]

    @property
    def why_not_compared(self) -> str:
        """Why batches of ranks were not compared, "" if they were."""
        if not self.of_ranks:
            return "too little was seen of the batches of all ranks"
        has_few = len(self.inputs_of_ranks()[0]) < MIN_COMPARED
        return "the batches of ranks were not compared" if has_few else ""


def _number(x: Tensor | None) -> int | None:
    return None if x is None else int(x)
