"""Wraps a model for several processes: replicas, shards, or what a user's function makes of it."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hookcb.hooks.modules import Where, find_modules
from hookcb.processes.groups import is_sharded, send_from_main


def is_wrapped(model: nn.Module) -> bool:
    """Whether a model is replicated or sharded already."""
    return is_sharded(model) or any(isinstance(m, DistributedDataParallel) for m in model.modules())


def replicated(model: nn.Module, device: torch.device, options: dict[str, Any]) -> nn.Module:
    """Wraps a model in DistributedDataParallel, with the weights of rank 0."""
    model.to(device)
    return DistributedDataParallel(model, **options)


def sharded(
    model: nn.Module, blocks: Where | Iterable[Where] | None, mesh: Any, options: dict[str, Any]
) -> nn.Module:
    """Shards a model in place by `fully_shard`: each of its blocks, inner ones first, then the rest.

    Args:
        model: the model; all ranks get the weights of rank 0.
        blocks: which modules are blocks, see `find_modules`; None for none.
        mesh: a DeviceMesh.
        options: more arguments of `fully_shard`.
    """
    from torch.distributed.fsdp import fully_shard

    send_from_main(model)
    found = [] if blocks is None else [m for m in find_modules(model, blocks).values() if m is not model]
    for m in [*reversed(found), model]:
        fully_shard(m, mesh=mesh, **options)
    return model


def prepared(
    model: nn.Module, device: torch.device, prepare: Callable[[nn.Module, Any], nn.Module | None], mesh: Any
) -> nn.Module:
    """Has a user's function change a model, which all ranks give it with the weights of rank 0.

    Raises:
        TypeError: If that is not a model of several processes.
    """
    if not any(x.is_meta for x in model.parameters()):
        model.to(device)
    send_from_main(model)
    made = prepare(model, mesh)
    made = model if made is None else made
    if not isinstance(made, nn.Module) or not is_wrapped(made):
        raise TypeError(
            "prepare must make a model whose parameters are DTensors, or that is wrapped in "
            "DistributedDataParallel or FullyShardedDataParallel, and return it, or None if it is the same "
            f"object; it returned {type(made).__name__}"
        )
    return made


def layout(model: nn.Module) -> list[tuple[Any, ...]]:
    """Facts about the parameters that DistributedDataParallel must know when it is made."""
    return [(p.requires_grad, p.shape, p.stride()) for p in model.parameters()]
