"""Moments: the state of Adam between steps, in which nothing but a program changes it."""

import math
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

from torch import Tensor, nn
from torch.optim import Optimizer

from hookcb.core.torch_private import version_of
from hookcb.diagnosis.fault import EVERY, Measurement
from hookcb.diagnosis.run import Run
from hookcb.gradients.samples import is_native, on_cpu, sketch_copies
from hookcb.hooks.params import named_params
from hookcb.records.store import read_numbers

N_CHANGES, MAX_NOTED = 8, 64  # of an optimizer: changes that are kept, and after which it is left alone
FAR = 10.0  # ratio of two roots of a second moment that no eight steps of usual gradients make
Number = float | Tensor


@dataclass(frozen=True, slots=True)
class StateChange:
    """A change of the state of an optimizer between two of its steps.

    Attributes:
        step: number of the batch whose step was the first with the new state.
        kind: class of the optimizer.
        param: name of the parameter whose state was compared.
        before, after: its number of steps in the state, 0 without one.
        ratio: RMS of the new root of `exp_avg_sq` over sampled elements relative to that of the last noted
            step before, at most 8 steps earlier; 0 if all of it is zero now, NaN if unknown.
        is_gone: whether there is no state at all.
        has_moved: whether the parameter was written to as well, as by a checkpoint that is loaded.
    """

    step: int
    kind: str
    param: str
    before: float
    after: float
    ratio: float
    is_gone: bool
    has_moved: bool


class _Known(NamedTuple):
    """State of a parameter after a step: what tells of a change, none of which is kept alive."""

    moment: ReferenceType[Tensor]
    version: int
    count: Number  # of its steps, at the last noted step if it is counted on a device
    n_since: int  # steps since then
    of_param: int  # version of the parameter itself


class _Change(NamedTuple):
    step: int
    kind: str
    param: str
    counts: tuple[Number, int, Number]
    samples: tuple[Tensor | None, Tensor | None]
    has_moved: bool


class Moments(Measurement):
    """Follows the second moment of two parameters of each optimizer like Adam, the first and the last.

    A step ends with a version of the tensor, which counts changes in place, and the next one begins with the
    same version of the same tensor, unless the program has written to it or replaced it. So this costs no
    operation of a device, and no transfer. A write through `.data` is not seen. What is there after a change
    is compared by samples of up to 1,024 elements, and read at the end.

    Attributes:
        changes: at most eight of each optimizer, in their order.
        has_seen: whether there is an optimizer with a second moment and a number of steps.
    """

    cadence = EVERY

    def __init__(self) -> None:
        self._params: dict[int, tuple[ReferenceType[Optimizer], list[ReferenceType[nn.Parameter]]]] = {}
        self._known: dict[int, dict[int, _Known]] = {}  # by ids of optimizer and parameter
        self._samples: dict[tuple[int, int], Tensor] = {}
        self._changes: dict[int, deque[_Change]] = {}
        self._n_noted: dict[int, int] = {}
        self.has_seen = False
        self.changes: list[StateChange] = []

    def on_step(self, run: Run) -> None:
        opt = run.loop.opt
        if not (known := self._known.get(id(opt))) or not self._is_same(opt):
            return
        for known_p in self._params[id(opt)][1]:
            if (p := known_p()) is not None and id(p) in known and _has_changed(known[id(p)], opt.state.get(p, {})):
                self._note(run, opt, p, known[id(p)])
                break

    def on_between(self, run: Run) -> None:
        opt = run.loop.opt
        if not isinstance(opt, Optimizer):
            return
        if not self._is_same(opt):
            self._params[id(opt)], self._known[id(opt)] = (ref(opt), []), {}
        params, known = self._params[id(opt)][1], self._known[id(opt)]
        if not params and (n := self._n_noted.get(id(opt), 0)) < MAX_NOTED:
            params += _watched(opt)
            self._n_noted[id(opt)] = n + (not params)
        for known_p in params:
            p = known_p()
            state = {} if p is None else opt.state.get(p, {})
            if p is None or (moment := moment_of(state)) is None:
                continue
            self.has_seen, last = True, known.get(id(p))
            count, n_since = _count(state), 0
            if isinstance(count, Tensor):
                if run.noting or last is None:
                    count = count.detach().clone()
                else:
                    count, n_since = last.count, last.n_since + 1
            known[id(p)] = _Known(ref(moment), version_of(moment), count, n_since, version_of(p))
            if run.noting and is_native(moment):
                self._samples[id(opt), id(p)] = sketch_copies([moment])[0]

    def _is_same(self, opt: Any) -> bool:
        return id(opt) in self._params and self._params[id(opt)][0]() is opt

    def _note(self, run: Run, opt: Optimizer, p: nn.Parameter, known: _Known) -> None:
        """Keeps a change of the state before the step, unless it is of steps that were not followed."""
        state = opt.state.get(p, {})
        moment, count = moment_of(state), _count(state)
        if isinstance(count, Tensor):
            count = count.detach().clone()
        elif not isinstance(known.count, Tensor) and moment is not None and moment is known.moment():
            if count > known.count and version_of(moment) != known.version:
                return
        self._n_noted[id(opt)] = self._n_noted.get(id(opt), 0) + 1
        if self._n_noted[id(opt)] >= MAX_NOTED:  # as of a state that is on another device between the steps
            self._params[id(opt)][1].clear()
        sample = sketch_copies([moment])[0] if moment is not None and is_native(moment) else None
        names = {id(x): name for name, x in named_params(run.loop.model).items()}
        self._changes.setdefault(id(opt), deque(maxlen=N_CHANGES)).append(
            _Change(
                run.step,
                type(opt).__name__,
                names.get(id(p), ""),
                (known.count, known.n_since, count),
                (self._samples.get((id(opt), id(p))), sample),
                version_of(p) != known.of_param,
            )
        )

    def tell(self, run: Run) -> None:
        kept = (_read(x) for changes in self._changes.values() for x in changes)
        self.changes = sorted(filter(_is_other, kept), key=lambda x: x.step)

    def freeze(self) -> None:
        self._params, self._known, self._samples, self._changes = {}, {}, {}, {}


