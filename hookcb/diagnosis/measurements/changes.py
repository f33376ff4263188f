"""Changes: values that had stayed the same and then were others for good, and words on them."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hookcb.core.text import as_layer, join_names

MIN_SPAN, MIN_STAY = 32, 8  # steps with one value before a change, and with the new one
NUMBERS = {bool, int, float}
SINGLE = {*NUMBERS, str, torch.dtype}
PLAIN = {*SINGLE, tuple, type(None)}
# what is followed: of each step
BACKWARDS, CLIPPED, LIMIT = "backwards per step", "parameters that are clipped", "limit of clip_grad_norm_"
GRADIENT, CLEARED, OPTIMIZER = "gradient", "gradients", "optimizer"
# of the loss: the number that multiplies a mean, numbers that scale the rest, and operations; of the model
FACTOR, FACTORS, OPERATIONS, GRAPH = "the factor", "numbers that scale parts", "operations", "autograd graph"
# of the inputs, and of what a layer holds; the last two before the name of a buffer
SHAPE, PARTS, PARAMS, MODULES = "shape", "tensors", "names of parameters", "modules"
BUFFER, DTYPE = "buffer ", "dtype of "
PARAM = "="  # before the name of a parameter in a graph
LOADED = -2  # stands for the batch before a first step after a state was loaded


class Change(NamedTuple):
    """Something that had stayed the same and was then changed.

    Attributes:
        step: number of the first batch with the new value, as far as was seen.
        last: that of the last batch in which the old one was seen; -2 if it was in a state that was loaded.
        name: of the setting.
        before, after: its values.
        of: what has it, as text.
        layer: name of the layer that has it, None if it is of none.
    """

    step: int
    last: int
    name: str
    before: Any
    after: Any
    of: str = "the optimizer"
    layer: str | None = None

    @property
    def text(self) -> str:
        """Words on what has changed, how and when, without a verb."""
        if self.last == LOADED:
            values = f"{shown(self.before)} in the state that was loaded and {shown(self.after)}"
            return f"{self.name} of {self.of}, {values} in its first step, {self.step:,}"
        when = when_of(self.last, self.step)
        if self.name == OPTIMIZER:
            return f"the optimizer, from {self.before[0]} to another {self.after[0]} {when}"
        if self.name == GRADIENT:
            way = "is written to" if self.after else "is no longer written to"
            return f"the gradient of {self.of} {way} between backward and step, first seen {when}"
        if self.name == CLEARED:
            way = "cleared" if self.after else "no longer cleared"
            return f"gradients are {way} before each backward, from step {self.step:,} on"
        if self.name.startswith(BUFFER):
            return f"{self.name} of {self.of}, which was written to {when}"
        how = f"from {shown(self.before)} to {shown(self.after)}"
        if self.name in (OPERATIONS, PARTS, MODULES):
            how = _difference(self.before, self.after)
        if self.name == GRAPH:
            place = f", near {as_layer(self.layer)}" if self.layer else ""
            how = f"{_difference(self.before, self.after)}{place},"
        return f"{self.name} of {self.of}, {how} {when}"


def _difference(before: Sequence[str], after: Sequence[str]) -> str:
    """Words on names that were added and removed: those of parameters, or else of operations."""
    old, new = Counter(before), Counter(after)
    said = []
    for way, names in (("now with", new - old), ("without", old - new)):
        found = [x[1:] for x in names if x[0] == PARAM] or [*names]
        said += [f"{way} {join_names(found, 4)}"] * bool(found)
    return ", ".join(said) or "in another order"


def shown(value: Any) -> str:
    """A value in words: a number with four digits, "none" if it is infinite, a dtype without `torch.`."""
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else "none"
    if isinstance(value, tuple):
        return f"({', '.join(map(shown, value))})"
    return str(value).removeprefix("torch.")


def is_number(x: Any) -> bool:
    """Whether a value is a plain number, or a tuple of such."""
    return type(x) in NUMBERS or (type(x) is tuple and NUMBERS.issuperset(map(type, x)))


def when_of(last: int, step: int) -> str:
    """Words on a change between two steps that were looked at, of which `last` is the one before it."""
    return f"between steps {last:,} and {step:,}" if step > last + 1 else f"at step {step:,}"


class Known:
    """Values of settings, and the first and last step in which they were all so.

    Args:
        values: those of the first step.
        step: that step.
        min_seen: number of looks with one value before a change, and of a third as many after it, if not all
            steps are looked at: values that alternate may be the same in some looks by chance.
    """

    __slots__ = ("_before", "_min_seen", "_n_seen", "_new", "last", "since", "values")

    def __init__(self, values: dict[str, Any], step: int, min_seen: int = 1) -> None:
        self.values, self.since, self.last = values, step, step
        self._min_seen, self._n_seen = min_seen, 1
        self._new: list[Change] = []  # not told yet, as the old values may come back
        self._before = values, step

    @property
    def is_new(self) -> bool:
        """Whether a change waits to be told."""
        return bool(self._new)

    def changed(self, values: dict[str, Any], step: int) -> list[Change]:
        """Takes the values of a step; returns what has left a value that had stayed, and not come back."""
        if not PLAIN.issuperset(map(type, values.values())):
            return []  # a tensor, which cannot be compared at no cost
        if self._new:
            return self._left(values, step)
        if values == self.values:
            self.last, self._n_seen = step, self._n_seen + 1
            return []
        is_long = self.last - self.since >= MIN_SPAN and self._n_seen >= self._min_seen
        old, self._n_seen = self.values, 1
        names = [name for name in values if is_long and values[name] != old.get(name)]
        self._new = [Change(step, self.last, name, old.get(name), values[name]) for name in names]
        self._before, self.values, self.since, self.last = (old, self.since), values, step, step
        return []

    def _left(self, values: dict[str, Any], step: int) -> list[Change]:
        """Takes values after a change that is not told yet; they may be others by now, as of a schedule."""
        if values == self._before[0]:
            (self.values, self.since), self.last, self._new = self._before, step, []
            self._n_seen = 1
            return []
        if values != self.values:
            self.values, self.since = values, step
        self.last, self._n_seen = step, self._n_seen + 1
        if step - self._new[0].step < MIN_STAY or self._n_seen <= self._min_seen // 3:
            return []
        new, self._new = self._new, []
        return [x._replace(after=values.get(x.name)) for x in new if values.get(x.name) != x.before]


def changed(known: list[Known], values: dict[str, Any], step: int, min_seen: int = 1) -> list[Change]:
    """Takes values of a step, each of which is followed by itself; returns what has changed."""
    if not known:
        known += [Known({name: x}, step, min_seen) for name, x in values.items()]
    pairs = zip(known, values.items(), strict=True)
    return [change for own, (name, x) in pairs for change in own.changed({name: x}, step)]
