"""LiveServer: shows runs to browsers on this machine while they go on."""

import json
import os
import secrets
import time
from contextlib import suppress
from functools import partial
from hmac import compare_digest
from html import escape, unescape
from http.server import BaseHTTPRequestHandler
from itertools import count
from socket import SHUT_RDWR, socket
from socketserver import ThreadingTCPServer
from threading import Condition, Thread
from typing import Any

from hookcb.diagnosis.failures import is_failure
from hookcb.processes.hangs import Terminated
from hookcb.report.data import PageData
from hookcb.report.page import RUN, filled, inserted
from hookcb.report.text import text_of, title_of

HOST = "127.0.0.1"
NAMES = (HOST, "localhost")  # of this machine in a request; the port may be that of a tunnel
WAITING = "No numbers yet: the first come after a few seconds of training."
RECENT = 3.0  # seconds after which a page is taken for closed; an open one asks every second
LATELY = 30.0  # seconds after which nobody waits for a page to ask for the end
LINGER = 5.0  # seconds in which open pages get the end, at most
TURN = 0.1  # seconds of waiting at a time
MAX_OPEN = 64  # connections at a time


class LivePage:
    """A page of a `LiveServer`. One thread gives it data, others send them; what they read is set at once.

    Attributes:
        title: name of the run.
        place: its address below that of the server: "", or "2/" for the second.
    """

    def __init__(self, server: "LiveServer", place: str) -> None:
        self._server, self.place, self.title = server, place, ""
        self.show(PageData(WAITING))

    def show(self, data: PageData) -> None:
        """Shows these data from now on."""
        markup = text_of(data) | {"TITLE": escape(title_of(data))}
        self._shown = data.to_json(), markup, next(self._server.numbers)
        self.title = data.title

    @property
    def tag(self) -> str:
        """Tag of what is sent; it changes when that does."""
        return f'"{self._shown[-1]}-{self._server.state[1]}"'

    @property
    def is_open(self) -> bool:
        """Whether a browser has it open."""
        return self._server.is_open(self)

    def sent(self, is_whole: bool) -> tuple[bytes, str]:
        """The whole page, or only its data with their text, as JSON; and the tag."""
        tag, (data, markup, _) = self.tag, self._shown
        root = "../" if self.place else "./"
        others = [(x.title, root + x.place) for x in self._server.pages if x is not self and x.title]
        live = {"ended": self._server.state[0], "others": others, "tag": tag}
        beside: dict[str, Any] = {"live": live}
        whole, text_only = self._server.templates
        if not is_whole:
            beside |= {"title": unescape(markup["TITLE"]), "markup": inserted(text_only, markup)}
        text = f"{json.dumps(beside)[:-1]}, {data[1:]}".replace("<", "\\u003c")  # no text ends its element
        return (inserted(whole, markup | {"DATA": text}) if is_whole else text).encode(), tag


class LiveServer:
    """Serves pages of runs at an address of this machine that has a secret in it.

    Only a page and its data are there, and only for GET. All else is answered with 404; so is a request that
    names another host, as a page of the web makes it whose name has been given this address meanwhile (DNS
    rebinding). The thread that trains makes data and text; those of the server only put them together.

    Args:
        port: where to listen; 0 for any that is free.
        token: the secret; by default a new one.

    Attributes:
        port, token: where it listens, and the secret.
        address: what to open in a browser.
        templates: a page, and what is between its scripts, without text and data.
        pages: the pages; there is always a first.
        state: how the run has ended: "", or "with KeyError: 'x'", or None as long as it goes on; and a number
            that is another one for other pages or another end.

    Raises:
        OSError: If it cannot listen there.
    """

    def __init__(self, port: int = 0, token: str = "") -> None:
        try:
            self._server = _Server((HOST, port), partial(_Handler, self))
        except OSError as error:
            hint = "; give another one, or none for any that is free" if port else ""
            raise OSError(f"no page can be served on port {port}: {error.strerror or error}{hint}") from error
        self.port, self.token = self._server.server_address[1], token or secrets.token_urlsafe(16)
        self.address = f"http://{HOST}:{self.port}/{self.token}/"
        self.numbers = count()
        self.state: tuple[str | None, int] = None, 0
        self.templates = _templates()
        self.pages: list[LivePage] = []
        self._free: list[LivePage] = [self._add()]
        self._asked: dict[tuple[LivePage, str], tuple[float, str]] = {}  # by open page: when, and what it has
        self._answered, self._process = Condition(), os.getpid()
        self._thread = Thread(target=self._server.serve_forever, name="hookcb live", daemon=True)
        self._thread.start()

    def page(self, title: str = "") -> LivePage:
        """A page that is in no use; the first is there from the beginning."""
        page = self._free.pop() if self._free else self._add()
        page.title = title
        self.state = self.state[0], next(self.numbers)
        return page

    def give_back(self, page: LivePage) -> None:
        """Leaves a page to another run."""
        page.title = ""
        self._free.append(page)

    def end(self, how: str = "") -> None:
        """Tells that the run has ended, and how; see `state`. The pages have their last data."""
        self.state = how, next(self.numbers)

    def close(self) -> None:
        """Ends to serve, once the pages that are open have what is sent, or a few seconds later.

        Does nothing in a process that was forked, which has no thread of it.
        """
        if os.getpid() != self._process:
            return
        try:
            self._wait_for_pages()
        finally:
            self._server.end()
            self._thread.join(1.0)

    def found(self, path: str, host: str) -> tuple[LivePage, bool] | None:
        """The page that a request asks for, and whether only its data; None if there is none."""
        token, slash, asked = path.partition("?")[0][1:].partition("/")
        is_here = compare_digest(token.encode(), self.token.encode()) and slash
        if not is_here or (host.rpartition(":")[0] or host) not in NAMES:
            return None
        place = asked.removesuffix("data")
        page = next((page for page in self.pages if page.place == place), None)
        return None if page is None else (page, asked != place)

    def note(self, page: LivePage, client: str, tag: str | None) -> None:
        """Notes what a page in a browser has been sent, or with None only that it has asked.

        One that has not asked for data yet is called "".
        """
        with self._answered:
            now = time.monotonic()
            self._asked = {key: own for key, own in self._asked.items() if now - own[0] < LATELY}
            asked, had = self._asked.get((page, client), (now, ""))
            self._asked.pop((page, ""), None)
            self._asked[page, client] = (now, had) if tag is None else (asked, tag)
            self._answered.notify_all()

    def is_open(self, page: LivePage) -> bool:
        """Whether a browser has asked for a page in the last seconds."""
        now = time.monotonic()
        return any(own is page and now - when < RECENT for (own, _), (when, _) in [*self._asked.items()])

    def _add(self) -> LivePage:
        page = LivePage(self, f"{len(self.pages) + 1}/" if self.pages else "")
        self.pages = [*self.pages, page]  # at once, as other threads read it
        return page

    def _wait_for_pages(self) -> None:
        """Waits for pages that ask since this began, and a while for those that have asked lately.

        Turns are counted, not seconds: while a machine stands still, no page can ask.
        """
        began, turns = time.monotonic(), 0
        with self._answered:
            while any(
                tag != page.tag and turns < (LINGER if when > began else RECENT) / TURN
                for (page, _), (when, tag) in self._asked.items()
                if began - when < LATELY
            ):
                turns += not self._answered.wait(TURN)


