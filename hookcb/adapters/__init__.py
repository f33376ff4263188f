"""Adapters for hookcb callbacks in other libraries' trainers; each imports its library when first used."""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hookcb.adapters import lightning as lightning
    from hookcb.adapters import transformers as transformers
else:

    def __getattr__(name: str) -> ModuleType:
        if name in ("lightning", "transformers"):
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has lightning, transformers")
