"""`hookcb summary`: the layers of a model that a module or a file has."""

import importlib
import os
import runpy
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hookcb.core.console import show, show_error
from hookcb.hooks.dry_run import sample_inputs
from hookcb.hooks.summary import module_summary

Input = tuple[tuple[int, ...], str]  # shape, with the batch, and name of the dtype


def summarize(where: str, inputs: Sequence[Input], depth: int | None = None) -> int:
    """Shows the layers of the model that `where` names, as package.module:name or file.py:name.

    Returns:
        Exit code: 0, or 1 if the model cannot be had or raises.
    """
    try:
        xb = sample_inputs([size for size, _ in inputs], [_dtype(dtype) for _, dtype in inputs])
        show(module_summary(_find(where), *xb, depth=depth), soft_wrap=True)
    except Exception as error:  # of the user's module or model, too
        notes = [*getattr(error, "__notes__", ())]
        if not inputs and isinstance(error, ValueError):
            notes.append("give the shape of each input with its batch, as --input 8,3,32,32")
        elif inputs:
            given = " and ".join(f"{','.join(map(str, size))}:{dtype}" for size, dtype in inputs)
            notes.append(f"the input was {given}; a shape has the batch, and a dtype follows a colon")
        show_error("\n  ".join([f"hookcb summary: {type(error).__name__}: {error}", *notes]))
        return 1
    return 0


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}; such as float32, int64 or bfloat16")
    return dtype


def _find(where: str) -> nn.Module:
    """The model, or what the class or function of that name returns without arguments."""
    place, _, name = where.rpartition(":")
    if not place or not name:
        raise ValueError(f"{where!r} names no model; type package.module:name or file.py:name")
    sys.path.insert(0, os.getcwd())
    if place.endswith(".py"):
        names: dict[str, Any] = runpy.run_path(place, run_name="hookcb_summary")
    else:
        names = vars(importlib.import_module(place))
    if name not in names:
        models = sorted(key for key, x in names.items() if callable(x) or isinstance(x, nn.Module))
        own = [key for key in models if getattr(names[key], "__module__", place) in (place, "hookcb_summary")]
        raise LookupError(f"{place} has no {name!r}; it has {', '.join(own) or 'nothing that makes a model'}")
    found = names[name]
    model = found() if callable(found) and not isinstance(found, nn.Module) else found
    if not isinstance(model, nn.Module):
        raise TypeError(f"{where} is no model, but a {type(model).__name__}")
    return model
