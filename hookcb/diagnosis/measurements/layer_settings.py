"""LayerSettings: what a program changes in the layers of a model while it trains."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from hookcb.core.text import as_layer
from hookcb.core.torch_private import buffers_of, children_of, parameters_of, version_of
from hookcb.diagnosis.measurements.attributes import plain_objects
from hookcb.diagnosis.measurements.changes import (
    BUFFER,
    DTYPE,
    MODULES,
    PARAMS,
    SINGLE,
    Change,
    Known,
    is_number,
)
from hookcb.hooks.modules import named_modules

LEFT_OUT = {"lr", "initial_lr", "training"}  # which have records of their own
MAX_OBJECTS = 64  # of the user's, in attributes of layers


class Holds(NamedTuple):
    """Buffers, parameters and modules of a layer, in the mappings that it has them in."""

    buffers: Mapping[str, Tensor | None] = {}
    params: Mapping[str, Tensor | None] = {}
    modules: Mapping[str, nn.Module | None] = {}


class Followed(NamedTuple):
    """A layer, or an object in an attribute of one, and which of its attributes and buffers are followed."""

    name: str
    layer: str
    attributes: dict[str, Any]
    key: str  # of the object among these; "" for the layer itself
    holds: Holds
    numbers: tuple[str, ...]
    known: list[Known]


class LayerSettings:
    """Follows layers, and objects in their attributes, with what they hold.

    Of each, attributes that are numbers, such as `p`, `eps` and `momentum`, strings or dtypes, without
    private ones; names of its parameters, names and types of its modules, dtypes of its buffers and writes
    to these.

    Args:
        model: the model.
        step: number of the first batch.
    """

    def __init__(self, model: nn.Module, step: int) -> None:
        self._followed = [*_followed_in(model, step)]

    def changed(self, step: int, all_of_them: bool) -> Iterator[Change]:
        """Yields what has changed in all layers, or in one of them, each in turn."""
        followed = self._followed
        if followed and not all_of_them:
            followed = [followed[step % len(followed)]]
        for name, layer, attributes, key, holds, numbers, known in followed:
            of_each = _values_of(_own(attributes, key), holds, numbers)
            new = [x for own, values in zip(known, of_each, strict=True) for x in own.changed(values, step)]
            replaced = {BUFFER + x.name.removeprefix(DTYPE) for x in new}  # told by their new dtype
            yield from (x._replace(of=name, layer=layer) for x in new if x.name not in replaced)


def _followed_in(model: nn.Module, step: int) -> Iterator[Followed]:
    objects: dict[int, tuple[str, str, dict[str, Any], str]] = {}
    for name, m in named_modules(model).items():
        holds = Holds(buffers_of(m), parameters_of(m), children_of(m))
        are_plain = all(isinstance(x, dict) for x in holds)  # not those of TorchScript
        of = as_layer(name) or "the model", name, vars(m), ""
        yield from _followed(step, *of, holds if are_plain else Holds())
        for key, x in plain_objects(m):
            objects.setdefault(id(x), (f"{name}.{key}" if name else key, name, vars(m), key))
    for of in [*objects.values()][:MAX_OBJECTS]:
        yield from _followed(step, *of, Holds())


def _followed(
    step: int, name: str, layer: str, attributes: dict[str, Any], key: str, holds: Holds
) -> Iterator[Followed]:
    """A layer or an object, if there is anything to follow."""
    own = _own(attributes, key)
    numbers = tuple(plain_settings(own))
    if numbers or any(holds):
        known = [Known(values, step) for values in _values_of(own, holds, numbers)]
        yield Followed(name, layer, attributes, key, holds, numbers, known)


def _own(attributes: dict[str, Any], key: str) -> dict[str, Any]:
    """Attributes of a layer, or of the object that is in one of them now, which is not kept alive."""
    own: dict[str, Any] = getattr(attributes.get(key), "__dict__", {}) if key else attributes
    return own


def plain_settings(owner: dict[str, Any]) -> dict[str, Any]:
    """Public numbers, tuples of numbers, strings and dtypes, by their names."""
    named = {name: x for name, x in owner.items() if name[0] != "_" and name not in LEFT_OUT}
    return {name: x for name, x in named.items() if type(x) in SINGLE or is_number(x)}


def _values_of(
    attributes: dict[str, Any], holds: Holds, numbers: tuple[str, ...]
) -> tuple[dict[str, Any], ...]:
    """Numbers of a layer, the names and types of what it holds, and writes to its buffers."""
    buffers = [(name, x) for name, x in holds.buffers.items() if x is not None]
    return (
        {name: attributes.get(name) for name in numbers},
        {DTYPE + name: x.dtype for name, x in buffers}
        | {
            PARAMS: tuple(holds.params),
            MODULES: tuple([f"{name} ({type(m).__name__})" for name, m in holds.modules.items()]),
        },
        {BUFFER + name: (id(x), version_of(x)) for name, x in buffers if not x.is_inference()},
    )
