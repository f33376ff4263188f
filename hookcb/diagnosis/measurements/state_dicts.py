"""Contents of state dicts that a program loads, reads and saves."""

import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer

from hookcb.core.torch_private import BatchNorm, is_flattened

MAX_ITEMS, MAX_DEPTH = 10_000, 4  # of what is read or saved
WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
Found = tuple[str, dict[Any, Any], bool]  # key of a dict, the dict, and whether it holds modules


class Renaming(NamedTuple):
    """Change of names that makes a state dict fit: `kind` is "strip", "add" or "remove" (anywhere)."""

    kind: str
    text: str
    fits: frozenset[str]  # names of the module that it fills


def renaming(missing: Mapping[str, Any], unexpected: Mapping[str, Any]) -> Renaming | None:
    """The change of names that lets most of what was given fit what is missing; None if none does.

    Args:
        missing: shapes by the names that a module has.
        unexpected: shapes by the names that were given.
    """
    fits: dict[tuple[str, str], set[str]] = {}

    def note(kind: str, text: str, name: str, other: str) -> None:
        if name in missing and other in unexpected and missing[name] == unexpected[other]:
            fits.setdefault((kind, text), set()).add(name)

    for other in unexpected:
        for rest in _ends(other):
            note("strip", other.removesuffix(rest), rest, other)
        for text in WRAPPERS:
            if text in other[1:]:
                note("remove", text, other.replace(text, ""), other)
    for name in missing:
        for rest in _ends(name):
            note("add", name.removesuffix(rest), name, rest)
    if not fits:
        return None
    (kind, text), names = max(fits.items(), key=lambda item: (len(item[1]), item[0][0] != "remove"))
    return Renaming(kind, text, frozenset(names))


def path_of(f: Any) -> str:
    """Absolute path of a file that was given, "" if it is open or in memory."""
    return os.path.abspath(os.fspath(f)) if isinstance(f, str | os.PathLike) else ""


def _ends(name: str) -> Iterator[str]:
    """Ends of a name, without its first parts."""
    while "." in name:
        name = name.partition(".")[2]
        yield name


def params(m: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    """Parameters by all of their names."""
    return m.named_parameters(remove_duplicate=False)


def statistics(m: nn.Module) -> dict[str, Tensor]:
    """Running means and variances of its batch norms, by their names in a state dict."""
    found = (
        (f"{name}.{kind}".lstrip("."), x)
        for name, norm in m.named_modules(remove_duplicate=False)
        if isinstance(norm, BatchNorm)
        for kind, x in (("running_mean", norm.running_mean), ("running_var", norm.running_var))
    )
    return {name: x for name, x in found if isinstance(x, Tensor) and not isinstance(x, UninitializedBuffer)}


def is_initial(name: str, x: Tensor) -> bool:
    """Whether a running mean is 0, or a running variance 1, as before any batch; waits for the device."""
    return is_plain(x) and bool((x == float(name.endswith("running_var"))).all())


def tensors(state: dict[Any, Any]) -> dict[str, Tensor]:
    """Tensors of a dict by their names; no code of a class that inherits from dict is run."""
    items = islice(dict.items(state), MAX_ITEMS)
    return {key: x for key, x in items if isinstance(key, str) and isinstance(x, Tensor)}


def is_plain(x: Tensor) -> bool:
    """Whether its address tells where it is."""
    is_whole = type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided
    return is_whole and not x.is_meta and not is_flattened(x)


def dicts_in(value: Any, key: str = "", depth: int = MAX_DEPTH) -> Iterator[tuple[str, dict[Any, Any], bool]]:
    """Dicts in plain containers with their keys, and whether they hold modules or lists of weights."""
    if isinstance(value, dict):
        items = list(islice(dict.items(value), MAX_ITEMS))
        yield key, value, any(isinstance(x, nn.Module) or _has_tensors(x) for _, x in items)
        if depth and not is_optimizer(value):
            for name, x in items:
                if isinstance(x, dict | list | tuple):
                    yield from dicts_in(x, str(name), depth - 1)
    elif type(value) in (list, tuple) and depth:
        for x in value[:MAX_ITEMS]:
            if isinstance(x, dict | list | tuple):
                yield from dicts_in(x, key, depth - 1)


def _has_tensors(x: Any) -> bool:
    """Whether it is a list of floats in tensors, whose names are not known."""
    items = x[:MAX_ITEMS] if type(x) in (list, tuple) else ()
    return any(isinstance(y, Tensor) and y.is_floating_point() and y.ndim for y in items)


def is_optimizer(state: dict[Any, Any]) -> bool:
    """Whether it has the form of the state of an optimizer."""
    states, groups = state.get("state"), state.get("param_groups")
    return isinstance(states, dict) and isinstance(groups, list) and all(isinstance(x, dict) for x in groups)


def is_scheduler(state: dict[Any, Any]) -> bool:
    """Whether it has the form of the state of a scheduler of torch."""
    return "last_epoch" in state and "_step_count" in state


def n_params(groups: list[dict[str, Any]]) -> int:
    """Number of parameters in the groups of an optimizer's state."""
    return sum(len(group.get("params", ())) for group in groups)


def numbers(state: dict[str, Any]) -> dict[str, float]:
    """Numbers in a group or in the state of a scheduler, such as a learning rate."""
    return {name: float(x) for name, x in state.items() if type(x) in (int, float)}


def entry_with(state: Any, own: Mapping[str, Any]) -> str:
    """Key of a dict in a state dict that has names of the module, if these were not given."""
    for key, found, _ in dicts_in(state if isinstance(state, dict) else {}):
        if key and not own.keys().isdisjoint(found):
            return key
    return ""
