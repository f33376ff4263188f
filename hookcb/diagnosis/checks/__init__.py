"""The checks, by what they look at; each reads an Evidence and gives findings.

They register themselves when they are imported, and are judged in the order of these imports.
"""

# isort: off
from hookcb.diagnosis.checks import (
    parameters,
    inputs,
    gan,
    gradients,
    layers,
    loss,
    optimizer,
    runtime,
    observed,
)

SECTIONS = (observed, parameters, inputs, gan, layers, loss, gradients, optimizer, runtime)
