"""Ear: what a program has called of torch, heard from its start under the command, else during the fit."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from traceback import clear_frames
from types import ModuleType
from typing import Any, ClassVar, TypeVar, cast

from hookcb.core.call_hook import CallHook

E = TypeVar("E", bound="Ear")
# holder and name of a function, name of the method that observes it
Call = tuple[type | ModuleType, str, str]

EARS: list[type["Ear"]] = []


class Ear:
    """Base of what is heard of a program; its subclasses are found by themselves.

    There is one of each kind while anyone listens, for all models that are watched. It keeps no object of the
    user alive. A part that reads it names it in `hears`; an error in it costs these parts only.

    Attributes:
        calls: functions of torch, and the method that observes each: a generator function, see `CallHook`.
        options: of `CallHook`.
        from_start: whether it has heard the program from its start, and not only during the fit.
        failure: the first error in it.
    """

    calls: ClassVar[tuple[Call, ...]] = ()
    options: ClassVar[dict[str, Any]] = {}
    from_start = False
    failure: Exception | None = None

    def __init_subclass__(cls) -> None:
        EARS.append(cls)

    def failed(self, error: Exception) -> None:
        """Keeps the first error, which is not raised into the program."""
        clear_frames(error.__traceback__)  # which would keep the tensors of the user alive
        self.failure = self.failure or error


_open: dict[type[Ear], tuple[Ear, list[object], ExitStack]] = {}  # with those who listen, and its hooks


def listen(kinds: Iterable[type[Ear]], *, from_start: bool = False) -> Callable[[], None]:
    """Begins to listen; returns what ends that. Afterwards torch is as it was, unless others listen too.

    Args:
        kinds: what to listen with.
        from_start: whether the program begins now.
    """
    me, mine = object(), list(dict.fromkeys(kinds))
    for kind in mine:
        if kind not in _open:
            ear, hooks = kind(), ExitStack()
            ear.from_start = from_start
            for holder, name, method in kind.calls:
                hook = CallHook(holder, name, getattr(ear, method), ear.failed, **kind.options)
                hooks.callback(hook.remove)
            _open[kind] = ear, [], hooks
        _open[kind][1].append(me)

    def end() -> None:
        for kind in mine:
            _, listeners, hooks = _open.get(kind, (None, [], None))
            if me in listeners:
                listeners.remove(me)
                if not listeners and hooks is not None:
                    del _open[kind]
                    hooks.close()

    return end


def heard(kind: type[E]) -> E:
    """An ear that is open, or a new one that has heard nothing."""
    return cast("E", _open[kind][0]) if kind in _open else kind()
