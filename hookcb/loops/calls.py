"""Classifies calls of a watched model: parts of a training batch, validations, or neither."""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal, NamedTuple

from hookcb.loops.stages import AFTER_BACKWARD, BEFORE_BACKWARD, Stage


class Call(Enum):
    """Kinds of calls of the model."""

    TRAIN = auto()  # begins a training batch
    CONTINUE = auto()  # belongs to the training batch that is open
    VALIDATE = auto()  # begins a validation batch
    ASIDE = auto()  # is no part of the training
    RECOMPUTE = auto()  # activation checkpointing runs a forward again


class Now(NamedTuple):
    """The moment of a call.

    Attributes:
        trains: whether gradients are on, in a mode in which the loop trains.
        in_train_mode: whether the model is.
        in_backward: whether a backward is running.
        is_open: whether a training batch is open.
        stage: its stage.
        is_stepped: whether an optimizer has made a step in it.
        has_optimizer: whether an optimizer of the model is known.
        step: the step in progress: None, one whose closure has called the model, or one of LBFGS, whose
            closure does so for each evaluation.
    """

    trains: bool
    in_train_mode: bool
    in_backward: bool
    is_open: bool
    stage: Stage
    is_stepped: bool
    has_optimizer: bool
    step: Literal["closure", "lbfgs"] | None

    @property
    def is_waiting(self) -> bool:
        """Whether a training batch is open and its backward has not begun."""
        return self.is_open and self.stage in BEFORE_BACKWARD and not self.is_stepped


@dataclass(slots=True)
class Habits:
    """Habits of a loop so far, by which its next call is told.

    Attributes:
        left_in: stages in which it has left a training batch and begun another.
        looks_aside: whether it has called the model in eval mode in the middle of the open batch.
        spans_asides: whether calls before and after those have had one backward.
    """

    left_in: set[Stage] = field(default_factory=set)
    looks_aside: bool = False
    spans_asides: bool = False


def classify(now: Now, habits: Habits) -> Call:
    """Tells what a call is, by the moment and the habits of its loop."""
    if not now.trains and (now.in_train_mode or _goes_on(now, habits)):
        return Call.ASIDE
    if now.in_backward and now.is_open and now.stage not in AFTER_BACKWARD:
        return Call.RECOMPUTE
    if not now.trains:
        return Call.VALIDATE
    if now.is_waiting and (habits.spans_asides or not habits.looks_aside):
        return Call.CONTINUE
    # LBFGS may make hundreds of evaluations in a step, each with a loss and a gradient of its own
    is_evaluated = now.step == "lbfgs" and now.stage in AFTER_BACKWARD
    return Call.CONTINUE if now.is_open and now.step is not None and not is_evaluated else Call.TRAIN


def _goes_on(now: Now, habits: Habits) -> bool:
    """Whether the open batch is expected to go on to a step after a call in eval mode.

    It is, unless the loop has left an earlier batch at this stage, as it does while it accumulates.
    """
    is_between = now.stage in BEFORE_BACKWARD or (now.stage is Stage.GRADIENTS and now.has_optimizer)
    return now.is_open and is_between and not now.is_stepped and now.stage not in habits.left_in
