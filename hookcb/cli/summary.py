"""`hookcb summary`: the layers of a model, from the command line."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import torch
from torch import Tensor, nn

from hookcb.cli.hints import NotFoundError, no_module, similar, similar_files
from hookcb.core.console import show, show_error
from hookcb.hooks.summary import module_summary

DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
WRONG = 2
MAX_LENGTH = 100  # of a layer's own text in a message


@dataclass(frozen=True, slots=True)
class InputSpec:
    """Sizes and dtype of an input.

    >>> from hookcb.cli.summary import InputSpec
    >>> InputSpec.parse("1,77:int64").tensor().shape
    torch.Size([1, 77])
    """

    sizes: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `"1,3,224,224"` or `"1,77:int64"`.

        Raises:
            ValueError: If it is neither.
        """
        sizes, _, name = text.partition(":")
        parts = [size.strip() for size in sizes.split(",")]
        if not all(part.isdecimal() for part in parts):
            raise ValueError(f"sizes must be whole numbers with commas, such as 1,3,224,224, got {text!r}")
        if (name := name or "float32") not in DTYPES:
            raise ValueError(
                f"there is no dtype {name!r} of inputs{similar(name, DTYPES)}; dtypes: {', '.join(DTYPES)}"
            )
        return cls(tuple(map(int, parts)), getattr(torch, name))

    def tensor(self) -> Tensor:
        """Ones of these sizes; zeros if they are whole numbers, as index 0 is valid in every embedding."""
        is_whole = not self.dtype.is_floating_point and self.dtype is not torch.bool
        return (torch.zeros if is_whole else torch.ones)(self.sizes, dtype=self.dtype)


def show_summary(target: str, inputs: Sequence[InputSpec], depth: int | None = None) -> int:
    """Shows the summary of a model after one forward.

    Args:
        target: `module:name` or `file.py:name` of a model, or of what makes one without arguments.
        inputs: its inputs.
        depth: depth of the deepest rows; None for all.

    Returns:
        Exit code: 0; 1 if the model cannot be made or its forward fails; 2 if there is no such name.
    """
    try:
        thing = _find(target)
    except NotFoundError as error:
        show_error(f"hookcb summary: {error}")
        return WRONG
    except Exception as error:
        show_error(f"hookcb summary: {target.rpartition(':')[0]} cannot be imported: {_said(error)}")
        return 1
    try:
        model = thing if isinstance(thing, nn.Module) else thing()
        if not isinstance(model, nn.Module):
            raise TypeError(f"it gives {type(model).__name__}, not an nn.Module")
    except Exception as error:
        show_error(
            f"hookcb summary: {target} does not make a model without arguments: {_said(error)}; "
            "name a function without arguments that returns the model"
        )
        return 1
    try:
        summary = module_summary(model, *(spec.tensor() for spec in inputs), depth=depth)
    except Exception as error:
        given = " ".join(f"--input {_typed(spec)}" for spec in inputs) or "no --input"
        show_error(
            f"hookcb summary: the forward fails with {given}: {_said(error)}; give the sizes that "
            f"the model takes, one --input each{_first_layer(model)}"
        )
        return 1
    show(summary)
    return 0


def _find(target: str) -> Any:
    """The object that `module:name` or `file.py:name` names.

    Raises:
        NotFoundError: If there is none.
        Exception: If the module raises when it is imported.
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise NotFoundError(
            f"MODEL must be module:name or file.py:name, got {target!r}; "
            f"try: hookcb summary {target.strip(':') or 'models.py'}:NAME"
        )
    with _importing(place):
        found: Any = _module(place)
    for part in name.split("."):
        if not hasattr(found, part):
            public = [n for n in vars(found) if not n.startswith("_")] if hasattr(found, "__dict__") else []
            raise NotFoundError(f"{place} has no {name!r}{similar(part, public)}")
        found = getattr(found, part)
    if not isinstance(found, nn.Module) and not callable(found):
        raise NotFoundError(
            f"{target} must be a model, or a function or class that makes one, got {found!r:.60}"
        )
    return found


@contextmanager
def _importing(place: str) -> Iterator[None]:
    """Has imports find modules beside a file, or in the current folder."""
    is_file = place.endswith(".py")
    folder = os.path.dirname(os.path.realpath(place)) if is_file else os.getcwd()
    before = sys.path[:]
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path[:] = before


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        return _import(place)
    if not Path(place).is_file():
        raise NotFoundError(f"there is no file {place!r}{similar_files(place)}")
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    assert spec is not None  # as its name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as dataclasses and pickle look there
    spec.loader.exec_module(module)
    return module


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if f"{name}.".startswith(f"{error.name}."):
            raise NotFoundError(no_module(name)) from None
        raise  # a module that it imports is missing


def _said(error: Exception) -> str:
    lines = [line.strip() for line in (f"{type(error).__name__}: {error}").splitlines() if line.strip()]
    return "; ".join([*lines[:3], *getattr(error, "__notes__", [])])


def _typed(spec: InputSpec) -> str:
    sizes = ",".join(map(str, spec.sizes))
    return sizes if spec.dtype is torch.float32 else f"{sizes}:{str(spec.dtype).removeprefix('torch.')}"


def _first_layer(model: nn.Module) -> str:
    """Text about the first layer with parameters, whose settings often tell which sizes the model takes."""
    for name, m in model.named_modules():
        if next(m.parameters(recurse=False), None) is not None and len(shown := repr(m)) <= MAX_LENGTH:
            return f"; its first layer with weights is {name or 'the model'}: {shown}"
    return ""
