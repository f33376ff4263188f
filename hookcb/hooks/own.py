"""Hooks of hookcb on modules, tensors and optimizers, which copies and files of these do not contain."""

import copyreg
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from hookcb.core.torch_private import backward_hooks, forward_hooks, parameters_of, skip_frames, tensor_hooks


class OwnHook:
    """A hook that `register` keeps out of copies and files; a copy of the hook itself does nothing."""

    __torch_unserializable__ = True  # else torch.save warns about it for every parameter

    def __call__(self, *seen: Any, **named: Any) -> Any:
        """Called by torch."""

    def __reduce__(self) -> tuple[type["OwnHook"], tuple[()]]:
        return type(self), ()


class _Calling(OwnHook):
    """Calls a function."""

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self.function = function

    def __call__(self, *seen: Any, **named: Any) -> Any:
        return None if self.function is None else self.function(*seen, **named)

    skip_frames(__call__)  # else a step that is compiled would compile it at each place that calls it


def register(on: Callable[..., RemovableHandle], hook: Callable[..., Any], **options: Any) -> RemovableHandle:
    """Registers a hook that copies and files of the hooked object do not contain.

    Args:
        on: the method that registers it, such as `m.register_forward_hook` or `x.register_hook`.
        hook: an `OwnHook`, or a function.
        **options: arguments of that method.
    """
    _leave_out_of_copies()
    hook = hook if isinstance(hook, OwnHook) else _Calling(hook)
    handle = on(hook, **options)
    for ref in handle.extra_dict_ref:  # flags by id, `_forward_hooks_with_kwargs`: any value counts as True
        flags = ref()
        if flags is not None and handle.id in flags:
            flags[handle.id] = hook
    return handle


def n_others(m: nn.Module) -> int:
    """Number of hooks that are not hookcb's on the calls of a module and on its own parameters."""
    params = [p for p in parameters_of(m).values() if p is not None]
    found = (*forward_hooks(m), *backward_hooks(m), *map(tensor_hooks, params))
    return sum(not _is_own(hook) for hooks in found for hook in hooks.values())


@cache
def _leave_out_of_copies() -> None:
    # all dicts of hooks are OrderedDicts, and pickle and copy ask here how to reduce one; the handles of the
    # user's hooks would not work with a dict of another class
    copyreg.pickle(OrderedDict, _reducing(copyreg.dispatch_table.get(OrderedDict, OrderedDict.__reduce__)))


def _reducing(reduce: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def reduced(items: "OrderedDict[Any, Any]") -> Any:
        if any(map(_is_own, items.values())):
            items = OrderedDict((key, value) for key, value in items.items() if not _is_own(value))
        return reduce(items)

    return reduced


def _is_own(value: object) -> bool:
    return issubclass(type(value), OwnHook)  # isinstance would run code of proxies
