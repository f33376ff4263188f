"""Mutations of cases: is the verdict the same if only the way of training changes?"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from case import Case
from torch import nn
from torch.utils.checkpoint import checkpoint

from hookcb import Callback, Compile, Diagnose, GradientAccumulation, Learner, MixedPrecision
from hookcb.diagnosis.verdict import Verdict

EVERY = 4  # the sample has every fourth case
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def checkpoint_blocks(model: nn.Module) -> list[nn.Module]:
    """Make a model's blocks run again in the backward; `del block.forward` undoes it.

    Blocks are the children of the first ModuleList or Sequential, or the model's children if it has none.
    Blocks with batch norm are left out, because it would update its statistics with each batch twice.

    Returns:
        The wrapped blocks.
    """
    chosen = [m for m in blocks(model) if not any(isinstance(inner, NORMS) for inner in m.modules())]
    for block in chosen:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return chosen


def blocks(model: nn.Module) -> list[nn.Module]:
    """Parts of a model that have trainable parameters; none is inside another."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    parts = lists[0].children() if lists else model.children()
    return [part for part in parts if any(p.requires_grad for p in part.parameters())]


class CheckpointBlocks(Callback):
    """Activation checkpointing of the model's blocks during a fit."""

    order = -75  # before the model is compiled or hooked

    def before_fit(self) -> None:
        self._wrapped = checkpoint_blocks(self.model)

    def after_fit(self) -> None:
        for block in self._wrapped:
            del block.forward  # restores the class's forward


# "aot_eager" is enough to trace the hooks; generating code for each case would take minutes
MUTATIONS: dict[str, Callable[[], Callback]] = {
    "bf16 autocast": lambda: MixedPrecision("bf16"),
    "accumulation 4": lambda: GradientAccumulation(4),
    "checkpointing": CheckpointBlocks,
    "torch.compile": lambda: Compile(backend="aot_eager"),
}


@dataclass(frozen=True)
class Judgment:
    """Status and primary code of a verdict, or the reason why there is none."""

    status: str
    primary: str = ""

    @classmethod
    def from_verdict(cls, verdict: Verdict) -> "Judgment":
        """Status and primary code of a verdict."""
        return cls(verdict.status, "" if verdict.primary is None else verdict.primary.code)

    def __str__(self) -> str:
        return f"{self.status} {self.primary}".strip()


@dataclass(frozen=True)
class Mutated:
    """Judgments of one case: as it is, and with each mutation."""

    case: str
    plain: Judgment
    mutations: dict[str, Judgment]


def sample(faults: Sequence[Case], controls: Sequence[Case]) -> list[Case]:
    """Every fourth fault and every fourth control."""
    return [*faults[::EVERY], *controls[::EVERY]]


def mutate(cases: Sequence[Case], seed: int) -> Iterator[Mutated]:
    """Train each case as it is and with each mutation; skip cases that are not trained by a Learner."""
    for case in cases:
        run = case.train(seed, [Diagnose(show=False)])
        if isinstance(run.loop, Learner):
            judgments = {name: _judge(case, seed, make) for name, make in MUTATIONS.items()}
            yield Mutated(case.name, Judgment.from_verdict(run.loop.diagnose()), judgments)


def _judge(case: Case, seed: int, make: Callable[[], Callback]) -> Judgment:
    torch.compiler.reset()  # otherwise cases that share a class reach the recompile limit, and run eagerly
    try:
        run = case.train(seed, [make(), Diagnose(show=False)])
        verdict: Any = run.loop.diagnose()
    except Exception as error:  # the case has such a callback already, or a layer lacks the precision
        return Judgment(f"not possible: {type(error).__name__}: {error}".splitlines()[0][:60])
    return Judgment.from_verdict(verdict)
