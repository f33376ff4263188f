"""hookcb::take: the hook inside compiled code, of which torch.compile sees one opaque call for each tensor.

So a compiled model has as many graphs as without hooks, and which batches are recorded changes none of them.
Blocks that are compiled one by one share a graph; a mark, a tensor of each layer, tells whose output it is.
"""

import sys
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from hookcb.activations.stats import has_stats, kind_of
from hookcb.core.batch import parts
from hookcb.core.torch_private import (
    is_dynamo_imported,
    is_transform_tensor,
    keeps_snapshots,
    mark_static_address,
    plain_class,
    transforms_left,
    without_transform,
)

OWNERS: WeakValueDictionary[int, Any] = WeakValueDictionary()  # instances of ActivationStats
NUMBERS = count()  # of owners, the same in each run of a program, so that torch's caches find its graphs
# that it writes to a tensor is why no compiler leaves it out, or moves it to another step
SCHEMA = "(Tensor? x, Tensor mark, Tensor(a!) written, int owner, str part, str kind) -> ()"


def marks_on(device: torch.device, n: int) -> list[Tensor]:
    """Tensors on a device whose addresses tell layers apart, one for each of `n` layers."""
    with torch.inference_mode(False):
        marks = [torch.zeros(1, device=device) for _ in range(n)]
    for mark in marks if is_dynamo_imported() else ():
        mark_static_address(mark)  # else a CUDA graph would have a copy
    return marks


def leave_out(m: nn.Module, output: Any) -> None:
    """Has compiled code do nothing with an output."""


class Traced:
    """Has compiled code call `take_compiled` of its owner for each tensor of a layer's output.

    Dynamo follows it, so it reads nothing that tells one layer from others of its kind.

    Args:
        stats: the owner.
        mark: the tensor by which it knows the layer.
    """

    def __init__(self, stats: Any, mark: Tensor) -> None:
        self.stats, self.mark = stats, mark

    def __call__(self, m: nn.Module, output: Any) -> None:
        """Called with the layer and its output."""
        stats, kind = self.stats, plain_class(m).__name__
        found = [("", output)] if type(output) is Tensor else list(parts(output)) or [("", output)]
        for part, x in found:
            taken, what = (x.detach(), kind) if has_stats(x) else (None, kind_of(x))
            torch.ops.hookcb.take(taken, self.mark, stats._written, stats._owner, part, what)


def _take(x: Tensor | None, mark: Tensor, written: Tensor, owner: int, part: str, kind: str) -> None:
    owners = sys.modules[__name__].OWNERS  # not those of the first import, if there was another
    if (found := owners.get(owner)) is not None:
        found.take_compiled(x, mark, written, part, kind)


def _nothing(x: Tensor | None, mark: Tensor, written: Tensor, owner: int, part: str, kind: str) -> None:
    """Done with tensors without values, as a compiler has them."""


def _in_vmap(x: Tensor | None, mark: Tensor, written: Tensor, owner: int, part: str, kind: str) -> None:
    """Takes the tensor of all calls, as a model that is compiled may have torch.func.vmap in it."""
    while x is not None and is_transform_tensor(x):
        x = without_transform(x)
    with transforms_left(), keeps_snapshots():
        torch.ops.hookcb.take(x, mark, written, owner, part, kind)


LIBRARY = torch.library.Library("hookcb", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch has no types
if not hasattr(torch.ops.hookcb, "take"):  # it is there if this module is imported again, as by autoreload
    torch.library.define("hookcb::take", SCHEMA, tags=(torch.Tag.flexible_layout,))
    torch.library.impl("hookcb::take", "default", _take)
    LIBRARY.impl("take", _in_vmap, "FuncTorchBatched")  # type: ignore[no-untyped-call]  # as above
    torch.library.register_fake("hookcb::take", _nothing)
