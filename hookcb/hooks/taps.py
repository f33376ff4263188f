"""What is registered on modules and tensors: it leads to a `Hook`."""

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

from torch import Tensor, nn

from hookcb.core.torch_private import forward_hooks
from hookcb.hooks.own import OwnHook


class HookLike(Protocol):
    """What a tap knows of the `Hook` it leads to."""

    title: str
    modify: bool
    always_call: bool
    with_kwargs: bool
    called: bool
    why_silent: str
    without_grad: str | None
    n_without_graph: int

    @property
    def removed(self) -> bool:
        """Whether it has come off."""

    @property
    def where(self) -> str:
        """The module or tensor it is on, in words."""

    @property
    def gate(self) -> Callable[[], bool]:
        """Whether it acts now, asked at each call."""

    def next_call(self, time: int = 0) -> Any:
        """Counts a call of the module."""

    def call(self, module: Any, seen: tuple[Any, ...], call: Any) -> Any:
        """Has the hook's function called with what was seen."""


class Tap(OwnHook):
    """On a module's forward: calls the hook after it, or before it."""

    def __init__(self, hook: HookLike | None = None) -> None:
        self.hook = hook

    def __call__(self, module: nn.Module, *seen: Any) -> Any:
        """Calls the hook, if it is open, with what torch gives; what it returns replaces something or not."""
        hook = self.hook
        if hook is None or not hook.gate():
            return None
        try:
            result = hook.call(module, seen, hook.next_call())
        except Exception as failure:
            own = _raised_by_forward(sys._getframe(1)) if hook.always_call else None
            if own is None:
                raise
            own.add_note(f"then the hook on {hook.where} failed too: {failure!r}")
            return None
        return result if hook.modify else None

    def close(self) -> None:
        """Leads nowhere from now on, also where compiled code or a graph still holds it."""
        self.hook = None


def _raised_by_forward(caller: FrameType) -> BaseException | None:
    """The exception of the forward after which `caller`, Module._call_impl, still calls hooks."""
    error = sys.exc_info()[1]  # the hook's own, which came while the forward's was being handled
    while error is not None:
        if error.__traceback__ is not None and error.__traceback__.tb_frame is caller:
            return error
        error = error.__context__
    return None


class ParameterTap(Tap):
    """On a leaf tensor: calls the hook when a gradient has been accumulated in its `.grad`."""

    def __call__(self, param: Tensor) -> None:  # type: ignore[override]  # torch calls it with the tensor alone
        """Called with the tensor that now has a gradient."""
        grad = super().__call__(param, param.grad)  # type: ignore[arg-type]
        if grad is not None:
            check_gradient(self.hook, grad, param)
            param.grad = grad


class TensorTap(Tap):
    """On a tensor: calls the hook with the gradient that has come to it."""

    def __init__(self, hook: HookLike | None = None, tensor: Tensor | None = None) -> None:
        super().__init__(hook)
        self.tensor = None if tensor is None else weakref.ref(tensor)

    def __call__(self, grad: Tensor) -> Any:  # type: ignore[override]  # torch calls it with the gradient alone
        """Called with the gradient."""
        new = super().__call__(self.tensor and self.tensor(), grad)  # type: ignore[arg-type]
        if new is not None:
            check_gradient(self.hook, new, grad)
        return new


def check_gradient(hook: HookLike | None, new: Any, grad: Tensor) -> None:
    """Refuses what cannot take the place of `grad`.

    Raises:
        TypeError, ValueError: that name the hook, which torch's own error does not.
    """
    if hook is None:
        return
    who = f"{hook.title}, the hook on {hook.where},"
    if not isinstance(new, Tensor):
        raise TypeError(f"{who} returned {new!r:.80} for a gradient; return a tensor")
    if new.shape != grad.shape:
        raise ValueError(
            f"{who} returned a gradient of shape {tuple(new.shape)} for one of "
            f"shape {tuple(grad.shape)}; return one of the same shape, or None to leave it"
        )


def taps_on(model: nn.Module) -> list[Tap]:
    """The taps on the forwards of all modules of `model`."""
    forwards = [hooks for m in model.modules() for hooks in forward_hooks(m)]
    return [tap for hooks in forwards for tap in hooks.values() if isinstance(tap, Tap)]
