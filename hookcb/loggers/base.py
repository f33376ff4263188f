"""Logger: its protocol, what it may support besides numbers, and what is made a logger of."""

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hookcb.core.randomness import random_kept
from hookcb.loggers.files import CSVLogger, JSONLLogger
from hookcb.loggers.trackers import tracker_of
from hookcb.records.recording import Histogram

FILES: dict[str, Callable[[Path], "Logger"]] = {".jsonl": JSONLLogger, ".csv": CSVLogger}
POSSIBLE = (
    "give a JSONLLogger, CSVLogger, TensorBoardLogger or MLflowLogger, a path that ends in .jsonl or .csv, "
    "a run of wandb, trackio, SwanLab, Comet, ClearML, Neptune or Aim, or an object with a method "
    "log(values, step=…)"
)


class Logger(Protocol):
    """Logs named numbers; all that `Log` needs.

    Accelerate's Accelerator is one too, and `as_logger` makes one of a run of wandb, trackio, SwanLab, Comet,
    ClearML, Neptune or Aim.

    >>> from hookcb import Log, synth_learner
    >>> class Largest:
    ...     loss = 0.0
    ...     def log(self, values, step):
    ...         self.loss = max(self.loss, values.get("loss", 0.0))
    >>> learn, largest = synth_learner(), Largest()
    >>> with learn.no_logging():
    ...     learn.fit(1, cbs=Log(largest, every=1))
    >>> largest.loss == max(learn.recorder.losses)
    True
    """

    def log(self, values: Mapping[str, float], /, step: int) -> object:
        """Logs numbers, including NaN and infinities.

        Args:
            values: the numbers by name.
            step: the training step they belong to; it never decreases, unless a fit begins anew or is
                resumed from a checkpoint.
        """


@runtime_checkable
class TakesHistograms(Protocol):
    """A logger that also logs histograms."""

    def log_histograms(self, hists: Mapping[str, Histogram], /, step: int) -> object:
        """Logs the histograms of a training step, by name."""


@runtime_checkable
class TakesText(Protocol):
    """A logger that also logs texts, such as a verdict."""

    def log_text(self, name: str, text: str, /, step: int) -> object:
        """Logs a text of several lines."""


@runtime_checkable
class TakesFigures(Protocol):
    """A logger that also logs figures of matplotlib."""

    def log_figure(self, name: str, figure: Any, /, step: int) -> object:
        """Logs a figure."""


@runtime_checkable
class Opens(Protocol):
    """A logger that opens a resource when it first logs, and again when it logs after `close`."""

    @property
    def is_open(self) -> bool:
        """Whether the resource is open."""

    def close(self) -> None:
        """Closes the resource."""


@runtime_checkable
class DiffersByRank(Protocol):
    """A logger that several ranks can have, each with its own file."""

    def of_rank(self, rank: int) -> Logger:
        """Logger for a rank; rank 0 has the original."""


def as_logger(thing: Any) -> Logger:
    """Returns a logger: for a path one that writes to it, for a run of another library one that tells it.

    Any other logger is returned as it is.

    Raises:
        TypeError: If it is neither a path nor a logger.
        ValueError: If the path has another suffix than .jsonl or .csv.

    >>> from hookcb.loggers import as_logger
    >>> as_logger("runs/first.csv").path.name
    'first.csv'
    """
    if isinstance(thing, str | Path):
        path = Path(thing)
        if path.suffix not in FILES:
            raise ValueError(f"{str(thing)!r} does not end in {' or '.join(FILES)}; {POSSIBLE}")
        return FILES[path.suffix](path)
    if (tracker := tracker_of(thing)) is not None:
        return tracker
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
    if hasattr(type(thing), "log_hyperparams"):
        return "instead of a logger of Lightning, give its attribute experiment, or MLflowLogger(run)"
    return "for MLflow, give MLflowLogger(run)" if hasattr(thing, "log_metric") else ""


def import_extra(module: str, package: str, extra: str) -> Any:
    """Imports a module of an optional package.

    Args:
        module: name of the module.
        package: name of the package, for the message.
        extra: the extra of hookcb that installs it.

    Raises:
        ModuleNotFoundError: If it is not installed; the message says how to install it.
    """
    try:
        with random_kept():
            return import_module(module)
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"this needs {package}, which is not installed; pip install 'hookcb[{extra}]'"
        ) from missing
