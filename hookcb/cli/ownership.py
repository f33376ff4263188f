"""Finds the model of a script that a call or a loss belongs to, and the name that the script gives it."""

import gc
import inspect
import sys
from collections.abc import Iterator
from itertools import islice
from types import FrameType, ModuleType
from typing import Any

from torch import Tensor, nn

from hookcb.cli.tracked_model import TrackedModel
from hookcb.core import graph
from hookcb.core.torch_private import is_initialized
from hookcb.hooks.modules import without_wrappers

MAX_ITEMS = 100  # of a list or dict of the script, when looking for a model in it
MAX_VIEWS = 4  # operations between a parameter and the one that uses it
MAX_NODES = 50_000  # in the graph of a loss, when looking for the models that it depends on


def params_in(m: nn.Module) -> set[int]:
    """Ids of the parameters of a module, by which a model is known, whatever is made around it."""
    return {id(p) for p in m.parameters()}


def has_part(root: nn.Module, m: nn.Module) -> bool:
    """Whether `m` is `root`, or a module in it."""
    return any(part is m for part in root.modules())


def layers(root: nn.Module) -> list[nn.Module]:
    """`root`, the module in it that has all of its parameters, the one in that, and so on."""
    ids, found = params_in(root), [root]
    while (inside := next((m for m in found[-1].children() if params_in(m) == ids), None)) is not None:
        found.append(inside)
    return found


def shared(m: nn.Module, root: nn.Module) -> nn.Module | None:
    """The part of `root` that `m` is, or is made around without adding parameters; None if there is none."""
    return next((part for part in layers(m) if has_part(root, part)), None)


def belongs(m: nn.Module, root: nn.Module) -> bool:
    """Whether `m` is a part of `root`, or made around one that has not all parameters of `root`."""
    part = shared(m, root)
    return part is m or (part is not None and params_in(part) < params_in(root))


def modules_alive() -> list[nn.Module]:
    """All modules of this process, without those that are being made."""
    found = (x for x in gc.get_objects() if issubclass(type(x), nn.Module))
    return [m for m in found if is_initialized(m)]


def owner_at_work(m: nn.Module) -> nn.Module | None:
    """Outermost module that contains `m`, or its parameters, and has a method running, else `m`.

    None in the `__init__` of a module, which may call one of its parts to learn a shape.
    """
    root = m
    for frame in _frames():
        code = frame.f_code
        owner = _variables(frame).get(code.co_varnames[0]) if code.co_argcount else None  # self, by any name
        if isinstance(owner, nn.Module):
            if code.co_name == "__init__":
                return None
            root = owner if params_in(root) <= params_in(owner) else root
    return root


def kept_by_script(root: nn.Module) -> tuple[nn.Module, str]:
    """The module that the script keeps longest, of `root` and those that it wraps, and its variable's name.

    A module that is made anew around the model for each call, as by an ODE solver, is in variables of inner
    functions only. The name is "" if no variable has it, and the first one if several have.
    """
    around = layers(root)
    while any(len(list(m.children())) > 1 for m in around[:-1]):
        around.pop()  # what is beside it must be seen too
    for frame in reversed(_frames()):
        held = list(_held(_variables(frame)))
        kept = next((m for m in around if any(x is m for _, x in held)), None)
        if kept is not None:
            kept = root if without_wrappers(root) is kept else kept
            same = (kept, without_wrappers(kept))
            return kept, next(name for name, x in held if any(x is m for m in same))
    return root, ""


def _frames() -> list[FrameType]:
    """Frames of the script and its packages in progress in this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(2)
    found = []
    while frame is not None:
        if not str(frame.f_globals.get("__name__")).startswith("hookcb."):
            found.append(frame)
        frame = frame.f_back
    return found


def _variables(frame: FrameType) -> dict[str, Any]:
    """Variables of a frame.

    Before Python 3.13 the frame keeps what was read until it ends; its tensors are removed from that.
    """
    read = frame.f_locals
    found = dict(read)
    if isinstance(read, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # else they are the variables
        for name in [name for name, x in found.items() if issubclass(type(x), Tensor)]:
            del read[name]
    return found


def _held(variables: dict[str, Any]) -> Iterator[tuple[str, nn.Module]]:
    """Modules among variables, their attributes and items, by name: `net`, `agent.net`, `nets[0]`."""
    for name, x in variables.items():
        of = "" if name == "self" else f"{name}."
        if issubclass(type(x), nn.Module):
            inside = [(f"{of}{part}", m) for part, m in x.named_children()]
            yield from [(name, x), *inside] if of else inside
        elif issubclass(type(x), list | tuple):
            yield from ((f"{name}[{i}]", m) for i, m in enumerate(x[:MAX_ITEMS]) if _is_module(m))
        elif issubclass(type(x), dict):
            items = islice(dict.items(x), MAX_ITEMS)
            yield from ((f"{name}[{key!r}]", m) for key, m in items if _is_module(m))
        elif not issubclass(type(x), type | ModuleType):
            yield from ((f"{of}{key}", m) for key, m in _attributes(x).items() if _is_module(m))


def _is_module(x: object) -> bool:
    return issubclass(type(x), nn.Module)


def _attributes(x: object) -> dict[str, Any]:
    """Attributes of an object, without calling code of its class."""
    try:
        return dict(object.__getattribute__(x, "__dict__"))
    except AttributeError:
        return {}


def gives_to_loss(model: TrackedModel, loss: Tensor, models: list[TrackedModel]) -> bool:
    """Whether a loss takes outputs of a model as they are, as targets or features, not through another."""
    if model.model is None or model.watch is None:
        return False
    others = set().union(*(params_in(m.model) for m in models if m.model)) - params_in(model.model)
    outputs = set(graph.roots(model.watch.pred))
    nodes = graph.walk(
        [loss.grad_fn],
        at_most=MAX_NODES,
        through=lambda at: others.isdisjoint(map(_leaf_id, graph.inputs(at))),
    )
    return any(at in outputs for at in nodes)


def _leaf_id(node: Any) -> int:
    """Id of the parameter that an operation gets from `node`, perhaps transposed or cast; 0 if it is none."""
    for _ in range(MAX_VIEWS):
        if (leaf := graph.leaf(node)) is not None:
            return id(leaf)
        node = graph.only_input(node)
    return 0


def models_behind(loss: Tensor, models: list[TrackedModel]) -> list[TrackedModel]:
    """Models that a loss depends on; in the same order."""
    params = {id(p): model for model in models if model.model for p in model.model.parameters()}
    leaves = graph.leaves([loss.grad_fn], MAX_NODES)
    reached = {id(model) for leaf in leaves if (model := params.get(id(leaf)))}
    return [model for model in models if id(model) in reached]
