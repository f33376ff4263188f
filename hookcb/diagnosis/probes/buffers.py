"""Compares the buffers of replicas, which DistributedDataParallel need not keep alike."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hookcb.core.ranks import Ranks, name_ranks
from hookcb.core.torch_private import BatchNorm, buffers_of, unsaved_buffer_names
from hookcb.diagnosis.probes.replicas import can_compare, hashes, is_shared, others_of, ranks_apart
from hookcb.diagnosis.run import Observation
from hookcb.hooks.modules import named_modules

MAX_APART = 0.5  # standard deviations of a channel
COUNTER = "num_batches_tracked"
TINY = 1e-12  # variance of a channel that is constant


def has_own_buffers(loop: Any) -> bool:
    """Whether each replica keeps buffers of its own."""
    return can_compare(loop) and not loop.model.broadcast_buffers


def observe_buffers(loop: Any) -> Iterator[Observation]:
    """Compares saved buffers between ranks, which all call this, if they are not sent by rank 0.

    Statistics of batch norms are those of a rank's own batches, and differ by chance; a note says so. They
    are a warning if they are so far apart that those of one rank do not fit the data of another.
    """
    if not has_own_buffers(loop):
        return
    norms = {name: m for name, m in named_modules(loop.model).items() if _has_statistics(m)}
    others = [
        (f"{path}.{name}" if path else name, x)
        for path, m in named_modules(loop.model).items()
        for name, x in buffers_of(m).items()
        if x is not None and name not in unsaved_buffer_names(m) and name != COUNTER and path not in norms
    ]
    yield from _observe_others([(name, x) for name, x in others if is_shared(loop.model, name)], loop)
    if norms:
        yield from _observe_norms(norms, loop)


def _observe_others(buffers: Sequence[tuple[str, Tensor]], loop: Any) -> Iterator[Observation]:
    names, own = hashes(buffers)
    most, least = loop.ranks.max([len(own), -len(own)])
    if most != -least:  # some were made on one rank only, as a cache may be
        return
    apart = ranks_apart(own, loop.ranks)
    if apart is None:
        return
    first, ranks = apart
    yield Observation(
        "replica.buffers",
        param=names[first],
        step=loop.train_iter,
        value=float(len(ranks)),
        text=f"Buffer {names[first]} differs on {name_ranks(ranks)} from that of {others_of(ranks)}, and "
        "DistributedDataParallel has broadcast_buffers=False, so it stays so.",
        causes=("a buffer that is changed on one rank only, or that follows the batches of its rank",),
        next_steps=("Set broadcast_buffers=True, or average the buffer over ranks when it changes",),
        ranks=tuple(ranks),
    )


def _observe_norms(norms: dict[str, nn.Module], loop: Any) -> Iterator[Observation]:
    apart = distances(list(norms.values()), loop.ranks)
    if not any(apart):
        return
    worst = max(range(len(apart)), key=apart.__getitem__)
    is_far = apart[worst] > MAX_APART
    yield Observation(
        "replica.buffers",
        list(norms)[worst],
        step=loop.train_iter,
        value=apart[worst],
        text="Each rank has running statistics of batch norm of its own, as DistributedDataParallel has "
        f"broadcast_buffers=False: they are up to {apart[worst]:.2g} standard deviations from those of the "
        f"other ranks (limit {MAX_APART:g}), and a validation depends on the rank.",
        causes=("ranks whose data differ",) if is_far else ("batches that differ by chance",),
        next_steps=(
            "Use nn.SyncBatchNorm.convert_sync_batchnorm(model), or average the statistics before a "
            "validation",
        ),
        severity="warning" if is_far else "info",
    )


@torch.no_grad()
def distances(norms: Sequence[Any], ranks: Ranks) -> list[float]:
    """How far statistics of batch norms are from those of the other ranks, for each of them on any rank.

    It is the median over the channels of the distance of the mean, in standard deviations of the channel, or
    of the difference of the logarithms of the standard deviation, if that is more. Costs a sum and a maximum
    of a few numbers for each channel.
    """
    sizes = [len(m.running_mean) for m in norms]
    mean = torch.cat([m.running_mean.cpu().double() for m in norms])
    var = torch.cat([m.running_var.cpu().double() for m in norms])
    log = var.clamp_min(TINY).log() / 2
    sums = torch.tensor(ranks.sum([*mean.tolist(), *log.tolist()]), dtype=torch.float64, device="cpu")
    of_others = (sums - torch.cat([mean, log])) / (ranks.world - 1)
    mean_of_others, log_of_others = of_others.chunk(2)
    moved = (mean - mean_of_others).abs() / log_of_others.exp()
    scaled = (log - log_of_others).abs()
    own = [
        max(float(a.median()), float(b.median()))
        for a, b in zip(torch.split(moved, sizes), torch.split(scaled, sizes), strict=True)
    ]
    return ranks.max([x if math.isfinite(x) else 0.0 for x in own])


def _has_statistics(m: nn.Module) -> bool:
    return isinstance(m, BatchNorm) and isinstance(m.running_mean, Tensor)
