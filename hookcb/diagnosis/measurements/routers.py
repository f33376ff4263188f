"""Routers: to which experts the routers of a model send their tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hookcb.core.torch_private import Convolution
from hookcb.diagnosis.fault import Measurement
from hookcb.diagnosis.measurements.operations import AGAIN, Operations
from hookcb.diagnosis.measurements.processes import Processes
from hookcb.diagnosis.run import Absent, Partial, Run, Skipped
from hookcb.hooks.modules import named_modules

MIN_EXPERTS = 2
MAX_LOOKS, MAX_SHARED, MIN_SHARED = 256, 16, 4  # the latest of a router: that are kept, and that a rank gives
MAX_BYTES, MAX_OF_ALL, BYTES = 1 << 18, 1 << 26, 3  # that a rank gives, and all ranks; of a number of tokens


class Load(NamedTuple):
    """Numbers of tokens that a router sends to each expert in one batch, `(n_experts,)`."""

    step: int
    counts: tuple[int, ...]
    k: int  # experts of each token

    @property
    def expected(self) -> float:
        """Tokens of each expert if all got as many."""
        return sum(self.counts) / len(self.counts)

    @property
    def favorite(self) -> int:
        """Index of the busiest expert."""
        return self.counts.index(max(self.counts))

    @property
    def busiest(self) -> float:
        """Tokens of the busiest expert, in units of `expected`."""
        return max(self.counts) / self.expected


class Routers(Measurement):
    """Counts the tokens of each expert in inspected batches.

    A router is a layer that chooses among n numbers of each token, by `topk`, `max` or `argmax` over the last
    dimension, and that has, or whose parent has, n experts: a ModuleList of n modules of one kind, or a
    parameter of shape (n, …, …).
    """

    uses = (Operations, Processes)
    is_under_way = False  # whether `Operations` is to measure each inspected batch

    def __init__(self) -> None:
        self._experts: dict[str, set[int]] = {}  # numbers of experts, by layer that has them
        self._seen: dict[tuple[str, int], dict[int, tuple[Tensor, int]]] = {}  # by router, then by step
        self._step = 0
        self.loads: dict[str, list[Load]] = {}  # by router
        self.lacks_balance = False  # whether a config of transformers leaves the load-balancing loss out

    def on_model(self, run: Run) -> None:
        model = run.loop.model
        of_layers = ((name, set(_numbers_of_experts(m))) for name, m in named_modules(model).items())
        self._experts = {name: numbers for name, numbers in of_layers if numbers}
        config = getattr(model, "config", None)
        self.lacks_balance = getattr(config, "output_router_logits", None) is False
        run.measured(Operations).listeners.append(self)
        self.is_under_way, self.done = bool(self._experts), not self._experts

    def on_batch(self, run: Run) -> None:
        self._step = run.step

    def see_choice(self, layer: str, n: int, chosen: Tensor, k: int) -> None:
        """Counts what a layer has chosen among n numbers of each token: k indices, `(…, k)`, or `(…)`."""
        if not any(n in self._experts.get(x, ()) for x in (layer, _parent(layer))):
            return
        ones = torch.ones_like(chosen, dtype=torch.int64).flatten()
        counts = ones.new_zeros(n).scatter_add_(0, chosen.flatten(), ones)  # bincount would wait for a GPU
        of_steps = self._seen.setdefault((layer, n), {})
        before = of_steps.get(self._step)
        of_steps[self._step] = (counts if before is None else counts + before[0], k)
        if len(of_steps) > MAX_LOOKS:
            del of_steps[min(of_steps)]

    def tell(self, run: Run) -> None:
        self.loads = {
            layer: [Load(step, tuple(counts.tolist()), k) for step, (counts, k) in of_steps.items()]
            for (layer, _), of_steps in self._seen.items()
        }
        if not self._experts and run.measured(Operations).failure is None:
            run.lack(Absent("the model has no experts"), "experts")
        elif (operations := run.measured(Operations)).is_left_out:
            none, unseen = "the model is compiled, and no choice of a router was seen", operations.unseen
            if not self.loads:
                run.lack(Skipped(unseen or f"{none}; {AGAIN}"), "experts")
            elif unseen:
                run.lack(Partial(unseen), "moe.imbalance", "moe.dead")

    def state(self, run: Run) -> dict[str, list[Load]] | None:
        """The latest looks of each router; None if these are too large, so that each rank judges its own."""
        most = min(MAX_BYTES, MAX_OF_ALL // run.measured(Processes).world)
        n_experts = sum(len(loads[-1].counts) for loads in self.loads.values() if loads)
        n_looks = min(MAX_SHARED, most // (BYTES * max(1, n_experts)))
        shared = {layer: loads[-n_looks:] for layer, loads in self.loads.items()}
        return shared if n_looks >= MIN_SHARED else None

    def merge(self, run: Run, of_ranks: Sequence[dict[str, list[Load]]], rank: int) -> None:
        """Adds the tokens of all ranks in looks of all; ranks that share all tokens count once."""
        self.loads = {}
        for layer in dict.fromkeys(layer for loads in of_ranks for layer in loads):
            different = dict.fromkeys(tuple(loads[layer]) for loads in of_ranks if layer in loads)
            by_step = [{load.step: load for load in loads} for loads in different]
            common = sorted(set.intersection(*map(set, by_step)))
            self.loads[layer] = [_sum([loads[step] for loads in by_step]) for step in common]

    def freeze(self) -> None:
        self._experts, self._seen = {}, {}


def _sum(loads: Sequence[Load]) -> Load:
    """Tokens of one look on several ranks."""
    same = [load.counts for load in loads if len(load.counts) == len(loads[0].counts)]
    return loads[0]._replace(counts=tuple(map(sum, zip(*same, strict=True))))


def _numbers_of_experts(m: nn.Module) -> list[int]:
    """Sizes of what may be the experts of a layer: of its own, or of one of its parts."""
    stacks = [
        p for x in (m, *m.children()) if not isinstance(x, Convolution) for p in x.parameters(recurse=False)
    ]
    numbers = [p.shape[0] for p in stacks if p.ndim == 3]
    lists = [x for x in m.children() if isinstance(x, nn.ModuleList) and len({*map(type, x)}) == 1]
    return [n for n in (*numbers, *map(len, lists)) if n >= MIN_EXPERTS]


def _parent(layer: str) -> str:
    return layer.rpartition(".")[0]
