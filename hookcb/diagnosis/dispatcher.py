"""Dispatcher: calls measurements and faults at the events of a training; keeps the failure of one to it."""

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from hookcb.diagnosis.failures import describe_failure
from hookcb.diagnosis.fault import HANDLERS, NOTES, RARE, Part, key_of, parts_for
from hookcb.diagnosis.frame import Frame
from hookcb.diagnosis.heard import heard, listen
from hookcb.diagnosis.run import Partial, Run
from hookcb.diagnosis.schedule import Schedule
from hookcb.diagnosis.verdict import Finding
from hookcb.hooks.modules import ModelGoneError

T = TypeVar("T")
Calls = dict[str, tuple[tuple[Part, Callable[..., object]], ...]]

GONE = "the model was freed before its watch was closed, so its final state was not inspected"
SOURCES = ("batches", "batch", "model", "steps", "time")  # of each run with a diagnosis
# what is not ruled out if a callback that records for the diagnosis fails, or what is common to all parts
COSTS = {"events": ("batches", "batch", "steps"), "frame": ("gradients", "optimizers")}


class Dispatcher:
    """Makes the parts of a diagnosis for one fit, and calls them at its events.

    Args:
        run: what they are called with.
        kinds: faults; the measurements that they use are made too.
        budget: share of the batches to inspect closely, 0..1; see `Schedule`.
    """

    def __init__(self, run: Run, kinds: Iterable[type[Part]], budget: float) -> None:
        self.run, self.schedule = run, Schedule(budget)
        self.is_closed = False
        self.is_alarmed = False  # whether something was seen that should be told at once
        self._has_loss, self._under_way = False, False
        self._end_listening: Callable[[], None] = lambda: None
        self._is_looked = False  # likewise whether that batch is inspected
        for kind in parts_for(kinds):
            run.parts[kind] = kind()
        self._parts = list(run.parts.values())
        self._handlers = [
            (event, part, handle)
            for event in HANDLERS
            for part in self._parts
            if (handle := getattr(part, event, None)) is not None
        ]
        self._arrange()

    def _arrange(self) -> None:
        """Lists the handlers of each event: in idle batches, those of `Run.noting`, and inspected ones."""
        self._parts = [part for part in self._parts if not part.done]
        self._handlers = [called for called in self._handlers if not called[1].done]
        n, self._changes_at = self.run.n_steps, math.inf
        self._calls: tuple[Calls, ...] = tuple({event: () for event in HANDLERS} for _ in range(3))
        for event, part, handle in self._handlers:
            cadence = part.cadences.get(event, part.cadence)
            if cadence > n:
                self._changes_at = min(self._changes_at, cadence)
            first = 0 if cadence > n or event in RARE else 1 if cadence == NOTES else 2
            for calls in self._calls[first:]:
                calls[event] += ((part, handle),)
        self._is_outdated = False

    def begin(self) -> None:
        """Shows the model, before the first batch; a part with nothing to see there is called no more."""
        self._listen()
        self.emit("on_model")
        self._arrange()

    def _listen(self) -> None:
        """Listens to what parts hear that are not done."""
        end, self._end_listening = self._end_listening, listen(x for part in self._parts for x in part.hears)
        end()

    def emit(self, event: str, *args: Any) -> None:
        """Calls the handlers of an event."""
        run = self.run
        for part, handle in self._calls[run.looking + run.noting][event]:  # what is inspected is noted
            try:
                if handle(run, *args):
                    self.is_alarmed = True
            except Exception as error:  # the training must go on, whatever it is
                self.fail(part, error)
            if part.done:
                self._is_outdated = True

    def emit_output(self, name: str, m: torch.nn.Module, output: Any) -> None:
        """Calls the handlers of a layer's output; in code that torch compiles, as plain functions."""
        if not torch.compiler.is_compiling():
            self.emit("on_output", name, m, output)
            return
        for _, handle in self._calls[-1]["on_output"]:
            handle(self.run, name, m, output)

    def show_loss(self) -> None:
        """Shows a loss; the graph of the first one to all parts."""
        if not self._has_loss:
            self._has_loss = True
            self.emit("on_first_graph")
            self._arrange()  # as what it shows may be needed in each batch
        self.emit("on_loss")

    def end_backward(self) -> None:
        """Ends a backward, after which the batch may be the last: an external loop does not tell its end."""
        self.emit("on_gradients")
        self._under_way, self._is_looked = True, self.run.looking

    def end_step(self) -> None:
        """Ends a step, also one that was cancelled."""
        self.run.n_steps += 1
        self.emit("on_between")

    def end_batch(self) -> None:
        """Ends a batch; leaves out parts that are done, or that are called at the beginning only."""
        run, self._under_way = self.run, False
        run.n_batches, run.n_looked = run.n_batches + 1, run.n_looked + run.looking
        self.emit("on_batch_end")
        if self._is_outdated or self.run.n_steps >= self._changes_at:
            self._arrange()
            self._listen()

    def doubt(self, told: Run, findings: tuple[Finding, ...]) -> bool:
        """Lets parts spend a few steps on what findings leave open; True if one has found more."""
        asked = [(part, part.on_doubt) for part in self._parts if hasattr(part, "on_doubt")]
        return any([bool(self.guarded(part, decide, told, findings)) for part, decide in asked])

    def told(self, frame: Frame) -> Run:
        """A run to be judged, with what was measured so far; findings of faults do not change it."""
        live = self.run
        run = Run(parts=dict(live.parts), sources=set(SOURCES), params=frame.params, n_steps=live.n_steps)
        run.n_batches = live.n_batches + self._under_way
        run.n_looked = live.n_looked + (self._under_way and self._is_looked)
        run.parts[Schedule] = self.schedule
        for part in live.parts.values():
            for failed in (part, *map(heard, part.hears)):
                if failed.failure is not None:
                    self.fail(part, failed.failure)
            self.guarded(part, part.tell, run)
        return run

    def close(self) -> None:
        """Removes all hooks, and keeps plain numbers only."""
        parts, self._parts, self._handlers = list(self.run.parts.values()), [], []
        if not self.is_closed:
            self.is_closed = True
            for part in parts:
                self.guarded(part, part.close, self.run)
                self.guarded(part, part.freeze)
                part.failure = None  # which would keep the tensors of its frames alive
            self._end_listening()
        self._arrange()

    # ---- failures

    def guarded(self, part: Part | str, function: Callable[..., T], *args: Any) -> T | None:
        """Calls a function that belongs to a part; None if it fails."""
        try:
            return function(*args)
        except Exception as error:  # likewise
            self.fail(part, error)
            return None

    def fail(self, part: Part | str, error: Exception) -> None:
        """Notes that a part has failed, which is called no more; what depends on it is not ruled out."""
        run = self.run
        if isinstance(error, ModelGoneError):
            run.note(GONE)
            return
        note = describe_failure("a part of Diagnose", error)
        run.note(note)
        if isinstance(part, Part):
            part.done = self._is_outdated = True
        for key in COSTS.get(part, (part,)) if isinstance(part, str) else (key_of(type(part)),):
            if not isinstance(run.reasons.get(key), Partial):
                run.lack(Partial(note), key)
