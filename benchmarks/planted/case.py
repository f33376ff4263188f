"""What a planted case is, and how most of them are trained."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
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
    """What a training came to.

    Attributes:
        loop: what ran; its `.diagnose()` gives the verdict.
        losses: of each training batch.
        error: what the training raised.
        model: kept here, as a watch does not keep it alive.
    """

    loop: Learner | Watch
    losses: list[float]
    error: Exception | None = None
    model: nn.Module | None = None


Train = Callable[[int, Callbacks], Run]


@dataclass(frozen=True)
class Case:
    """A small training with one planted fault, or with none.

    Attributes:
        name: the fault, or what is trained.
        train: from a seed and callbacks to what ran.
        codes: of findings that name the fault; empty for a control.
        layers: qualified names of modules that count as the right layer; empty where none is asked for.
        target: a control's mean loss of the last 10 steps is below it.
        planted_at: step at which the fault comes.
    """

    name: str
    train: Train
    codes: frozenset[str] = field(default_factory=frozenset)
    layers: frozenset[str] = field(default_factory=frozenset)
    target: float = nan
    planted_at: int = 0


def fault(
    to: list[Case], name: str, codes: Iterable[str], layers: Iterable[str] = (), planted_at: int = 0
) -> Callable[[Train], Train]:
    """Adds a training as a fault to the list `to`."""

    def add(train: Train) -> Train:
        to.append(Case(name, _seeded(train), frozenset(codes), frozenset(layers), planted_at=planted_at))
        return train

    return add


def control(to: list[Case], name: str, target: float) -> Callable[[Train], Train]:
    """Adds a training as a control to the list `to`."""

    def add(train: Train) -> Train:
        to.append(Case(name, _seeded(train), target=target))
        return train

    return add


def _seeded(train: Train) -> Train:
    """The same training, with weights that follow from the seed alone."""

    @wraps(train)
    def seeded(seed: int, cbs: Callbacks) -> Run:
        torch.manual_seed(seed)
        return train(seed, cbs)

    return seeded


class Losses(Callback):
    """Keeps the loss of each training batch."""

    order = -40  # before those who weigh it

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
    """Trains with a Learner.

    Args:
        model: what is trained.
        loss_func: called with the model's output and the target.
        opt: its optimizer.
        batches: what a Learner takes as `dls`.
        cbs: callbacks, those that a case needs among them.
        seed: for what is drawn while it trains.
        n_epoch: number of passes over the batches.
        raises: what this training is known to raise; anything else goes on to the caller.
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
    """Trains with a plain loop under `watch`; the last item of a batch is the target.

    Args:
        model: what is trained.
        loss_func: called with the model's output and the target.
        opt: its optimizer.
        batches: of one epoch.
        cbs: callbacks.
        seed: for what is drawn while it trains.
        clip: the norm to which gradients are clipped, or None.
        schedule: stepped after each step of the optimizer.
        after_step: called with the index of the step that was made.
    """
    torch.manual_seed(seed)
    with watch(model, opt, *cbs) as w:
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
