"""Reported: state of a loop that is reported by a method."""

import dis
import sys
from types import FrameType
from typing import Generic, Self, TypeVar, overload

from hookcb.core.loop import Loop

T = TypeVar("T")


class Reported(Generic[T]):
    """State that a loop reports by a method; an attempt to call the state names the method.

    The error of Python, "'NoneType' object is not callable", would not help.
    """

    def __init__(self, method: str) -> None:
        self.method = method

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, loop: None, owner: type) -> Self: ...
    @overload
    def __get__(self, loop: Loop, owner: type) -> T: ...
    def __get__(self, loop: Loop | None, owner: type) -> Self | T:
        if loop is None:
            return self
        if _is_method_call(sys._getframe(1)):
            raise TypeError(f".{self.name} is not a method but the {self.name} itself; call .{self.method}")
        value: T = loop.__dict__[self.name]
        return value

    def __set__(self, loop: Loop, value: T) -> None:
        loop.__dict__[self.name] = value


def _is_method_call(frame: FrameType) -> bool:
    """Whether `frame` is reading an attribute in order to call it, as in `w.loss(x)`.

    CPython compiles that into an instruction of its own, except for calls with `*args` or `**kwargs`; for
    these, and in another Python, it is False.
    """
    # verified in 3.11.7, 3.12.1 and 3.13.0, also for specialized, traced and EXTENDED_ARG instructions
    code, at = frame.f_code.co_code, frame.f_lasti
    if sys.version_info < (3, 12):
        return dis.opname[code[at]] == "LOAD_METHOD"
    return dis.opname[code[at]] == "LOAD_ATTR" and code[at + 1] & 1 == 1
