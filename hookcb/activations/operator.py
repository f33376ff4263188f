"""hookcb::take: the hook inside compiled code, of which torch.compile sees one opaque call for each tensor.

So a compiled model has as many graphs as without hooks, and which batches are recorded changes none of them.
"""

import sys
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from hookcb.core.torch_private import (
    is_transform_tensor,
    keeps_snapshots,
    transforms_left,
    without_transform,
)

OWNERS: WeakValueDictionary[int, Any] = WeakValueDictionary()  # instances of ActivationStats
# that it writes to a tensor is why no compiler leaves it out, or moves it to another step
SCHEMA = "(Tensor? x, Tensor(a!) written, int owner, str path, str kind) -> ()"


def _take(x: Tensor | None, written: Tensor, owner: int, path: str, kind: str) -> None:
    owners = sys.modules[__name__].OWNERS  # not those of the first import, if there was another
    if (found := owners.get(owner)) is not None:
        found.take_compiled(x, written, path, kind)


def _nothing(x: Tensor | None, written: Tensor, owner: int, path: str, kind: str) -> None:
    """Done with tensors without values, as a compiler has them."""


def _in_vmap(x: Tensor | None, written: Tensor, owner: int, path: str, kind: str) -> None:
    """Takes the tensor of all calls, as a model that is compiled may have torch.func.vmap in it."""
    while x is not None and is_transform_tensor(x):
        x = without_transform(x)
    with transforms_left(), keeps_snapshots():
        torch.ops.hookcb.take(x, written, owner, path, kind)


LIBRARY = torch.library.Library("hookcb", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch has no types
if not hasattr(torch.ops.hookcb, "take"):  # it is there if this module is imported again, as by autoreload
    torch.library.define("hookcb::take", SCHEMA, tags=(torch.Tag.flexible_layout,))
    torch.library.impl("hookcb::take", "default", _take)
    LIBRARY.impl("take", _in_vmap, "FuncTorchBatched")  # type: ignore[no-untyped-call]  # as above
    torch.library.register_fake("hookcb::take", _nothing)
