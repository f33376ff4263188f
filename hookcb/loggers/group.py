"""LoggerGroup: several loggers, whose errors do not end a training."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from hookcb.core.console import warn
from hookcb.core.randomness import random_state, set_random_state
from hookcb.loggers.base import Histogram, Logger, Opens, TakesHistograms


class LoggerGroup:
    """Logs to several loggers, from `begin` to `end`.

    If one raises, there is a warning, and it is left out until the next `begin`. Random numbers that a logger
    draws do not change those of the training.

    Args:
        loggers: the loggers; a copy of the group logs to the same ones.
    """

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self.loggers = tuple(loggers)
        self.begin()

    def begin(self) -> None:
        """Includes all loggers again, and notes those that are already open, which `end` will not close."""
        self._failed: set[int] = set()
        self._were_open = {i for i, logger in enumerate(self.loggers) if _is_open(logger)}

    def log(self, step: int, values: Mapping[str, float], hists: Mapping[str, Histogram]) -> None:
        """Logs the numbers and histograms of a step, if there are any."""
        acts: list[tuple[int, Callable[[], object]]] = []
        for i, logger in enumerate(self.loggers):
            if values:
                acts.append((i, partial(logger.log, dict(values), step=step)))
            if hists and isinstance(logger, TakesHistograms):
                acts.append((i, partial(logger.log_histograms, dict(hists), step=step)))
        self._guarded(acts)

    def end(self) -> None:
        """Closes the loggers that were opened since `begin`."""
        self._guarded(
            [
                (i, logger.close)
                for i, logger in enumerate(self.loggers)
                if i not in self._were_open and isinstance(logger, Opens) and logger.is_open
            ],
            also_failed=True,
        )

    def _guarded(self, acts: list[tuple[int, Callable[[], object]]], also_failed: bool = False) -> None:
        state = random_state()
        try:
            for i, act in acts:
                if i not in self._failed or also_failed:
                    self._try(i, act)
        finally:
            set_random_state(state)

    def _try(self, i: int, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:
            self._warn(i, error)

    def _warn(self, i: int, error: Exception) -> None:
        if i not in self._failed:
            self._failed.add(i)
            warn(
                f"{self.loggers[i]!r:.80} failed with {error!r:.200}; the training goes on, but nothing more "
                "is logged there in this fit",
                stacklevel=2,
            )


def _is_open(logger: Logger) -> bool:
    return isinstance(logger, Opens) and logger.is_open
