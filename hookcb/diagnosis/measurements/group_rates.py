"""GroupRates: the learning rate of each parameter group at each step, and groups whose rate rises alone."""

import math
from collections import deque
from collections.abc import Iterator, MutableMapping
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

from hookcb.core.text import join_names
from hookcb.diagnosis.fault import EVERY, Measurement
from hookcb.diagnosis.rules import median, ratio
from hookcb.diagnosis.run import Run
from hookcb.hooks.params import named_params
from hookcb.records.thinned import Thinned

JUMP, RISE = 1.5, 2.0  # ratio of the rates of two steps in a row, and of the last of 64 steps to the first
ALONE = 1.2  # ratio up to which a group goes with the others
N_STEPS, N_KEPT, N_JUMPS = 64, 160, 64  # steps of a slow rise; rates and jumps that are kept
N_COURSE = 128  # rates over the whole training
MIN_SPAN, SAME = 32, 1.01  # steps in which a group goes along with the others, and ratio up to which it does
MAX_GROUPS, N_NAMED = 256, 3  # groups that are followed at most, and parameters of one that are named


class Jump(NamedTuple):
    """A learning rate that has risen in one parameter group and not in all.

    Attributes:
        step: number of the batch whose step was the first with the new rate.
        before, after: its rates.
        group: index of the group.
        names: names of some of its parameters, as text.
        since: step of the first rate, if it has risen over several steps.
    """

    step: int
    before: float
    after: float
    group: int
    names: str = ""
    since: int | None = None

    @property
    def text(self) -> str:
        """The jump as a clause."""
        whose = f"parameter group {self.group}" + f" ({self.names})" * bool(self.names)
        start = f"the learning rate of {whose} had risen from {self.before:.3g}"
        if self.since is not None:
            return f"{start} at step {self.since:,} to {self.after:.3g}, and of no other group as much"
        return f"{start} to {self.after:.3g} at step {self.step:,}"


class _Followed:
    """Groups of one optimizer."""

    def __init__(self, rates: list[float], names: list[str]) -> None:
        self.rates, self.names = rates, names
        self.past = deque[tuple[int, list[float]]](maxlen=N_KEPT)  # where they have changed
        self.course = Thinned[tuple[int, list[float], list[float]]](N_COURSE)  # likewise, with those before


class GroupRates(Measurement):
    """Follows the rates of all groups of each optimizer that has several; one on a device is unknown.

    Attributes:
        jumps: the last 64 steps in which the rate of a group rises by half or more, and not that of all.
        rises: groups that have gone along with the others for 32 steps or more, and have left them step by
            step until the end, to twice their rate or more.
    """

    cadence = EVERY

    def __init__(self) -> None:
        self._followed: MutableMapping[Optimizer, _Followed] = WeakKeyDictionary()
        self.jumps = deque[Jump](maxlen=N_JUMPS)
        self.rises: list[Jump] = []

    def on_between(self, run: Run) -> None:
        opt = run.loop.opt
        if not isinstance(opt, Optimizer) or not 1 < len(opt.param_groups) <= MAX_GROUPS:
            return
        rates = [x if type(x := group["lr"]) is float else as_number(x) for group in opt.param_groups]
        known = self._followed.get(opt)
        if known is None or len(known.rates) != len(rates):
            known = self._followed[opt] = _Followed(rates, _names(run, opt))
        elif rates != known.rates:
            self.jumps.extend(_jumps(run.step, known, rates))
        else:
            return
        known.past.append((run.step, rates))
        known.course.add((run.step, rates, known.rates))
        known.rates = rates

    def tell(self, run: Run) -> None:
        leapt = {x.group for x in self.jumps}
        found = [x for known in self._followed.values() for x in _slow_rises(known)]
        self.rises = [x for x in found if x.group not in leapt]

    def before(self, step: int, within: int) -> Jump | None:
        """The largest jump within so many steps before a step; without any, the largest slow rise."""
        jumps = [x for x in self.jumps if step - within <= x.step < step]
        rises = (x for known in self._followed.values() if (x := _rise(known, step)) is not None)
        return max(jumps or rises, key=lambda x: x.after / x.before, default=None)

    def freeze(self) -> None:
        self._followed = {}


def as_number(rate: object) -> float:
    """A learning rate as a number; NaN if it is none, or on a device."""
    is_there = isinstance(rate, int | float) or (
        isinstance(rate, Tensor) and rate.is_cpu and rate.numel() == 1
    )
    return float(rate) if is_there else math.nan  # type: ignore[arg-type]


def _names(run: Run, opt: Optimizer) -> list[str]:
    names = {id(p): name for name, p in named_params(run.loop.model).items()}
    of_groups = ([names[id(p)] for p in group["params"] if id(p) in names] for group in opt.param_groups)
    return [join_names(of_group, N_NAMED) if of_group else "" for of_group in of_groups]


def _ratios(old: list[float], new: list[float]) -> list[float]:
    return [ratio(y, x) for x, y in zip(old, new, strict=True)]


def _jumps(step: int, known: _Followed, rates: list[float]) -> Iterator[Jump]:
    """Groups whose rate rises by half or more, unless all do so alike."""
    ratios = _ratios(known.rates, rates)
    sure = [x for x in ratios if math.isfinite(x)]
    if not sure or max(sure) <= ALONE * min(sure):
        return
    for i, x in enumerate(ratios):
        if x >= JUMP:
            yield Jump(step, known.rates[i], rates[i], i, known.names[i])


def _rise(known: _Followed, step: int) -> Jump | None:
    """The group whose rate has risen most over the 64 steps before, if it has doubled and the others stay."""
    past = [(at, rates) for at, rates in known.past if at < step]
    if not past:
        return None
    first, old = next((x for x in reversed(past) if x[0] <= step - N_STEPS), past[0])
    last, new = past[-1]
    ratios = _ratios(old, new)
    ordered = sorted((x for x in ratios if math.isfinite(x)), reverse=True)
    if len(ordered) < 2 or ordered[0] < RISE or ordered[1] > ordered[0] / ALONE:
        return None
    i = ratios.index(ordered[0])
    return Jump(last, old[i], new[i], i, known.names[i], max(first, step - N_STEPS))


def _slow_rises(known: _Followed) -> Iterator[Jump]:
    """Groups whose rate has left those of the others step by step, and has risen by half or more."""
    course = known.course.items
    for i, name in enumerate(known.names):
        ratios = [ratio(rates[i], median(rates[:i] + rates[i + 1 :])) for _, rates, _ in course]
        top = start = len(ratios) - 1
        while start > 0 and ratios[start - 1] <= ratios[start]:
            start -= 1
        low = ratios[start] * SAME
        while start > 0 and low / SAME**2 <= ratios[start - 1] <= low:
            start -= 1
        first = next((n for n in range(start, top + 1) if ratios[n] > low), None)
        if first is None or course[first][0] - course[start][0] < MIN_SPAN:
            continue
        step, before, after = course[first][0], course[first][2][i], course[top][1][i]
        if ratios[top] >= RISE * low and after >= JUMP * before > 0:
            yield Jump(course[top][0], before, after, i, name, step)
