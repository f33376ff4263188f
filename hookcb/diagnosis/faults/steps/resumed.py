"""load.not_resumed: trainings that are resumed without the state of their optimizer or scheduler."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

from torch.optim import Optimizer

from hookcb.diagnosis.fault import EVERY, Fault, Result, Site, Unknown, fault
from hookcb.diagnosis.heard import heard
from hookcb.diagnosis.measurements.group_rates import RISE, as_number
from hookcb.diagnosis.measurements.loads import File, LoadClock, Loads, Saves
from hookcb.diagnosis.measurements.restores import (
    PROGRESS,
    Place,
    Restored,
    Restores,
    rates_of,
    settings_of,
)
from hookcb.diagnosis.measurements.schedules import Schedulers, position
from hookcb.diagnosis.measurements.state_dicts import numbers
from hookcb.diagnosis.rules import N_BEFORE, Rise, format_factor, rise_of_loss
from hookcb.diagnosis.run import WINDOW, Absent, Run
from hookcb.diagnosis.verdict import Finding

UNHEARD = "files that were read before the training were not heard; hookcb diagnose script.py hears them"
NOTHING = Absent(
    "neither weights from a file with the state of a training were loaded, nor an optimizer in mid-schedule"
)
NEAR = 1e-6  # relative difference of rates that are the same but for rounding
CAUSE = "a part of the checkpoint that is saved, and not loaded"


@dataclass(slots=True)
class Restart:
    """A schedule that begins anew, while its optimizer goes on with a state of the middle of one.

    Attributes:
        step: number of the batch with the first step after the load.
        opt, kind: the optimizer, None after the training, and its class.
        scheduler: class of the scheduler.
        loaded, base, place: largest `lr` and `initial_lr` that were loaded, and how far the schedule was.
        first, begin: largest learning rates of the groups, of that step and of the scheduler as it was made.
        is_same: whether the schedule is the one of before.
        top: highest rate since.
        high_at: number of the first batch at twice the loaded rate, None without one.
    """

    step: int
    opt: ReferenceType[Optimizer] | None
    kind: str
    scheduler: str
    loaded: float
    base: float
    place: Place | None
    first: float
    begin: float
    is_same: bool
    top: float = 0.0
    high_at: int | None = None

    def follow(self, opt: Optimizer, step: int) -> None:
        """Notes the rate of a step."""
        if self.opt is not None and self.opt() is opt:
            self.top = max(self.top, rate := rates_of(opt)[0])
            if self.high_at is None and rate >= RISE * self.loaded:
                self.high_at = step

    @property
    def is_kept(self) -> bool:
        """Whether that step is made at the loaded rate, as the scheduler was made before the load."""
        return not _is_near(self.first, self.begin)

    @property
    def is_new(self) -> bool:
        """Whether the rate is no longer the loaded one; a schedule that only falls may go on from it."""
        return not _is_near(self.first, self.loaded) or self.top > (1 + NEAR) * self.loaded

    @property
    def course(self) -> str:
        """Learning rates in the state and after it, as a sentence."""
        loaded, factor = self.loaded, self.top / self.loaded
        first = f"the loaded {loaded:.3g}, but the schedule begins at {self.begin:.3g}"
        step = f" Step {self.step:,} is made at {first if self.is_kept else f'{self.first:.3g}'}"
        if factor > 1 + NEAR:
            times = f"{format_factor(factor)} times the loaded {loaded:.3g} (limit {RISE:g})"
            return f"{step}, and the rate then reaches {self.top:.3g}, {times}."
        return f"{step}." if self.is_kept else f"{step}, and the loaded rate is {loaded:.3g}."


@fault(
    "load.not_resumed",
    Site.OPTIMIZER,
    needs="batches",
    leads_to="loss.spike loss.diverging loss.worse update.* train.unfinished",
    subject="resumed trainings",
    exact=True,
)
class NotResumed(Fault):
    """A training that goes on from a checkpoint, but without the state of the optimizer or scheduler in it.

    Exact: the weights come from a file of `torch.load` that has the state of an optimizer with the same
    settings, the script also writes that file or loads the scheduler in it, and at the first step afterwards
    the optimizer is fresh and `load_state_dict` of an optimizer was not called. Or the optimizer was loaded,
    the file has a scheduler with the same settings after its beginning, and the one in use is at its
    beginning. Other files may be read for their weights alone, as for fine-tuning.

    Exact, with a file or without: in the state that `load_state_dict` of an optimizer was given, `lr` is not
    `initial_lr`, so a scheduler had moved it; and at the first step afterwards all schedulers of that
    optimizer are at 0, none was loaded, and the rate that the last one begins with, its `get_last_lr()`, is
    not the loaded one, or it is the same schedule, see below. Of several groups, the largest rate counts. A
    note, as a second phase with a new schedule looks the same. A warning if the rate then reaches twice the
    loaded one, the rise that `loss.spike` tells, too, and either the loss rises with it and stays high: the
    mean of 64 losses is above the median of those before, ten or more, by six standard errors; or it is the
    same schedule, as heard when `state_dict` of the optimizer was called, with its settings and functions,
    whose rate had come down to half of its highest one, but not to its end, its length or a thousandth; not
    one that rises again by itself, such as `CosineAnnealingWarmRestarts`. Not told: a schedule that goes on
    from the loaded rate, and does not raise it, such as `CosineAnnealingLR`; `lr` or `initial_lr` set by hand
    after the load; a loaded rate of 0; a scheduler that is stepped before the first step of the optimizer;
    `ReduceLROnPlateau`; schedulers that are not torch's.

    Source: the PyTorch tutorial "Saving and Loading Models": to resume, "it is important to also save the
    optimizer's state_dict". torch.optim.lr_scheduler: `initial_lr` in the groups is the rate that a scheduler
    starts from, and `last_epoch` how far it is. Gupta et al., "Continual Pre-Training of Large Language
    Models: How to (re)warm your model?", 2023: warming a rate up again first raises the loss.
    """

    headline = "The training resumes without part of its state"
    severity = "warning"
    cadence = EVERY
    uses = (LoadClock,)
    hears = (Restores, Schedulers)
    passed = "a training that is resumed without a part of its state"
    unless: Unknown = UNHEARD

    def __init__(self) -> None:
        super().__init__()
        self._n_loads = 0
        self._fresh: list[tuple[int, File, str]] = []  # step, file, and class of an optimizer that is fresh
        self._begun: list[tuple[int, File, str, float]] = []  # likewise of a scheduler, and where it was
        self._restarts: list[Restart] = []
        self._known = set[int]()  # numbers of the loads of optimizers that were looked at
        self._has_looked = False

    def on_step(self, run: Run) -> None:
        if (restores := heard(Restores)).restored and isinstance(opt := run.loop.opt, Optimizer):
            self._look_at_rate(run.step, opt, restores)
        ear = heard(Loads)
        if len(ear.loads) == self._n_loads:
            return
        new, self._n_loads = ear.loads[self._n_loads :], len(ear.loads)
        own = set(map(id, run.measured(LoadClock).params().values()))
        for load in new:
            if load.file is not None and own & {id(p()) for p in load.params.values()}:
                self._look(run, ear.files[load.file], ear)

    def _look(self, run: Run, file: File, ear: Loads) -> None:
        opt, is_loaded = run.loop.opt, ear.n_optimizers > file.n_optimizers
        if opt is None or not any(file.n_states):
            return
        self._has_looked, kind = True, type(opt).__name__
        group = _without_rate(numbers(opt.param_groups[0]))
        if not is_loaded and not opt.state and any(_without_rate(x) == group for x in file.groups):
            self._fresh.append((run.n_steps, file, kind))
        if is_loaded and ear.n_schedulers == file.n_schedulers:
            for scheduler, now in _schedulers_of(opt, ear):
                was = [x["last_epoch"] for x in file.rates if _settings(x) == _settings(now)]
                if was and max(was) > 0 == now.get("last_epoch"):
                    self._begun.append((run.n_steps, file, scheduler, max(was)))

    def _look_at_rate(self, step: int, opt: Optimizer, ear: Restores) -> None:
        load = ear.restored_by(opt)
        if load is not None and load.number not in self._known:
            self._known.add(load.number)
            self._has_looked = True
            if (restart := _restart(step, opt, load, ear)) is not None:
                self._restarts.append(restart)
        for restart in self._restarts:
            restart.follow(opt, step)

    def findings(self, run: Run) -> Iterator[Result]:
        restarts = [] if self._begun else [self._told(run, x) for x in self._restarts if x.is_new]
        yield from self.told(run, [*self.seen, *restarts], self.unless)

    def _told(self, run: Run, x: Restart) -> Finding:
        rise, place = _rise(run, x), x.place
        took = "" if place is None else f" in {'at least ' * (not place.is_sure)}{place.at:,} steps"
        harm = f" The loss rises with it from {rise.before:.3g} to {rise.after:.3g}." if rise else ""
        again = "the same " * x.is_same
        is_again = x.is_same and place is not None and place.is_falling
        is_wrong = x.high_at is not None and (is_again or (rise is not None and not rise.has_healed))
        return self.finding(
            f"{x.kind} has loaded a state of a schedule that had moved the learning rate from "
            f"{x.base:.3g} to {x.loaded:.3g}{took}, but {again}{x.scheduler} begins "
            f"at 0: its state was not loaded.{x.course}{harm}" + " A new one may be meant." * (not is_wrong),
            "warning" if is_wrong else "info",
            when=x.step,
            value=x.top / x.loaded,
            limit=RISE,
            causes=("a scheduler whose state is not saved, or not loaded",),
            next_steps=("Save and load it, too: scheduler.load_state_dict(checkpoint[…])",),
        )

    def freeze(self) -> None:
        for restart in self._restarts:
            restart.opt = None

    def tell(self, run: Run) -> None:
        ear, paths = heard(Loads), {save.path for save in heard(Saves).saves}
        if run.measured(LoadClock).has_heard_start:
            self.unless = "" if self._has_looked else NOTHING
        self.seen = []
        for step, file, kind in self._fresh:
            if file.path in paths or ear.n_schedulers > file.n_schedulers:  # "" in memory
                self._see(
                    f"The weights come from {_name(file)}, which also has the state of an optimizer for "
                    f"{max(file.n_states)} parameters, but {kind} began step {step} without any state: its "
                    "moments were not loaded.",
                    step,
                    "optimizer.load_state_dict(checkpoint[…]), after the model is on its device",
                )
        course = self._restarts[0].course if self._restarts else ""
        for step, file, kind, was in self._begun:
            self._see(
                f"The weights and the optimizer come from {_name(file)}, in which the scheduler has made "
                f"{was:.0f} steps, but {kind} begins at 0: its state was not loaded.{course}",
                step,
                "scheduler.load_state_dict(checkpoint[…])",
            )

    def _see(self, message: str, step: int, call: str) -> None:
        self.see(message, when=step, value=0.0, causes=(CAUSE,), next_steps=(f"Load it too: {call}",))


def _restart(step: int, opt: Optimizer, load: Restored, ear: Restores) -> Restart | None:
    """A schedule that begins at this step, the first one after a load; None if it goes on, or may."""
    found = ear.schedulers_of(opt)
    if not found or load.rate <= 0 or any(made.is_loaded or position(x) for made, x in found):
        return None
    made, last = found[-1]
    first, begin = rates_of(opt)[0], _begin(last)
    is_set = not _is_near(first, begin if made.n_loads >= load.number else load.rate)  # by hand
    is_same = load.place is not None and load.place.settings == settings_of(last)
    is_again = is_same and load.place is not None and load.place.at > 0 and load.place.is_falling
    if is_set or (_is_near(begin, load.rate) and not is_again):
        return None
    what = ref(opt), type(opt).__name__, type(last).__name__, load.rate, load.base, load.place
    return Restart(step, *what, first, begin, is_same)


def _begin(scheduler: Any) -> float:
    """The largest rate that a scheduler has set, NaN if it does not keep its rates."""
    try:
        return max(map(as_number, scheduler.get_last_lr()))
    except AttributeError:  # of a `step` of its own
        return math.nan


def _rise(run: Run, x: Restart) -> Rise | None:
    """Rise of the loss after the rate has become high."""
    if x.high_at is None or not len(run.loss):
        return None
    return rise_of_loss(run, max(x.high_at, run.loss.steps[0] + WINDOW), N_BEFORE, WINDOW)


def _is_near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=NEAR)


def _schedulers_of(opt: Any, ear: Loads) -> Iterator[tuple[str, dict[str, float]]]:
    for made in ear.schedulers:
        if (scheduler := made()) is not None and getattr(scheduler, "optimizer", None) is opt:
            yield type(scheduler).__name__, numbers(vars(scheduler))


def _settings(rate: dict[str, float]) -> dict[str, float]:
    return {name: x for name, x in rate.items() if name not in PROGRESS}


def _without_rate(group: dict[str, float]) -> dict[str, float]:
    """Settings of a group: its rate is that of the beginning, if a scheduler has changed it."""
    return {name: x for name, x in group.items() if name not in ("lr", "initial_lr")} | {
        "lr": group.get("initial_lr", group.get("lr", 0.0))
    }


def _name(file: File) -> str:
    return file.path.rpartition("/")[2] or "a file"
