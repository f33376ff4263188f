"""All programs."""

from program import Program
from programs_data import DATA
from programs_heads import HEADS
from programs_layers import LAYERS
from programs_steps import STEPS

PROGRAMS: tuple[Program, ...] = (*HEADS, *DATA, *LAYERS, *STEPS)
