"""All programs."""

from program import Program
from programs_heads import HEADS

PROGRAMS: tuple[Program, ...] = (*HEADS,)