def _is_other(change: StateChange) -> bool:
    """Whether a state has other contents than before; it may have been moved to another device and back."""
    is_far = math.isfinite(change.ratio) and not 1 / FAR < change.ratio < FAR
    return change.is_gone or change.after != change.before or is_far


def _read(change: _Change) -> StateChange:
    """A change with plain numbers; waits for the device."""
    (old_count, n_since, new_count), (old, new) = change.counts, change.samples
    old_count, new_count = read_numbers([old_count, new_count])
    if new_count >= old_count:  # some of the steps since then may have been skipped
        old_count = min(old_count + n_since, new_count)
    ratio = math.nan
    if old is not None and new is not None:
        old_rms, new_rms = (math.sqrt(x.double().mean()) for x in on_cpu([old, new]))
        ratio = new_rms / old_rms if old_rms > 0 else math.nan
    return StateChange(
        change.step,
        change.kind,
        change.param,
        old_count,
        new_count,
        ratio,
        new is None and new_count == 0,
        change.has_moved,
    )


def _watched(opt: Optimizer) -> list[ReferenceType[nn.Parameter]]:
    """The first and the last parameter that have a second moment and a number of steps."""
    params = [p for group in opt.param_groups for p in group["params"]]
    known = [ref(p) for p in params if moment_of(opt.state.get(p, {})) is not None]
    return known[:1] + known[1:][-1:]


def moment_of(state: dict[str, Any]) -> Tensor | None:
    """Second moment of a parameter whose steps are counted; None if there is none."""
    moment = state.get("exp_avg_sq")
    is_known = isinstance(moment, Tensor) and "step" in state and not moment.is_inference()
    return moment if is_known else None


def _count(state: dict[str, Any]) -> Number:
    """Number of steps, 0 without any; a tensor if it is on a device, as reading it would wait."""
    step = state.get("step", 0)
    return step if isinstance(step, Tensor) and not step.is_cpu else float(step)


def _has_changed(known: _Known, state: dict[str, Any]) -> bool:
    moment = moment_of(state)
    if moment is None or moment is not known.moment() or version_of(moment) != known.version:
        return True
    count = _count(state)
    return not (isinstance(count, Tensor) or isinstance(known.count, Tensor)) and count != known.count
