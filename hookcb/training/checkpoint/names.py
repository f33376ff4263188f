"""Names of weights without those of wrappers, so that any form of a model reads what another has written."""

import copy
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from hookcb.core.torch_private import COMPILED_NAME, is_compile_wrapper, without_compile_wrapper
from hookcb.hooks.modules import plain_name

PARALLEL = nn.DataParallel, nn.parallel.DistributedDataParallel


def key_prefix(model: nn.Module) -> str:
    """Text that the wrappers around a model put before its names: "module." of DistributedDataParallel."""
    prefix = ""
    while is_compile_wrapper(model) or isinstance(model, PARALLEL):
        prefix += f"{COMPILED_NAME}." if is_compile_wrapper(model) else "module."
        model = without_compile_wrapper(model) if is_compile_wrapper(model) else model.module  # type: ignore[assignment]
    return prefix


def with_plain_names(model: nn.Module, named: dict[str, Any]) -> dict[str, Any]:
    """The same values by names without those of wrappers."""
    prefix = key_prefix(model)
    return _renamed(named, {name: plain_name(name.removeprefix(prefix)) for name in named})


def with_own_names(model: nn.Module, named: dict[str, Any], own: Iterable[str]) -> dict[str, Any]:
    """The same values by the names that this model has.

    Args:
        model: the model.
        named: values by the names of a file, written by any form of the model.
        own: names in the model.
    """
    prefix = key_prefix(model)
    table = {plain_name(name.removeprefix(prefix)): name for name in own}
    names = {}
    for name in named:
        plain = plain_name(name)
        if plain not in table and plain.removeprefix("module.") in table:
            plain = plain.removeprefix("module.")
        names[name] = table.get(plain, name if name.startswith(prefix) else prefix + name)
    return _renamed(named, names)


def plain_weights(named: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors by names without those of wrappers, of weights whose model is not known."""
    plain = {plain_name(name): x for name, x in named.items() if isinstance(x, Tensor)}
    if plain and all(name.startswith("module.") for name in plain):  # of DistributedDataParallel
        plain = {name.removeprefix("module."): x for name, x in plain.items()}
    return plain


def _renamed(named: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    if all(name == new for name, new in names.items()):
        return named
    renamed = copy.copy(named)  # not a new one, as the state of a model has attributes
    renamed.clear()
    renamed.update((names[name], x) for name, x in named.items())
    return renamed