class _Server(ThreadingTCPServer):
    """The sockets and threads of a `LiveServer`; HTTPServer would look up the name of the host."""

    allow_reuse_address = os.name == "posix"  # a port whose last server has just ended
    daemon_threads, request_queue_size = True, MAX_OPEN

    def __init__(self, *args: Any) -> None:
        self._open: dict[Thread, socket] = {}
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers in a thread of its own, of which there are not too many."""
        self._open = {own: x for own, x in self._open.items() if own.is_alive()}
        if len(self._open) >= MAX_OPEN:
            return self.shutdown_request(request)
        thread = Thread(target=self.process_request_thread, args=(request, client_address), daemon=True)
        self._open[thread] = request
        thread.start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: a client that goes is none of the training's business."""

    def end(self) -> None:
        """Ends all threads; a process that was forked meanwhile does not listen on, either."""
        with suppress(OSError):  # wakes the thread that waits for clients
            self.socket.shutdown(SHUT_RDWR)
        self.shutdown()
        self.server_close()
        for thread, request in self._open.items():
            with suppress(OSError):  # it is closed
                request.shutdown(SHUT_RDWR)
            thread.join(1.0)


class _Handler(BaseHTTPRequestHandler):
    """Answers a request."""

    timeout = 30.0

    def __init__(self, live: LiveServer, *args: Any) -> None:
        self._live = live
        super().__init__(*args)

    def do_GET(self) -> None:
        """Sends a page or its data, or 304 if the client has them."""
        found = self._live.found(self.path, self.headers.get("Host", ""))
        if found is None:
            return self.send_error(404)
        page, is_data = found
        if not is_data:
            data, tag = page.sent(is_whole=True)
            self._send(200, data, "text/html; charset=utf-8")
            return self._live.note(page, "", "" if self._live.state[0] is None else tag)
        client = self.headers.get("Hookcb-Page", "data")[:64]
        self._live.note(page, client, None)  # so that the end is held back for it
        data, tag = b"", page.tag
        if self.headers.get("If-None-Match") != tag:
            data, tag = page.sent(is_whole=False)
        self._send(200 if data else 304, data, "application/json", tag)
        self._live.note(page, client, tag)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Says that nothing is here, whatever is wrong."""
        self._send(404, b"", "text/plain")

    def log_message(self, format: str, *args: Any) -> None:
        """Writes nothing: the terminal is the training's."""

    def version_string(self) -> str:
        """Name of the server."""
        return "hookcb"

    def _send(self, code: int, body: bytes, kind: str, tag: str = "") -> None:
        self.send_response(code)
        headers = {"Content-Type": kind, "Content-Length": str(len(body)), "Cache-Control": "no-store"}
        headers |= {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
        for name, value in (headers | ({"ETag": tag} if tag else {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def _templates() -> tuple[str, str]:
    markup = {name: f"@@{name}@@" for name in text_of(PageData(""))}  # which fills itself in
    whole = filled(RUN._replace(title="@@TITLE@@"), "@@DATA@@", markup, is_live=True)
    end = "</main>"
    return whole, whole[whole.index("<header>") : whole.index(end)] + end


def how_ended(error: BaseException | None) -> str:
    """How an error has ended a run, as the end of a sentence; "" if none has.

    >>> how_ended(KeyError("x")), how_ended(KeyboardInterrupt()), how_ended(SystemExit(0))
    ("with KeyError: 'x'", 'by Ctrl-C', '')
    """
    if isinstance(error, Terminated):
        return f"by {error}"
    if is_failure(error):
        return f"with {type(error).__name__}: {error}"[:300]
    return "by Ctrl-C" if isinstance(error, KeyboardInterrupt) else ""
