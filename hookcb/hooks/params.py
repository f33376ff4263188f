"""Selection of a model's parameters by name."""

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, NamedTuple
from weakref import ref

from torch import nn

from hookcb.core.text import join_names
from hookcb.core.torch_private import children_of, parameters_of, plain_class
from hookcb.hooks.modules import modules_in, plain_name, unwrapped

Which = str | Callable[[str, nn.Parameter], bool]


class Param(NamedTuple):
    """A selected parameter."""

    name: str
    p: nn.Parameter
    kind: str  # type of the module it belongs to


def find_params(model: nn.Module, which: Which | Iterable[Which] | None = None) -> list[Param]:
    """The parameters of `model` that `which` selects, each once, in the order of `named_parameters()`.

    Names are without wrappers, see `named_modules`; what FullyShardedDataParallel has flattened into one
    parameter is that one, `_flat_param`.

    Args:
        model: the model.
        which: None for all, a glob on qualified names (`"blocks.*.weight"`, where `*` also spans dots), a
            predicate `(name, parameter) -> bool`, or several of these.

    Raises:
        LookupError: If one of them selects nothing; the message lists the parameters.
        TypeError: If `which` is of another type.
    """
    every: dict[int, Param] = {}
    for prefix, m in unwrapped(model).named_modules():
        for name, p in parameters_of(m).items():
            if p is not None:
                full = plain_name(f"{prefix}.{name}" if prefix else name)
                every.setdefault(id(p), Param(full, p, plain_class(m).__name__))
    names = [param.name for param in every.values()]
    several = [None] if which is None else check_which(which)
    selected: set[str] = set()
    for one in several:
        found = {param.name for param in every.values() if _selects(one, param)}
        if not found:
            kind = type(unwrapped(model)).__name__
            if not names:
                raise LookupError(f"{kind} has no parameters")
            raise LookupError(f"no parameter of {kind} matches {one!r:.80}; it has: {join_names(names)}")
        selected |= found
    return [param for param in every.values() if param.name in selected]


def named_params(model: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters of `model` by name, as `find_params` names them; each once."""
    return {plain_name(name): p for name, p in unwrapped(model).named_parameters()}


def all_params(model: nn.Module) -> list[nn.Parameter]:
    """All parameters of `model`, soon listed; one that several modules share comes several times."""
    return [p for m in modules_in(model) for p in parameters_of(m).values() if p is not None]


class Held:
    """Modules and parameters that a model holds, none of which this keeps alive.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._all = [
            (
                ref(m),
                [
                    (name, ref(x))
                    for name, x in chain(children_of(m).items(), parameters_of(m).items())
                    if x is not None
                ],
            )
            for m in modules_in(model)
        ]

    def is_same(self) -> bool:
        """Whether the model still holds the same objects under the same names; others may have been added."""
        for known, inside in self._all:
            if (m := known()) is None:
                return False
            children, params = children_of(m), parameters_of(m)
            for name, x in inside:
                here = children if name in children else params
                if name not in here or here[name] is not x():
                    return False
        return True


def check_which(which: Any) -> list[Which]:
    """`which` as a list, checked.

    Raises:
        TypeError: If it is not a glob, predicate or several of these.
        ValueError: If it is empty.
    """
    single = isinstance(which, str) or callable(which)
    several: list[Any] = [which] if single else list(which) if isinstance(which, Iterable) else [None]
    for one in several:
        if not isinstance(one, str) and (not callable(one) or isinstance(one, type | nn.Module)):
            raise TypeError(
                "params must be a glob on parameter names, a predicate (name, parameter) -> bool, or a list "
                f"of these, got {which!r:.80}"
            )
    if not several:
        raise ValueError("params is empty; give globs on parameter names, or None for all parameters")
    return several


def _selects(which: Which | None, param: Param) -> bool:
    if isinstance(which, str):
        return fnmatchcase(param.name, which)
    return which is None or bool(which(param.name, param.p))
