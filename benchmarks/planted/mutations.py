"""The same trainings in another manner: does the verdict stay, when only the way of training has changed?"""

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

EVERY = 4  # cases between two of the sample
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def checkpoint_blocks(model: nn.Module) -> list[nn.Module]:
    """Has the blocks of a model run again in the backward; `del block.forward` takes it back.

    Blocks are what a ModuleList or Sequential has in it, where there is one, and the model's children
    otherwise. Those with batch norm are left out, as it would take in each batch twice.

    Returns:
        The blocks that are wrapped.
    """
    found = [m for m in blocks(model) if not any(isinstance(inner, NORMS) for inner in m.modules())]
    for block in found:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return found


def blocks(model: nn.Module) -> list[nn.Module]:
    """Parts of a model with parameters, none of them inside another."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    parts = lists[0].children() if lists else model.children()
    return [part for part in parts if any(p.requires_grad for p in part.parameters())]


class CheckpointBlocks(Callback):
    """Activation checkpointing of the model's blocks for the length of a fit."""

    order = -75  # before it is compiled, and before anyone hooks it

    def before_fit(self) -> None:
        self._wrapped = checkpoint_blocks(self.model)

    def after_fit(self) -> None:
        for block in self._wrapped:
            del block.forward  # what the class has is there again


# eager beneath: what matters is that hooks are traced, and code for each of the cases would take minutes
MUTATIONS: dict[str, Callable[[], Callback]] = {
    "bf16 autocast": lambda: MixedPrecision("bf16"),
    "accumulation 4": lambda: GradientAccumulation(4),
    "checkpointing": CheckpointBlocks,
    "torch.compile": lambda: Compile(backend="aot_eager"),
}


@dataclass(frozen=True)
class Told:
    """Status and primary code of a verdict, or why there is none."""

    status: str
    primary: str = ""

    @classmethod
    def of(cls, verdict: Verdict) -> "Told":
        """What stays of a verdict."""
        return cls(verdict.status, "" if verdict.primary is None else verdict.primary.code)

    def __str__(self) -> str:
        return f"{self.status} {self.primary}".strip()


@dataclass(frozen=True)
class Mutated:
    """One case: what is told of it as it is, and of each mutation."""

    case: str
    plain: Told
    told: dict[str, Told]


def sample(faults: Sequence[Case], controls: Sequence[Case]) -> list[Case]:
    """Every fourth fault, and every fourth control."""
    return [*faults[::EVERY], *controls[::EVERY]]


def mutate(cases: Sequence[Case], seed: int) -> Iterator[Mutated]:
    """Trains each of the cases as it is and by each mutation; those that no Learner trains are left out."""
    for case in cases:
        run = case.train(seed, [Diagnose(show=False)])
        if isinstance(run.loop, Learner):
            told = {name: _told(case, seed, make) for name, make in MUTATIONS.items()}
            yield Mutated(case.name, Told.of(run.loop.diagnose()), told)


def _told(case: Case, seed: int, make: Callable[[], Callback]) -> Told:
    torch.compiler.reset()  # else cases that share a class reach the limit of compilations, and run as usual
    try:
        run = case.train(seed, [make(), Diagnose(show=False)])
        verdict: Any = run.loop.diagnose()
    except Exception as error:  # a case that has such a callback already, or a precision that a layer lacks
        return Told(f"not possible: {type(error).__name__}: {error}".splitlines()[0][:60])
    return Told.of(verdict)
