"""Whether replicas of DistributedDataParallel have the same parameters."""

from collections.abc import Iterator

import torch
from torch import Tensor, distributed, nn

from hookcb.core.precision import widened
from hookcb.core.restore import same_bits
from hookcb.diagnosis.evidence import Observation


def is_replica(model: nn.Module) -> bool:
    """Whether there are others like it on other ranks, which can be asked."""
    is_one = isinstance(model, nn.parallel.DistributedDataParallel)
    return is_one and distributed.is_available() and distributed.is_initialized()


def observe_replicas(model: nn.Module, step: int) -> Iterator[Observation]:
    """At the end of an epoch, on all ranks: they tell one another sum and norm of their parameters."""
    if not is_replica(model):
        return
    own = _fingerprint(model)
    of_ranks = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
    distributed.all_gather(of_ranks, own)
    apart = [rank for rank, of in enumerate(of_ranks) if not same_bits(of, of_ranks[0])]
    if apart:
        yield Observation(
            "replica.diverged",
            step=step,
            value=float(len(apart)),
            text=f"the parameters of rank {apart[0]} differ from those of rank 0, which they should never.",
            causes=("parameters that are changed outside of the optimizer, or on one rank only",),
            next_steps=("look for code that runs on one rank, and for parameters that DDP does not know of",),
        )


@torch.no_grad()
def _fingerprint(model: nn.Module) -> Tensor:
    """Sum and norm of each parameter."""
    params = [widened(p.detach()) for p in model.parameters()]
    return torch.stack([x for p in params for x in (p.sum(), p.norm())])
