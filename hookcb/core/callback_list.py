"""Lists of callbacks: given in any form, checked, looked up, and sorted by event."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from hookcb.core.batch import shown
from hookcb.core.callback import Callback
from hookcb.core.events import Event

# not looked into for callbacks: each is one, or given by mistake, and a loader would load its data
SINGLE: tuple[type, ...] = (Callback, type, str, nn.Module, DataLoader)
EVENTS = [event.value for event in Event]
Callbacks = Callback | type[Callback] | Iterable[Callback | type[Callback]] | None
Handlers = tuple[tuple[Callback, Callable[[], object]], ...]  # who acts at an event, and the function to call


def new_callbacks(cbs: Callbacks, attached: Sequence[Callback]) -> list[Callback]:
    """Instances of `cbs`, checked against those attached.

    Raises:
        TypeError: If one is not a callback, or is a class that needs arguments.
        ValueError: If one is attached already, here or elsewhere, or its name is taken.
    """
    new: list[Callback] = []
    for cb in map(_instance, listed(cbs)):
        if is_among(cb, [*attached, *new]):
            raise ValueError(f"{cb!r} is attached already; attach an instance once")
        if "learn" in cb.__dict__:
            raise ValueError(
                f"{cb!r} belongs to another learner; make a second one, or remove it there first"
            )
        if cb.name in {other.name for other in [*attached, *new]}:
            raise ValueError(
                f"a callback named {cb.name!r} is attached already; remove it first, "
                f"with remove_cb, or give this one another name: {renamed(cb)}"
            )
        new.append(cb)
    return new


def renamed(cb: Callback) -> str:
    """Code that creates a callback like this one with another name, for a message."""
    return f"{type(cb).__name__}(…, name='my_{cb.name}')"


def find_callbacks(cbs: Callbacks, attached: Sequence[Callback]) -> list[Callback]:
    """The attached callbacks in `cbs`; a class stands for all its instances.

    Raises:
        ValueError: If one is not attached.
    """
    found: list[Callback] = []
    for wanted in listed(cbs):
        these = [
            cb for cb in attached if cb is wanted or (isinstance(wanted, type) and isinstance(cb, wanted))
        ]
        if not these:
            names = ", ".join(cb.name for cb in attached) or "none"
            raise ValueError(f"{wanted!r} is not attached; attached are: {names}")
        found += [cb for cb in these if not is_among(cb, found)]
    return found


def is_among(cb: Callback, cbs: Iterable[Callback]) -> bool:
    """Whether `cb` is one of `cbs`, by identity, as a dataclass callback may equal another one."""
    return any(cb is other for other in cbs)


def dispatch_tables(cbs: Sequence[Callback]) -> dict[bool, dict[str, Handlers]]:
    """Handlers of each event, in order; by whether it is training, then by event."""
    handlers = {
        event: [(cb, handler) for cb in cbs if (handler := cb.handler(event)) is not None] for event in EVENTS
    }
    return {
        training: {
            event: tuple([pair for pair in pairs if pair[0].acts(event, training)]) if pairs else ()
            for event, pairs in handlers.items()
        }
        for training in (True, False)
    }


def listed(given: Any) -> list[Any]:
    """Callbacks or optimizers as a list: of none, one or several; an iterable callback counts as one."""
    if given is None:
        return []
    is_one = isinstance(given, SINGLE) or not isinstance(given, Iterable)
    return [given] if is_one else list(given)


def _instance(cb: Callback | type[Callback]) -> Callback:
    if isinstance(cb, type) and issubclass(cb, Callback):
        try:
            inspect.signature(cb).bind()
        except TypeError as missing:
            raise TypeError(
                f"{cb.__name__} needs arguments ({missing}); give an instance, {cb.__name__}(…)"
            ) from None
        return cb()
    if not isinstance(cb, Callback):
        raise TypeError(f"{shown(cb)} is not a Callback; {_repair(cb)}")
    return cb


def _repair(cb: Any) -> str:
    """Advice on what to give instead of something that is not a callback."""
    if isinstance(cb, str):
        return f"give the class or an instance, {cb if cb.isidentifier() else 'ActivationStats'}()"
    if isinstance(cb, LRScheduler):
        return "watch needs no scheduler; in a Learner one is made by Schedule(partial(StepLR, step_size=3))"
    if callable(getattr(cb, "log", None)):
        shown = f"{cb.__name__ if isinstance(cb, type) else type(cb).__name__}(…)"
        return f"it is a logger: wrap it, Log({shown})"
    return "subclass hookcb.Callback, or give Callback(after_batch=function)"
