"""Settings: numbers of optimizers and layers that a program changes while it trains."""

from collections import deque
from collections.abc import MutableMapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from hookcb.diagnosis.fault import EVERY, Measurement
from hookcb.diagnosis.run import Run
from hookcb.hooks.modules import named_modules

N_CHANGES, MAX_GROUPS = 16, 8  # changes that are kept; groups of an optimizer that are followed
MIN_SPAN = 32  # steps with one value before a change
NUMBERS = {bool, int, float}
PLAIN = {*NUMBERS, tuple}
LEFT_OUT = {"lr", "initial_lr", "training"}  # which have records of their own


class Change(NamedTuple):
    """A number that had stayed the same and was then changed.

    Attributes:
        step: number of the first batch with the new value, as far as was seen.
        last: that of the last batch in which the old one was seen.
        name: of the setting.
        before, after: its values; numbers, or tuples of these.
        layer: name of the layer that has it; "" of the model itself, None of an optimizer.
        group: index of the parameter group, -1 if the optimizer has only one.
    """

    step: int
    last: int
    name: str
    before: Any
    after: Any
    layer: str | None = None
    group: int = -1


class _Known:
    """Values of settings, and the first and last step in which they were all so."""

    __slots__ = ("last", "since", "values")

    def __init__(self, values: dict[str, Any], step: int) -> None:
        self.values, self.since, self.last = values, step, step

    def changed(self, owner: dict[str, Any], step: int) -> list[Change]:
        """Takes the values of a step; returns those that are new, if all had stayed for 32 steps."""
        values = {name: owner.get(name) for name in self.values}
        if not PLAIN.issuperset(map(type, values.values())):
            return []  # a tensor, which cannot be compared at no cost
        if values == self.values:
            self.last = step
            return []
        old, last, is_long = self.values, self.last, self.last - self.since >= MIN_SPAN
        self.values, self.since, self.last = values, step, step
        new = ((name, x) for name, x in values.items() if is_long and x != old[name])
        return [Change(step, last, name, old[name], x) for name, x in new]


class Settings(Measurement):
    """Follows settings: of up to eight groups of each optimizer, in each step, and of layers.

    Those of a layer are its attributes that are numbers, such as `p`, `eps` and `momentum`, without private
    ones: of all layers in inspected batches, and of one in each other batch, in turn. What changes often, as
    by a schedule, was not changed by a program once.

    Attributes:
        changes: the last 16, where no setting of the group or layer had changed for 32 steps before.
    """

    cadence = EVERY

    def __init__(self) -> None:
        self.changes = deque[Change](maxlen=N_CHANGES)
        self._of_layers: list[tuple[str, dict[str, Any], _Known]] = []  # names, attributes, numbers of these
        self._of_groups: MutableMapping[Optimizer, list[_Known]] = WeakKeyDictionary()

    def on_model(self, run: Run) -> None:
        for layer, m in named_modules(run.loop.model).items():
            if settings := _settings(vars(m)):
                self._of_layers.append((layer, vars(m), _Known(settings, run.step)))

    def on_batch(self, run: Run) -> None:
        layers = self._of_layers
        if layers and not run.looking:
            layers = [layers[run.step % len(layers)]]
        for layer, attributes, known in layers:
            new = known.changed(attributes, run.step)
            self.changes += [x._replace(layer=layer) for x in new]

    def on_between(self, run: Run) -> None:
        opt = run.loop.opt
        if not isinstance(opt, Optimizer):
            return
        groups = opt.param_groups[:MAX_GROUPS]
        known = self._of_groups.setdefault(opt, [])
        for i, group in enumerate(groups):
            if i == len(known):
                known.append(_Known(_settings(group), run.step))
                continue
            new = known[i].changed(group, run.step)
            self.changes += [x._replace(group=i if len(groups) > 1 else -1) for x in new]

    def freeze(self) -> None:
        self._of_layers, self._of_groups = [], {}


def _settings(owner: dict[str, Any]) -> dict[str, Any]:
    """Public numbers, and tuples of numbers, by their names."""
    named = {name: x for name, x in owner.items() if name[0] != "_" and name not in LEFT_OUT}
    return {
        name: x
        for name, x in named.items()
        if type(x) in NUMBERS or (type(x) is tuple and NUMBERS.issuperset(map(type, x)))
    }
