"""All programs, written after questions that people ask on the web, in our own words and code.

The codes that name each fault were set down before hookcb was run on any program, and no check was
tuned to them. A program is changed if its repair does not learn or its fault has no effect, never because
of a verdict.
"""

from program import Program
from programs_data import DATA
from programs_heads import HEADS
from programs_layers import LAYERS
from programs_steps import STEPS

PROGRAMS: tuple[Program, ...] = (*HEADS, *DATA, *LAYERS, *STEPS)
