"""CallHook: called around each call of a function of torch, through one wrapper for all CallHooks on it."""

import inspect
from collections.abc import Callable, Generator
from functools import wraps
from threading import get_ident
from types import ModuleType
from typing import Any
from weakref import WeakMethod, WeakSet

import torch

from hookcb.core.threads import in_each_fork, locked
from hookcb.core.torch_private import as_it_is, script_instead, skip_frames

Observer = Generator[None, Any, None]
MISSING = object()  # instead of an attribute that a class inherits, and of the result of a call that raises


class CallHook:
    """Observes calls of a function of torch that has no hooks, until it is removed.

    While there are CallHooks on it, a wrapper replaces the function; afterwards it is torch's own again. If
    other code has replaced it since, theirs stays, and the wrapper below it only passes calls on.
    torch.compile traces no observer; a call that it compiles into a graph is not observed.

    Args:
        holder: the class or module that has the function.
        name: the name of the function.
        method: generator function, called with the arguments of each call. Its `yield` returns the result of
            the call; if that raises, only `finally` blocks run. Observers begin in the order in which they
            were added, and end in the reverse one. The object of a method is not kept alive.
        failed: called with an exception of `method`, which is not raised into the call.
        nested: whether to observe calls inside of an observed one.
        all_threads: whether to observe calls in all threads, not only in the current one.
        in_forks: whether to go on in processes that are forked from this one.
        gate: a call is observed only if this is true, which costs less than an observer that does nothing.

    Raises:
        AttributeError: If `holder` has no such attribute.
        TypeError: If it is not a function or method.
    """

    def __init__(
        self,
        holder: type | ModuleType,
        name: str,
        method: Callable[..., Observer],
        failed: Callable[[Exception], object],
        *,
        nested: bool = True,
        all_threads: bool = False,
        in_forks: bool = False,
        gate: Callable[[], bool] | None = None,
    ) -> None:
        self.gate = gate
        self.nested, self.thread = nested, None if all_threads else get_ident()
        self.inside: set[int] = set()  # threads that are in an observed call
        with locked():
            self.wrapper = _wrapper_at(holder, name) or _Wrapper(holder, name)
            self.method, self.failed = self._weak(method), self._weak(failed)
            self.wrapper.hooks = (*self.wrapper.hooks, self)
            if not in_forks:
                _left_by_forks.add(self)

    def _weak(self, method: Callable[..., Any]) -> Callable[[], Any]:
        return WeakMethod(method, lambda _: self.remove()) if inspect.ismethod(method) else lambda: method

    def remove(self) -> None:
        """Stops the calls; a second time does nothing."""
        with locked():
            wrapper = self.wrapper
            wrapper.hooks = tuple(hook for hook in wrapper.hooks if hook is not self)
            # if other code has replaced it since, ours is called by theirs and stays
            while (there := _wrapper_at(wrapper.holder, wrapper.name)) is not None and not there.hooks:
                there.undo()

    def is_due(self, thread: int) -> bool:
        """Whether to observe a call in a thread that begins now."""
        is_here = self.thread in (None, thread) and (self.nested or thread not in self.inside)
        return is_here and (self.gate is None or self.gate())

    def observe(self, args: Any, kwargs: Any) -> Observer:
        """The observer of a call, which does nothing if its object is gone."""
        method = self.method()
        yield from () if method is None else method(*args, **kwargs)

    def guarded(self, act: Callable[..., Any], *args: Any) -> None:
        """Calls a method of an observer; its end is no failure."""
        try:
            act(*args)
        except StopIteration:
            pass
        except Exception as error:
            if (failed := self.failed()) is not None:
                failed(error)


class _Wrapper:
    """Replaces an attribute of torch, and calls hooks; without hooks it passes calls on."""

    def __init__(self, holder: type | ModuleType, name: str) -> None:
        self.holder, self.name, self.before = holder, name, vars(holder).get(name, MISSING)
        self.hooks: tuple[CallHook, ...] = ()  # replaced, never changed: other threads read it
        found: Any = inspect.getattr_static(holder, name)
        kind = type(found) if isinstance(found, staticmethod | classmethod) else None
        real = found.__func__ if kind else found
        if not inspect.isroutine(real):
            raise TypeError(f"{name!r} of {holder!r} must be a function or method, got {found!r}")
        call = _inherited(holder, name, kind is staticmethod) if self.before is MISSING else real
        wrapper = wraps(real)(_observed(self, call))
        vars(wrapper)["call_hooks"] = self
        script_instead(wrapper, real)
        if isinstance(holder, ModuleType):
            wrapper.__module__ = holder.__name__  # where pickle looks for it
        self.attribute: Any = kind(wrapper) if kind else wrapper
        setattr(holder, name, self.attribute)

    def undo(self) -> None:
        if self.before is MISSING:
            delattr(self.holder, self.name)
        else:
            setattr(self.holder, self.name, self.before)


def _wrapper_at(holder: type | ModuleType, name: str) -> _Wrapper | None:
    attribute = vars(holder).get(name)
    found: _Wrapper | None = getattr(getattr(attribute, "__func__", attribute), "call_hooks", None)
    # other code that wraps ours with functools.wraps copies this attribute
    return found if found is not None and found.attribute is attribute else None


def _inherited(holder: Any, name: str, is_static: bool) -> Callable[..., Any]:
    """Calls what `holder` inherits; through `super`, as in its subclasses another class may come next."""
    if is_static:
        return lambda *args, **kwargs: getattr(super(holder, holder), name)(*args, **kwargs)
    return lambda this, /, *args, **kwargs: getattr(super(holder, this), name)(*args, **kwargs)


def _observed(wrapper: _Wrapper, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return real(*args, **kwargs)
        here = get_ident()
        due = [x for x in wrapper.hooks if x.is_due(here)]
        if not due:
            return real(*args, **kwargs)
        begun: list[tuple[CallHook, Observer]] = []
        try:
            _begin(begun, due, args, kwargs)
            result = real(*args, **kwargs)
            _end(begun, result)
        finally:
            if begun:
                _end(begun, MISSING)
        return result

    skip_frames(call)  # else torch.compile would compile it, where it is called outside of a graph
    return call


@as_it_is
def _begin(begun: list[tuple[CallHook, Observer]], due: list[CallHook], args: Any, kwargs: Any) -> None:
    for hook in due:
        hook.inside.add(get_ident())
        begun.append((hook, hook.observe(args, kwargs)))
        hook.guarded(next, begun[-1][1])


@as_it_is
def _end(begun: list[tuple[CallHook, Observer]], result: Any) -> None:
    while begun:
        hook, observer = begun.pop()
        try:
            if result is not MISSING and hook in hook.wrapper.hooks:
                hook.guarded(observer.send, result)
            hook.guarded(observer.close)
        finally:
            hook.inside.discard(get_ident())


_left_by_forks: WeakSet[CallHook] = WeakSet()


def _leave_forks() -> None:
    for hook in list(_left_by_forks):
        hook.remove()


in_each_fork(_leave_forks)
