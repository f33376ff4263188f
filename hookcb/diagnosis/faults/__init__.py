"""All faults, in folders by where they are; each registers when its file is imported, which happens here."""

import pkgutil
from importlib import import_module

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    import_module(_module.name)
