"""Hooks for modules compiled in place, whose graph runs no hooks."""

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

from torch import nn

from hookcb.core.torch_private import compiled_call, set_compiled_call


class CompiledTap:
    """Replaces the call of a module that was compiled in place, whose graph runs no hooks.

    A copy is the compiled call alone.

    Args:
        m: the module.
        begins: called with `(args, kwargs)` before its forward.
        ends: called with its output after it, with None if it raises.
        gives: called with its output before `ends`, unless the forward raises.
        gate: called at each call; if it returns False, none of them is called.
    """

    def __init__(
        self, m: nn.Module, begins: Any, ends: Any, gives: Any = None, gate: Callable[[], bool] | None = None
    ) -> None:
        self.m, self.own = ref(m), compiled_call(m)
        self.hooks: tuple[Any, Any, Any] | None = begins, ends, gives
        self.gate = gate
        set_compiled_call(m, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Called in place of the module's compiled call."""
        if self.hooks is None or (self.gate is not None and not self.gate()):
            return self.own(*args, **kwargs)
        begins, ends, gives = self.hooks
        output = None
        begins(args, kwargs)
        try:
            output = self.own(*args, **kwargs)
            if gives is not None:
                gives(output)
        finally:
            ends(output)
        return output

    def __reduce__(self) -> tuple[Any, ...]:
        # called only by a module that copies all of its `__dict__`; others leave a compiled call out
        return partial, (self.own,)

    def remove(self) -> None:
        """Restores the module's call, even if another tap has been put in front since."""
        self.hooks, m = None, self.m()
        while m is not None and isinstance(tap := compiled_call(m), CompiledTap) and tap.hooks is None:
            set_compiled_call(m, tap.own)
