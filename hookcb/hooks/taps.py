"""Taps: the callables registered on modules and tensors, each of which calls a `Hook`."""

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

from torch import Tensor, nn
from torch.compiler import is_compiling

from hookcb.core.torch_private import forward_hooks
from hookcb.hooks.own import OwnHook


class HookLike(Protocol):
    """The part of `Hook` that taps use."""

    title: str
    modify: bool
    always_call: bool
    with_kwargs: bool
    fired: bool
    quick: Callable[[Any, Any], bool] | None
    traced: Callable[[Any, Any], object] | None
    is_idle: bool
    take_error: Callable[[Exception], object] | None
    why_silent: str
    without_grad: str | None
    n_without_graph: int

    @property
    def removed(self) -> bool:
        """Whether it was removed."""

    @property
    def where(self) -> str:
        """The hooked module or tensor, for a message."""

    @property
    def gate(self) -> Callable[[], bool]:
        """Called at each call of the module; the hook acts if it returns True."""

    def next_call(self, time: int = 0) -> Any:
        """Counts a call of the module."""

    def call(self, module: Any, seen: tuple[Any, ...], call: Any) -> Any:
        """Calls the hook's function."""

    def remove(self) -> None:
        """Removes it."""


class Tap(OwnHook):
    """Forward hook or pre-hook of a module."""

    def __init__(self, hook: HookLike | None = None) -> None:
        self.hook = hook

    def __call__(self, module: nn.Module, *seen: Any) -> Any:
        """Calls the hook if its gate is open; returns its result if the hook may modify."""
        hook, compiles = self.hook, is_compiling()
        if hook is None:
            return None
        if compiles and hook.traced is not None:
            hook.traced(module, seen[-1])
            return None
        if hook.is_idle:
            return None
        try:
            if hook.quick is not None and not compiles and hook.fired and hook.quick(module, seen[-1]):
                return None
            if not hook.gate():
                return None
            result = hook.call(module, seen, hook.next_call())
        except Exception as failure:
            if hook.take_error is not None:
                hook.remove()
                hook.take_error(failure)
                return None
            own = _raised_by_forward(sys._getframe(1)) if hook.always_call else None
            if own is None:
                raise
            own.add_note(f"then the hook on {hook.where} failed too: {failure!r}")
            return None
        return result if hook.modify else None

    def close(self) -> None:
        """Detaches it from its hook, as compiled code or a graph may still call it."""
        self.hook = None


def _raised_by_forward(caller: FrameType) -> BaseException | None:
    """The exception of a forward after which `caller`, Module._call_impl, still calls hooks."""
    error = sys.exc_info()[1]  # the hook's, raised while the forward's was being handled
    while error is not None:
        if error.__traceback__ is not None and error.__traceback__.tb_frame is caller:
            return error
        error = error.__context__
    return None


class ParameterTap(Tap):
    """Hook of a leaf tensor, called when a gradient was accumulated in its `.grad`."""

    def __call__(self, param: Tensor) -> None:  # type: ignore[override]  # torch calls it with the tensor alone
        """Called with the tensor, which now has a gradient."""
        grad = super().__call__(param, param.grad)  # type: ignore[arg-type]
        if grad is not None:
            check_gradient(self.hook, grad, param)
            param.grad = grad


class TensorTap(Tap):
    """Hook of a tensor, called with its gradient."""

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
    """Checks that `new` can replace `grad`.

    Raises:
        TypeError, ValueError: If it cannot; the message names the hook, which torch's own error does not.
    """
    if hook is None:
        return
    who = f"{hook.title}, the hook on {hook.where},"
    if not isinstance(new, Tensor):
        raise TypeError(f"{who} must return a tensor for a gradient, got {new!r:.80}")
    if new.shape != grad.shape:
        raise ValueError(
            f"{who} must return a gradient of shape {tuple(grad.shape)}, got {tuple(new.shape)}; "
            "return None to keep the gradient"
        )


def taps_on(model: nn.Module) -> list[Tap]:
    """The taps on the forwards of all modules of `model`."""
    forwards = [hooks for m in model.modules() for hooks in forward_hooks(m)]
    return [tap for hooks in forwards for tap in hooks.values() if isinstance(tap, Tap)]
