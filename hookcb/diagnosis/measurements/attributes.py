"""Tensors with a graph, and objects of the user's, in the attributes of a model's modules."""

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hookcb.core.restore import OF_MODULE
from hookcb.core.torch_private import buffers_of
from hookcb.hooks.modules import modules_in, named_modules

MAX_ITEMS = 1_000  # of a list or dict that are looked at, the last ones of a list
MAX_DEPTH = 2  # of nesting
PLAIN = {bool, int, float, str, type(None)}  # which are no tensors and have none


NOT_PLAIN = nn.Module, Optimizer, Tensor, type, FunctionType, MethodType, ModuleType


def plain_objects(m: nn.Module) -> Iterator[tuple[str, Any]]:
    """Objects in attributes of a module that have attributes of their own, by name: a config, a scaler."""
    for name, x in vars(m).items():
        if name not in OF_MODULE and hasattr(x, "__dict__") and not isinstance(x, NOT_PLAIN):
            yield name, x


def with_graph(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors that a computation has made, with the path of the attribute that holds them."""
    prefixes: dict[nn.Module, str] = {}
    for m in modules_in(model):
        for name, value in (*vars(m).items(), *buffers_of(m).items()):
            if type(value) not in PLAIN and name not in OF_MODULE:
                for x in _inside(value, MAX_DEPTH):
                    prefixes = prefixes or {m: prefix for prefix, m in named_modules(model).items()}
                    if m in prefixes:  # else it is a wrapper
                        yield f"{prefixes[m]}.{name}" if prefixes[m] else name, x


def _inside(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.grad_fn is not None:
            yield value
    elif depth and isinstance(value, list | tuple | deque):
        for item in islice(reversed(value), MAX_ITEMS):
            yield from _inside(item, depth - 1)
    elif depth and isinstance(value, Mapping):
        for item in islice(value.values(), MAX_ITEMS):
            yield from _inside(item, depth - 1)
