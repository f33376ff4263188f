"""LoggerGroup: several loggers, none of which can do harm."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from hookcb.core.console import warn
from hookcb.core.randomness import random_state, set_random_state
from hookcb.loggers.base import Histogram, Logger, Opens, TakesHistograms


class LoggerGroup:
    """Logs to several, from `begin` to `end`.

    One that raises is told of in a warning, and left out until the next `begin`. What a logger does with
    random numbers changes none of those that come after it.

    Args:
        loggers: to log to; a copy of the group logs to the same.
    """

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self.loggers = tuple(loggers)
        self.begin()

    def begin(self) -> None:
        """All take part, and those that are open now will stay so."""
        self._failed: set[int] = set()
        self._were_open = {i for i, logger in enumerate(self.loggers) if _is_open(logger)}

    def log(self, step: int, values: Mapping[str, float], hists: Mapping[str, Histogram]) -> None:
        """Logs what there is of a step."""
        acts: list[tuple[int, Callable[[], object]]] = []
        for i, logger in enumerate(self.loggers):
            if values:
                acts.append((i, partial(logger.log, dict(values), step=step)))
            if hists and isinstance(logger, TakesHistograms):
                acts.append((i, partial(logger.log_histograms, dict(hists), step=step)))
        self._guarded(acts)

    def end(self) -> None:
        """Closes those that were opened since `begin`."""
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
                f"{self.loggers[i]!r:.80} has failed with {error!r:.200}; training goes on, and nothing more "
                "is logged there in this fit",
                stacklevel=2,
            )


def _is_open(logger: Logger) -> bool:
    return isinstance(logger, Opens) and logger.is_open
