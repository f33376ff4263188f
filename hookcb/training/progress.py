"""Progress: a progress bar and a table row for each epoch."""

import time
from collections.abc import Callable

from rich.console import Console

from hookcb.core import orders
from hookcb.core.callback import Callback
from hookcb.core.console import attempt, safe_console
from hookcb.training.display import Display, open_display


class Progress(Callback):
    """Shows the progress of a fit: a bar with loss and remaining time, and a row per epoch.

    If the output is neither a terminal nor a notebook, there are only rows, printed as each epoch ends. A row
    shows `learn.row`, so every number that a callback puts there gets a column. If a callback ends the fit
    early, a line says which one, where and why.

    Args:
        bar: False for rows only.
        console: console to print to; by default standard output.
        name: name of the callback in the learner.

    >>> from hookcb import Progress, synth_learner
    >>> learn = synth_learner(cbs=Progress(bar=False))
    >>> learn.progress.bar
    False
    """

    order = orders.PROGRESS
    shows_only = True
    every_seconds = 0.2  # reading the loss waits for the device: five times a second at most

    def __init__(self, bar: bool = True, *, console: Console | None = None, name: str | None = None) -> None:
        super().__init__(name=name)
        self.bar, self.console = bar, console
        self._display: Display | None = None

    def before_fit(self) -> None:
        self._drawn, self._display = 0.0, None
        if self.learn.ranks.is_main:
            self._shown(lambda: setattr(self, "_display", open_display(safe_console(self.console), self.bar)))

    def tell(self, line: str) -> None:
        """Shows a line of text, while a fit runs."""
        if (display := self._display) is not None:
            self._shown(lambda: display.add_line(line))

    def after_batch(self) -> None:
        if self._display is None or (now := time.perf_counter()) - self._drawn < self.every_seconds:
            return
        self._drawn = now
        epoch = f"epoch {self.epoch + 1}" + (f"/{self.n_epoch}" if self.n_epoch else "")
        loss = self.loss if self.training else None
        doing = f"{epoch}  validating" if loss is None else f"{epoch}  loss {float(loss.detach()):.4f}"
        display, done, total = self._display, self.iter + 1, self.n_iter
        self._shown(lambda: display.advance(doing, done, total))

    def after_cancel_fit(self) -> None:
        self.tell(self.learn.ended_by)

    def after_epoch(self) -> None:
        if (display := self._display) is not None:
            self._shown(lambda: display.add_row({"epoch": self.epoch, **self.learn.row}))

    def after_fit(self) -> None:
        if (display := self._display) is not None:
            self._shown(display.close)
            self._display = None

    def _shown(self, act: Callable[[], object]) -> None:
        """Shows something; after an error, nothing more is shown in this fit."""
        if not attempt(act) and (display := self._display) is not None:
            self._display = None
            attempt(display.close)
