"""A live page of what a script trains."""

import time
from collections.abc import Callable

from hookcb.diagnosis.callback import diagnose_loop
from hookcb.diagnosis.verdict import Verdict
from hookcb.report.callback import Report
from hookcb.report.collect import collect
from hookcb.report.data import PageData
from hookcb.report.live import LivePage

EVERY = 2.0  # seconds from one update to the next; more if that took much of the time, see `Report`


class ScriptReport(Report):
    """Shows a model on a page of a server while a script trains it; its end is shown by the tracker.

    Args:
        page: the page.
        scoped: the verdict to show, given that on the training.
        note: called with what is wrong if the page cannot be made.
    """

    def __init__(
        self, page: LivePage, scoped: Callable[[Verdict], Verdict], note: Callable[[str], None]
    ) -> None:
        super().__init__(None, EVERY, live=True, name="script_report")
        self._target, self._scoped, self._note = page, scoped, note

    @property
    def page(self) -> LivePage:
        """The page; not an attribute, as pages list the arguments that a callback keeps."""
        return self._target

    def before_fit(self) -> None:
        self._page, self._next = self.page, time.monotonic() + EVERY

    def after_fit(self) -> None:
        self._page = None

    def _collect(self) -> PageData:
        data = collect(self.learn, self._scoped(diagnose_loop(self.learn)))
        data.title = self.page.title
        return data

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._note(f"the live page could not be made: {why}")
