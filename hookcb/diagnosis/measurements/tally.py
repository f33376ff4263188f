"""Tally: counts of the labels of batches by class, without a device sync."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hookcb.core import graph

N_WAITING = 64  # batches that are counted at a time, as each batch then costs a copy
MAX_ELEMENTS = 4_096  # labels of a batch that are counted, spread over it
MAX_EDGES = 16  # from the loss to the node that has saved the labels
MAX_EQUAL = 1.2  # ratio of the shares of equal pairs in a batch and in 64; 1 ± 0.07 for random batches of 8


class Tally:
    """Counts class indices, on their device.

    Args:
        n_classes: number of classes; other indices are left out.
        ignored: an index that is left out, too.

    Attributes:
        n_batches: number of batches that were counted.
        is_mixed: whether a part of the batches is as good as all: 64 of them with two classes or more looked
            as drawn at random, and no class came later. Unknown on a GPU, which would have to be waited for.
    """

    def __init__(self, n_classes: int, ignored: int = -100) -> None:
        self.n_classes, self.ignored = n_classes, ignored
        self.n_batches, self.is_mixed = 0, False
        self._waiting: list[Tensor] = []
        self._counts: Tensor | None = None

    def add(self, y: Tensor) -> None:
        """Counts the labels of a batch."""
        y = y if y.ndim == 1 else y.reshape(-1)
        if (n := len(y)) > MAX_ELEMENTS:
            y = y[:: -(-n // MAX_ELEMENTS)]
        self.n_batches += 1
        self._waiting.append(y.clone())  # the program may change its own
        if len(self._waiting) == N_WAITING:
            self._count()

    def _count(self) -> None:
        y, batches, self._waiting = torch.cat(self._waiting).long(), self._waiting, []
        before, now = self._counts, y.new_zeros(self.n_classes + 2)  # with a place for those below, and above
        places = y.clamp(-1, self.n_classes).add_(1)
        now.scatter_add_(0, places, torch.ones_like(places))
        self._counts = now if before is None else before + now
        if len(batches) == N_WAITING and self.n_batches < 2 * N_WAITING:
            self.is_mixed = y.is_cpu and _are_mixed(batches)
        elif self.is_mixed and before is not None:
            self.is_mixed = not bool(((before == 0) & (now > 0)).any())

    def read(self) -> list[int]:
        """Number of labels of each class; waits for their device."""
        if self._waiting:
            self._count()
        counts: list[int] = [] if self._counts is None else self._counts[1:-1].tolist()
        return [0 if i == self.ignored else n for i, n in enumerate(counts)]


def _are_mixed(batches: Sequence[Tensor]) -> bool:
    of_each = [_share_of_equal(y) for y in batches if len(y) > 1]
    mean = sum(of_each) / max(1, len(of_each))
    return bool(of_each) and mean <= MAX_EQUAL * _share_of_equal(torch.cat(list(batches))) < 1


def _share_of_equal(y: Tensor) -> float:
    """Share of the pairs of labels that are equal."""
    n = torch.unique(y, return_counts=True)[1].double()
    return float((n * (n - 1)).sum()) / (len(y) * (len(y) - 1))


def path_to(node: Any, of: Any) -> tuple[int, ...] | None:
    """Places of the inputs that lead from a node to another one, None if that is far."""
    waiting: list[tuple[Any, tuple[int, ...]]] = [(node, ())]
    for at, path in waiting:
        if at is of:
            return path
        if at is not None and len(path) < MAX_EDGES and len(waiting) < MAX_EDGES**2:
            waiting += [(x, (*path, i)) for i, (x, _) in enumerate(at.next_functions)]
    return None


def at_path(node: Any, path: Sequence[int]) -> Any:
    """The node at the end of a path, None if there is none."""
    for i in path:
        behind = () if node is None else node.next_functions
        node = behind[i][0] if i < len(behind) else None
    return node


def saved_labels(node: Any) -> Tensor | None:
    """Class indices that a loss of torch has saved, None if it has none or has freed them."""
    y = graph.read_saved(node, "target")
    return y if isinstance(y, Tensor) else None
