"""Report: a page of the run that is written again and again while it goes on."""

import os
import time

from hookcb.core import orders
from hookcb.core.arguments import check_number, check_page
from hookcb.core.callback import Callback
from hookcb.core.console import warn
from hookcb.report.collect import collect
from hookcb.report.page import Page

FIRST = 5.0  # seconds until the first page; later ones are `every` seconds apart
MAX_SHARE = 0.01  # of the time of a training that is spent on writing pages


class Report(Callback):
    """Writes the run as one HTML file, every few seconds while it goes on, and at its end.

    The file is replaced as a whole; an open page follows by itself and keeps its place. It shows what the
    other callbacks record, such as `Diagnose`, so give those too. Of several ranks, rank 0 writes. If writing
    takes more than 1 % of the time, pages come less often. A page that cannot be written gives a warning, and
    the training goes on.

    Args:
        path: the file; its folder is created if it is missing.
        every: seconds from one page to the next.
        name: attribute of the learner.

    Raises:
        TypeError, ValueError: If an argument is invalid.

    >>> import tempfile
    >>> from hookcb import Diagnose, Report, load_report, synth_learner
    >>> learn, folder = synth_learner(), tempfile.mkdtemp()
    >>> with learn.no_logging():
    ...     learn.fit(2, cbs=[Diagnose(), Report(f"{folder}/run.html")])
    >>> load_report(f"{folder}/run.html").n_batches
    20
    """

    default_name = "page"  # report is a method of a Learner
    order = orders.REPORT
    run_valid = run_lr_find = False

    def __init__(
        self, path: str | os.PathLike[str] = "run.html", every: float = 30, *, name: str | None = None
    ) -> None:
        super().__init__(name=name)
        self.path, self.every = check_page(path), check_number("every", every, 0, hint=", in seconds")
        self._next = 0.0
        self._has_warned = False

    def before_fit(self) -> None:
        self._has_warned = False
        self._next = time.monotonic() + min(self.every, FIRST)
        if self.path.is_dir():
            self._warn(f"{self.path} is a folder; give the path of a file in it")

    def after_batch(self) -> None:
        if time.monotonic() >= self._next:
            self._write(self.every)

    def after_fit(self) -> None:
        self._write(None)

    def _write(self, every: float | None) -> None:
        """Writes the page, as it is while the fit goes on, or at its end."""
        if not self.learn.ranks.is_main:
            return
        began = time.monotonic()
        try:
            data = collect(self.learn)
            data.every = every
            Page(data).save(self.path)
        except Exception as error:  # the training must go on, whatever it is
            self._warn(f"{type(error).__name__}: {error}")
        now = time.monotonic()
        self._next = now + max(self.every, (now - began) / MAX_SHARE)

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn(f"Report cannot write {self.path}, and the training goes on without it: {why}")
