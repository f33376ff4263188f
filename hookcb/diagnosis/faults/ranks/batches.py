"""data.duplicated, data.repeated, data.same_order: batches that ranks or epochs have had before."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import DistributedSampler

from hookcb.core.randomness import parts_of
from hookcb.core.ranks import name_ranks
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.batch_hashes import BatchHash, BatchHashes
from hookcb.diagnosis.measurements.replicas import alike, can_compare
from hookcb.diagnosis.run import Passed, Run, Skipped

MIN_BATCHES = 4  # whose order is compared


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
        batches = hashes.inputs_of_ranks()
        if hashes.why_not_compared:
            yield Skipped(hashes.why_not_compared)
        elif same := alike(batches):
            yield self.finding(
                f"The inputs of {name_ranks(same)} are the same in each of the first {len(batches[0])} "
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
        repeated, rank = [n for _, n in hashes.of_ranks], hashes.rank
        n = max(map(len, hashes.epochs), default=0)
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


def _are_alike(epochs: Sequence[Sequence[BatchHash]]) -> bool:
    """Whether inputs, or targets if inputs are augmented, come in the same order; not if all are the same."""
    n = min(map(len, epochs))
    for numbers in zip(*([*batch] for epoch in epochs for batch in epoch[:n]), strict=True):
        orders = [numbers[i : i + n] for i in range(0, len(numbers), n)]
        if None not in numbers and len(set(orders[0])) == n and all(x == orders[0] for x in orders):
            return True
    return False
