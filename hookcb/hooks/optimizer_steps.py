"""StepHook: called at the steps of all optimizers, through one torch hook for all StepHooks."""

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from hookcb.core.threads import locked
from hookcb.core.torch_private import untraced


class _Dispatcher:
    """A torch hook on the steps of all optimizers; registered while there are listeners.

    torch iterates over these hooks in each step of the process. Adding or removing a hook meanwhile makes
    the iteration fail, in whatever thread, unless no other hook is left to be called. So there is one hook
    for all listeners, which is removed only while it is the only one; beside hooks of others it stays and
    does nothing.
    """

    def __init__(self, register: Callable[[Any], RemovableHandle]) -> None:
        self._register = register
        self._handle: RemovableHandle | None = None
        self._listening: tuple[StepHook, ...] = ()  # replaced, never changed: a step may be iterating

    def update(self, *new: "StepHook") -> None:
        """Adds new listeners and drops removed ones."""
        with locked():  # by this thread too: garbage collection may remove a hook meanwhile
            now = [hook for hook in (*self._listening, *new) if hook.is_on]
            self._listening = tuple(sorted(now, key=lambda hook: hook.is_last))
            if self._listening and self._handle is None:
                self._handle = self._register(self)
            elif not self._listening and self._handle is not None and self._is_alone(self._handle):
                self._handle.remove()
                self._handle = None

    @staticmethod
    def _is_alone(handle: RemovableHandle) -> bool:
        hooks = handle.hooks_dict_ref()
        return hooks is not None and len(hooks) == 1

    @untraced  # in a compiled step too, whose graph torch.compile ends here
    def __call__(self, opt: Optimizer, args: Any, kwargs: Any) -> Any:
        """Called by torch; returns the arguments of the step if a listener has replaced them."""
        replaced = None
        for hook in self._listening:
            new = hook(opt, args, kwargs)
            if new is not None:
                replaced = args, kwargs = new
        return replaced


class StepHook:
    """Calls a method before or after the step of any optimizer, in any thread, until it is removed.

    Nothing is registered on an optimizer. The owner of the method is not kept alive.

    Args:
        method: called as `method(opt, args, kwargs)`; before a step, what it returns, unless None, replaces
            the arguments.
        after: call it after the step.
        is_last: call it after all that are not; it may then raise, which ends the calls.
    """

    def __init__(self, method: Callable[..., Any], *, after: bool = False, is_last: bool = False) -> None:
        self.is_last = is_last
        self._method: WeakMethod[Callable[..., Any]] | None = WeakMethod(method)
        self._dispatcher = AFTER if after else BEFORE
        self._dispatcher.update(self)

    @property
    def is_on(self) -> bool:
        """Whether the method is still to be called."""
        return self._method is not None and self._method() is not None

    def __call__(self, opt: Optimizer, args: Any, kwargs: Any) -> Any:
        """Called with the arguments of the step."""
        method = None if self._method is None else self._method()
        return None if method is None else method(opt, args, kwargs)

    def remove(self) -> None:
        """Stops the calls; a second time does nothing."""
        self._method = None
        self._dispatcher.update()


def params_of(opt: Optimizer) -> set[int]:
    """Ids of an optimizer's parameters."""
    return {id(p) for group in opt.param_groups for p in group["params"]}


BEFORE = _Dispatcher(register_optimizer_step_pre_hook)
AFTER = _Dispatcher(register_optimizer_step_post_hook)
