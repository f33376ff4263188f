"""LoggerGroup: logs to several loggers; their errors do not end a training."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeGuard

from hookcb.core.console import warn
from hookcb.core.randomness import random_state, set_random_state
from hookcb.loggers.base import Logger, Opens, TakesFigures, TakesHistograms, TakesText
from hookcb.records.recording import Histogram


class LoggerGroup:
    """Logs to several loggers, from `begin` to `end`.

    If one raises, there is a warning, and it is left out until the next `begin`. A logger that draws random
    numbers does not change the training.

    Args:
        loggers: the loggers; a copy of the group logs to the same ones.
    """

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self.loggers = tuple(loggers)
        self.begin()

    def begin(self) -> None:
        """Includes all loggers again; `end` will not close those that are already open."""
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

    def show(self, step: int, texts: Mapping[str, str], figures: Mapping[str, Callable[[], Any]]) -> None:
        """Logs texts, and figures, which are made if a logger takes them."""
        made: dict[str, Any] = {}

        def log_figure(logger: TakesFigures, name: str) -> None:
            if name not in made:
                made[name] = figures[name]()
            logger.log_figure(name, made[name], step=step)

        acts: list[tuple[int, Callable[[], object]]] = []
        for i, logger in enumerate(self.loggers):
            if isinstance(logger, TakesText):
                acts += [(i, partial(logger.log_text, name, text, step=step)) for name, text in texts.items()]
            if isinstance(logger, TakesFigures):
                acts += [(i, partial(log_figure, logger, name)) for name in figures]
        self._guarded(acts)

    def end(self) -> None:
        """Closes the loggers that were opened since `begin`."""
        opened = [
            (i, logger.close)
            for i, logger in enumerate(self.loggers)
            if i not in self._were_open and _is_open(logger)
        ]
        self._guarded(opened, also_failed=True)

    def _guarded(self, acts: Sequence[tuple[int, Callable[[], object]]], also_failed: bool = False) -> None:
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
            if i not in self._failed:
                self._failed.add(i)
                warn(
                    f"{self.loggers[i]!r:.80} failed with {error!r:.200}; the training goes on, but nothing "
                    "more is logged there in this fit",
                    is_of_rank=True,
                )


def _is_open(logger: Logger) -> TypeGuard[Opens]:
    return isinstance(logger, Opens) and logger.is_open
