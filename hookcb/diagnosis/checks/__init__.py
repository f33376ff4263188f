"""The checks, by topic; each is a function from a Run to findings.

They register when they are imported, and are judged in the order of these imports.
"""

# isort: off
from hookcb.diagnosis.checks import (  # noqa: F401
    observed,
)
