"""replica.buffers: buffers that replicas of a model hold, which should be alike."""

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hookcb.core.torch_private import BatchNorm, buffers_of, unsaved_buffer_names
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.processes import Processes
from hookcb.diagnosis.measurements.replicas import INTEGERS, apart_from_most, hash_bits, name_others
from hookcb.diagnosis.run import Run
from hookcb.hooks.modules import named_modules
from hookcb.processes.groups import name_ranks

MAX_APART = 0.5  # standard deviations of a channel
COUNTER = "num_batches_tracked"
TINY = 1e-12  # variance of a channel that is constant
MAX_NORMS, MAX_CHANNELS, MAX_BUFFERS = 64, 64, 1_024  # that a rank sends, evenly spread
N_KEPT = 4  # ends of epochs, as ranks may have seen other ones


@dataclass(frozen=True, slots=True)
class Buffers:
    """Buffers of a model at the end of an epoch.

    Attributes:
        step: number of the batch.
        names: of the saved buffers, without those of batch norms.
        hashes: of these, 64 bits each.
        norms: of the batch norms.
        means: running means of some channels of each of these.
        logs: logarithms of their running standard deviations.
    """

    step: int
    names: list[str]
    hashes: Any
    norms: list[str]
    means: Any
    logs: Any

    def read(self) -> "Buffers":
        """With numbers in place of tensors, which waits for their device."""
        own = [x.tolist() for x in self.hashes]
        means, logs = ([x.tolist() for x in every] for every in (self.means, self.logs))
        return Buffers(self.step, self.names, own, self.norms, means, logs)


@fault("replica.buffers", Site.OPTIMIZER, needs="batches", leads_to="loss.*", subject="buffers")
class OwnBuffers(Fault):
    """Buffers of DistributedDataParallel's replicas that differ, if it has `broadcast_buffers=False`.

    Formula: 64-bit hashes of the saved buffers, compared between ranks at the end of the last epoch that all
    have seen. Running statistics of batch norms differ by chance: a note. A warning if they are far apart:
    the median over up to 64 channels of the distance of the mean from that of the other ranks, in standard
    deviations, or of the difference of the logarithms of the standard deviations. Limit: 0.5. With
    `broadcast_buffers=True`, all replicas have those of rank 0 at each forward, and are not compared.

    Source: PyTorch, DistributedDataParallel, `broadcast_buffers`; Ioffe & Szegedy, "Batch Normalization",
    2015, for the statistics that a model is validated with.
    """

    headline = "Replicas have buffers of their own"
    uses = (Processes,)
    severity = "warning"
    passed = "buffers that differ"

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, Buffers] = {}  # by number of optimizer steps
        self.own: dict[int, Buffers] = {}
        self.of_ranks: Sequence[dict[int, Buffers]] = ()

    def on_epoch(self, run: Run) -> None:
        ddp = run.measured(Processes).ddp
        if ddp is not None and not ddp.broadcast_buffers:
            self._live.pop(run.n_steps, None)
            self._live[run.n_steps] = buffers(run.loop.model, run.step, ddp.parameters_to_ignore)
            self._live = dict(list(self._live.items())[-N_KEPT:])

    on_end = on_epoch

    def tell(self, run: Run) -> None:
        self.own = {n: found.read() for n, found in self._live.items()}

    def state(self, run: Run) -> dict[int, Buffers]:
        return self.own

    def merge(self, run: Run, of_ranks: Sequence[dict[int, Buffers]], rank: int) -> None:
        self.of_ranks = of_ranks

    def freeze(self) -> None:
        self._live = {}

    def findings(self, run: Run) -> Iterator[Result]:
        groups = run.measured(Processes).groups(self.of_ranks)
        common = [(ranks, every, set.intersection(*map(set, every))) for ranks, every in groups]
        seen = [(ranks, [x[max(ns)] for x in every]) for ranks, every, ns in common if ns]
        found = [
            x for ranks, every in seen for x in (*self._compare(ranks, every), *self._compare_norms(every))
        ]
        yield from self.told(run, found, "" if seen else "too little was seen of the buffers of each replica")

    def _compare(self, ranks: Sequence[int], every: Sequence[Buffers]) -> Iterator[Any]:
        names = every[0].names
        if any(x.names != names for x in every):  # some were made on one rank only, as a cache may be
            return
        for name, *own in zip(names, *(x.hashes for x in every), strict=True):
            if apart := apart_from_most(ranks, own):
                yield self.finding(
                    f"Buffer {name} differs on {name_ranks(apart)} from that of "
                    f"{name_others(ranks[0], apart)}, and "
                    "DistributedDataParallel has broadcast_buffers=False, so it stays so.",
                    param=name,
                    when=every[0].step,
                    value=float(len(apart)),
                    causes=("a buffer that is changed on one rank only, or that follows its batches",),
                    next_steps=("Set broadcast_buffers=True, or average the buffer over ranks",),
                    ranks=apart,
                )
                return

    def _compare_norms(self, every: Sequence[Buffers]) -> Iterator[Any]:
        apart = distances(every) if all(x.norms == every[0].norms for x in every) else []
        if not any(apart):
            return
        worst = max(range(len(apart)), key=apart.__getitem__)
        is_far = apart[worst] > MAX_APART
        yield self.finding(
            "Each rank has running statistics of batch norm of its own, as DistributedDataParallel has "
            f"broadcast_buffers=False: they are up to {apart[worst]:.2g} standard deviations from those of "
            f"the other ranks (limit {MAX_APART:g}), and a validation depends on the rank.",
            "warning" if is_far else "info",
            at=every[0].norms[worst],
            when=every[0].step,
            value=apart[worst],
            causes=("ranks whose data differ",) if is_far else ("batches that differ by chance",),
            next_steps=(
                "Use nn.SyncBatchNorm.convert_sync_batchnorm(model), or average the statistics before a "
                "validation",
            ),
        )


