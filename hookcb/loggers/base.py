"""What takes the numbers of a training: the protocol of a logger, and what it may do besides."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

from hookcb.core.randomness import random_kept


@dataclass(frozen=True, slots=True)
class Histogram:
    """How values are spread over bins of equal width.

    Args:
        low: lower edge of the first bin, in the unit of the values.
        high: upper edge of the last.
        counts: number of values in each bin.
        below: number of values below `low`.
        above: number of values above `high`.
        min: smallest finite value, NaN where there is none.
        max: largest finite value.

    >>> from hookcb.loggers import Histogram
    >>> Histogram(low=0.0, high=1.0, counts=(3, 1), below=0, above=2, min=0.1, max=4.0).edges
    (0.0, 0.5, 1.0)
    """

    low: float
    high: float
    counts: tuple[float, ...]
    below: float
    above: float
    min: float
    max: float

    @property
    def edges(self) -> tuple[float, ...]:
        """Of the bins, one more than there are bins."""
        n = len(self.counts)
        return tuple(self.low + (self.high - self.low) * i / n for i in range(n + 1))


class Logger(Protocol):
    """Takes numbers under their names: all that `Log` needs.

    So do a run of wandb, trackio or swanlab, Accelerate's Accelerator, and any object of your own.

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
        """Takes numbers, NaN and infinities among them.

        Args:
            values: by name.
            step: of the training they are of; never less than the one before, but where a fit begins anew,
                or goes on from a checkpoint.
        """


@runtime_checkable
class TakesHistograms(Protocol):
    """A logger that takes histograms too."""

    def log_histograms(self, hists: Mapping[str, Histogram], /, step: int) -> object:
        """Takes histograms by name, of the training's step `step`."""


@runtime_checkable
class Opens(Protocol):
    """A logger that opens something when it first logs, and again when it logs after `close`."""

    @property
    def is_open(self) -> bool:
        """Whether there is something to close."""

    def close(self) -> None:
        """Gives back what it has opened."""


def import_extra(module: str, package: str, extra: str) -> Any:
    """A module of an optional package.

    Args:
        module: which.
        package: what a user knows it as.
        extra: of hookcb, that installs it.

    Raises:
        ModuleNotFoundError: that says how to get it.
    """
    try:
        with random_kept():
            return import_module(module)
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"this needs {package}, which is not installed; pip install 'hookcb[{extra}]'"
        ) from missing
