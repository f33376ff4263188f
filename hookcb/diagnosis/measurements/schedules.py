"""Schedules: schedulers of torch, their lengths, and how often they are stepped beside batches and steps."""

import math
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from weakref import ReferenceType, ref

from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from hookcb.diagnosis.fault import NOTES, Measurement
from hookcb.diagnosis.heard import Ear, heard
from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.run import Run
from hookcb.hooks.optimizer_steps import params_of

Observer = Generator[None, Any, None]
MAX_KNOWN = 1_000  # schedulers
RISING = CosineAnnealingWarmRestarts, CyclicLR  # whose rate rises again by themselves
WITH_ITERS = lr_scheduler.LinearLR, lr_scheduler.ConstantLR, lr_scheduler.PolynomialLR


@dataclass(slots=True)
class Scheduler:
    """Length and steps of a scheduler.

    Attributes:
        kind: its class.
        opt: its optimizer, None after the training.
        length: number of its steps, None if it has no end.
        length_name: argument that has it.
        period: number of steps in which a cosine falls, at its end; 0 if it ends with none. It then rises.
        n: number of calls of its `step`.
        at: its own count of them, `last_epoch`.
        is_inner: whether another scheduler steps it.
        is_set: whether a step was given a number of an epoch.
        top: highest learning rate so far.
    """

    kind: str
    opt: ReferenceType[Optimizer] | None
    length: int | None = None
    length_name: str = ""
    period: int = 0
    n: int = 0
    at: int = 0
    is_inner: bool = False
    is_set: bool = False
    top: float = 0.0


class Schedulers(Ear):
    """Hears of schedulers that are created, and counts their steps."""

    calls = (
        (LRScheduler, "__init__", "see"),
        (SequentialLR, "__init__", "see"),
        (ChainedScheduler, "__init__", "see"),
        *(
            (kind, "step", "see_step")
            for kind in (
                LRScheduler,
                SequentialLR,
                ChainedScheduler,
                ReduceLROnPlateau,
                CosineAnnealingWarmRestarts,
            )
        ),
    )

    def __init__(self) -> None:
        self.n_steps = 0  # of all
        self.known: list[Scheduler] = []
        self._by_id: dict[int, tuple[ReferenceType[Any], Scheduler]] = {}

    def see(self, scheduler: Any, *args: Any, **kwargs: Any) -> Observer:
        """Notes a scheduler once it is made; it has made its first step by itself then."""
        yield
        if (found := self.of(scheduler)) is not None:
            found.n = 0

    def see_step(self, scheduler: Any, *args: Any, **kwargs: Any) -> Observer:
        """Counts a step."""
        yield
        if (found := self.of(scheduler)) is None:
            return
        if not found.n:
            found.length_name, found.length = length_of(scheduler)
            found.period = _period(scheduler)
        found.n, found.at = found.n + 1, position(scheduler)
        found.is_set |= bool(args or kwargs) and not isinstance(scheduler, ReduceLROnPlateau)
        found.top = max(found.top, _rate(scheduler.optimizer))
        self.n_steps += 1

    def of(self, scheduler: Any) -> Scheduler | None:
        """Length and steps of a scheduler; None before it has an optimizer."""
        alive, found = self._by_id.get(id(scheduler), (None, None))
        if alive is not None and alive() is scheduler:
            return found
        opt = getattr(scheduler, "optimizer", None)
        if not isinstance(opt, Optimizer) or len(self.known) >= MAX_KNOWN:
            return None  # before it has one
        found = Scheduler(type(scheduler).__name__, ref(opt))
        self.known.append(found)
        self._by_id[id(scheduler)] = ref(scheduler), found
        for inner in inner_of(scheduler):
            if (known := self.of(inner)) is not None:
                known.is_inner = True
        return found


def inner_of(scheduler: Any) -> list[Any]:
    """The schedulers that a `SequentialLR` or `ChainedScheduler` steps; none of another one."""
    is_of_others = isinstance(scheduler, SequentialLR | ChainedScheduler)
    return list(getattr(scheduler, "_schedulers", ())) if is_of_others else []


def position(scheduler: Any) -> int:
    """Number of steps that a scheduler has made, `last_epoch`; of a `ChainedScheduler` those of its parts."""
    return max((getattr(x, "last_epoch", 0) for x in (scheduler, *inner_of(scheduler))), default=0)


