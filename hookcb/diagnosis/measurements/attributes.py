"""Tensors with a graph in the attributes of a model's modules."""

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from torch import Tensor, nn

from hookcb.core.restore import OF_MODULE
from hookcb.core.torch_private import buffers_of
from hookcb.hooks.modules import named_modules

MAX_ITEMS = 1_000  # of a list or dict that are looked at, the last ones of a list
MAX_DEPTH = 2  # of nesting


def with_graph(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors that a computation has made, with the path of the attribute that holds them."""
    for prefix, m in named_modules(model).items():
        for name, value in (*vars(m).items(), *buffers_of(m).items()):
            if name not in OF_MODULE:
                path = f"{prefix}.{name}" if prefix else name
                yield from ((path, x) for x in _inside(value, MAX_DEPTH))


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
