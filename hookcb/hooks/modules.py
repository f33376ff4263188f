"""Selection of a model's modules, and questions about them."""

from collections.abc import Callable, Container, Iterable, Iterator
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookcb.core.arguments import did_you_mean
from hookcb.core.text import join_names
from hookcb.core.torch_private import (
    WRAPPERS,
    children_of,
    compile_counts,
    compiled_call,
    flattened_modules,
    is_compile_wrapper,
    is_dynamo_imported,
    without_compile_wrapper,
    wrapped_module,
)

WRAPPED = frozenset(WRAPPERS.values())
Where = str | type[nn.Module] | nn.Module | Callable[[nn.Module], bool]


class ModelGoneError(RuntimeError):
    """The model was freed; observers do not keep it alive."""


def find_modules(
    model: nn.Module, where: Where | Iterable[Where] | None = None, include_paramless: bool = False
) -> dict[str, nn.Module]:
    """The modules of `model` that `where` selects, by qualified name, in the order of `named_modules()`.

    A shared module is found once, under its first name.

    Args:
        model: the model.
        where: None (leaves with parameters), a glob on qualified names (`"blocks.*.attn"`, where `*` also
            spans dots), a type, a predicate, a module of the model, or several of these.
        include_paramless: with None, also the leaves without parameters, such as activation functions.

    Raises:
        LookupError: If one of them selects nothing; the message lists the modules.
        TypeError: If `where` is of another type, or the model is TorchScript.
    """
    named = named_modules(model)
    if where is None:
        leaves = {
            name: m for name, m in named.items() if is_leaf(m) and not isinstance(m, torch.jit.ScriptModule)
        }
        flat = flattened_modules(model)
        found = {n: m for n, m in leaves.items() if include_paramless or has_params(m) or id(m) in flat}
        if found:
            return found
        if isinstance(model, torch.jit.ScriptModule):
            raise TypeError(torchscript_message(model))
        raise LookupError(
            f"no module of {type(model).__name__} is a leaf with parameters; it has: {join_names(named)}"
        )
    aliases = [(plain_name(name), m) for name, m in unwrapped(model).named_modules(remove_duplicate=False)]
    several = [where] if _is_single(where) else list(where)  # type: ignore[arg-type]  # then it is iterable
    if not several:
        raise LookupError(
            f"where is empty; choose from the modules of {type(model).__name__}: {join_names(named)}"
        )
    selected: set[int] = set()
    for one in several:
        ids = {id(m) for name, m in aliases if _selects(one, name, m)}
        if not ids:
            raise _nothing(model, one, named)
        selected |= ids
    return {name: m for name, m in named.items() if id(m) in selected}


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """All modules of `model` by qualified name, a shared one under its first name.

    Names are without the wrappers of torch.compile, DataParallel, DistributedDataParallel, activation
    checkpointing and FullyShardedDataParallel; these themselves are left out.
    """
    return {plain_name(name): m for name, m in unwrapped(model).named_modules() if wrapped_module(m) is None}


def modules_in(model: nn.Module) -> list[nn.Module]:
    """All modules of `model`, each once, level by level; in a third of the calls of `model.modules()`."""
    found, known = [model], {model}
    for m in found:
        for child in children_of(m).values():
            if child is not None and child not in known:
                known.add(child)
                found.append(child)
    return found


def names_around(name: str) -> Iterator[str]:
    """Names of the modules around one, innermost first: of "blocks.0.conv" "blocks.0", "blocks" and ""."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside the wrappers of `torch.compile`, DataParallel and DistributedDataParallel."""
    parallel = nn.DataParallel, nn.parallel.DistributedDataParallel
    while is_compile_wrapper(model) or isinstance(model, parallel):
        model = without_compile_wrapper(model) if is_compile_wrapper(model) else model.module  # type: ignore[assignment]
    return model


def without_wrappers(m: nn.Module) -> nn.Module:
    """The module inside all wrappers, those in which it is called included; for its name and its type."""
    while (inside := wrapped_module(m := unwrapped(m))) is not None:
        m = inside
    return m


def has_params(m: nn.Module) -> bool:
    """Whether `m` or a module in it has a parameter."""
    return any(True for _ in m.parameters())


class ParamCount(NamedTuple):
    """Number of parameters, and whether they are trained: True, False, or "partly"."""

    n: int
    trainable: bool | str


def total_params(m: nn.Module) -> ParamCount:
    """Number of parameters of `m`, each counted once, and whether they are trained.

    Parameters of a lazy module that has not run yet count 0.

    >>> import torch
    >>> from hookcb import total_params
    >>> model = torch.nn.Sequential(torch.nn.Linear(10, 30), torch.nn.Linear(30, 2))
    >>> _ = model[0].requires_grad_(False)
    >>> total_params(model)
    ParamCount(n=392, trainable='partly')
    """
    params = list(m.parameters())
    trained = {p.requires_grad for p in params}
    n = sum(p.numel() for p in params if not is_lazy(p))
    return ParamCount(n, "partly" if len(trained) > 1 else True in trained)


