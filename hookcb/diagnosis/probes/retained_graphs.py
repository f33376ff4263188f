"""RetainedGraphs: detects autograd graphs of past batches that are still in memory."""

from collections import deque
from collections.abc import Iterator
from typing import Any
from weakref import ReferenceType, ref

from hookcb.diagnosis.run import Observation

N_TRACKED = 60  # batches
EVERY = 8  # batches, of which one is tracked once there are so many: a token takes 20 µs of a small step
KEY = "hookcb"


class _Token:
    """Lives as long as the graph node that holds it."""

    __slots__ = ("__weakref__",)


class RetainedGraphs:
    """Tracks graphs of past batches by a token in the metadata of each loss's node.

    The node lives as long as any tensor computed from the loss with gradients enabled, for example in a list
    or a running sum.
    """

    def __init__(self) -> None:
        self._tokens: deque[tuple[int, ReferenceType[_Token]]] = deque(maxlen=N_TRACKED)
        self._n = self._due = 0
        self._retained: tuple[int, int] | None = None  # first step, number of graphs

    def is_due(self, step: int) -> bool:
        """Whether to track the graph of a batch; counts it if so."""
        is_due = self._n < N_TRACKED or step >= self._due
        if is_due:
            self._n, self._due = self._n + 1, step + EVERY
        return is_due

    def mark_graph(self, node: Any, step: int) -> None:
        """Puts a token on the node of a batch's loss."""
        if node is not None:
            token = _Token()
            node.metadata[KEY] = token
            self._tokens.append((step, ref(token)))

    def count_alive(self) -> None:
        """Counts the graphs of past batches that are still in memory."""
        past = list(self._tokens)[:-2]  # the last two may be in use
        alive = [step for step, token in past if token() is not None]
        if len(past) >= N_TRACKED - 2 and len(alive) == len(past):
            self._retained = self._retained or (alive[0], len(alive))

    @property
    def has_looked(self) -> bool:
        """Whether there were enough batches to decide."""
        return len(self._tokens) >= N_TRACKED

    def observations(self) -> Iterator[Observation]:
        """One observation if all tracked graphs were still in memory."""
        if self._retained is not None:
            step, n = self._retained
            yield Observation(
                "memory.graphs_kept",
                step=step,
                value=float(n),
                text=f"The graphs of {n} batches since step {step} are all still in memory, and each batch "
                "adds one.",
                causes=("losses or outputs are collected or summed with their graph",),
                next_steps=("Collect numbers: losses.append(loss.item()), or loss.detach()",),
            )
