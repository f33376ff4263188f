"""Clocks: seconds of a training by what it does: its phases, callbacks, fetches, garbage collections."""

import gc
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from time import perf_counter
from typing import Any, NamedTuple

from hookcb.core.events import BATCH_EVENTS, Event
from hookcb.core.threads import this_thread

# "callbacks" is the time that callbacks take, at any event
PHASES = ("data", "forward", "loss", "backward", "optimizer", "callbacks")
NEXT: Mapping[str, str] = {  # the phase that begins after an event
    Event.BEFORE_BATCH: "forward",
    Event.AFTER_PRED: "loss",
    Event.BEFORE_BACKWARD: "backward",
    Event.BEFORE_STEP: "optimizer",
}
BETWEEN_BATCHES = (Event.BEFORE_TRAIN, Event.BEFORE_VALIDATE, Event.AFTER_BATCH)  # it depends on the loop
RESUMES: Mapping[str, str] = {  # the phase that goes on after the callbacks at an event
    Event.AFTER_BACKWARD: "backward",  # until the step begins
    Event.AFTER_STEP: "optimizer",  # with zero_grad
}


class Calls(NamedTuple):
    """Functions that a loop calls at an event.

    Attributes:
        before, after: called before the first callback and after the last one.
        passed: called instead if no callback acts.
        acted: called with each callback that has acted.
    """

    before: Sequence[Callable[[], object]] = ()
    after: Sequence[Callable[[], object]] = ()
    passed: Sequence[Callable[[], object]] = ()
    acted: Sequence[Callable[[Any], object]] = ()


NOTHING = Calls()


class Follower:
    """Is told of the phases of a training, from a loop's `follow_phases` to `leave_phases`.

    Attributes:
        in_training, in_validation: of which it is told; a validation inside a batch is neither.
    """

    in_training, in_validation = True, False

    def enter(self, phase: str) -> object:
        """Begins another phase, one of `PHASES`, or "other"."""

    def told(self, event: str, training: bool, between: str) -> Calls:
        """Functions that the loop calls at an event.

        Args:
            event: the event.
            training: whether that of a training.
            between: name of the time between two batches.
        """
        if not (self.in_training if training else self.in_validation):
            return NOTHING
        begins = between if event in BETWEEN_BATCHES else NEXT.get(event)
        after, passed = (self._entering(x) for x in (begins or RESUMES.get(event), begins))
        return Calls(self._entering("callbacks"), after, passed)

    def _entering(self, phase: str | None) -> list[Callable[[], object]]:
        return [] if phase is None else [partial(self.enter, phase)]


def calls_of(followers: Sequence[Follower], between: str) -> dict[bool, dict[str, Calls]]:
    """Functions that a loop calls: by whether it trains, then by event; empty if nobody follows."""
    tables: dict[bool, dict[str, Calls]] = {True: {}, False: {}}
    for training, table in tables.items():
        for event in Event if followers else ():
            told = [] if event.endswith("_fit") else [x.told(event, training, between) for x in followers]
            table[event] = Calls(*(tuple(chain(*calls)) for calls in zip(NOTHING, *told, strict=True)))
    return tables


class Clock(Follower):
    """Adds up seconds by phase while the phases change; to record the times and add them later takes longer.

    Attributes:
        phase: the phase in progress.
        sums: seconds by phase.
    """

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self.sums: dict[str, float] = defaultdict(float)
        self._since = perf_counter()

    def enter(self, phase: str) -> float:
        """Begins another phase, and returns the time; called ten times per step, so each look-up counts."""
        now = perf_counter()
        self.sums[self.phase] += now - self._since
        self.phase, self._since = phase, now
        return now


class Inside:
    """Counts what begins and ends inside of other phases, such as a fetch, as a phase of its own.

    It is a `FetchListener`; a fetch inside another, as of a dataset that reads from a loader, counts once.
    """

    def __init__(self, clock: Clock, phase: str) -> None:
        self._clock, self._phase, self._before, self._depth = clock, phase, "", 0

    def begin(self) -> None:
        """Begins the phase."""
        self._depth += 1
        if self._depth == 1:
            self._before = self._clock.phase
            self._clock.enter(self._phase)

    def end(self) -> None:
        """Ends it, and returns to the phase before it."""
        self._depth -= 1
        if not self._depth:
            self._clock.enter(self._before)


# ---- garbage collections

_told_of_garbage: list[Callable[[int, float], object]] = []
_began: float | None = None  # when the collection in progress began


def follow_garbage(tell: Callable[[int, float], object]) -> None:
    """Calls `tell` with the generation and seconds of each garbage collection, until `leave_garbage`."""
    if _at_collection not in gc.callbacks:
        gc.callbacks.append(_at_collection)
    _told_of_garbage.append(tell)


def leave_garbage(tell: Callable[[int, float], object]) -> None:
    """Undoes `follow_garbage`; a second call does nothing."""
    if tell in _told_of_garbage:
        _told_of_garbage.remove(tell)
    if not _told_of_garbage and _at_collection in gc.callbacks:
        gc.callbacks.remove(_at_collection)


