"""The events of a training loop, in firing order, and the exceptions that cut a part of it short.

`Learner.fit` in pseudocode; every name in CAPITALS is an event:

    BEFORE_FIT
    for epoch in range(n_epoch):
        BEFORE_EPOCH
        BEFORE_TRAIN
        for xb, yb in dls.train:
            BEFORE_BATCH
            pred = model(*xb);           AFTER_PRED
            loss = loss_func(pred, *yb); AFTER_LOSS
            BEFORE_BACKWARD; loss.backward(); AFTER_BACKWARD
            BEFORE_STEP;     opt.step();      AFTER_STEP   # these and the next line
            opt.zero_grad()                               # not while `learn.accumulating`
            AFTER_BATCH
        AFTER_TRAIN
        BEFORE_VALIDATE                          # model.eval(), torch.no_grad()
        for xb, yb in dls.valid:
            BEFORE_BATCH
            pred = model(*xb);           AFTER_PRED
            loss = loss_func(pred, *yb); AFTER_LOSS
            AFTER_BATCH
        AFTER_VALIDATE
        AFTER_EPOCH
    AFTER_FIT                                    # always, last callback first

A level is the part between `before_x` and `after_x`. A callback ends a level early by raising its exception
anywhere inside it. Then:

    raised                    skipped                       fires next
    CancelBackwardException   backward                      after_cancel_backward, after_backward, before_step
    CancelStepException       optimizer step and zero_grad  after_cancel_step, after_step, after_batch
    CancelBatchException      the rest of the batch         after_cancel_batch, after_batch, next batch
    CancelTrainException      the rest of the training      after_cancel_train, after_train, before_validate
    CancelValidException      the rest of the validation    after_cancel_validate, after_validate, after_epoch
    CancelEpochException      the rest of the epoch         after_cancel_epoch, after_epoch, next epoch
    CancelFitException        everything left               after_cancel_fit, after_fit
    one of them in after_x    nothing more                  it counts as the end of x
    one outside its level     everything left               after_fit, then a RuntimeError that names it
    any other exception       everything left               after_fit, then the exception goes on with a note

Closing events, by what ends the fit (● fires, – does not):

    raised inside a batch     after_batch  after_train  after_epoch  after_fit
    nothing                   ●            ●            ●            ●
    CancelBatchException      ●            ●            ●            ●
    CancelTrainException      –            ●            ●            ●
    CancelEpochException      –            –            ●            ●
    CancelFitException        –            –            –            ●
    any other exception       –            –            –            ●

A batch that is cancelled after its backward but before `zero_grad` leaves its gradients, and the next batch
adds to them, as in accumulation.

All callbacks see an event before a cancel raised at that event takes effect; if there are several, that of
the outermost level wins.
"""

import difflib
import re
from contextlib import suppress
from enum import StrEnum, auto
from typing import ClassVar, NamedTuple


class Event(StrEnum):
    """Events at which callbacks act, in firing order; each value is the name of the callback's method."""

    BEFORE_FIT = auto()
    BEFORE_EPOCH = auto()
    BEFORE_TRAIN = auto()
    BEFORE_BATCH = auto()
    AFTER_PRED = auto()
    AFTER_LOSS = auto()
    BEFORE_BACKWARD = auto()
    AFTER_CANCEL_BACKWARD = auto()
    AFTER_BACKWARD = auto()
    BEFORE_STEP = auto()
    AFTER_CANCEL_STEP = auto()
    AFTER_STEP = auto()
    AFTER_CANCEL_BATCH = auto()
    AFTER_BATCH = auto()
    AFTER_CANCEL_TRAIN = auto()
    AFTER_TRAIN = auto()
    BEFORE_VALIDATE = auto()
    AFTER_CANCEL_VALIDATE = auto()
    AFTER_VALIDATE = auto()
    AFTER_CANCEL_EPOCH = auto()
    AFTER_EPOCH = auto()
    AFTER_CANCEL_FIT = auto()
    AFTER_FIT = auto()


_ordered = list(Event)
# the events of one batch: the only ones that `run_train` and `run_valid` switch
BATCH_EVENTS = frozenset(_ordered[_ordered.index(Event.BEFORE_BATCH) : _ordered.index(Event.AFTER_BATCH) + 1])


class CancelException(Exception):
    """Base of the exceptions that end a level of the loop early; the message says why, and may be empty."""

    level: ClassVar[str]
    raised_in: str = (
        "the model, the loss function or the loader"  # or, set by the loop, "SkipNonFinite.after_loss"
    )


