"""Adapters for hookcb callbacks in other libraries' trainers; each imports its library when first used."""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hookcb.core.switch import is_asked_for

if TYPE_CHECKING:
    from hookcb.adapters import lightning as lightning
    from hookcb.adapters import transformers as transformers
else:

    def __getattr__(name: str) -> ModuleType:
        if name in ("lightning", "transformers"):
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has lightning, transformers")


def lightning_callbacks() -> list[Any]:
    """The callbacks that Lightning adds to each Trainer, by an entry point: with HOOKCB=1 one, else none.

    Raises:
        ValueError: If HOOKCB in the environment is neither 0 nor 1.
    """
    if not is_asked_for():
        return []
    from hookcb.adapters.lightning import DiagnoseCallback

    return [DiagnoseCallback()]
