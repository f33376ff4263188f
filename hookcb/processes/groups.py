"""The group of processes that train a model: which it is, and whether they have replicas or shards."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from hookcb.core.text import join_names
from hookcb.core.torch_private import is_fully_sharded, is_joining

MAX_SHOWN = 4  # ranks named in a message


def name_own_rank() -> str:
    """Names this process among those of the open group, "rank 0"; "" if there is no other."""
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() < 2:
        return ""
    return name_ranks([distributed.get_rank()])


def describe_alone(model: nn.Module, group: Any) -> str:
    """Describes whose numbers this rank shows, where a group does not communicate; "" without a group."""
    if group is None:
        return ""
    rank, world = distributed.get_rank(group), distributed.get_world_size(group)
    what = "its batches and its shards of the parameters" if is_sharded(model) else "its batches"
    return f"numbers are those of rank {rank} of {world}, from {what}; only Diagnose joins those of all ranks"


def group_of(model: nn.Module) -> Any:
    """Process group in which a model is replicated or sharded, None if this process has it alone.

    Inside of `with model.join():` there is none: ranks may end at different batches, and do not wait there.
    """
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    replicas = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    if any(is_joining(m) for m in replicas):
        return None
    group = next((m.process_group for m in replicas), None)
    if group is None and is_sharded(model):
        group = distributed.group.WORLD
    return None if group is None or distributed.get_world_size(group) <= 1 else group


def is_sharded(model: nn.Module) -> bool:
    """Whether ranks have different parts of the parameters; checks names, as importing classes takes time."""
    if any(map(is_fully_sharded, model.modules())):  # its parameters may be gathered now
        return True
    kinds = {type(m).__name__ for m in model.modules()} | {type(p).__name__ for p in model.parameters()}
    return bool(kinds & {"DTensor", "FullyShardedDataParallel"})


def has_whole_layers(model: nn.Module) -> bool:
    """Whether layers of a sharded model run whole, as in FSDP, and not in tensor parallelism."""
    if not any(
        is_fully_sharded(m) or type(m).__name__ == "FullyShardedDataParallel" for m in model.modules()
    ):
        return False
    parts: list[Any] = [p for p in model.parameters() if type(p).__name__ == "DTensor"]
    # else some are divided in another dimension than that of the samples, or than that and one of copies
    is_over_samples = all(p.device_mesh.ndim == 1 or p.placements[0].is_replicate() for p in parts)
    return is_over_samples and len({p.device_mesh for p in parts}) < 2


def send_from_main(model: nn.Module) -> None:
    """Gives all ranks the parameters and buffers that rank 0 has, unless they have no values yet."""
    for x in chain(model.parameters(), model.buffers()):
        if not (is_lazy(x) or x.is_meta):
            distributed.broadcast(x.data, 0)


def without_replicas(model: nn.Module) -> nn.Module:
    """The model of which a DistributedDataParallel keeps replicas; any other as it is."""
    inside: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    return inside


def set_sync(model: nn.Module, is_on: bool) -> bool:
    """Has a DistributedDataParallel reduce gradients in its next backwards, or not.

    Returns:
        Whether gradients stay on this rank.
    """
    replicas = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    for m in replicas:
        m.require_backward_grad_sync = is_on
    return bool(replicas) and not is_on


def name_ranks(ranks: Sequence[int]) -> str:
    """Names ranks: "rank 1", or "ranks 0, 2, 3"."""
    names = join_names([str(rank) for rank in ranks], MAX_SHOWN)
    return f"rank{'s' if len(ranks) > 1 else ''} {names}"
