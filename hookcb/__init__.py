"""hookcb: callbacks that let you see inside any PyTorch training run."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.3.0"

if TYPE_CHECKING:
    from hookcb.public import *  # noqa: F403  # all public names
    from hookcb.public import __all__ as __all__
else:

    def __getattr__(name: str) -> object:
        """Loads the public names, and torch with them, when one is first used: most commands need none."""
        if name.startswith("__") and name != "__all__":  # Python and tools look for these in any module
            raise AttributeError(f"module 'hookcb' has no attribute {name!r}")
        public, own = import_module("hookcb.public"), vars(sys.modules[__name__])
        own.update({known: getattr(public, known) for known in ("__all__", *public.__all__)})
        if name in own:  # also a room, such as hookcb.testing
            return own[name]
        return own["loops"].ported.missing_name(name)

    def __dir__() -> list[str]:
        return __getattr__("__all__")
