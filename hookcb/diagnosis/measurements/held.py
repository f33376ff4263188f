"""HeldWeights: the weights that optimizers hold, before and after each step and before the next forward."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, AdamW, NAdam, Optimizer

from hookcb.core.optim import mark_of
from hookcb.core.precision import numbers_to
from hookcb.core.restore import same_bits
from hookcb.core.torch_private import held_versions, is_flattened, version_of
from hookcb.diagnosis.fault import EVERY, Measurement
from hookcb.diagnosis.measurements.outside import OutsideParameters
from hookcb.diagnosis.measurements.samples import COLUMNS, Group, Range, differ, flat, spread_copy, written
from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.run import Partial, Run, Series
from hookcb.gradients.hand_steps import StepByHand
from hookcb.gradients.stats import is_readable
from hookcb.hooks.params import find_params
from hookcb.processes.shards import local_part, local_parts

N_WIDE = 64  # steps at the beginning with wide samples
MAX_WRITES = 200  # tables of writes that are kept; a loop that writes this often means to
MAX_OPTIMIZERS = 16  # at a time
TINY = 1e-3  # of the rate: a step of an optimizer whose rule is unknown is at least that large
NOT_JUDGED = (StepByHand, LBFGS)
OF_UPDATE = ("n_changed", "n_visible", "n_since")  # columns of the table of a look


@dataclass(frozen=True, slots=True)
class Write:
    """A write by something other than the optimizer, between a step and the next forward.

    Attributes:
        step: number of the batch of the step before it.
        rows: numbers by name of the parameter; see `samples.COLUMNS`.
        goes_on: whether the same optimizer went on with the same state, and not with all weights written and
            another rate, as a training that begins anew.
        is_wide: whether it was seen in up to 1,024 elements, and not because a version had changed.
        since: number of the batch of the step after which the values were copied that it is compared with; if
            that is an earlier step, only weights whose version has changed are in `rows`.
        may_be_undone: whether the values of the step may be back, as weights are swapped to validate.
    """

    step: int
    rows: dict[str, dict[str, float]]
    goes_on: bool
    is_wide: bool
    since: int
    may_be_undone: bool


@dataclass(frozen=True, slots=True)
class Look:
    """Changes of one parameter by an inspected step, of up to 1,024 elements.

    Attributes:
        step: number of its batch.
        n_changed: how many elements have changed.
        n_visible: how many the step should have changed, by their gradients, the rate and the dtype.
        n_since: how many have changed since the inspected step before it.
        has_scaler: whether a GradScaler may have skipped the step.
        is_usual: whether steps without effect came in turn before, as of an optimizer that adds up gradients.
    """

    step: int
    n_changed: float
    n_visible: float
    n_since: float
    has_scaler: bool = False
    is_usual: bool = False


@dataclass(slots=True)
class _Raw:
    """A write or a look, until it is read from the device."""

    step: int
    names: list[str]
    tables: list[Tensor]
    ids: tuple[int, ...] = ()
    going: tuple[float, int] = (math.nan, 0)
    goes_on: bool = False  # with the same state
    has_new_rate: bool = False
    is_wide: bool = True
    since: int = -1
    may_be_undone: bool = False
    has_scaler: bool = False
    is_usual: bool = False

    def rows(self, columns: tuple[str, ...]) -> Iterator[tuple[str, dict[str, float]]]:
        values = [row for table in self.tables for row in table.tolist()]
        for name, row in zip(self.names, values, strict=True):
            yield name, dict(zip(columns, row, strict=True))


@dataclass(slots=True)
class _Held:
    """An optimizer, with samples of the weights that it holds and steps."""

    opt: ReferenceType[Optimizer]
    ids: tuple[int, ...] = ()  # of the weights
    known: list[ReferenceType[Tensor]] = field(default_factory=list)  # these
    of_groups: list[int] = field(default_factory=list)  # index of the parameter group of each
    every: list[tuple[int, bool]] = field(default_factory=list)  # ids of all, and which have a gradient
    names: list[str] = field(default_factory=list)  # in the order of the groups
    groups: list[Group] = field(default_factory=list)
    ranges: dict[bool, list[Range]] = field(default_factory=dict)  # of wide samples, and of narrow ones
    versions: list[int] = field(default_factory=list)  # of all that it holds, after its last step
    after: list[Tensor] = field(default_factory=list)  # a sample after that step, or after an earlier one
    is_wide: bool = True  # whether that is a wide one
    since: int = -1  # number of the batch of that step, which may be an earlier one
    is_written: bool = False  # whether something else has changed a version
    going: tuple[float, int] = (math.nan, 0)  # its rate at that step, and the id of its state
    n_same: int = 0  # steps in turn that have changed no version, as those of a fused optimizer
    longest: int = 0  # of these, in the past
    step: int = 0
    before: list[Tensor] | None = None  # a sample before the step that is inspected
    last: list[Tensor] | None = None  # a sample after the last step that was inspected
    n_backward: int = 0  # before its last step
    marks: dict[int, Any] = field(default_factory=dict)  # of gradients, in that step

    def params(self) -> list[Tensor]:
        """The weights; fewer if some are gone."""
        return [p for known in self.known if (p := known()) is not None]

    def sample(self, wide: bool) -> list[Tensor]:
        if not wide:
            return [group.narrow() for group in self.groups]
        params = self.params()
        return [group.wide([params[i] for i in group.places]) for group in self.groups]

    def add_to_ranges(self) -> None:
        """Adds wide and narrow samples to the ranges of earlier values."""
        for wide in (True, False):
            now = self.after if wide and self.after else self.sample(wide)
            if wide not in self.ranges:
                self.ranges[wide] = [Range(x) for x in now]
            for seen, x in zip(self.ranges[wide], now, strict=True):
                seen.add(x)


class HeldWeights(Measurement):
    """Follows what each step changes in the weights, and what is changed before the next forward.

    Version counters are read after each step and before the next forward. If one has changed, up to 32
    elements of each matrix are compared with those after the latest step of `Run.noting`, or once that has
    happened, with those after each step. In the first 64 steps, inspected ones and those after them up to
    1,024 elements are compared, as some writes have no version. Left out are weights without a gradient, and
    loops without an optimizer or with LBFGS.

    Attributes:
        writes: those seen, see `Write`.
        looks: by parameter, what inspected steps have changed.
        n_compared: steps after which up to 1,024 elements were compared with those before the next forward.
        shared: by parameter, in how many batches two optimizers have made a step with the same gradient.
    """

    cadence = EVERY
    uses = (OutsideParameters, Steps)

    def __init__(self) -> None:
        self.writes: list[Write] = []
        self.looks: dict[str, list[Look]] = {}
        self.n_compared = 0
        self.shared: dict[str, int] = {}
        self._names: dict[int, tuple[ReferenceType[nn.Parameter], str]] = {}
        self._held: dict[int, _Held] = {}  # by id of the optimizer
        self._now: _Held | None = None  # that of the latest step
        self._pending: list[_Held] = []  # those that have stepped, until the next forward
        self._written: list[_Raw] = []
        self._open: list[_Raw] = []  # of these, those after which there was no step yet
        self._looks: list[_Raw] = []
        self._is_after_look = False
        self._has_validated = False  # since the latest step

    def on_model(self, run: Run) -> None:
        self._names = {id(p): (ref(p), name) for name, p, _ in find_params(run.loop.model)}

    @property
    def are_as_stepped(self) -> bool:
        """Whether no version has changed since the last step of each optimizer."""
        every = [(held, opt) for held in self._held.values() if (opt := held.opt()) is not None]
        return bool(every) and all(held_versions(opt) == held.versions for held, opt in every)

    # ---- around a step

    def on_step(self, run: Run) -> None:
        if (held := self._of(run)) is None or (opt := held.opt()) is None:
            return
        if run.looking or not held.ids:
            if run.measured(OutsideParameters).has_joined:
                self.on_model(run)
                held.every = []
            self._arrange(held, opt)
        if self._open:
            self._close_writes(held, opt)
        n = held.n_same
        is_look = run.looking or (n > 0 and not n & (n - 1))  # after 1, 2, 4, 8 … steps
        held.before = held.sample(wide=True) if is_look else None
        if len(self._held) > 1 and (run.looking or run.n_steps < N_WIDE):
            held.n_backward = run.measured(Steps).n_backward
            held.marks = {id(p): mark_of(p.grad) for p in held.params()}
            self._note_shared(held)

    def on_between(self, run: Run) -> None:
        if (held := self._of(run)) is None or not held.ids or (opt := held.opt()) is None:
            return
        is_look = run.looking or held.before is not None
        is_wide = run.n_steps <= N_WIDE or is_look or self._is_after_look
        versions = held_versions(opt)
        held.n_same, past = (held.n_same + 1, 0) if versions == held.versions else (0, held.n_same)
        held.longest = max(held.longest, past)
        held.step, held.versions, held.going = run.step, versions, _going(opt)
        if is_wide or run.noting or held.is_written or not held.after:
            held.after, held.is_wide, held.since = held.sample(is_wide), is_wide, held.step
        if is_wide:
            held.add_to_ranges()
        if held.before is not None:
            self._look(run, held, opt)
        others = [x for x in self._pending if x is not held and _are_apart(x, held)]
        self._pending = [*others, held]
        self._is_after_look, self._has_validated = run.looking, False

    def on_cancel(self, run: Run, level: str) -> None:
        for held in self._held.values():
            held.before = None

    def on_validation(self, run: Run) -> None:
        self._has_validated = True

    def on_batch(self, run: Run) -> None:
        pending, self._pending = self._pending, []
        for held in pending:
            opt = held.opt()
            if opt is not None and len(self._written) < MAX_WRITES:
                is_wide, now = held.is_wide and held.since == held.step, held_versions(opt)
                self.n_compared += is_wide
                if is_wide or now != held.versions:
                    self._compare(held, opt, is_wide)
                held.is_written |= now != held.versions

    def _of(self, run: Run) -> _Held | None:
        opt, held = run.loop.opt, self._now
        if held is not None and held.opt() is opt:
            return held
        if not isinstance(opt, Optimizer) or isinstance(opt, NOT_JUDGED):
            return None
        held = self._held.get(id(opt))
        if held is None or held.opt() is not opt:
            self._held = {key: x for key, x in self._held.items() if x.opt() is not None}
            if len(self._held) >= MAX_OPTIMIZERS:  # as if each weight had one, which steps in the backward
                why = Partial(f"more than {MAX_OPTIMIZERS} optimizers make steps")
                run.lack(why, "param.overwritten", "param.duplicated")
                self.done = True
                return None
            self._held[id(opt)] = held = _Held(ref(opt))
        self._now = held
        return held

    def _arrange(self, held: _Held, opt: Optimizer) -> None:
        """Lists the weights that have a gradient, and takes new views of them."""
        every = [(id(p), p.grad is not None) for group in opt.param_groups for p in group["params"]]
        if held.ids and every == held.every:  # the usual case
            return
        known, found, held.every = set(held.ids), dict[int, tuple[Tensor, int]](), every
        for k, of_group in enumerate(opt.param_groups):
            for p in of_group["params"]:
                if self._name(p) and _can_sample(p, id(p) in known):
                    found[id(p)] = p, k
        params, ids = [p for p, _ in found.values()], tuple(found)
        held.known, held.of_groups = list(map(ref, params)), [k for _, k in found.values()]
        if ids == held.ids:
            return
        by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for i, p in enumerate(params):
            by_kind.setdefault((p.device, p.dtype), []).append(i)
        held.groups = [Group([params[i] for i in places], places) for places in by_kind.values()]
        held.ids, held.names = ids, [self._name(params[i]) for places in by_kind.values() for i in places]
        held.ranges, held.after, held.last = {}, [], None
        held.add_to_ranges()

    def _name(self, p: Tensor) -> str:
        known, name = self._names.get(id(p), (None, ""))
        return name if known is not None and known() is p else ""

    # ---- writes

    def _compare(self, held: _Held, opt: Optimizer, is_wide: bool) -> None:
        if len(held.params()) != len(held.ids):
            return
        pairs = list(zip(held.after, held.sample(held.is_wide), strict=True))
        if any(x.shape != y.shape or x.device != y.device or x.dtype != y.dtype for x, y in pairs):
            held.ids = ()  # they are elsewhere now, or of another dtype
            return
        if all(x.is_cpu and same_bits(x, y) for x, y in pairs):
            return
        tables = [
            written(group, x, y, seen)
            for group, (x, y), seen in zip(held.groups, pairs, held.ranges[held.is_wide], strict=True)
        ]
        raw = _Raw(held.step, held.names, tables, held.ids, held.going, is_wide=is_wide, since=held.since)
        if raw.since != raw.step:  # steps have changed the others, too
            every = (p for group in opt.param_groups for p in group["params"])
            both = zip(every, held.versions, strict=False)
            changed = {self._name(p) for p, version in both if version_of(p) != version}
            raw.names = [name if name in changed else "" for name in raw.names]
            raw.may_be_undone = self._has_validated
        self._written.append(raw)
        self._open.append(raw)

    def _close_writes(self, held: _Held, opt: Optimizer) -> None:
        """A write counts if the optimizer goes on afterwards as if there had been none."""
        stay = []
        for raw in self._open:
            if raw.ids == held.ids:
                (before, state), (now, state_now) = raw.going, _going(opt)
                change = now / before if before > 0 else math.nan
                raw.goes_on, raw.has_new_rate = state == state_now, change < 0.5 or change > 2
            elif set(held.ids).isdisjoint(raw.ids):
                stay.append(raw)
        self._open = stay

    # ---- looks

    def _look(self, run: Run, held: _Held, opt: Optimizer) -> None:
        params, before, held.before = held.params(), held.before or [], None
        if len(params) != len(held.ids):
            return
        scaler = run.loop.scaler
        is_scaled = scaler is not None and any(group.get("fused") for group in opt.param_groups)
        tables = []
        for i, (group, x, y) in enumerate(zip(held.groups, before, held.after, strict=True)):
            own = [params[place] for place in group.places]
            eps = torch.finfo(own[0].dtype)
            of_groups = [held.of_groups[place] for place in group.places]
            size = _updates(own, group.lengths, opt, of_groups, is_scaled)
            visible = size > eps.eps * x.abs() + eps.smallest_normal
            since = torch.ones_like(visible) if held.last is None else differ(held.last[i], x)
            tables.append(group.sums(x, [differ(x, y), visible, since]))
        is_usual = held.longest > 0 and held.n_same <= 2 * held.longest
        raw = _Raw(held.step, held.names, tables, has_scaler=scaler is not None, is_usual=is_usual)
        self._looks.append(raw)
        held.last = held.after

    def _note_shared(self, held: _Held) -> None:
        """Notes weights that another optimizer has just stepped with the same gradient."""
        for other in self._held.values():
            if other is held or other.n_backward != held.n_backward or not held.n_backward:
                continue
            for i, mark in held.marks.items():
                if mark is not None and other.marks.get(i) == mark and i in self._names:
                    name = self._names[i][1]
                    self.shared[name] = self.shared.get(name, 0) + 1

    # ---- the end

    def tell(self, run: Run) -> None:
        self.writes = []
        for raw in self._written:
            rows = {name: row for name, row in raw.rows(COLUMNS) if name and row["n_changed"]}
            goes_on = raw.goes_on and not (raw.has_new_rate and len(rows) == len(raw.names))
            about = raw.step, rows, goes_on, raw.is_wide, raw.since, raw.may_be_undone
            self.writes.append(Write(*about))
        self.looks = {}
        for raw in self._looks:
            for name, row in raw.rows(OF_UPDATE):
                look = Look(raw.step, **row, has_scaler=raw.has_scaler, is_usual=raw.is_usual)
                self.looks.setdefault(name, []).append(look)

    def without_effect(self, run: Run) -> dict[str, list[int]]:
        """By parameter, its last inspected steps that should have changed it, if none has by a bit.

        Left out are those that a GradScaler may have skipped. A step counts only if nothing has changed since
        the inspected step before it, as an optimizer may add up the gradients of several steps.
        """
        skipped = dict(run.steps.get("skipped", Series()))
        found = {}
        for name, looks in self.looks.items():
            idle: list[int] = []
            for look in reversed(looks):
                was_made = not look.has_scaler or skipped.get(look.step, 1.0) == 0
                if look.n_changed:
                    break
                if look.n_visible and was_made and not look.is_usual:
                    idle.insert(0, look.step)
                if look.n_since:
                    break
            found[name] = idle
        return found

    def freeze(self) -> None:
        self._names, self._held, self._pending, self._now = {}, {}, [], None
        self._written, self._open, self._looks = [], [], []


def _are_apart(one: _Held, other: _Held) -> bool:
    return set(one.ids).isdisjoint(other.ids)


def _going(opt: Optimizer) -> tuple[float, int]:
    """The rate of the first group, NaN if it is a tensor, and the id of the state."""
    rate = opt.param_groups[0].get("lr")
    return rate if isinstance(rate, float) else math.nan, id(opt.state)


def _can_sample(p: Tensor, was_stepped: bool) -> bool:
    if isinstance(p, nn.parameter.UninitializedParameter) or is_flattened(p):
        return False
    if p.grad is None and not was_stepped:
        return False
    is_number = (p.is_floating_point() or p.is_complex()) and p.dtype.itemsize >= 2
    return is_number and is_readable(p) and local_part(p).numel() > 0


@torch.no_grad()
def _updates(
    params: Sequence[Tensor], lengths: Sequence[int], opt: Optimizer, of_groups: list[int], is_scaled: bool
) -> Tensor:
    """Sizes of the updates of all sampled elements, at least; 0 where a gradient is 0 or not finite.

    `lengths` are the numbers of sampled elements, `of_groups` the indices of the parameter groups.
    """
    alike: dict[tuple[Any, ...], list[int]] = {}  # those that one formula with the same numbers is for
    is_adam, states = isinstance(opt, Adam | AdamW | NAdam), [opt.state.get(p, {}) for p in params]
    for i, (p, state, k) in enumerate(zip(params, states, of_groups, strict=True)):
        if p.grad is not None and p.grad.layout is torch.strided:
            n, has_moments = None, is_adam and "exp_avg" in state and "exp_avg_sq" in state
            if has_moments and "step" in state:
                n = state["step"]
            n = None if n is None or (isinstance(n, Tensor) and not n.is_cpu) else float(n)
            alike.setdefault((k, has_moments, n), []).append(i)
    found: dict[int, Tensor] = {}
    for (k, has_moments, _), places in alike.items():
        own, of_own = [params[i] for i in places], [states[i] for i in places] if has_moments else []
        sizes = [lengths[i] for i in places]
        update = _update(own, of_own, sizes, opt, opt.param_groups[k], is_scaled)
        if len(places) == len(params):
            return update
        found |= zip(places, torch.split(update, sizes), strict=True)
    like = flat(params[0])
    return torch.cat([found[i] if i in found else like.new_zeros(n) for i, n in enumerate(lengths)])


def _update(
    params: Sequence[Tensor],
    states: Sequence[dict[str, Any]],
    lengths: Sequence[int],
    opt: Optimizer,
    group: dict[str, Any],
    is_scaled: bool,
) -> Tensor:
    """Sizes of updates by the rule of Adam and of SGD, of parameters with the same settings.

    `states` are those with the moments of Adam. Other optimizers are taken to make at least a thousandth of
    the step of SGD with gradients below 1.
    """
    size, rate = _placed([p.grad for p in params], params).abs(), group.get("lr", math.nan)
    if states:
        means = _placed([state["exp_avg"] for state in states], params).abs()
        squares = _placed([state.get("max_exp_avg_sq", state["exp_avg_sq"]) for state in states], params)
        (beta1, beta2), n = group.get("betas", (0.9, 0.999)), states[0].get("step", math.inf)
        is_on_device = isinstance(n, Tensor) and not n.is_cpu  # where nothing is read
        n = torch.stack([state["step"] for state in states]) if is_on_device else n
        unbiased = (1 - beta2**n) ** 0.5 / (1 - beta1**n)
        if is_on_device:
            index = numbers_to(size.device, lengths, torch.int64)
            unbiased = torch.repeat_interleave(unbiased, index, output_size=len(size))
        update = (unbiased * means).to(means.dtype) / (squares.abs().sqrt() + group.get("eps", 1e-8))
    elif is_scaled:
        return torch.zeros_like(size)
    elif isinstance(opt, SGD):
        update = size * (1 - group.get("dampening", 0))
    else:
        update = TINY * size / (1 + size)
    return torch.where((size > 0) & (size < math.inf), rate * update, 0.0).to(size.dtype)


def _placed(xs: Sequence[Tensor | None], params: Sequence[Tensor]) -> Tensor:
    """Samples of tensors at the places of those of parameters, which depend on their order in memory."""
    both = zip(local_parts([x for x in xs if x is not None]), local_parts(params), strict=True)
    return spread_copy(
        [x if x.stride() == p.stride() else torch.empty_like(p, dtype=x.dtype).copy_(x) for x, p in both]
    )