@torch.no_grad()
def buffers(model: nn.Module, step: int, ignored: Container[str]) -> Buffers:
    """The buffers of a model that DistributedDataParallel could keep alike, without waiting for a device."""
    modules = named_modules(model)
    norms: dict[str, Any] = {
        path: m
        for path, m in modules.items()
        if isinstance(m, BatchNorm) and isinstance(m.running_mean, Tensor)
    }
    others = {
        full: x.detach()
        for path, m in modules.items()
        for name, x in buffers_of(m).items()
        if x is not None and name not in unsaved_buffer_names(m) and name != COUNTER and path not in norms
        if (full := f"{path}.{name}" if path else name) not in ignored
        and x.layout is torch.strided
        and x.element_size() in INTEGERS
    }
    names = list(others)[:MAX_BUFFERS]
    norms = dict(list(norms.items())[:: -(-len(norms) // MAX_NORMS) or 1])
    means = [_some(m.running_mean).float() for m in norms.values()]
    logs = [_some(m.running_var).float().clamp_min(TINY).log() / 2 for m in norms.values()]
    return Buffers(step, names, [hash_bits(others[name]) for name in names], list(norms), means, logs)


def _some(x: Tensor) -> Tensor:
    """A copy of up to 64 channels, evenly spread."""
    return x[:: -(-len(x) // MAX_CHANNELS) or 1].clone()


def distances(every: Sequence[Buffers]) -> list[float]:
    """How far statistics of each batch norm are from those of the other ranks, where that is most."""
    found = []
    for mean, log in zip(
        *(zip(*(getattr(x, k) for x in every), strict=True) for k in ("means", "logs")), strict=True
    ):
        means, logs = (torch.tensor(x, dtype=torch.float64, device="cpu") for x in (mean, log))
        of_others = [(x.sum(0) - x) / (len(x) - 1) for x in (means, logs)]
        moved = ((means - of_others[0]).abs() / of_others[1].exp()).median(1).values
        scaled = (logs - of_others[1]).abs().median(1).values
        own = torch.maximum(moved, scaled)
        found.append(max(x if math.isfinite(x) else 0.0 for x in own.tolist()))
    return found
