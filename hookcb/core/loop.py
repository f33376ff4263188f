"""Loop: the state of a training, its callbacks, and the emission of events; contains no iteration."""

import difflib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Self

from fastcore.basics import camel2snake
from torch import nn

from hookcb.core.alone import ELSEWHERE
from hookcb.core.batch import shown
from hookcb.core.callback import Callback
from hookcb.core.callback_list import (
    Callbacks,
    Handlers,
    dispatch_tables,
    find_callbacks,
    is_among,
    new_callbacks,
    renamed,
)
from hookcb.core.clock import Calls, Follower, calls_of
from hookcb.core.console import show
from hookcb.core.events import BATCH_EVENTS, LEVELS, CancelException, CancelFitException, Event, outermost
from hookcb.core.loop_tree import loop_tree
from hookcb.core.state import C, TrainingState

DOING: dict[str, str] = {  # what happens after an event
    Event.BEFORE_BATCH: "in the model's forward",
    Event.AFTER_PRED: "in the loss function",
    Event.BEFORE_BACKWARD: "in the backward",
    Event.BEFORE_STEP: "in the optimizer's step",
    Event.AFTER_BATCH: "between batches",
}


class Loop(TrainingState):
    """Base of all loops: the state of a training, its callbacks in order, and `emit`.

    Args:
        model: the model being trained.
        cbs: one callback or several, as instances, or as classes that need no arguments.

    Raises:
        TypeError: If the model is not an nn.Module, or one of `cbs` is not a callback.
        ValueError: If a callback cannot be attached, see `add_cbs`.
    """

    def __init__(self, model: nn.Module, cbs: Callbacks = ()) -> None:
        check_model(model)
        super().__init__(model)
        self.cbs: list[Callback] = []
        self._event = ""  # the last event at which callbacks acted
        self._entered: list[Callback] | None = None  # in a fit: callbacks whose before_fit was called
        self._follow([])
        self.build_dispatch()
        self.add_cbs(cbs)

    @property
    def fitting(self) -> bool:
        """Whether a fit is running."""
        return self._entered is not None

    @property
    def rank(self) -> int:
        """Number of this process among those that train, from 0."""
        return self.ranks.rank

    @property
    def world(self) -> int:
        """Number of processes that train, whether or not they train one model."""
        return self.ranks.world

    def follow_phases(self, follower: Follower) -> None:
        """Tells a follower which phase begins and ends at each event, until `leave_phases`."""
        self._follow([*self._followers, follower])
        self._use_tables()

    def leave_phases(self, follower: Follower) -> None:
        """Undoes `follow_phases`; a second call does nothing."""
        self._follow([x for x in self._followers if x is not follower])
        self._use_tables()

    def _follow(self, followers: list[Follower]) -> None:
        self._followers, self._calls_of = followers, calls_of(followers, self.between_batches)

    def set_phase(self, training: bool, dl: Any, n_iter: int | None) -> None:
        """Begins training or validation on `dl`, with `n_iter` batches, or None if unknown."""
        super().set_phase(training, dl, n_iter)
        self._use_tables()

    @contextmanager
    def restored(self, batch: bool = True) -> Iterator[None]:
        """Restores the phase, the modes of all modules and, with `batch`, the state of the batch."""
        try:
            with super().restored(batch):
                yield
        finally:
            self._use_tables()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={x}' for name, x in self._held().items())})"

    def _held(self) -> dict[str, str]:
        """Kinds and numbers of its parts, for its repr; no values."""
        return {"model": type(self.model).__name__, "cbs": f"[{', '.join(cb.name for cb in self.cbs)}]"}

    def __getstate__(self) -> dict[str, Any]:
        tables = "_table", "_tables", "_calls", "_calls_of", "_followers"
        return {key: value for key, value in self.__dict__.items() if key not in tables}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._follow([])
        for cb in self.cbs:
            cb.learn = self  # a copied callback is not attached, but those of a copied loop are, to the copy
        self.build_dispatch()

    # ---- callbacks

    def get(self, kind: type[C], name: str | None = None) -> C:
        """The attached callback of a class, as in `learn.get(ActivationStats).stats`.

        If none is attached, the one of an earlier fit, which is still an attribute, `learn.activation_stats`.

        Args:
            kind: its class, or a base class.
            name: its name, if several of the class are attached.

        Raises:
            TypeError: If `kind` is not a class.
            LookupError: If there is none, or if there are several.
        """
        if not isinstance(kind, type):
            raise TypeError(f"kind must be a class of callbacks, such as ActivationStats, got {kind!r:.80}")
        earlier = [cb for key, cb in vars(self).items() if isinstance(cb, Callback) and cb.name == key]
        for cbs in (self.cbs, earlier):
            found = [cb for cb in cbs if isinstance(cb, kind) and name in (None, cb.name)]
            if found:
                break
        if len(found) == 1:
            return found[0]
        wanted = kind.__name__ if name is None else f"{kind.__name__} named {name!r}"
        if found:
            names = ", ".join(repr(cb.name) for cb in found)
            raise LookupError(f"several {wanted} are attached; give name=, one of {names}")
        attached = {cb.name: f"{type(cb).__name__} as {cb.name!r}" for cb in self.cbs}
        close = difflib.get_close_matches(name or camel2snake(kind.__name__), attached, n=1)
        hint = f"did you mean {attached[close[0]]}? " if close else ""
        raise LookupError(
            f"no {wanted} is attached; {hint}attached are: {', '.join(attached.values()) or 'none'}"
        )

    def add_cb(self, cb: Callback | type[Callback]) -> Self:
        """Attaches a callback; see `add_cbs`."""
        return self.add_cbs([cb])

    def add_cbs(self, cbs: Callbacks) -> Self:
        """Attaches callbacks, or none if one is refused; each becomes an attribute, `learn.<name>`.

        While a fit runs, a new callback's `before_fit` is called at once; it takes part in the levels that
        begin later.

        Raises:
            TypeError: If one is not a callback, or is a class that needs arguments.
            ValueError: If one is attached already, here or elsewhere, or its name is taken.
        """
        new = self._checked(cbs)
        for cb in new:
            cb.learn = self
            setattr(self, cb.name, cb)
        self.cbs = sorted([*self.cbs, *new], key=lambda cb: cb.order)
        self.build_dispatch()
        for cb in new:
            self._enter([cb])
        return self

    def remove_cb(self, cb: Callback | type[Callback]) -> Self:
        """Detaches a callback, or all of a class; see `remove_cbs`."""
        return self.remove_cbs([cb])

    def remove_cbs(self, cbs: Callbacks) -> Self:
        """Detaches callbacks; `learn.<name>` stays, to read results.

        While a fit runs, their `after_fit` is called at once, so that no hook stays behind.

        Raises:
            ValueError: If one is not attached.
        """
        old = find_callbacks(cbs, self.cbs)
        try:
            self._leave(old)
        finally:
            self.cbs = [cb for cb in self.cbs if not is_among(cb, old)]
            for cb in old:
                del cb.learn
            self.build_dispatch()
        return self

    @contextmanager
    def added_cbs(self, cbs: Callbacks) -> Iterator[None]:
        """Attaches callbacks in a `with` block."""
        before = self.cbs
        self.add_cbs(cbs)
        added = [cb for cb in self.cbs if not is_among(cb, before)]
        try:
            yield
        finally:
            self.remove_cbs([cb for cb in added if is_among(cb, self.cbs)])

    @contextmanager
    def removed_cbs(self, cbs: Callbacks) -> Iterator[None]:
        """Detaches callbacks in a `with` block."""
        removed = find_callbacks(cbs, self.cbs)
        self.remove_cbs(removed)
        try:
            yield
        finally:
            self.add_cbs(removed)

    def _checked(self, cbs: Callbacks) -> list[Callback]:
        """The new callbacks, if they can be attached; see `add_cbs`."""
        new = new_callbacks(cbs, self.cbs)
        for cb in new:
            if hasattr(type(self), cb.name) or not isinstance(self.__dict__.get(cb.name, cb), Callback):
                owner = type(self).__name__
                raise ValueError(f"{cb!r} would overwrite {owner}.{cb.name}; give it a name: {renamed(cb)}")
        return new

    # ---- events

    def build_dispatch(self) -> None:
        """Updates the lists of callbacks that act at each event; called whenever they change."""
        self._tables = dispatch_tables(self.cbs)
        self._use_tables()

    def _use_tables(self) -> None:
        """Selects the callbacks that act in this phase."""
        self._table = self._tables[self.training]
        # a validation inside a batch counts as the callback that makes it
        self._calls: dict[str, Calls] = {} if self.is_nested else self._calls_of[self.training]

    def emit(self, event: str) -> None:
        """Calls the callbacks that act at `event`, in order.

        All of them see the event before a cancel raised by one takes effect.
        """
        if (handlers := self._table[event]) or self.ranks.is_together:
            self._call(event, handlers)
        elif self._calls:
            self._pass(event)

    def within(self, level: str, body: Callable[[], object]) -> bool:
        """Runs `body` between the level's `before_` and `after_` events.

        Returns:
            False if the level was cancelled.
        """
        before, after, after_cancel, cancel = LEVELS[level]
        table = self._table
        closing = False
        try:
            if (handlers := self._table[before]) or self.ranks.is_together:
                self._call(before, handlers)
            elif self._calls:
                self._pass(before)
            body()
            closing = True
            if self._table is not table or self._table[after] or self.ranks.is_together:
                self._close(after, table)
            elif self._calls:
                self._pass(after)
        except cancel:
            if not closing:  # a cancel raised while closing counts as the end
                with suppress(cancel):
                    self._close(after_cancel, table)
                with suppress(cancel):
                    self._close(after, table)
        return closing

    def step(self) -> None:
        """Makes the optimizer's step, through the scaler if there is one."""
        if self.scaler is None:
            self.opt.step()
        else:
            self.scaler.step(self.opt)

    def note_signal(self, number: int) -> None:
        """Requests the end of the training by a signal; several ranks first agree on it."""
        self.stop_requested = True
        self.ranks.note_signal(number)

    def agree_on_alarm(self, noticed: bool) -> bool:
        """See `Ranks`."""
        return self.ranks.agree_on_alarm(noticed)

    def _close(self, event: str, opened_for: dict[str, Handlers]) -> None:
        handlers = self._table[event]
        if self._table is not opened_for:  # skip those who joined after the level began
            handlers = tuple(pair for pair in handlers if pair in opened_for[event])
        self._call(event, handlers)

    def _pass(self, event: str) -> None:
        """Tells the followers of an event at which no callback acts."""
        for begin in self._calls[event].passed:
            begin()

    def _call(self, event: str, handlers: Handlers) -> None:
        cancels: list[CancelException] = []
        table, self._event = self._table, event
        if (calls := self._calls[event] if self._calls else None) is not None:
            for begin in calls.before:
                begin()
        for cb, handler in handlers:
            if self._table is not table and not is_among(cb, self.cbs):
                continue  # an earlier callback has removed it
            try:
                handler()
            except CancelException as cancel:
                cancel.raised_in = f"{label_of(cb)}.{event}"
                cancels.append(cancel)
            except BaseException as error:
                if isinstance(error, Exception) and cb.takes_error(error, event):
                    continue
                error.add_note(", ".join([f"in {label_of(cb)}.{event}", *self.position(event)]))
                raise
            if calls is not None:
                for note in calls.acted:
                    note(cb)
        if calls is not None:
            for begin in calls.after:
                begin()
        if self.ranks.is_together:
            cancels = self.ranks.decide(event, [cb for cb, _ in handlers], cancels, self.training)
        if cancels:
            raise outermost(cancels)

    # ---- a fit

    def run_fit(self, body: Callable[[], object]) -> None:
        """Runs `body` between `before_fit` and `after_fit`, which is always called.

        Raises:
            RuntimeError: If a cancel was raised outside its level.
        """
        self._entered, self.ended_by = [], ""
        try:
            with stray_cancels_as_errors():
                try:
                    self._enter(self.cbs)
                    body()
                except CancelFitException as cancel:
                    self.ended_by = self._describe_end(cancel)
                    with suppress(CancelFitException):
                        self.emit(Event.AFTER_CANCEL_FIT)
        except BaseException as error:
            cause = self.ranks.blame(error, self.where())
            self._leave(error=cause)
            if cause is error:
                raise
            raise cause from error
        else:
            self._leave()
        finally:
            self._entered, self.stop_requested = None, False

    @contextmanager
    def wrapped_model(self, name: str) -> Iterator[None]:
        """Has callbacks wrap the model in the block; see `Callback.wrapping_model`."""
        with ExitStack() as stack:
            for cb in self.cbs:
                if cb.run:
                    stack.enter_context(cb.wrapping_model(name))
            yield

    def _enter(self, cbs: list[Callback]) -> None:
        """Calls `before_fit` of `cbs`, if a fit is running that they have not entered yet."""
        self._call(Event.BEFORE_FIT, tuple((cb, partial(self._before_fit, cb)) for cb in cbs))

    def _before_fit(self, cb: Callback) -> None:
        if self._entered is None or not cb.run or is_among(cb, self._entered):
            return
        self._entered.append(cb)
        if handler := cb.handler(Event.BEFORE_FIT):
            handler()

    def _leave(self, cbs: list[Callback] | None = None, error: BaseException | None = None) -> None:
        """Calls `after_fit` of `cbs`, by default of all that entered it, last first, even if some fail."""
        if cbs is None:
            self.fit_succeeded, self.fit_error = error is None, error
        failures: list[BaseException] = []
        while cb := next(
            (cb for cb in reversed(self._entered or ()) if cbs is None or is_among(cb, cbs)), None
        ):
            self._entered = [other for other in self._entered or () if other is not cb]
            try:
                with stray_cancels_as_errors(), suppress(CancelFitException):
                    if handler := cb.handler(Event.AFTER_FIT):
                        self._call(Event.AFTER_FIT, ((cb, handler),))
            except BaseException as failure:
                failures.append(failure)
        if cbs is None:
            self.fit_succeeded, self.fit_error = False, None  # an error holds tensors of its frames
        if (first := _first(error, failures)) is None:
            return
        _note_failures(first, [failure for failure in failures if failure is not first])
        if error is None:
            raise first
        if first is not error:
            raise first from error

    def position(self, event: str) -> list[str]:
        """Position of the loop at `event`, for a message; epochs and batches count from 0."""
        position = []
        if self.fitting and not event.endswith("_fit"):
            position.append(f"epoch {self.epoch}")
        if event in BATCH_EVENTS:
            position.append(f"{'batch' if self.training else 'validation batch'} {self.iter}")
        return position

    def where(self) -> str:
        """Describes what the loop does now, for a message to other ranks."""
        doing = DOING.get(self._event, f"at {self._event}" if self._event else "before the fit")
        return ", ".join([doing, *self.position(self._event)])

    def _describe_end(self, cancel: CancelException) -> str:
        """Who ends the fit, where and why, in one line; all ranks call it, and get the same."""
        place, reason = ", ".join(self.position(self._event)), str(cancel)
        at = f" at {place}" if place and place not in reason else ""
        why = f": {reason}" if reason else ""
        line = f"fit ended by {cancel.raised_in.partition('.')[0]}{at}{why}"
        known = self.ranks.gather("" if cancel.raised_in == ELSEWHERE else line)
        return next(filter(None, known), line)

    def show_training_loop(self) -> None:
        """Prints the events as a tree, with the callbacks that act at each."""

        def acting(training: bool, event: str) -> list[str]:
            names = [cb.name for cb, _ in self._tables[training][event]]
            return names[::-1] if event == Event.AFTER_FIT else names

        show(loop_tree(type(self).__name__, acting))


