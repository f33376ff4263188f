"""memory.graphs_kept: autograd graphs of past batches that are still in memory."""

from collections import deque
from collections.abc import Iterator
from weakref import ReferenceType, ref

from hookcb.diagnosis.fault import EVERY, Fault, Result, Site, fault
from hookcb.diagnosis.run import Run

N_TRACKED = 60  # batches
EACH = 8  # batches, of which one is tracked once there are so many: a token takes 20 µs of a small step
KEY = "hookcb"


class _Token:
    """Lives as long as the graph node that holds it."""

    __slots__ = ("__weakref__",)


@fault(
    "memory.graphs_kept",
    headline="The graphs of past batches stay in memory",
    site=Site.RUN,
    needs=("batches",),
    leads_to=("memory.growth",),
    exact=True,
)
class GraphsKept(Fault):
    """The autograd graphs of past batches stay in memory, one more with each batch.

    Formula: the nodes of the last 60 losses, other than the last two, are all still alive.
    """

    cadence = EVERY
    severity = "warning"
    passed = "retained graphs"

    def __init__(self) -> None:
        super().__init__()
        self._tokens: deque[tuple[int, ReferenceType[_Token]]] = deque(maxlen=N_TRACKED)
        self._n = self._due = 0

    def on_loss(self, run: Run) -> None:
        """Puts a token on the node of a loss, which lives as long as any tensor computed from that."""
        if self._n >= N_TRACKED and run.step < self._due:
            return
        self._n, self._due = self._n + 1, run.step + EACH
        if (node := run.loop.loss_node) is not None:
            token = _Token()
            node.metadata[KEY] = token
            self._tokens.append((run.step, ref(token)))

    def on_batch_end(self, run: Run) -> None:
        if not run.looking or self.seen:
            return
        past = list(self._tokens)[:-2]  # the last two may be in use
        alive = [step for step, token in past if token() is not None]
        if len(past) >= N_TRACKED - 2 and len(alive) == len(past):
            self.see(
                f"The graphs of {len(alive)} batches since step {alive[0]} are all still in memory, and each "
                "batch adds one.",
                when=alive[0],
                value=float(len(alive)),
                causes=("losses or outputs are collected or summed with their graph",),
                next_steps=("Collect numbers: losses.append(loss.item()), or loss.detach()",),
            )

    def findings(self, run: Run) -> Iterator[Result]:
        has_looked = len(self._tokens) >= N_TRACKED
        unless = "" if has_looked else "too little was seen of the graphs of 60 losses"
        yield from self.told(run, self.seen, unless)
