"""Hooks of models that were compiled in place, whose graph runs none."""

from typing import Any

from torch import nn

from hookcb.core.torch_private import compiled_call, set_compiled_call
from hookcb.hooks.own import StandIn


class CompiledTap(StandIn):
    """Stands before the call of a module that was compiled in place, as hooks do nothing in its graph.

    Args:
        m: the module.
        begins, gives, ends: called as hooks before and after its forward are, `ends` also where it raises.
    """

    def __init__(self, m: nn.Module, begins: Any, gives: Any, ends: Any) -> None:
        self.own: Any = compiled_call(m)
        self.hooks: tuple[Any, Any, Any] | None = begins, gives, ends
        set_compiled_call(m, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Called in place of the module's compiled call."""
        if self.hooks is None:
            return self.own(*args, **kwargs)
        begins, gives, ends = self.hooks
        begins(args, kwargs)
        try:
            output = self.own(*args, **kwargs)
            gives(output)
        finally:
            ends()
        return output

    def close(self, m: nn.Module | None) -> None:
        """Is in the way no longer, also where another one came before it meanwhile."""
        self.hooks = None
        while m is not None and isinstance(tap := compiled_call(m), CompiledTap) and tap.hooks is None:
            set_compiled_call(m, tap.own)