def has_uninitialized(m: nn.Module) -> bool:
    """Whether `m` is or contains a lazy module that has not run yet."""
    return any(map(is_lazy, [*m.parameters(), *m.buffers()]))


def is_leaf(m: nn.Module) -> bool:
    """Whether `m` has no submodules."""
    return not any(True for _ in m.children())


def make_ready_for_hooks(model: nn.Module) -> None:
    """Resets torch.compile if a module of `model` is compiled.

    A hook that was added after the first compiled call never runs (pytorch#117758). Before that call there
    is nothing to drop; other compiled functions of the process are compiled again at their next call.

    Raises:
        TypeError: If `model` is or contains a DataParallel on several devices.
    """
    for name, m in model.named_modules():
        if isinstance(m, nn.DataParallel) and len(m.device_ids) > 1:  # else it calls the module itself
            what = f"its module {name!r}" if name else "the model"
            raise TypeError(
                f"{what} is a DataParallel on devices {list(m.device_ids)}, which runs copies of its layers "
                "that hooks cannot follow; use torch.nn.parallel.DistributedDataParallel, or train the model "
                "inside, .module, on one device"
            )
    if is_dynamo_imported() and any(map(is_compiled, model.modules())):
        torch.compiler.reset()


def contains_compiled(model: nn.Module) -> bool:
    """Whether the model is compiled, or anything in this process, which may contain hooks of its modules."""
    return has_compiled() or any(map(is_compiled, modules_in(model)))


def has_compiled() -> bool:
    """Whether anything was compiled in this process."""
    # with fullgraph=True torch counts no frames
    return bool(compile_counts("frames") or compile_counts("stats"))


def is_compiled(m: nn.Module) -> bool:
    """Whether torch.compile was applied to this module itself."""
    return compiled_call(m) is not None or is_compile_wrapper(m)


@lru_cache(maxsize=1 << 16)  # as models are walked often
def plain_name(name: str) -> str:
    """A qualified name without the parts that wrappers inside the model add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPED)


def torchscript_message(m: nn.Module) -> str:
    """Message of the error for a module that cannot be watched as it is TorchScript."""
    return (
        f"{type(m).__name__} is TorchScript, which calls no hooks; "
        "train the module it was made from, and script it then"
    )


def _is_single(where: Any) -> bool:
    return isinstance(where, str | type | nn.Module) or callable(where) or not isinstance(where, Iterable)


def _selects(where: Any, name: str, module: nn.Module) -> bool:
    if isinstance(where, str):
        return fnmatchcase(name, where) and name != ""
    if isinstance(where, nn.Module):
        return module is without_wrappers(where)
    if isinstance(where, type):
        return isinstance(module, where)
    if callable(where):
        return bool(where(module))
    raise TypeError(
        f"where must be a glob, a type, a predicate, a module or a list of these, got {where!r:.80}"
    )


def _nothing(model: nn.Module, where: Any, named: dict[str, nn.Module]) -> LookupError:
    hint = did_you_mean(where, named) if isinstance(where, str) else ""
    what = f"matches {where!r}" if isinstance(where, str) else f"is selected by {where!r:.80}"
    return LookupError(f"no module of {type(model).__name__} {what}; {hint}it has: {join_names(named)}")


def unsaved_buffers(model: nn.Module, state: Container[str]) -> dict[str, Tensor]:
    """The buffers that are not in `state`, the model's `state_dict`."""
    return {name: x for name, x in model.named_buffers() if name not in state}


def resolve_device(device: str | torch.device) -> torch.device:
    """The device of that name; for "auto" the accelerator of this machine, or else the CPU."""
    if device != "auto":
        return torch.device(device)
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found or torch.device("cpu")


def device_of(model: nn.Module, device: torch.device | None = None) -> torch.device:
    """Moves the model to `device`, if given; returns the device of its first parameter or buffer."""
    if device is not None:
        model.to(device)
    first = next(chain(model.parameters(), model.buffers()), None)
    return first.device if first is not None else device or torch.device("cpu")


def outermost_compiled(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that torch.compile was applied to, by name: wrappers, and modules compiled in place."""
    found: dict[str, nn.Module] = {}
    if not any(map(is_compiled, model.modules())):  # the usual case, which needs no names
        return found
    names = {id(m): name for name, m in named_modules(model).items()}
    inside: set[int] = set()
    for m in model.modules():
        if is_compiled(m) and id(m) not in inside:
            found[names[id(without_wrappers(m))]] = m
            inside |= {id(inner) for inner in m.modules()}
    return found