class CancelFitException(CancelException):
    """Ends the fit: `after_cancel_fit` and `after_fit` come next, and `Progress` shows the reason."""

    level = "fit"


class CancelEpochException(CancelException):
    """Ends the epoch: `after_cancel_epoch` and `after_epoch` come next, then the next epoch."""

    level = "epoch"


class CancelTrainException(CancelException):
    """Ends the epoch's training: `after_cancel_train` and `after_train` come next, then the validation."""

    level = "train"


class CancelValidException(CancelException):
    """Ends the validation: `after_cancel_validate` and `after_validate` come next."""

    level = "validate"


class CancelBatchException(CancelException):
    """Ends the batch: `after_cancel_batch` and `after_batch` come next, then the next batch."""

    level = "batch"


class CancelBackwardException(CancelException):
    """Skips the backward pass: `after_cancel_backward` and `after_backward` come next, then the step."""

    level = "backward"


class CancelStepException(CancelException):
    """Skips the optimizer's step and `zero_grad`: gradients stay, as accumulation needs."""

    level = "step"


class Level(NamedTuple):
    """A part of the loop: the events that open and close it, and the exception that ends it early."""

    before: str
    after: str
    after_cancel: str
    cancel: type[CancelException]


# by name, outermost first, which is also the order of precedence of their cancels
LEVELS = {
    cancel.level: Level(
        Event(f"before_{cancel.level}").value,
        Event(f"after_{cancel.level}").value,
        Event(f"after_cancel_{cancel.level}").value,
        cancel,
    )
    for cancel in (
        CancelFitException,
        CancelEpochException,
        CancelTrainException,
        CancelValidException,
        CancelBatchException,
        CancelBackwardException,
        CancelStepException,
    )
}


def outermost(cancels: list[CancelException]) -> CancelException:
    """The first of `cancels` that ends the outermost level."""
    return min(cancels, key=lambda cancel: list(LEVELS).index(cancel.level))


# words of a method's name in Lightning, Hugging Face, Keras and fastai v1, and the level that they stand for
_WORDS = {
    "backward": "backward",
    "optimizer": "step",
    "loss": "loss",
    "batch": "batch",
    "step": "batch",
    "substep": "batch",
    "val": "validate",
    "valid": "validate",
    "validate": "validate",
    "validation": "validate",
    "eval": "validate",
    "evaluate": "validate",
    "test": "validate",
    "epoch": "epoch",
    "train": "fit",
    "fit": "fit",
    "exception": "fit",
}
_OPENING, _CLOSING = {"before", "begin", "start", "pre"}, {"after", "end"}
# parts of a training that have no event
_OTHER_WORDS = {"forward", "save", "log", "init", "predict", "prediction", "sanity", "zero"}


def looks_like_event(name: str) -> bool:
    """Whether a method or argument `name` is clearly meant as an event of hookcb or another framework.

    >>> [looks_like_event(name) for name in ("afterBatch", "on_epoch_end", "begin_fit", "on_alarm", "report")]
    [True, True, True, False, False]
    """
    if re.match(r"(before|after)(_|[A-Z])", name) or re.fullmatch(
        "begin_(fit|epoch|train|batch|validate)", name
    ):
        return True
    if name.startswith("on_"):
        return not _words(name).isdisjoint({*_WORDS, *_OPENING, *_CLOSING, *_OTHER_WORDS})
    return not name.startswith("_") and _plain(name) in {_plain(event) for event in Event}


def event_meant(name: str) -> Event | None:
    """The event that `name` is a misspelling of, or stands for in another framework; None if there is none.

    >>> [event_meant(name).value for name in ("after_bacth", "on_batch_end", "on_before_optimizer_step")]
    ['after_batch', 'after_batch', 'before_step']
    """
    words = _words(name)
    if "forward" in words:
        return Event.BEFORE_BATCH if words & _OPENING else Event.AFTER_PRED
    if not words & {"on", "begin"}:
        close = difflib.get_close_matches(_plain(name), [_plain(event) for event in Event], n=1)
        return next((event for event in Event if [_plain(event)] == close), None)
    level = next((level for word, level in _WORDS.items() if word in words), None)
    if level == "epoch" and "train" in words:
        level = "train"
    with suppress(ValueError):  # there is no before_loss
        return Event(f"{'before' if words & _OPENING else 'after'}_{level}")
    return None


def _words(name: str) -> set[str]:
    return set(name.lower().split("_"))


def _plain(name: str) -> str:
    return name.replace("_", "").lower()
