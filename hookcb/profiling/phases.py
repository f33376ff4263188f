"""The phases of a training step, reported as they change."""

from collections.abc import Callable, Container, Mapping
from functools import partial
from typing import Any

from hookcb.core import orders
from hookcb.core.callback import Callback
from hookcb.core.events import Event
from hookcb.core.state import TrainingState

# "callbacks" is the time that callbacks take, at any event
PHASES = ("data", "forward", "loss", "backward", "optimizer", "callbacks")


# phase that begins after all callbacks have handled an event; zero_grad follows the last of them
NEXT = {
    "before_batch": "forward",
    "after_pred": "loss",
    "before_backward": "backward",
    "before_step": "optimizer",
    "after_step": "optimizer",
}
BETWEEN = "before_train", "before_validate", "after_batch"  # the phase that follows depends on the loop


class PhaseMarker(Callback):
    """Runs before or after all other callbacks at each event, and reports the phase that begins there.

    Args:
        begin: called with the phase that begins.
        phases: the phase that begins, by event.
        order: `orders.FIRST` or `orders.LAST`, or later.
        name: see `Callback`.
    """

    run_lr_find = False
    shows_only = True

    def __init__(
        self, begin: Callable[[str], None], phases: Mapping[str, str], order: int, name: str
    ) -> None:
        super().__init__(name=name)
        self.begin: Callable[[str], None] | None = begin
        self.phases, self.order = phases, order

    def handler(self, event: str) -> Callable[[], object] | None:
        """The function to call at `event`: `begin` itself, because each call in between costs time."""
        if self.begin is None or event not in self.phases or (event in self.idle and not self._acts(event)):
            return None
        return partial(self.begin, self.phases[event])

    @property
    def idle(self) -> Container[str]:
        """Events that end no phase unless a callback handles them: callbacks take no time otherwise."""
        return self.phases if self.order == orders.FIRST else ("after_step",)

    def _acts(self, event: str) -> bool:
        return any(not isinstance(cb, PhaseMarker) and cb.handler(event) is not None for cb in self.learn.cbs)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"begin": None}  # a copy reports to no one


def track_phases(
    learn: TrainingState,
    owner: str,
    begin: Callable[[str], None],
    train: bool = True,
    valid: bool = False,
    last: int = orders.LAST,
) -> list[PhaseMarker]:
    """Calls `begin` at each new phase of a step, until `untrack_phases`.

    Args:
        learn: the loop.
        owner: name of the callback that tracks the phases.
        begin: called with one of `PHASES`, or "other".
        train: whether to track training.
        valid: whether to track validation, including one in the middle of a batch.
        last: order of the last marker; callbacks with a lower order count as "callbacks".
    """
    skipped = [part for part, follows in (("_train", train), ("_validate", valid)) if not follows]
    events = [event.value for event in Event if not event.endswith(("_fit", *skipped))]
    callbacks = dict.fromkeys(events, "callbacks")
    following = NEXT | dict.fromkeys(BETWEEN, learn.between_batches)
    after = {event: following[event] for event in events if event in following}
    markers = [
        PhaseMarker(begin, callbacks, orders.FIRST, f"_{owner}_first"),
        PhaseMarker(begin, after, last, f"_{owner}_last"),
    ]
    for marker in markers:
        marker.run_train, marker.run_valid = train, valid
    learn.add_cbs(markers)
    return markers


def untrack_phases(learn: TrainingState, markers: list[PhaseMarker]) -> None:
    """Removes the markers of `track_phases`; does nothing for those that are gone already."""
    if attached := [marker for marker in markers if any(marker is cb for cb in learn.cbs)]:
        learn.remove_cbs(attached)
    for marker in markers:
        learn.__dict__.pop(marker.name, None)
    markers.clear()
