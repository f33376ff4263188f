"""data.duplicated, data.repeated, data.same_order: batches that ranks or epochs have had before."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DistributedSampler

from hookcb.core.randomness import parts_of
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.batch_hashes import MIN_BATCHES, BatchHashes, Window, in_same_order
from hookcb.diagnosis.measurements.processes import Processes
from hookcb.diagnosis.run import Absent, Passed, Run, Skipped
from hookcb.processes.groups import name_ranks

TOO_FEW = Skipped("fewer than two epochs of four batches were trained")


@fault("data.duplicated", Site.INPUT, needs="batches", subject="replicas", exact=True)
class DuplicatedBatches(Fault):
    """Ranks that train replicas on the same batches.

    Formula: 64-bit hashes of the inputs, of 4,096 elements of each tensor at most, which are the same on two
    ranks in each of the first 4 to 8 batches. Ranks that shuffle the same samples, each in an order of its
    own, are not seen.
    """

    headline = "Ranks train on the same batches"
    uses = (BatchHashes, Processes)
    severity = "warning"

    def findings(self, run: Run) -> Iterator[Result]:
        hashes = run.measured(BatchHashes)
        if hashes.why_not_compared:
            yield Skipped(hashes.why_not_compared)
        elif same := run.measured(Processes).ranks_alike(hashes.inputs):
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
    uses = (BatchHashes, Processes)
    severity = "warning"

    def findings(self, run: Run) -> Iterator[Result]:
        hashes = run.measured(BatchHashes)
        if hashes.why_not_compared:
            yield Skipped(hashes.why_not_compared)
            return
        numbers = run.measured(Processes).numbers(len(hashes.repeated))
        found = [(rank, x, n) for rank, (x, n) in zip(numbers, hashes.repeated, strict=True) if 2 * x >= n]
        if not found or len(found) == len(numbers):  # as in overfitting a batch
            yield Passed("a rank whose batches repeat")
        for rank, x, n in found if len(found) < len(numbers) else ():
            yield self.finding(
                f"{x} of the first {n} batches of an epoch have come before in it, on rank {rank} of "
                f"{len(numbers)}; those of other ranks do not repeat.",
                when=0,
                value=float(x),
                causes=(
                    "a shard with few samples that is read again and again",
                    "a reader that does not advance",
                ),
                next_steps=("Print the indices or files that this rank reads",),
                ranks=(rank,),
            )


@fault("data.same_order", Site.INPUT, needs="batches", leads_to="random.epochs", exact=True)
class SameOrder(Fault):
    """Epochs with the same batches in the same order, although the data is shuffled.

    Formula: hashes of the inputs, or of the targets if inputs are augmented, of the first 4 to 20 batches,
    which all differ, are the same in two epochs. In one process: a warning if a sampler of torch draws the
    order of the DataLoader, and no new optimizer has come in between, as in a training that begins anew;
    another order may be meant. Of replicas, all of the first two to four epochs are compared: a warning if
    the loader has a DistributedSampler that shuffles, as if `set_epoch` is not called; else a note.

    Source: PyTorch, torch.utils.data.distributed.DistributedSampler, on `set_epoch`.
    """

    headline = "Each epoch has the same order"
    uses = (BatchHashes, Processes)
    severity = "warning"
    passed = "epochs in the same order"

    def __init__(self) -> None:
        super().__init__()
        self._loader: Any = None  # of the last epoch that has ended
        self.stays: int | None = None  # epoch of a sampler that shuffles
        self.is_of_ranks = False  # whether replicas are trained by a loop whose epochs and loader are known

    def on_epoch(self, run: Run) -> None:
        if run.measured(Processes).has_replicas:
            self._loader, self.is_of_ranks = run.loop.dl, not run.loop.is_external

    def tell(self, run: Run) -> None:
        samplers = (x for x in parts_of(self._loader) if isinstance(x, DistributedSampler) and x.shuffle)
        self.stays = next((x.epoch for x in samplers), None)

    def freeze(self) -> None:
        self._loader = None

    def findings(self, run: Run) -> Iterator[Result]:
        found = run.measured(BatchHashes)
        return self._of_ranks(found) if self.is_of_ranks else self._of_one(run, found)

    def _of_one(self, run: Run, found: BatchHashes) -> Iterator[Result]:
        """Compares epochs of one process, where an order that is not shuffled may be meant."""
        shuffled = [x for x in found.windows if x.is_epoch and x.of is not None and x.of.shuffles]
        pair, unseen = found.alike(_shuffle_alike), TOO_FEW
        if pair is None:
            is_known = len({x.n_pass for x in shuffled if len(x.hashes) >= MIN_BATCHES}) > 1
            why = unseen if shuffled else Absent("no DataLoader that shuffles was heard of")
            return self.told(run, (), "" if is_known else why)
        n, is_sharded = min(len(x.hashes) for x in pair), run.measured(Processes).has_replicas
        finding = self.finding(
            f"The DataLoader shuffles, but the {n} batches from {pair[1].step} on are those from "
            f"{pair[0].step} on, in the same order: both epochs were drawn from the same random state.",
            when=pair[1].step,
            value=float(n),
            causes=(
                *(("a DistributedSampler whose set_epoch is not called",) if is_sharded else ()),
                "a seed that is set again in the training, as in each epoch or before a validation",
                "a generator with a fixed seed that is made anew for each epoch",
            ),
            next_steps=(
                "Call sampler.set_epoch(epoch) before each epoch"
                if is_sharded
                else "Set seeds once, before the training, or add the number of the epoch to them",
            ),
        )
        return self.told(run, [finding])

    def _of_ranks(self, found: BatchHashes) -> Iterator[Result]:
        epochs, stays = found.epochs, self.stays
        if len(epochs) < 2 or min(map(len, epochs)) < MIN_BATCHES:
            yield TOO_FEW
        elif not in_same_order(epochs):
            yield Passed(self.passed)
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


def _shuffle_alike(a: Window, b: Window) -> bool:
    """Whether two passes that shuffle have the same order."""
    both = [x.is_epoch and x.of is not None and x.of.shuffles for x in (a, b)]
    return all(both) and a.n_pass != b.n_pass and in_same_order([a.hashes, b.hashes])
