"""Monitors a column of the epoch's row: whether it exists, lower is better, and it has improved."""

import difflib
import math
from collections.abc import Callable
from typing import Any

from hookcb.core.arguments import check_count, check_number, did_you_mean
from hookcb.core.events import Event
from hookcb.core.state import TrainingState
from hookcb.training.metrics import Metrics

MODES = ("min", "max")
Mode = str | Callable[[Any, Any], Any]  # "min", "max", or whether the first of two values is better


def resolve_mode(monitor: str, mode: Mode | None = None) -> str:
    """Returns "min" if lower values of a column are better, else "max"; by default, its name tells."""
    if not isinstance(monitor, str):
        raise TypeError(f"monitor must be the name of a column, such as 'valid_loss', got {monitor!r:.80}")
    if mode is None:
        return "min" if "loss" in monitor or "error" in monitor else "max"
    if callable(mode):  # as fastai's `comp`
        return "min" if mode(0.0, 1.0) else "max"
    if mode not in MODES:
        raise ValueError(
            f"mode must be 'min' if lower is better, 'max', a function such as np.less, or None, got {mode!r}"
        )
    return mode


def check_patience(patience: int, min_delta: float, least: int = 1) -> None:
    """Checks the arguments of those names."""
    check_count("patience", patience, "epochs", least)
    check_number("min_delta", min_delta, closed=True, hint=", in the unit of what is monitored")


def check_monitor(learn: TrainingState, monitor: str) -> None:
    """Checks before a fit that its rows will have a column.

    A callback, a metric or a Learner of the user may add columns; then only a likely typo is an error.

    Raises:
        LookupError: If no row will have this column, or the name looks like a typo of a known one.
        ValueError: If it comes from the validation, but there is no `dls.valid`.
    """
    metrics = [name for cb in _metrics(learn) for name in cb.names]
    known = ["train_loss", "valid_loss", *metrics, "time"]
    if monitor in ("valid_loss", *metrics) and not _has_valid(learn):
        raise ValueError(
            f"monitor is {monitor!r}, but there is no dls.valid to compute it on; "
            "give monitor='train_loss', or make the learner with (train, valid)"
        )
    if monitor in known:
        return
    is_open = _may_have_others(learn)
    close = difflib.get_close_matches(monitor, known, n=1, cutoff=0.8 if is_open else 0.6)
    # a name that only extends a known one, such as valid_loss_ema, is not a typo
    is_typo = close and not any(monitor.startswith(name) for name in known)
    if is_typo or not is_open:
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise LookupError(
            f"no column {monitor!r}; {hint}known are: {', '.join(known)}; metrics=… adds others"
        )


def monitored(learn: TrainingState, monitor: str) -> float | None:
    """Value of a column of this epoch's row; None if the epoch was cancelled before there was one.

    Raises:
        LookupError: If the epoch was not cancelled and has no such column; the message lists its columns.
    """
    if monitor in learn.row:
        return float(learn.row[monitor])
    if ("valid_loss" if _has_valid(learn) else "train_loss") not in learn.row:
        return None  # cancelled: an epoch without a value does not count
    hint = did_you_mean(monitor, learn.row)
    raise LookupError(f"no column {monitor!r} in the epoch's row; {hint}it has: {', '.join(learn.row)}")


def improves(value: float, best: float | None, mode: str, min_delta: float = 0.0) -> bool:
    """Whether `value` is better than `best`, None if there is none, by more than `min_delta`; NaN never is.

    >>> improves(0.5, 0.6, "min"), improves(0.5, 0.6, "max"), improves(0.5, None, "max")
    (True, False, True)
    """
    if best is None or math.isnan(best):
        return not math.isnan(value)
    return value < best - min_delta if mode == "min" else value > best + min_delta


def _metrics(learn: TrainingState) -> list[Metrics]:
    return [cb for cb in learn.cbs if isinstance(cb, Metrics)]


def _may_have_others(learn: TrainingState) -> bool:
    """Whether other code than hookcb's may add columns: a loop, a callback, a function in one, a metric."""
    are_ours = all(type(x).__module__.startswith("hookcb.") for x in (learn, *learn.cbs))
    has_functions = any(event in vars(cb) for cb in learn.cbs for event in Event)
    return not are_ours or has_functions or not all(cb.has_all_names for cb in _metrics(learn))


def _has_valid(learn: TrainingState) -> bool:
    # a loop that hookcb does not run has no loaders, but may validate
    return not hasattr(learn, "dls") or getattr(learn.dls, "valid", None) is not None