def length_of(scheduler: Any) -> tuple[str, int | None]:
    """Name of the argument with the length of a scheduler, and that length; None if it has no end."""
    name, length = "", None
    if isinstance(scheduler, OneCycleLR):
        name, length = "total_steps", scheduler.total_steps
    elif isinstance(scheduler, CosineAnnealingLR):
        name, length = "T_max", scheduler.T_max
    elif isinstance(scheduler, MultiStepLR):
        name, length = "milestones", max(scheduler.milestones, default=0)
    elif isinstance(scheduler, WITH_ITERS):
        name, length = "total_iters", scheduler.total_iters
    elif isinstance(scheduler, SequentialLR) and (inner := inner_of(scheduler)):
        name, rest = length_of(inner[-1])
        first = getattr(scheduler, "_milestones", [])
        length = first[-1] + rest if rest is not None and first else None
    return name, int(length) if length else None


def _period(scheduler: Any) -> int:
    if isinstance(scheduler, SequentialLR) and (inner := inner_of(scheduler)):
        return _period(inner[-1])
    return int(scheduler.T_max) if isinstance(scheduler, CosineAnnealingLR) else 0


def _rate(opt: Optimizer) -> float:
    """The largest learning rate of the groups, NaN if it is unknown."""
    rates = [x for group in opt.param_groups if isinstance(x := group.get("lr"), float)]
    return max(rates, default=math.nan)


@dataclass(slots=True)
class Use:
    """How a training uses a scheduler.

    Attributes:
        n_before: steps that it had made before the training.
        is_foreign: whether its optimizer has parameters of the model, and is not among those that step.
        is_ours: whether its optimizer is among those that step.
        is_early: whether it was stepped before the first step of the optimizer.
        key: id of that optimizer.
        n_steps: steps of that optimizer.
        rates: its smallest, largest and last learning rate, the largest of its groups in each batch of
            `Run.noting`.
    """

    n_before: int = 0
    is_foreign: bool = False
    is_ours: bool = False
    is_early: bool = False
    key: int = 0
    n_steps: int = 0
    rates: tuple[float, float, float] = (math.nan, math.nan, math.nan)


class Schedules(Measurement):
    """Schedulers of the optimizers of a training."""

    cadences: ClassVar = {"on_step": 1, "on_between": NOTES}
    hears = (Schedulers,)
    uses = (Steps,)

    def __init__(self) -> None:
        self.used: list[tuple[Scheduler, Use]] = []
        self.n_epochs = self.n_validations = 0  # epochs: 0 if it is unknown when they end
        self._n_heard = -1
        self._rates: dict[int, tuple[float, float]] = {}  # smallest and largest of each optimizer, by its id

    @property
    def rises_again(self) -> bool:
        """Whether a scheduler is meant to raise the rate again."""
        return any(one.kind in {kind.__name__ for kind in RISING} for one, _ in self.used)

    def on_model(self, run: Run) -> None:
        ear = heard(Schedulers)
        self.used = [(one, Use(one.n)) for one in ear.known]
        self._n_heard = ear.n_steps

    def on_step(self, run: Run) -> None:
        if not (run.n_steps or run.n_batches):
            self._add()
            for one, use in self.used:
                use.is_early = one.n > use.n_before and not one.is_inner

    def on_between(self, run: Run) -> None:
        if isinstance(opt := run.loop.opt, Optimizer):
            now = _rate(opt)
            low, high = self._rates.get(id(opt), (now, now))
            self._rates[id(opt)] = min(low, now), max(high, now)

    def on_batch_end(self, run: Run) -> None:
        n = heard(Schedulers).n_steps
        if n != self._n_heard:
            self._n_heard = n
            self._look(run)

    def on_epoch(self, run: Run) -> None:
        self._look(run)
        loop = run.loop
        is_known = not loop.is_external or loop.way in ("lightning", "transformers")
        self.n_epochs += is_known

    def on_validation(self, run: Run) -> None:
        self.n_validations += 1

    def tell(self, run: Run) -> None:
        self._look(run)

    def freeze(self) -> None:
        self.used = [(replace(one, opt=None), use) for one, use in self.used]

    def _add(self) -> None:
        self.used += [(one, Use()) for one in heard(Schedulers).known[len(self.used) :]]

    def _look(self, run: Run) -> None:
        """Compares optimizers of schedulers with those that step."""
        self._add()
        steps = run.measured(Steps)
        stepping = list(steps.optimizers.values())
        trained = {key for opt in stepping for key in params_of(opt)}
        for one, use in self.used:
            opt = None if one.opt is None else one.opt()
            if not stepping or opt is None:
                continue
            groups = set(map(id, opt.param_groups))
            for own in stepping:
                if own is opt or not groups.isdisjoint(map(id, own.param_groups)):
                    use.is_ours, use.key, use.n_steps = True, id(own), steps.n_of.get(id(own), 0)
                    if (rates := self._rates.get(id(own))) is not None:
                        use.rates = *rates, _rate(own)
            use.is_foreign = not use.is_ours and not trained.isdisjoint(params_of(opt))
