"""All faults, in folders by where they are; each registers when its file is imported, which happens here."""

import pkgutil
from importlib import import_module

from hookcb.diagnosis.fault import FAULTS

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    import_module(_module.name)

# as a verdict tells what it has ruled out: what has a number first, and in the order of a step
_ordered = sorted(FAULTS.items(), key=lambda item: (item[1].exact, item[1].site, item[0]))
FAULTS.clear()
FAULTS.update(_ordered)
