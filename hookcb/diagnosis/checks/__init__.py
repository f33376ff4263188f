"""The checks, by topic; each is a function from a Run to findings.

They register when they are imported, and are judged in the order of these imports.
"""

# isort: off
from hookcb.diagnosis.checks import (  # noqa: F401
    parameters,
    inputs,
    gan,
    attenuated,
    exploding,
    dead_units,
    layers,
    ranks,
    step_size,
    weight_decay,
    optimizer,
    runtime,
    spent,
    nonfinite,
    observed,
    frozen,
)