def check_model(model: Any, usage: str = "") -> None:
    """Checks that a model is one; `usage` is the call in which it is an argument, for the message.

    Raises:
        TypeError: If it is not; the message says what is in its place.
    """
    if not isinstance(model, nn.Module):
        hint = f"the order is {usage}" if usage else "give the model that is trained"
        if isinstance(model, type) and issubclass(model, nn.Module):
            hint = f"give an instance, {model.__name__}(…)"
        raise TypeError(f"model must be an nn.Module, got {shown(model)}; {hint}")


@contextmanager
def stray_cancels_as_errors() -> Iterator[None]:
    """Turns a cancel that no level has caught into an error that says who raised it, and where it is valid.

    Raises:
        RuntimeError: Instead of the cancel.
    """
    try:
        yield
    except CancelException as cancel:
        raise RuntimeError(
            f"{type(cancel).__name__} raised in {cancel.raised_in} is outside its level; "
            f"it can be raised from before_{cancel.level} to after_{cancel.level}"
        ) from cancel


def label_of(cb: Callback) -> str:
    """Class of a callback, and its name if it was given one."""
    kind = type(cb).__name__
    return f"{kind}({cb.name!r})" if "_name" in cb.__dict__ else kind


def _first(error: BaseException | None, failures: list[BaseException]) -> BaseException | None:
    """The exception to raise: the one that ended the fit, or else the first failure of an `after_fit`.

    Ctrl-C or SystemExit in an `after_fit` takes precedence over an error that ended the fit.
    """
    exits = [failure for failure in failures if not isinstance(failure, Exception)]
    if isinstance(error, Exception) and exits:
        return exits[0]
    return error or next(iter(failures), None)


def _note_failures(error: BaseException, failures: list[BaseException]) -> None:
    for failure in failures:
        notes = "; ".join(getattr(failure, "__notes__", ()))
        error.add_note(f"then after_fit failed too: {failure!r} {notes}")
