"""data.duplicated, data.repeated, data.same_order: batches that ranks or epochs have had before."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import DistributedSampler

from hookcb.core.randomness import parts_of
from hookcb.core.ranks import name_ranks
from hookcb.diagnosis.fault import EVERY, Fault, Measurement, Result, Site, fault
from hookcb.diagnosis.measurements.replicas import alike, can_compare, hash_of
from hookcb.diagnosis.run import Passed, Run, Skipped

N_EPOCHS, N_BATCHES = 4, 20  # epochs, and first batches of each, that are hashed
MIN_COMPARED, N_COMPARED = 4, 8  # batches that are compared between ranks
MIN_BATCHES = 4  # whose order is compared
Hashes = Sequence[int | None]  # of the inputs and of the targets of a batch; None if they have no tensors


class BatchHashes(Measurement):
    """Hashes the first batches of each epoch, on replicas; on a GPU, it waits for nothing."""

    cadence = EVERY

    def __init__(self) -> None:
        self._epochs: list[list[tuple[Tensor | None, Tensor | None]]] = []
        self._is_open = False  # whether the current epoch is hashed from its beginning
        self.epochs: list[list[Hashes]] = []
        # of each rank: hashes of the inputs of its first batches, and how many of an epoch have come before
        self.inputs: list[list[int]] = []
        self.n_repeated: list[int] = []
        self.rank = 0
        self.why_not_compared = "too little was seen of the batches of all ranks"

    def on_model(self, run: Run) -> None:
        self.done = not can_compare(run.loop)

    def on_batch(self, run: Run) -> None:
        loop = run.loop
        if loop.iter == 0:
            self._is_open = len(self._epochs) < N_EPOCHS
            self.done = not self._is_open
            self._epochs += [[]] if self._is_open else []
        if self._is_open and len(self._epochs[-1]) == loop.iter < N_BATCHES:
            self._epochs[-1].append((hash_of(loop.xb), hash_of(loop.yb)))

    def tell(self, run: Run) -> None:
        self.epochs = [
            [[None if x is None else int(x) for x in batch] for batch in epoch] for epoch in self._epochs
        ]

    def state(self, run: Run) -> tuple[list[int], int]:
        inputs = [x for epoch in self.epochs for x, _ in epoch if x is not None]
        n_repeated = max((len(epoch) - len(set(map(tuple, epoch))) for epoch in self.epochs), default=0)
        return inputs[:N_COMPARED], n_repeated

    def merge(self, run: Run, of_ranks: Sequence[tuple[list[int], int]], rank: int) -> None:
        n = min(len(inputs) for inputs, _ in of_ranks)
        self.inputs, self.rank = [inputs[:n] for inputs, _ in of_ranks], rank
        self.n_repeated = [n_repeated for _, n_repeated in of_ranks]
        self.why_not_compared = "" if n >= MIN_COMPARED else "the batches of ranks were not compared"

    def freeze(self) -> None:
        self._epochs = []


@fault("data.duplicated", Site.INPUT, needs="batches", subject="replicas", exact=True)
class DuplicatedBatches(Fault):
    """Ranks that train replicas on the same batches.

    Formula: 64-bit hashes of the inputs, of 4,096 elements of each tensor at most, which are the same on two
    ranks in each of the first 4 to 8 batches. Ranks that shuffle the same samples, each in an order of its
    own, are not seen.
    """

    headline = "Ranks train on the same batches"
    uses = (BatchHashes,)
    severity = "warning"

    def findings(self, run: Run) -> Iterator[Result]:
        hashes = run.measured(BatchHashes)
        if hashes.why_not_compared:
            yield Skipped(hashes.why_not_compared)
        elif same := alike(hashes.inputs):
            yield self.finding(
                f"The inputs of {name_ranks(same)} are the same in each of the first {len(hashes.inputs[0])} "
                "batches: they train on the same samples, and see no more than one.",
                when=0,
                value=float(len(same)),
                causes=("a loader without a DistributedSampler", "a sampler that does not know the rank"),
                next_steps=("Give the training loader sampler=DistributedSampler(dataset)",),
                ranks=same,
            )
        else:
            yield Passed("ranks with the same batches")


@fault("data.repeated", Site.INPUT, needs="batches", leads_to="loss.*", subject="replicas", exact=True)
class RepeatedBatches(Fault):
    """A rank whose batches repeat within an epoch, though those of other ranks do not.

    Formula: hashes of inputs and targets of the first 20 batches of an epoch, in the first four epochs. Half
    or more of them have come before.
    """

    headline = "A rank repeats its batches"
    uses = (BatchHashes,)
    severity = "warning"

    def findings(self, run: Run) -> Iterator[Result]:
        hashes = run.measured(BatchHashes)
        repeated, rank, n = hashes.n_repeated, hashes.rank, max(map(len, hashes.epochs), default=0)
        if hashes.why_not_compared:
            yield Skipped(hashes.why_not_compared)
        elif 2 * repeated[rank] < n or all(2 * x >= n for x in repeated):  # as in overfitting a batch
            yield Passed("a rank whose batches repeat")
        else:
            yield self.finding(
                f"{repeated[rank]} of the first {n} batches of an epoch have come before in it, on rank "
                f"{rank} of {len(repeated)}; those of other ranks do not repeat.",
                when=0,
                value=float(repeated[rank]),
                causes=(
                    "a shard with few samples that is read again and again",
                    "a reader that does not advance",
                ),
                next_steps=("Print the indices or files that this rank reads",),
                ranks=(rank,),
            )


@fault("data.same_order", Site.INPUT, needs="batches", subject="replicas", exact=True)
class SameOrder(Fault):
    """Epochs with the same batches in the same order, as if `set_epoch` of a DistributedSampler is not called.

    Formula: hashes of the inputs, or of the targets if inputs are augmented, of the first 4 to 20 batches,
    which all differ, are the same in each of the first two to four epochs. A warning if the loader has a
    DistributedSampler that shuffles; else a note, as the order may be meant. Not checked in one process.

    Source: PyTorch, torch.utils.data.distributed.DistributedSampler, on `set_epoch`.
    """  # noqa: E501

    headline = "Each epoch has the same order"
    uses = (BatchHashes,)

    def __init__(self) -> None:
        super().__init__()
        self._loader: Any = None  # of the last epoch that has ended
        self.stays: int | None = None  # epoch of a sampler that shuffles

    def on_epoch(self, run: Run) -> None:
        if can_compare(run.loop):
            self._loader = run.loop.dl

    def tell(self, run: Run) -> None:
        samplers = (x for x in parts_of(self._loader) if isinstance(x, DistributedSampler) and x.shuffle)
        self.stays = next((x.epoch for x in samplers), None)

    def freeze(self) -> None:
        self._loader = None

    def findings(self, run: Run) -> Iterator[Result]:
        epochs, stays = run.measured(BatchHashes).epochs, self.stays
        if len(epochs) < 2 or min(map(len, epochs)) < MIN_BATCHES:
            yield Skipped("fewer than two epochs of four batches were trained")
        elif not _are_alike(epochs):
            yield Passed("epochs in the same order")
        else:
            more, cause = "", "a loader that is not shuffled"
            advice = "Shuffle the training data, unless its order is meant"
            if stays is not None:
                more = f": the DistributedSampler has stayed in its epoch {stays}"
                cause = "a loader around that of torch, which hides set_epoch from the Learner"
                advice = "Give the loader a set_epoch(epoch) that calls that of its DistributedSampler"
            yield self.finding(
                f"Each epoch begins with the same {min(map(len, epochs))} batches in the same order, in all "
                f"of the first {len(epochs)} epochs{more}.",
                "info" if stays is None else "warning",
                when=0,
                value=float(len(epochs)),
                causes=(cause,),
                next_steps=(advice,),
            )


def _are_alike(epochs: Sequence[Sequence[Hashes]]) -> bool:
    """Whether inputs, or targets if inputs are augmented, come in the same order; not if all are the same."""
    n = min(map(len, epochs))
    for numbers in zip(*(batch for epoch in epochs for batch in epoch[:n]), strict=True):
        orders = [numbers[i : i + n] for i in range(0, len(numbers), n)]
        if None not in numbers and len(set(orders[0])) == n and all(x == orders[0] for x in orders):
            return True
    return False
