"""Compares the parameters of DistributedDataParallel replicas."""

from collections.abc import Iterator

import torch
from torch import Tensor, distributed, nn

from hookcb.core.precision import widened
from hookcb.core.restore import same_bits
from hookcb.diagnosis.evidence import Observation


def is_replica(model: nn.Module) -> bool:
    """Whether it has replicas on other ranks that can be reached."""
    is_one = isinstance(model, nn.parallel.DistributedDataParallel)
    return is_one and distributed.is_available() and distributed.is_initialized()


def observe_replicas(model: nn.Module, step: int) -> Iterator[Observation]:
    """Compares sum and norm of each parameter across ranks; called on all ranks at the end of an epoch."""
    if not is_replica(model):
        return
    local = _fingerprint(model)
    fingerprints = [torch.empty_like(local) for _ in range(distributed.get_world_size())]
    distributed.all_gather(fingerprints, local)
    apart = [rank for rank, x in enumerate(fingerprints) if not same_bits(x, fingerprints[0])]
    if apart:
        yield Observation(
            "replica.diverged",
            step=step,
            value=float(len(apart)),
            text=f"The parameters of rank {apart[0]} differ from those of rank 0; they must be identical.",
            causes=("parameters that are changed outside the optimizer, or on one rank only",),
            next_steps=(
                "Look for code that runs on one rank only, and for parameters that DDP does not manage",
            ),
        )


@torch.no_grad()
def _fingerprint(model: nn.Module) -> Tensor:
    """Sum and norm of each parameter."""
    params = [widened(p.detach()) for p in model.parameters()]
    return torch.stack([x for p in params for x in (p.sum(), p.norm())])
