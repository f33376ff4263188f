"""Whether the graphs of past batches are kept alive."""

from collections import deque
from collections.abc import Iterator
from typing import Any
from weakref import ReferenceType, ref

from hookcb.diagnosis.evidence import Observation

FOLLOWED = 60  # batches
KEY = "hookcb"


class _Token:
    """Lives as long as the node of a graph that it was given to."""

    __slots__ = ("__weakref__",)


class RetainedGraphs:
    """Follows the graphs of the last batches by a token in the metadata of each loss's node.

    The node lives as long as any tensor that was made of the loss with gradients on: in a list, or in a sum
    that goes on.
    """

    def __init__(self) -> None:
        self._tokens: deque[tuple[int, ReferenceType[_Token]]] = deque(maxlen=FOLLOWED)
        self.found: tuple[int, int] | None = None  # first step, number

    def mark_graph(self, node: Any, step: int) -> None:
        """The node of the loss of a batch."""
        if node is not None:
            token = _Token()
            node.metadata[KEY] = token
            self._tokens.append((step, ref(token)))

    def count_alive(self) -> None:
        """Counts those of past batches that are still there."""
        past = list(self._tokens)[:-2]  # the last may be in use
        alive = [step for step, token in past if token() is not None]
        if len(past) >= FOLLOWED - 2 and len(alive) == len(past):
            self.found = self.found or (alive[0], len(alive))

    @property
    def has_looked(self) -> bool:
        """Whether there were enough batches to tell."""
        return len(self._tokens) >= FOLLOWED

    def observations(self) -> Iterator[Observation]:
        """Where all of them were kept."""
        if self.found is not None:
            step, n = self.found
            yield Observation(
                "memory.graphs_kept",
                step=step,
                value=float(n),
                text=f"the graphs of the last {n} batches are all still in memory, and one more each batch.",
                causes=("losses or outputs are collected, or summed up, with their graph",),
                next_steps=("collect numbers: losses.append(loss.item()), or loss.detach()",),
            )
