"""Stages of a batch in an external loop, and the transitions between them."""

from enum import Enum, StrEnum, auto
from itertools import product
from typing import NamedTuple


class Stage(Enum):
    """Stage of a batch."""

    __hash__ = object.__hash__  # Enum's is in Python, and this is looked up at each event

    IDLE = auto()  # no batch is open
    FORWARD = auto()  # a batch is open, its backward has not begun
    BACKWARD = auto()
    GRADIENTS = auto()  # the backward is over
    STEP = auto()  # an optimizer steps, after the backward
    BLIND_STEP = auto()  # a step before any backward was seen; its closure may still run one
    BACKWARD_IN_STEP = auto()


class Move(StrEnum):
    """Next action of the loop; each value is the name of the `LoopReporter` method that reports it."""

    BEGIN_BATCH = auto()
    BEGIN_BACKWARD = auto()
    END_BACKWARD = auto()
    BEGIN_STEP = auto()
    END_STEP = auto()
    END_BATCH = auto()


class Transition(NamedTuple):
    """The stage that a legal move leads to, and the event it emits."""

    stage: Stage
    event: str


OUTSIDE_STEP = (Stage.FORWARD, Stage.BACKWARD, Stage.GRADIENTS)
IN_STEP = (Stage.STEP, Stage.BLIND_STEP, Stage.BACKWARD_IN_STEP)
BEFORE_BACKWARD = (Stage.FORWARD, Stage.BLIND_STEP)
IN_BACKWARD = (Stage.BACKWARD, Stage.BACKWARD_IN_STEP)
AFTER_BACKWARD = (Stage.GRADIENTS, Stage.STEP)

TRANSITIONS = {
    (Stage.IDLE, Move.BEGIN_BATCH): Transition(Stage.FORWARD, "before_batch"),
    (Stage.FORWARD, Move.BEGIN_BACKWARD): Transition(Stage.BACKWARD, "before_backward"),
    (Stage.BACKWARD, Move.END_BACKWARD): Transition(Stage.GRADIENTS, "after_backward"),
    (Stage.GRADIENTS, Move.BEGIN_STEP): Transition(Stage.STEP, "before_step"),
    (Stage.STEP, Move.END_STEP): Transition(Stage.GRADIENTS, "after_step"),  # there may be more optimizers
    (Stage.FORWARD, Move.BEGIN_STEP): Transition(Stage.BLIND_STEP, "before_step"),
    (Stage.BLIND_STEP, Move.END_STEP): Transition(Stage.FORWARD, "after_step"),
    (Stage.BLIND_STEP, Move.BEGIN_BACKWARD): Transition(Stage.BACKWARD_IN_STEP, "before_backward"),
    (Stage.BACKWARD_IN_STEP, Move.END_BACKWARD): Transition(Stage.STEP, "after_backward"),
    (Stage.BACKWARD_IN_STEP, Move.END_STEP): Transition(Stage.BACKWARD, "after_step"),
    **{(stage, Move.END_BATCH): Transition(Stage.IDLE, "after_batch") for stage in OUTSIDE_STEP},
}

# moves that are illegal until another one is made, which closes or opens what is missing;
# all other moves that are not in TRANSITIONS are ignored
FIRST = {
    **{(stage, Move.BEGIN_BATCH): Move.END_BATCH for stage in OUTSIDE_STEP + IN_STEP},
    **{move: Move.END_STEP for move in product(IN_STEP, (Move.BEGIN_STEP, Move.END_BATCH))},
    (Stage.IDLE, Move.BEGIN_STEP): Move.BEGIN_BATCH,  # its forward was not seen
    (Stage.BACKWARD, Move.BEGIN_STEP): Move.END_BACKWARD,
}
