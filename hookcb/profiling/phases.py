"""What a training step is busy with, told as it changes."""

from collections.abc import Callable, Container, Mapping
from functools import partial
from typing import Any

from hookcb.core import orders
from hookcb.core.callback import Callback
from hookcb.core.events import Event
from hookcb.core.state import TrainingState

# what a step is busy with; callbacks are so at each event
PHASES = ("data", "forward", "loss", "backward", "optimizer", "callbacks")


# what begins when all callbacks have had their turn at an event; zero_grad comes after the last one
NEXT = {
    "before_batch": "forward",
    "after_pred": "loss",
    "before_backward": "backward",
    "before_step": "optimizer",
    "after_step": "optimizer",
}
BETWEEN = "before_train", "before_validate", "after_batch"  # events after which the loop says what begins


class Edge(Callback):
    """Acts before or behind all others at each event, and says what begins there.

    Args:
        begin: called with the phase that begins.
        phases: what begins, by event.
        order: `orders.FIRST` or `orders.LAST`, or behind that.
        name: see `Callback`.
    """

    run_lr_find = False

    def __init__(
        self, begin: Callable[[str], None], phases: Mapping[str, str], order: int, name: str
    ) -> None:
        super().__init__(name=name)
        self.begin: Callable[[str], None] | None = begin
        self.phases, self.order = phases, order

    def handler(self, event: str) -> Callable[[], object] | None:
        """What to call at `event`: nothing between the dispatch and `begin`, as each call costs."""
        if self.begin is None or event not in self.phases or (event in self.idle and not self._acts(event)):
            return None
        return partial(self.begin, self.phases[event])

    @property
    def idle(self) -> Container[str]:
        """Events that end no phase while no callback acts there: callbacks take no time then."""
        return self.phases if self.order == orders.FIRST else ("after_step",)

    def _acts(self, event: str) -> bool:
        return any(not isinstance(cb, Edge) and cb.handler(event) is not None for cb in self.learn.cbs)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"begin": None}  # a copy tells no one


def follow_phases(
    learn: TrainingState,
    owner: str,
    begin: Callable[[str], None],
    train: bool = True,
    valid: bool = False,
    last: int = orders.LAST,
) -> list[Edge]:
    """Has a loop say which phase of a step begins, until `leave_phases`.

    Args:
        learn: the loop.
        owner: name of the callback that asks.
        begin: called with one of `PHASES`, or "other".
        train: in training.
        valid: in validation, also one in the middle of a batch.
        last: order of what comes behind all others, of those that shall count as callbacks.
    """
    aside = [part for part, follows in (("_train", train), ("_validate", valid)) if not follows]
    events = [event.value for event in Event if not event.endswith(("_fit", *aside))]
    callbacks = dict.fromkeys(events, "callbacks")
    following = NEXT | dict.fromkeys(BETWEEN, learn.between_batches)
    after = {event: following[event] for event in events if event in following}
    edges = [
        Edge(begin, callbacks, orders.FIRST, f"_{owner}_first"),
        Edge(begin, after, last, f"_{owner}_last"),
    ]
    for edge in edges:
        edge.run_train, edge.run_valid = train, valid
    learn.add_cbs(edges)
    return edges


def leave_phases(learn: TrainingState, edges: list[Edge]) -> None:
    """Ends what `follow_phases` began; a second time, and of edges that someone has removed, does nothing."""
    if here := [edge for edge in edges if any(edge is cb for cb in learn.cbs)]:
        learn.remove_cbs(here)
    for edge in edges:
        learn.__dict__.pop(edge.name, None)
    edges.clear()
