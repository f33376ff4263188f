"""replica.buffers and replica.diverged: what replicas of a model hold, which should be alike."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hookcb.core.ranks import Ranks, name_ranks
from hookcb.core.torch_private import BatchNorm, buffers_of, unsaved_buffer_names
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.replicas import can_compare, hashes, is_shared, others_of, ranks_apart
from hookcb.diagnosis.run import Run
from hookcb.hooks.modules import named_modules

MAX_APART = 0.5  # standard deviations of a channel
COUNTER = "num_batches_tracked"
TINY = 1e-12  # variance of a channel that is constant
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
    has_looked = False

    def on_epoch(self, run: Run) -> None:
        model = run.loop.model
        if not can_compare(run.loop) or model.broadcast_buffers:
            return
        self.has_looked = True
        norms = {name: m for name, m in named_modules(model).items() if _has_statistics(m)}
        others = [
            (f"{path}.{name}" if path else name, x)
            for path, m in named_modules(model).items()
            for name, x in buffers_of(m).items()
            if x is not None and name not in unsaved_buffer_names(m) and name != COUNTER and path not in norms
        ]
        self._compare([(name, x) for name, x in others if is_shared(model, name)], run)
        if norms:
            self._compare_norms(norms, run)

    def _compare(self, buffers: Sequence[tuple[str, Tensor]], run: Run) -> None:
        ranks = run.loop.ranks
        names, own = hashes(buffers)
        most, least = ranks.max([len(own), -len(own)])
        if most != -least:  # some were made on one rank only, as a cache may be
            return
        if (found := ranks_apart(own, ranks)) is None:
            return
        name, apart = names[found[0]], found[1]
        self.see(
            f"Buffer {name} differs on {name_ranks(apart)} from that of {others_of(apart)}, and "
            "DistributedDataParallel has broadcast_buffers=False, so it stays so.",
            param=name,
            when=run.step,
            value=float(len(apart)),
            causes=("a buffer that is changed on one rank only, or that follows the batches of its rank",),
            next_steps=("Set broadcast_buffers=True, or average the buffer over ranks when it changes",),
            ranks=tuple(apart),
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

    def findings(self, run: Run) -> Iterator[Result]:
        unless = "" if self.has_looked else "too little was seen of the buffers of each replica"
        return self.told(run, self.seen, unless)


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


def _has_statistics(m: nn.Module) -> bool:
    return isinstance(m, BatchNorm) and isinstance(m.running_mean, Tensor)


@fault("replica.diverged", Site.OPTIMIZER, needs="batches", leads_to="loss.*", subject="replicas", exact=True)
class DivergedReplicas(Fault):
    """Replicas of DistributedDataParallel whose parameters differ.

    Formula: 64-bit hashes of the bits of each parameter, and the learning rates, compared between ranks at
    the end of an epoch of a Learner's fit.
    """

    headline = "Replicas no longer have the same parameters"
    passed = "replicas that differ"
    has_looked = False

    def on_epoch(self, run: Run) -> None:
        loop = run.loop
        if not can_compare(loop):
            return
        self.has_looked, model = True, loop.model
        names, own = hashes((name, p) for name, p in model.named_parameters() if is_shared(model, name))
        for group in loop.opt.param_groups if loop.opt is not None else ():
            names.append("")
            own.append(float(group["lr"]))
        if (found := ranks_apart(own, loop.ranks)) is None:
            return
        name, apart = names[found[0]], found[1]
        what = f"Parameter {name}" if name else "The learning rate"
        cause, advice = OF_PARAMETER if name else OF_RATE
        self.see(
            f"{what} differs on {name_ranks(apart)} from that of {others_of(apart)}; replicas must be "
            "identical.",
            param=name,
            when=run.step,
            value=float(len(apart)),
            causes=(cause,),
            next_steps=(advice,),
            ranks=tuple(apart),
        )

    def findings(self, run: Run) -> Iterator[Result]:
        unless = "" if self.has_looked else "too little was seen of the replicas at the end of an epoch"
        return self.told(run, self.seen, unless)
