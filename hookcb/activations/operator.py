"""hookcb::take: the hook inside compiled code, of which torch.compile sees one opaque call for each tensor.

So a compiled model has as many graphs as without hooks, and which batches are recorded changes none of them.
"""

from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor


class Owner(Protocol):
    """Taker of outputs of compiled code."""

    def take_compiled(self, x: Tensor | None, written: Tensor, path: str, kind: str) -> None:
        """Takes an output, None if it has no statistics, when compiled code is run."""


OWNERS: WeakValueDictionary[int, Owner] = WeakValueDictionary()
# that it writes to a tensor is why no compiler leaves it out, or moves it to another step
torch.library.define(
    "hookcb::take",
    "(Tensor? x, Tensor(a!) written, int owner, str path, str kind) -> ()",
    tags=(torch.Tag.flexible_layout,),
)


@torch.library.impl("hookcb::take", "default")
def _take(x: Tensor | None, written: Tensor, owner: int, path: str, kind: str) -> None:
    if (found := OWNERS.get(owner)) is not None:
        found.take_compiled(x, written, path, kind)


def _nothing(x: Tensor | None, written: Tensor, owner: int, path: str, kind: str) -> None:
    """Done with tensors without values, as a compiler has them."""


torch.library.register_fake("hookcb::take", _nothing)
