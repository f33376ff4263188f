"""Planted cases, and the functions that train most of them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from math import nan
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hookcb import Callback, Learner, Watch, watch

Callbacks = Sequence[Callback]
LossFunc = Callable[[Any, Any], Tensor]
Raises = type[Exception] | tuple[type[Exception], ...]


@dataclass
class Run:
    """Result of a training run.

    Attributes:
        loop: the Learner or watch; its `.diagnose()` returns the verdict.
        losses: loss of each training batch.
        error: exception that the training raised.
        model: kept here because a watch does not keep it alive.
    """

    loop: Learner | Watch
    losses: list[float]
    error: Exception | None = None
    model: nn.Module | None = None


Train = Callable[[int, Callbacks], Run]


@dataclass(frozen=True)
class Case:
    """A small training run with one planted fault, or with none.

    Attributes:
        name: the fault, or a description of the control.
        train: function of a seed and callbacks that trains and returns a `Run`.
        codes: codes of the findings that name the fault; empty for a control.
        layers: qualified names of modules that count as the right layer; empty if none is required.
        target: a control has learned if its mean loss over the last 10 steps is below this.
        planted_at: step at which the fault occurs.
        note_suffices: whether a note with one of the codes is enough, as the training may be meant that way.
    """

    name: str
    train: Train
    codes: frozenset[str] = field(default_factory=frozenset)
    layers: frozenset[str] = field(default_factory=frozenset)
    target: float = nan
    planted_at: int = 0
    note_suffices: bool = False


def fault(
    to: list[Case],
    name: str,
    codes: Iterable[str],
    layers: Iterable[str] = (),
    planted_at: int = 0,
    note_suffices: bool = False,
) -> Callable[[Train], Train]:
    """Add a training function to the list `to` as a fault."""

    def add(train: Train) -> Train:
        case = Case(name, _seeded(train), frozenset(codes), frozenset(layers))
        to.append(replace(case, planted_at=planted_at, note_suffices=note_suffices))
        return train

    return add


def control(to: list[Case], name: str, target: float) -> Callable[[Train], Train]:
    """Add a training function to the list `to` as a control."""

    def add(train: Train) -> Train:
        to.append(Case(name, _seeded(train), target=target))
        return train

    return add


def _seeded(train: Train) -> Train:
    """The same training function, with weights that depend only on the seed."""

    @wraps(train)
    def seeded(seed: int, cbs: Callbacks) -> Run:
        torch.manual_seed(seed)
        return train(seed, cbs)

    return seeded


class Losses(Callback):
    """Keeps the loss of each training batch."""

    order = -40  # before callbacks that scale it

    def __init__(self, to: list[float]) -> None:
        super().__init__(name="losses_of_run")
        self.to = to

    def after_loss(self) -> None:
        if self.training:
            self.to.append(float(self.loss.detach()))


def fit(
    model: nn.Module,
    loss_func: LossFunc,
    opt: Optimizer,
    batches: Any,
    cbs: Callbacks,
    seed: int,
    n_epoch: int = 1,
    raises: Raises = (),
) -> Run:
    """Train with a Learner.

    Args:
        model: model to train.
        loss_func: called with the model's output and the target.
        opt: the model's optimizer.
        batches: passed to the Learner as `dls`.
        cbs: callbacks, including those that the case needs.
        seed: seed of random numbers drawn during training.
        n_epoch: number of passes over the batches.
        raises: exceptions that this training is known to raise; others are propagated.
    """
    losses: list[float] = []
    learn = Learner(batches, model, loss_func, opt)
    run = Run(learn, losses, model=model)
    torch.manual_seed(seed)
    with learn.no_logging():
        try:
            learn.fit(n_epoch, cbs=[*cbs, Losses(losses)])
        except raises as error:
            run.error = error
    return run


def follow(
    model: nn.Module,
    loss_func: LossFunc,
    opt: Optimizer,
    batches: Iterable[Sequence[Any]],
    cbs: Callbacks,
    seed: int,
    clip: float | None = None,
    schedule: LRScheduler | None = None,
    after_step: Callable[[int], object] | None = None,
) -> Run:
    """Train with a plain loop in `watch`; the last item of a batch is the target.

    Args:
        model: model to train.
        loss_func: called with the model's output and the target.
        opt: the model's optimizer.
        batches: batches of one epoch.
        cbs: callbacks.
        seed: seed of random numbers drawn during training.
        clip: norm to which gradients are clipped, or None.
        schedule: stepped after each optimizer step.
        after_step: called with the index of the step after each step.
    """
    torch.manual_seed(seed)
    with watch(model, opt, *(cbs or [Callback()])) as w:
        run = Run(w, [], model=model)
        for step, (*xb, y) in enumerate(batches):
            loss = w.report_loss(loss_func(model(*xb), y))
            run.losses.append(loss.item())
            loss.backward()
            if clip is not None:
                w.begin_step(opt)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step()
            opt.zero_grad()
            if schedule is not None:
                schedule.step()
            if after_step is not None:
                after_step(step)
    return run
