"""Position in an epoch as a number of samples in the order that all ranks share, for any number of ranks."""

import copy
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from hookcb.core.randomness import saves_itself
from hookcb.core.state import TrainingState

FACTS = {"n": "samples", "seed": "as seed of its DistributedSampler", "shuffle": "as shuffle= of its sampler"}


class Position(NamedTuple):
    """Place at which these ranks took over an epoch.

    Attributes:
        samples: number of samples of the shared order that came before.
        batches: number of batches that these count as.
    """

    samples: int = 0
    batches: int = 0

    def saved(self, learn: TrainingState) -> dict[str, Any] | None:
        """Position after the batch in progress, to be resumed by any number of ranks; None if it has none."""
        facts = _facts(learn.dl)
        if facts is None:
            return None
        done = (learn.iter + 1 - self.batches) * learn.dl.batch_size * learn.dl.sampler.num_replicas
        return {**facts, "samples": min(facts["n"], self.samples + done), "took_over": self.samples}


def check_position(position: dict[str, Any] | None, dl: Any) -> None:
    """Checks that a loader can go on in the middle of an epoch that other ranks have begun.

    Raises:
        ValueError: If it cannot; the message says why.
    """
    if position is None:
        raise ValueError(
            "was written in the middle of an epoch by another number of processes, whose loader had no "
            "DistributedSampler, so nobody knows which samples are left; resume from the end of an epoch, or "
            "with as many processes"
        )
    facts = _facts(dl)
    if facts is None:
        raise ValueError(
            "was written in the middle of an epoch by another number of processes; to go on with the samples "
            "that are left, the training loader must be a DataLoader with a DistributedSampler, in one "
            "process with num_replicas=1 and rank=0"
        )
    for key, what in FACTS.items():
        if facts[key] != position[key]:
            raise ValueError(
                f"was written in the middle of an epoch of other data: {position[key]} {what}, but this "
                f"training loader has {facts[key]}"
            )


def rest_of_epoch(position: dict[str, Any], dl: Any) -> tuple[Any, Position]:
    """A loader of the samples that are left of an epoch, divided among the ranks; and where it begins.

    As by the sampler, some samples are repeated if ranks would have fewer than others, or with its
    `drop_last` they are left out.
    """
    sampler = dl.sampler
    alone = copy.copy(sampler)
    alone.num_replicas, alone.rank = 1, 0
    alone.num_samples = alone.total_size = position["n"]
    left = list(alone)[position["samples"] :]
    n, rank = sampler.num_replicas, sampler.rank
    if sampler.drop_last:
        left = left[: len(left) // n * n]
    elif left:
        left += (left * n)[: -len(left) % n]
    rest = copy.copy(dl)  # DataLoader forbids changes by its attributes
    batches = BatchSampler(left[rank::n], dl.batch_size, dl.drop_last)
    rest.__dict__.update(batch_sampler=batches, persistent_workers=False)
    return rest, Position(position["samples"], position["samples"] // (dl.batch_size * n))


def _facts(dl: Any) -> dict[str, Any] | None:
    """Facts that fix the order of a loader's samples; None if it has no DistributedSampler."""
    sampler = getattr(dl, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or not isinstance(dl, DataLoader):
        return None
    if not dl.batch_size or saves_itself(dl):
        return None
    dataset: Any = sampler.dataset
    return {"n": len(dataset), "seed": sampler.seed, "shuffle": sampler.shuffle}
