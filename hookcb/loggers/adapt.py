"""Makes loggers of paths and of other libraries' runs."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hookcb.loggers.base import Logger
from hookcb.loggers.csv import CSVLogger
from hookcb.loggers.jsonl import JSONLLogger
from hookcb.loggers.mlflow import MLflowLogger
from hookcb.loggers.tensorboard import TensorBoardLogger

FILES: dict[str, Callable[[Path], Logger]] = {".jsonl": JSONLLogger, ".csv": CSVLogger}
OWN = (JSONLLogger, CSVLogger, TensorBoardLogger, MLflowLogger)  # which a loop takes in place of a `Log`
NAMES = ", ".join(kind.__name__ for kind in OWN)
POSSIBLE = (
    f"give one of {NAMES}, a path that ends in {' or '.join(FILES)}, or an object with a method "
    "log(values, step=…), as a run of wandb, trackio or swanlab has"
)


def as_logger(thing: Any) -> Logger:
    """Returns a logger: for a path one that writes to it, otherwise the object itself.

    Raises:
        TypeError: If it is neither a path nor a logger.
        ValueError: If the path has another suffix than those of `FILES`.

    >>> from hookcb.loggers import as_logger
    >>> as_logger("runs/first.csv").path.name
    'first.csv'
    """
    if isinstance(thing, str | Path):
        path = Path(thing)
        if path.suffix not in FILES:
            raise ValueError(f"{str(thing)!r} does not end in {' or '.join(FILES)}; {POSSIBLE}")
        return FILES[path.suffix](path)
    if isinstance(thing, type) or not _takes_values(getattr(thing, "log", None)):
        hint = "an instance, not the class" if isinstance(thing, type) else _hint(thing)
        raise TypeError(f"nothing can be logged to {thing!r:.80}; {hint or POSSIBLE}")
    logger: Logger = thing
    return logger


def _takes_values(log: Any) -> bool:
    """Whether `log` can be called as `log({}, step=0)`."""
    try:
        inspect.signature(log, follow_wrapped=False).bind({}, step=0)  # what is wrapped may take a `self` too
    except (TypeError, ValueError):  # ValueError: a function written in C, such as math.log
        return False
    return True


def _hint(thing: Any) -> str:
    if hasattr(thing, "add_scalar"):
        return "instead of a SummaryWriter, give TensorBoardLogger(folder)"
    return "for MLflow, give MLflowLogger(run)" if hasattr(thing, "log_metric") else ""
