"""Report: a page of the run that is written again and again while it goes on."""

import os
import time
from typing import Any

from hookcb.core import orders
from hookcb.core.arguments import check_number, check_page
from hookcb.core.callback import Callback
from hookcb.core.console import show, warn
from hookcb.report.collect import collect
from hookcb.report.data import PageData
from hookcb.report.live import LivePage, LiveServer, how_ended
from hookcb.report.page import Page

FIRST = 5.0  # seconds until the first page; later ones are `every` seconds apart
# of the time of a training that is spent on making pages, and while somebody looks at a live one
MAX_SHARE, MAX_SHARE_OPEN = 0.01, 0.05


class Report(Callback):
    """Writes the run as one HTML file, every few seconds while it goes on, and at its end.

    The file is replaced as a whole; an open page follows by itself and keeps its place. It shows what the
    other callbacks record, such as `Diagnose`, so give those too. Of several ranks, rank 0 writes. If writing
    takes more than 1 % of the time, pages come less often. A page that cannot be written gives a warning, and
    the training goes on.

    With `live` the page is also served to browsers on this machine, at an address that is printed when the
    fit begins. It draws new data in place, without a reload, and says how the run has ended. While it is open
    in a browser, up to 5 % of the time go into new data. The address is secret, and ends with the fit; a page
    that is open then gets the end, for which the fit waits 5 s at most.

    Args:
        path: the file; its folder is created if it is missing. None for no file, if `live`.
        every: seconds from one page to the next.
        live: whether to serve the page; a port if it is not to be any that is free, as for a tunnel by ssh.
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
        self,
        path: str | os.PathLike[str] | None = "run.html",
        every: float = 30,
        *,
        live: bool | int = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.live = check_live(live)
        self.path = None if path is None and live is not False else check_page(path)  # type: ignore[arg-type]
        self.every = check_number("every", every, 0, hint=", in seconds")
        self._next = 0.0
        self._has_warned = False
        self._server: LiveServer | None = None
        self._page: LivePage | None = None
        self._last = 0 if live is True else int(live), ""  # port and secret: the address stays in later fits

    def before_fit(self) -> None:
        self._has_warned = False
        self._next = time.monotonic() + min(self.every, FIRST)
        if self.path is not None and self.path.is_dir():
            self._warn(f"{self.path} is a folder; give the path of a file in it")
        if self.live is not False and self.learn.ranks.is_main:
            self._serve()

    def after_batch(self) -> None:
        if time.monotonic() >= self._next:
            self._write(self.every)

    def after_fit(self) -> None:
        try:
            self._write(None)
        finally:
            server, self._server, self._page = self._server, None, None
            if server is not None:
                server.end(how_ended(self.learn.fit_error))
                server.close()

    def _serve(self) -> None:
        """Begins to serve the page, at the address of the last fit if there was one."""
        try:
            self._server = LiveServer(*self._last)
        except (OSError, RuntimeError) as error:  # the port is in use, or no thread can be started
            return self._warn(str(error))
        self._page = self._server.page()
        self._last = self._server.port, self._server.token
        show(f"live: {self._server.address}", soft_wrap=True, highlight=False, markup=False)

    def _write(self, every: float | None) -> None:
        """Writes the page, as it is while the fit goes on, or at its end."""
        if not self.learn.ranks.is_main:
            return
        began = time.monotonic()
        try:
            data = self._collect()
            data.every = every
            data.title = data.title or (type(self.model).__name__ if self.path is None else self.path.stem)
            if self._page is not None:
                self._page.show(data)
            if self.path is not None:
                Page(data).save(self.path)
        except Exception as error:  # the training must go on, whatever it is
            self._warn(f"{type(error).__name__}: {error}")
        now = time.monotonic()
        share = MAX_SHARE_OPEN if self._page is not None and self._page.is_open else MAX_SHARE
        self._next = now + max(self.every, (now - began) / share)

    def _collect(self) -> PageData:
        return collect(self.learn)

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            what = "show a page" if self.path is None else f"write {self.path}"
            warn(f"Report cannot {what}, and the training goes on without it: {why}")

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_server": None, "_page": None}  # a copy does not serve


def check_live(live: bool | int) -> bool | int:
    """Returns `live` if it says whether to serve, or is a port.

    Raises:
        TypeError: If it is neither.
        ValueError: If there is no such port.
    """
    if not isinstance(live, int):
        raise TypeError(f"live must be True, False or a port, such as 8080, got {live!r:.80}")
    if not isinstance(live, bool) and not 0 < live < 65_536:
        raise ValueError(f"a port is a number from 1 to 65535, got {live!r}; True takes any that is free")
    return live
