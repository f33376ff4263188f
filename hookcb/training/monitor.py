"""What callbacks watch an epoch's row for: which column, whether lower is better, whether it got better."""

import difflib
import math

from hookcb.core.arguments import check_count, check_number
from hookcb.core.events import Event
from hookcb.core.state import TrainingState
from hookcb.training.metrics import Metrics

MODES = ("min", "max")


def resolve_mode(monitor: str, mode: str | None = None) -> str:
    """Whether `monitor` is better when it is lower, "min", or higher, "max".

    Args:
        monitor: a column of the epoch's row.
        mode: None for "min" where the name has "loss" or "error" in it, and "max" elsewhere.

    Raises:
        TypeError: where `monitor` is no text.
        ValueError: where `mode` is another one.
    """
    if not isinstance(monitor, str):
        raise TypeError(f"monitor is {monitor!r:.80}; give the name of a column, such as 'valid_loss'")
    if mode is None:
        return "min" if "loss" in monitor or "error" in monitor else "max"
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; give 'min' where lower is better, 'max', or None")
    return mode


def check_patience(patience: int, min_delta: float, least: int = 1) -> None:
    """Refuses what cannot say how long to wait for an improvement of which size.

    Raises:
        TypeError: where one is no number.
        ValueError: where `patience` is below `least`, or `min_delta` negative or not finite.
    """
    check_count("patience", patience, "epochs", least)
    check_number("min_delta", min_delta, closed=True, hint=", in the unit of what is monitored")


def check_monitor(learn: TrainingState, monitor: str) -> None:
    """Refuses, before a fit, a column that its rows will not have.

    A callback, a metric or a Learner of the user's own may add columns; then only a slip of the keyboard is
    refused.

    Raises:
        LookupError: if no row will have this column, or if the name is almost that of a known one.
        ValueError: where it comes from the validation, and there is no `dls.valid`.
    """
    metrics = [name for cb in _metrics(learn) for name in cb.names]
    known = ["train_loss", "valid_loss", *metrics, "time"]
    if monitor in ("valid_loss", *metrics) and not _has_valid(learn):
        raise ValueError(
            f"monitor is {monitor!r}, and there is no dls.valid to compute it on; "
            "give monitor='train_loss', or make the learner with (train, valid)"
        )
    if monitor in known:
        return
    is_open = _may_have_others(learn)
    close = difflib.get_close_matches(monitor, known, n=1, cutoff=0.8 if is_open else 0.6)
    # one that goes on after a known name, as valid_loss_ema, is not a slip of the keyboard
    is_slip = close and not any(monitor.startswith(name) for name in known)
    if is_slip or not is_open:
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise LookupError(
            f"no column {monitor!r}; {hint}known are: {', '.join(known)}; metrics=… adds others"
        )


def monitored(learn: TrainingState, monitor: str) -> float | None:
    """The value of a column of this epoch's row; None where the epoch was cut short before there was one.

    Raises:
        LookupError: where an epoch that was not cut short has no such column; the message lists those it has.
    """
    if monitor in learn.row:
        return float(learn.row[monitor])
    if ("valid_loss" if _has_valid(learn) else "train_loss") not in learn.row:
        return None  # cancelled: patience is not for epochs that nobody measured
    close = difflib.get_close_matches(monitor, learn.row, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise LookupError(f"no column {monitor!r} in the epoch's row; {hint}it has: {', '.join(learn.row)}")


def improves(value: float, best: float | None, mode: str, min_delta: float = 0.0) -> bool:
    """Whether `value` is better than `best` by more than `min_delta`; NaN never is, None is no best yet.

    >>> improves(0.5, 0.6, "min"), improves(0.5, 0.6, "max"), improves(0.5, None, "max")
    (True, False, True)
    """
    if best is None or math.isnan(best):
        return not math.isnan(value)
    return value < best - min_delta if mode == "min" else value > best + min_delta


def _metrics(learn: TrainingState) -> list[Metrics]:
    return [cb for cb in learn.cbs if isinstance(cb, Metrics)]


def _may_have_others(learn: TrainingState) -> bool:
    """Whether code that is not of hookcb may add columns: a loop, a callback, a function of one, a metric."""
    are_ours = all(type(x).__module__.startswith("hookcb.") for x in (learn, *learn.cbs))
    has_functions = any(event in vars(cb) for cb in learn.cbs for event in Event)
    return not are_ours or has_functions or not all(cb.has_all_names for cb in _metrics(learn))


def _has_valid(learn: TrainingState) -> bool:
    # a loop that is not ours has no loaders, and may validate
    return not hasattr(learn, "dls") or getattr(learn.dls, "valid", None) is not None
