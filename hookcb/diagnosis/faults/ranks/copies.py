"""replica.buffers and replica.diverged: what replicas of a model hold, which should be alike."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hookcb.core.alone import Ranks
from hookcb.core.torch_private import BatchNorm, buffers_of, unsaved_buffer_names
from hookcb.diagnosis.fault import Fault, Site, fault
from hookcb.diagnosis.measurements.replicas import INTEGERS, can_compare, hash_bits
from hookcb.diagnosis.run import Run
from hookcb.hooks.modules import named_modules, plain_name
from hookcb.processes.groups import name_ranks

MAX_APART = 0.5  # standard deviations of a channel
COUNTER = "num_batches_tracked"
TINY = 1e-12  # variance of a channel that is constant
HALF = 0xFFFFFFFF  # of 64 bits; a float64 holds that exactly
OF_PARAMETER = (
    "parameters that are changed outside the optimizer, or on one rank only",
    "Look for code that runs on one rank only, and for parameters that DDP does not manage",
)
OF_RATE = (
    "a schedule that follows a number of its rank only",
    "Have the schedule follow numbers that are the same on all ranks, such as means over them",
)


@fault("replica.buffers", Site.OPTIMIZER, needs="batches", leads_to="loss.*", subject="buffers")
class OwnBuffers(Fault):
    """Buffers of DistributedDataParallel's replicas that differ, if it has `broadcast_buffers=False`.

    Formula: 64-bit hashes of the saved buffers, compared between ranks at the end of an epoch. Running
    statistics of batch norms differ by chance: a note. A warning if they are far apart: the median over
    channels of the distance of the mean from that of the other ranks, in standard deviations, or of the
    difference of the logarithms of the standard deviations. Limit: 0.5. With `broadcast_buffers=True`, all
    replicas have those of rank 0 at each forward, and are not compared.

    Source: PyTorch, DistributedDataParallel, `broadcast_buffers`; Ioffe & Szegedy, "Batch Normalization",
    2015, for the statistics that a model is validated with.
    """

    headline = "Replicas have buffers of their own"
    severity = "warning"
    passed = "buffers that differ"
    unless = "too little was seen of the buffers of each replica"

    def on_epoch(self, run: Run) -> None:
        model = run.loop.model
        if not can_compare(run.loop) or model.broadcast_buffers:
            return
        self.unless, modules = "", named_modules(model)
        norms: dict[str, nn.Module] = {
            path: m
            for path, m in modules.items()
            if isinstance(m, BatchNorm) and isinstance(m.running_mean, Tensor)
        }
        others = (
            (f"{path}.{name}" if path else name, x)
            for path, m in modules.items()
            for name, x in buffers_of(m).items()
            if x is not None and name not in unsaved_buffer_names(m) and name != COUNTER and path not in norms
        )
        self._compare(run, *hashes(model, others))
        if norms:
            self._compare_norms(norms, run)

    def _compare(self, run: Run, names: list[str], own: list[float]) -> None:
        most, least = run.loop.ranks.max([len(own), -len(own)])
        if most != -least:  # some were made on one rank only, as a cache may be
            return
        if (found := ranks_apart(names, own, run.loop.ranks)) is None:
            return
        name, differs, ranks = found
        self.see(
            f"Buffer {name} {differs}, and DistributedDataParallel has broadcast_buffers=False, so it stays "
            "so.",
            param=name,
            when=run.step,
            value=float(len(ranks)),
            causes=("a buffer that is changed on one rank only, or that follows the batches of its rank",),
            next_steps=("Set broadcast_buffers=True, or average the buffer over ranks when it changes",),
            ranks=ranks,
        )

    def _compare_norms(self, norms: dict[str, nn.Module], run: Run) -> None:
        apart = distances(list(norms.values()), run.loop.ranks)
        if not any(apart):
            return
        worst = max(range(len(apart)), key=apart.__getitem__)
        is_far = apart[worst] > MAX_APART
        self.see(
            "Each rank has running statistics of batch norm of its own, as DistributedDataParallel has "
            f"broadcast_buffers=False: they are up to {apart[worst]:.2g} standard deviations from those of "
            f"the other ranks (limit {MAX_APART:g}), and a validation depends on the rank.",
            "warning" if is_far else "info",
            at=list(norms)[worst],
            when=run.step,
            value=apart[worst],
            causes=("ranks whose data differ",) if is_far else ("batches that differ by chance",),
            next_steps=(
                "Use nn.SyncBatchNorm.convert_sync_batchnorm(model), or average the statistics before a "
                "validation",
            ),
        )


@torch.no_grad()
def distances(norms: Sequence[Any], ranks: Ranks) -> list[float]:
    """How far statistics of batch norms are from those of the other ranks, for each of them on any rank."""
    sizes = [len(m.running_mean) for m in norms]
    mean = torch.cat([m.running_mean.cpu().double() for m in norms])
    var = torch.cat([m.running_var.cpu().double() for m in norms])
    log = var.clamp_min(TINY).log() / 2
    sums = torch.tensor(ranks.sum([*mean.tolist(), *log.tolist()]), dtype=torch.float64, device="cpu")
    of_others = (sums - torch.cat([mean, log])) / (ranks.world - 1)
    mean_of_others, log_of_others = of_others.chunk(2)
    moved = torch.split((mean - mean_of_others).abs() / log_of_others.exp(), sizes)
    scaled = torch.split((log - log_of_others).abs(), sizes)
    own = [max(float(a.median()), float(b.median())) for a, b in zip(moved, scaled, strict=True)]
    return ranks.max([x if math.isfinite(x) else 0.0 for x in own])


@fault("replica.diverged", Site.OPTIMIZER, needs="batches", leads_to="loss.*", subject="replicas", exact=True)
class DivergedReplicas(Fault):
    """Replicas of DistributedDataParallel whose parameters differ.

    Formula: 64-bit hashes of the bits of each parameter, and the learning rates, compared between ranks at
    the end of an epoch of a Learner's fit.
    """

    headline = "Replicas no longer have the same parameters"
    passed = "replicas that differ"
    unless = "too little was seen of the replicas at the end of an epoch"

    def on_epoch(self, run: Run) -> None:
        loop = run.loop
        if not can_compare(loop):
            return
        self.unless = ""
        names, own = hashes(loop.model, loop.model.named_parameters())
        rates = [float(group["lr"]) for group in loop.opt.param_groups] if loop.opt is not None else []
        if (found := ranks_apart([*names, *("" for _ in rates)], [*own, *rates], loop.ranks)) is None:
            return
        name, differs, ranks = found
        cause, advice = OF_PARAMETER if name else OF_RATE
        self.see(
            f"{f'Parameter {name}' if name else 'The learning rate'} {differs}; replicas must be identical.",
            param=name,
            when=run.step,
            value=float(len(ranks)),
            causes=(cause,),
            next_steps=(advice,),
            ranks=ranks,
        )


@torch.no_grad()
def hashes(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> tuple[list[str], list[float]]:
    """Names of tensors that DistributedDataParallel keeps alike, each twice, and halves of a 64-bit hash."""
    ignored: Any = getattr(model, "parameters_to_ignore", ())
    paths = ((name.removeprefix("module."), x.detach()) for name, x in tensors)
    named = [
        (plain_name(path), x)
        for path, x in paths
        if path not in ignored and x.layout is torch.strided and x.element_size() in INTEGERS
    ]
    found = [hash_bits(x).cpu() for _, x in named]
    every = torch.stack(found).tolist() if found else []
    halves = [float(half) for x in every for half in ((x >> 32) & HALF, x & HALF)]
    return [name for name, _ in named for _ in range(2)], halves


def ranks_apart(names: list[str], own: list[float], ranks: Ranks) -> tuple[str, str, tuple[int, ...]] | None:
    """Name of the first number that differs between ranks, a text that says so, and the ranks unlike most.

    If there is no majority, these are the ranks that are not like rank 0. None if no number differs.
    """
    extremes, n = ranks.max([*own, *(-x for x in own)]), len(own)
    differs = [high != -low for high, low in zip(extremes[:n], extremes[n:], strict=True)]
    if not any(differs):
        return None
    first = differs.index(True)
    by_rank = ranks.gather(own[first])
    usual = max(by_rank, key=lambda x: (by_rank.count(x), x == by_rank[0]))
    apart = tuple(rank for rank, x in enumerate(by_rank) if x != usual)
    others = "most ranks" if 0 in apart else "rank 0"
    return names[first], f"differs on {name_ranks(apart)} from that of {others}", apart