def _at_collection(stage: str, info: Mapping[str, int]) -> None:
    global _began
    now, began = perf_counter(), _began
    _began = now if stage == "start" else None
    if stage == "stop" and began is not None:  # else it began before anyone followed
        for tell in _told_of_garbage[:]:
            tell(info["generation"], now - began)


# ---- all the time of a training, batch by batch

DATA, BETWEEN, EPOCH, VALIDATION = "data", "between", "epoch", "validation"
GARBAGE = "garbage collection"
AFTER: Mapping[str, str] = {  # the phase that begins after an event
    **NEXT,
    Event.BEFORE_TRAIN: EPOCH,
    Event.AFTER_LOSS: BETWEEN,
    Event.AFTER_BACKWARD: BETWEEN,
    Event.AFTER_STEP: BETWEEN,
    Event.AFTER_BATCH: BETWEEN,
    Event.AFTER_TRAIN: EPOCH,
    Event.BEFORE_VALIDATE: VALIDATION,
    Event.AFTER_VALIDATE: EPOCH,
}
N_LARGEST = 3  # times that are kept of each phase and callback
MIN_GENERATION = 1  # collections of the youngest objects take 0.1 ms, every few steps


class TimeSplit(Clock):
    """Splits all the time of a training, also that of each callback; a `FetchListener`.

    The seconds of a batch count once its last event is over, unless `leaves_out`. The first ones of a fit do
    not count.

    Args:
        label: returns the name of a callback, "" for those whose time does not count.
        n_warm_up: number of batches at the beginning that are left out.

    Attributes:
        leaves_out: whether the batch in progress is left out.
        n: number of batches.
        seconds: seconds in all `n` batches, by phase and by name of the callback.
        largest: the largest of these in one batch, in order; a busy machine may have stopped it then.

    >>> from hookcb import synth_learner
    >>> from hookcb.core.clock import TimeSplit
    >>> learn, split = synth_learner(), TimeSplit(lambda cb: cb.name, n_warm_up=0)
    >>> learn.follow_phases(split)
    >>> with learn.no_logging():
    ...     learn.fit(1)
    >>> split.n, split.seconds["forward"] > 0
    (10, True)
    >>> split.close()
    """

    def __init__(self, label: Callable[[Any], str], n_warm_up: int) -> None:
        super().__init__(EPOCH)
        self.seconds: dict[str, float] = defaultdict(float)
        self.largest: dict[str, list[float]] = defaultdict(lambda: [0.0] * N_LARGEST)
        self.n, self.leaves_out = 0, False
        self._label, self._labels = label, dict[int, str]()
        self._n_to_come = n_warm_up
        self._before_fetch = self._outer = EPOCH  # phases to return to
        self._fetched = self._fetch_began = 0.0
        self._thread = this_thread()
        follow_garbage(self._at_collection)

    def close(self) -> None:
        """Stops listening to the garbage collector."""
        leave_garbage(self._at_collection)

    def told(self, event: str, training: bool, between: str) -> Calls:
        """See `Follower`; a validation counts as a whole."""
        if not training and event in BATCH_EVENTS:
            return NOTHING
        phase = AFTER.get(event)
        ends = [self._end_batch] if event == Event.AFTER_BATCH else []
        after = ends or [partial(self._end_callbacks, phase)]
        return Calls([self._begin_callbacks], after, ends or self._entering(phase), [self._acted])

    def _begin_callbacks(self) -> None:
        self._outer = self.phase
        self.enter("")  # until the first of them has acted

    def _end_callbacks(self, phase: str | None) -> None:
        self.enter(phase or self._outer)

    def _acted(self, cb: Any) -> None:
        if (name := self._labels.get(id(cb))) is None:
            name = self._labels[id(cb)] = self._label(cb)
        now = perf_counter()
        self.sums[name] += now - self._since
        self._since = now

    def begin(self) -> None:
        """Begins a fetch; the first one of an epoch also starts the loader."""
        self._before_fetch = phase = self.phase
        self._fetch_began = self.enter(phase if phase in (EPOCH, VALIDATION) else DATA)

    def end(self) -> None:
        """Ends a fetch; one of a validation is not one that the training waits for."""
        now = self.enter(self._before_fetch)
        if self._before_fetch != VALIDATION:
            self._fetched += now - self._fetch_began

    def take_fetched(self) -> float:
        """Returns the seconds in fetches since the last call, and sets them to 0."""
        seconds, self._fetched = self._fetched, 0.0
        return seconds

    def _end_batch(self) -> None:
        self.enter(BETWEEN)
        if self._n_to_come:
            self._n_to_come -= 1
        elif not self.leaves_out:
            for name, seconds in self.sums.items():
                self.seconds[name] += seconds
                largest = self.largest[name]
                if seconds > largest[0]:
                    largest[0] = seconds
                    largest.sort()
            self.n += 1
        self.sums.clear()

    def _at_collection(self, generation: int, seconds: float) -> None:
        if generation >= MIN_GENERATION and this_thread() == self._thread:
            self.sums[GARBAGE] += seconds
            self._since += seconds
            self._fetch_began += seconds  # of the fetch in progress, if there is one
