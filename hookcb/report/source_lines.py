"""The line of the source at which a layer is made."""

import ast
import inspect
import linecache
import sys
import textwrap
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from torch import nn

from hookcb.core.torch_private import plain_class

MAX_WIDTH = 160  # of a quoted line


class SourceLine(NamedTuple):
    """A line of a file: "model.py:12", and what it says."""

    place: str
    line: str


def line_of(model: nn.Module, name: str) -> SourceLine | None:
    """The line that makes the layer `name`; None if it is not known.

    It is the only assignment to the layer in the script, `model.head = …`, or to that attribute in the class
    of the module that has it, or to the variable of the script that has the whole model. In a `Sequential` it
    is the line of the argument.
    """
    path = name.split(".") if name else []
    try:
        modules = [model]
        for part in path:
            modules.append(getattr(modules[-1], part))
        if _has_assignments(made := _in_script(model, path)):
            return _quoted(*_argument(made, [], modules[-1]))
        for n in reversed(range(len(path))):  # the nearest module whose class names it
            if _has_assignments(made := _in_class(modules[n], path[n])):
                return _quoted(*_argument(made, path[n + 1 :], modules[-1]))
        made = _in_script(model, [])
        return _quoted(*_argument(made, path, modules[-1])) if _has_assignments(made) else None
    except (AttributeError, LookupError, OSError, TypeError, ValueError, SyntaxError):
        return None  # there is no source, it is another by now, or several lines make it


class _Made(NamedTuple):
    """Assignments in a file, whose lines are counted from `offset`."""

    file: str = ""
    offset: int = 0
    values: Sequence[ast.expr] = ()


def _in_class(owner: nn.Module, attribute: str) -> _Made:
    """Assignments `self.attribute = …` in the class of a module of the user's, or in the nearest base."""
    for kind in plain_class(owner).__mro__:
        if kind.__module__.startswith("torch."):
            break
        lines, first = inspect.getsourcelines(kind)
        tree = _parsed(textwrap.dedent("".join(lines)))
        found = [value for target, value in _assignments(tree) if _dotted(target) == ["self", attribute]]
        if found:
            return _Made(inspect.getsourcefile(kind) or "", first - 1, found)
    return _Made()


def _in_script(model: nn.Module, path: list[str]) -> _Made:
    """Assignments in the script to the variable that has the model, or to a layer of it, `model.head = …`."""
    script = sys.modules.get("__main__")
    file = getattr(script, "__file__", None) or ""
    names = [key for key, x in vars(script).items() if x is model] if script else []
    if not names or not file.endswith(".py"):
        return _Made()
    tree, wanted = _parsed("".join(linecache.getlines(file))), [[name, *path] for name in names]
    return _Made(file, 0, [value for target, value in _assignments(tree) if _dotted(target) in wanted])


@lru_cache(maxsize=16)  # a page that is made again and again asks for the same ones
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def _has_assignments(made: _Made) -> bool:
    return len(made.values) > 0


def _assignments(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            yield from ((target, node.value) for target in node.targets)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield node.target, node.value


def _dotted(target: ast.expr) -> list[str]:
    """Parts of `model.layers[2]`, "model", "layers" and "2"; empty for any other expression."""
    if isinstance(target, ast.Name):
        return [target.id]
    if isinstance(target, ast.Attribute):
        return [*before, target.attr] if (before := _dotted(target.value)) else []
    if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
        return [*before, str(target.slice.value)] if (before := _dotted(target.value)) else []
    return []


def _argument(made: _Made, path: list[str], layer: nn.Module) -> tuple[str, int]:
    """File and line of the argument of nested `Sequential`s that makes a layer, as far as they show it.

    Raises:
        LookupError: If there are several lines, or the line makes a layer of another type.
    """
    if len(made.values) > 1:
        raise LookupError
    value, rest = made.values[0], list(path)
    while rest:
        args = value.args if isinstance(value, ast.Call) else []
        if (
            not rest[0].isdigit()
            or int(rest[0]) >= len(args)
            or any(isinstance(x, ast.Starred) for x in args)
        ):
            break
        value = args[int(rest.pop(0))]
    called = _dotted(value.func)[-1:] if isinstance(value, ast.Call) else []
    kind = getattr(nn, called[0], None) if called else None
    if not rest and isinstance(kind, type) and not isinstance(layer, kind):
        raise LookupError
    return made.file, made.offset + value.lineno


def _quoted(file: str, number: int) -> SourceLine | None:
    line = linecache.getline(file, number).strip()
    return SourceLine(f"{Path(file).name}:{number}", line[:MAX_WIDTH]) if line else None
