"""Moments: the state of Adam between steps, in which nothing but a program changes it."""

import math
from collections import deque
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookcb.core.torch_private import version_of
from hookcb.diagnosis.fault import EVERY, Measurement
from hookcb.diagnosis.rules import format_factor
from hookcb.diagnosis.run import Run
from hookcb.gradients.samples import is_native, on_cpu, sketch_copies
from hookcb.hooks.params import named_params
from hookcb.records.store import read_numbers

N_CHANGES, MAX_NOTED = 8, 64  # of an optimizer: changes that are kept, and after which it is left alone
FAR = 10.0  # ratio of two roots of a second moment that no eight steps of usual gradients make
ROUNDED, MAX_PARAMS = (
    1e-15,
    1_024,
)  # |exp_avg| whose square float32 rounds to 0; parameters that are read first
WIDE = {torch.float32, torch.float64, torch.bfloat16}
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
            step before, at most 8 steps earlier; 0 if all of it is zero now, infinite if all of it was,
            NaN if unknown.
        is_gone: whether there is no state at all.
        has_moved: whether the parameter was written to as well, as by a checkpoint that is loaded.
        lost: share of the elements of the state before the first step that was seen whose `exp_avg_sq` is 0,
            though `exp_avg` is not, of the parameter with most of them; NaN for other changes.
    """

    step: int
    kind: str
    param: str
    before: float
    after: float
    ratio: float
    is_gone: bool
    has_moved: bool
    lost: float = math.nan

    @property
    def is_foreign(self) -> bool:
        """Whether a state cannot be that of these weights, or contradicts itself."""
        is_empty = (self.ratio == 0 or self.lost > 0) and self.after > 1
        is_far = not 1 / FAR < self.ratio < FAR and 0 < self.after < self.before
        return not self.has_moved and (is_empty or (is_far and math.isfinite(self.ratio)))

    @property
    def text(self) -> str:
        """A clause on what is new in a state."""
        kind, where = self.kind, f" of {self.param}" if self.param else ""
        if self.is_gone:
            return f"the state of {kind} was reset after {self.before:,.0f} steps"
        said = []
        if self.after != self.before:
            way = "falls" if self.after < self.before else "jumps"
            said.append(f"the step count of {kind} {way} from {self.before:,.0f} to {self.after:,.0f}")
        if self.lost > 0:
            share = "all zero" if self.lost == 1 else f"zero in {100 * self.lost:.2g}% of its elements"
            kept = f"while it counts {self.after:,.0f} steps"
            return f"exp_avg_sq{where} is {share}, though exp_avg is not, {kept}"
        if self.ratio == 0:
            kept = f", while it counts {self.after:,.0f} steps" if not said else ""
            said.append(f"exp_avg_sq{where} became all zero{kept}")
        elif not 1 / FAR < self.ratio < FAR and math.isfinite(self.ratio):
            factor = self.ratio**2
            size = f"{format_factor(factor)} times as large" if factor > 1 else f"{factor:.2g} of its size"
            said.append(f"exp_avg_sq{where} is {size}")
        return " and ".join(said)


class _Known(NamedTuple):
    """State of a parameter after a step: what tells of a change, none of which is kept alive."""

    moment: ReferenceType[Tensor]
    version: int
    n_steps: Number  # at the last noted step, if they are counted on a device
    n_since: int  # steps since then
    of_param: int  # version of the parameter itself


class _Change(NamedTuple):
    step: int
    kind: str
    param: str
    counts: tuple[Number, int, Number]
    samples: tuple[Tensor | None, Tensor | None]
    has_moved: bool = False
    lost: Tensor | None = None


class _Followed:
    """State of one optimizer after its last step."""

    def __init__(self) -> None:
        self.params: list[ReferenceType[nn.Parameter]] = []
        self.known: dict[int, _Known] = {}  # by id of the parameter
        self.samples: dict[int, Tensor] = {}  # after the last noted step, likewise
        self.changes = deque[_Change](maxlen=N_CHANGES)
        self.n_noted = 0  # changes, and steps without a second moment
        self.last = -math.inf  # step of the last change


class Moments(Measurement):
    """Follows the second moment of two parameters of each optimizer like Adam, the first and the last.

    A step ends with a version of the tensor, which counts changes in place, and the next one begins with the
    same version of the same tensor, unless the program has written to it or replaced it. Before the first
    step, the state of all parameters is compared with their first moment. So this costs no operation of a
    device, and no transfer. A write through `.data` is not seen. What is there after a change is compared by
    samples of up to 1,024 elements, and read at the end.

    Attributes:
        changes: the last eight of each optimizer, in their order.
        has_seen: whether there is an optimizer with a second moment and a number of steps.
    """

    cadence = EVERY

    def __init__(self) -> None:
        self._followed: MutableMapping[Optimizer, _Followed] = WeakKeyDictionary()
        self._changes: list[deque[_Change]] = []  # of optimizers that have some, also of dead ones
        self._first: list[_Change] = []  # states before the first step
        self.has_seen = False
        self.changes: list[StateChange] = []

    def on_step(self, run: Run) -> None:
        opt = run.loop.opt
        if not isinstance(opt, Optimizer):
            return
        if (followed := self._followed.get(opt)) is None:
            self._begin(run, opt)
            return
        for known_p in followed.params:
            p = known_p()
            if p is None or (known := followed.known.get(id(p))) is None:
                continue
            if p.grad is None:  # so this step does not use its state, which may be made anew
                del followed.known[id(p)]
            elif _has_changed(known, opt.state.get(p, {})):
                self._note(run, followed, p, known)
                break

    def on_between(self, run: Run) -> None:
        opt = run.loop.opt
        if not isinstance(opt, Optimizer):
            return
        if (followed := self._followed.get(opt)) is None:
            followed = self._begin(run, opt)
        if run.noting and not followed.params and followed.n_noted < MAX_NOTED:
            followed.params += _watched(opt)
            followed.n_noted += not followed.params
        # after a change of its tensor, more may come, and samples then are of the step before
        has_samples = run.noting or run.step <= followed.last + MAX_NOTED
        for known_p in followed.params:
            p = known_p()
            state = {} if p is None else opt.state.get(p, {})
            if p is None or (moment := moment_of(state)) is None:
                continue
            self.has_seen, last = True, followed.known.get(id(p))
            count, n_since = _count(state), 0
            if isinstance(count, Tensor):
                if run.noting or last is None:
                    count = _copy(count)
                else:
                    count, n_since = last.n_steps, last.n_since + 1
            followed.known[id(p)] = _Known(ref(moment), version_of(moment), count, n_since, version_of(p))
            if has_samples and is_native(moment):
                followed.samples[id(p)] = sketch_copies([moment])[0]

    def _begin(self, run: Run, opt: Optimizer) -> _Followed:
        """Follows an optimizer, and keeps samples of a state that it has before its first step."""
        followed = self._followed[opt] = _Followed()
        params = [p for group in opt.param_groups for p in group["params"] if p.grad is not None]
        for p in params[:MAX_PARAMS]:
            state = opt.state.get(p, {})
            first, second = state.get("exp_avg"), state.get("exp_avg_sq")
            if _is_wide(first) and _is_wide(second):
                m, v = sketch_copies([first])[0], sketch_copies([second])[0]
                lost = ((v == 0) & (m.abs() > ROUNDED)).float().mean()
                count = _copy(_count(state))
                at = run.step, type(opt).__name__, _name_of(p, run)
                self._first.append(_Change(*at, (count, 0, count), (None, None), lost=lost))
        return followed

    def _keep(self, followed: _Followed, change: _Change) -> None:
        if not followed.changes:
            self._changes.append(followed.changes)
        followed.changes.append(change)

    def _note(self, run: Run, followed: _Followed, p: nn.Parameter, known: _Known) -> None:
        """Keeps a change of the state before the step, unless it is of steps that were not followed."""
        opt = run.loop.opt
        state = opt.state.get(p, {})
        moment, count = moment_of(state), _count(state)
        if not isinstance(count, Tensor) and moment is not None and _has_stepped(known, moment, count):
            return
        followed.n_noted, followed.last = followed.n_noted + 1, run.step
        if followed.n_noted >= MAX_NOTED:  # as of a state that is on another device between the steps
            followed.params.clear()
        sample = sketch_copies([moment])[0] if moment is not None and is_native(moment) else None
        change = _Change(
            run.step,
            type(opt).__name__,
            _name_of(p, run),
            (known.n_steps, known.n_since, _copy(count)),
            (followed.samples.get(id(p)), sample),
            version_of(p) != known.of_param,
        )
        self._keep(followed, change)

    def tell(self, run: Run) -> None:
        first = [x for x in map(_read, self._first) if x.lost > 0]
        kept = [_read(x) for changes in self._changes for x in changes]
        kept += sorted(first, key=lambda x: -x.lost)[:1]
        self.changes = sorted(filter(_is_other, kept), key=lambda x: x.step)

    def freeze(self) -> None:
        self._followed, self._changes, self._first = {}, [], []


def _has_stepped(known: _Known, moment: Tensor, count: float) -> bool:
    """Whether a moment is as steps leave it that were not followed: the same tensor, with a higher count."""
    is_written = moment is known.moment() and version_of(moment) != known.version
    return is_written and not isinstance(known.n_steps, Tensor) and count > known.n_steps


def _is_other(change: StateChange) -> bool:
    """Whether a state has other contents than before.

    It may have been moved to another device and back, or be loaded after a step that has only made it.
    """
    if change.lost > 0:
        return change.after > 1
    if change.before <= 1 and math.isinf(change.ratio):
        return False
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
        ratio = new_rms / old_rms if old_rms else math.inf if new_rms > 0 else math.nan
    return StateChange(
        change.step,
        change.kind,
        change.param,
        old_count,
        new_count,
        ratio,
        new is None and new_count == 0,
        change.has_moved,
        math.nan if change.lost is None else float(change.lost),
    )


def _watched(opt: Optimizer) -> list[ReferenceType[nn.Parameter]]:
    """The first and the last parameter that have a second moment and a number of steps."""
    params = [
        p for group in opt.param_groups for p in group["params"] if "exp_avg_sq" in opt.state.get(p, ())
    ]
    ends = params[:1] + params[1:][-1:]
    return [ref(p) for p in ends if moment_of(opt.state[p]) is not None]


def moment_of(state: dict[str, Any]) -> Tensor | None:
    """Second moment of a parameter whose steps are counted; None if there is none."""
    moment = state.get("exp_avg_sq")
    is_known = isinstance(moment, Tensor) and "step" in state and not moment.is_inference()
    return moment if is_known else None


def _count(state: dict[str, Any]) -> Number:
    """Number of steps, 0 without any; a tensor if it is on a device, as reading it would wait."""
    step = state.get("step", 0)
    return step if isinstance(step, Tensor) and not step.is_cpu else float(step)


def _copy(count: Number) -> Number:
    return count.detach().clone() if isinstance(count, Tensor) else count


def _name_of(p: nn.Parameter, run: Run) -> str:
    return {id(x): name for name, x in named_params(run.loop.model).items()}.get(id(p), "")


def _is_wide(x: Any) -> TypeGuard[Tensor]:
    """Whether a moment has the exponents of float32, so that squares of usual gradients are not 0 in it."""
    return isinstance(x, Tensor) and x.dtype in WIDE and is_native(x)


def _has_changed(known: _Known, state: dict[str, Any]) -> bool:
    moment = moment_of(state)
    if moment is None or moment is not known.moment() or version_of(moment) != known.version:
        return True
    count = _count(state)
    return not (isinstance(count, Tensor) or isinstance(known.n_steps, Tensor)) and count != known.n_steps
