"""The checks, by topic; each is a function from an Evidence to findings.

They register when they are imported, and are judged in the order of these imports.
"""

# isort: off
from hookcb.diagnosis.checks import (
    parameters,
    inputs,
    gan,
    gradients,
    layers,
    unused,
    loss,
    guessing,
    step_size,
    weight_decay,
    optimizer,
    runtime,
    nonfinite,
    observed,
)

SECTIONS = (
    observed,
    parameters,
    inputs,
    gan,
    layers,
    unused,
    nonfinite,
    loss,
    guessing,
    gradients,
    step_size,
    weight_decay,
    optimizer,
    runtime,
)
