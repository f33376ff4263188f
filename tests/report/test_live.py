"""A live page answers who has its address, and nobody else; the training does not notice."""

import http.client
import json
import os
import re
import socket
import struct
import threading
import time
import warnings
from contextlib import closing, contextmanager, suppress
from types import SimpleNamespace
from unittest import mock
from urllib.parse import urlsplit

import pytest
import torch
from torch import nn

from hookcb import Callback, Diagnose, Learner, Report, load_report, watch
from hookcb.report.data import PageData
from hookcb.report.live import LINGER, RECENT, LiveServer, how_ended
from hookcb.report.page import BEGIN, END, page_of
from tests.support import make_batches, make_learner, make_model


def get(address, path="", method="GET", **headers):
    """Status, headers and body of what is at an address."""
    where = urlsplit(address)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=10)
    with closing(connection):
        connection.request(
            method, where.path + path, headers={k.replace("_", "-"): x for k, x in headers.items()}
        )
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()


def data_at(address, **headers):
    """The data of a page, what is told beside them, and their tag."""
    status, answered, text = get(address, "data", **headers)
    assert status == 200
    return PageData.from_json(text), json.loads(text)["live"], answered["ETag"]


@contextmanager
def serving(**options):
    """A server that waits for nobody, and leaves no thread."""
    before = set(threading.enumerate())
    server = LiveServer(**options)
    try:
        yield server
    finally:
        with mock.patch.multiple("hookcb.report.live", LINGER=0.0, RECENT=0.0):
            server.close()
    assert set(threading.enumerate()) == before


def test_two_clients_get_the_page_and_new_data_when_there_are_some():
    with serving() as server:
        page = server.page("first")
        status, headers, text = get(server.address)
        assert (status, headers["Cache-Control"]) == (200, "no-store")
        shown = PageData.from_json(text.partition(BEGIN)[2].partition(END)[0])
        assert shown.headline.startswith("No numbers yet")
        tags = [data_at(server.address, Hookcb_Page=name)[2] for name in "ab"]
        assert tags[0] == tags[1]
        for name in "ab":
            assert get(server.address, "data", If_None_Match=tags[0], Hookcb_Page=name)[0] == 304
        page.show(PageData("HEALTHY  so far", title="first", n_batches=7))
        for name in "ab":
            data, live, tag = data_at(server.address, If_None_Match=tags[0], Hookcb_Page=name)
            assert (data.n_batches, live) == (7, {"ended": None, "others": [], "tag": tag})
            assert tag != tags[0]


def test_more_time_goes_into_a_page_that_is_open(monkeypatch):
    with serving() as server:
        page, other = server.page("first"), server.page("second")
        assert not page.is_open
        data_at(server.address, Hookcb_Page="a")
        end = time.monotonic() + 10
        while not page.is_open and time.monotonic() < end:  # it is noted once the answer is sent
            data_at(server.address, Hookcb_Page="a")
        assert page.is_open
        assert not other.is_open
    now = [0.0]

    def collect(learn):
        now[0] += 1.0
        return PageData("x")

    monkeypatch.setattr("hookcb.report.callback.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("hookcb.report.callback.collect", collect)
    report = Report(None, every=1, live=True)
    report.learn = make_learner()
    waits = []
    for is_open in (False, True):
        report._page = SimpleNamespace(show=lambda data: None, is_open=is_open)
        report._write(1.0)
        waits.append(report._next - now[0])
    assert waits == [100.0, 20.0]


def test_only_a_live_page_may_connect_and_only_to_its_server():
    with serving() as server:
        text = get(server.address)[2]
    policy = re.findall('Content-Security-Policy" content="(.*?)"', text)[0]
    assert "connect-src 'self'" in policy
    assert policy.replace("; connect-src 'self'", "") in page_of(PageData("x"))


def test_all_else_is_not_found():
    with serving() as server:
        root = f"http://127.0.0.1:{server.port}"
        at = f"/{server.token}/"
        paths = ["/", "/data", at[:-1], f"{at}x", f"{at}data/", f"{at}2/", f"{at}../", "/robots.txt", "*"]
        for path in [*paths, f"/{server.token[:-1]}/", f"/{server.token}x/", "/%C3%A9/"]:
            assert get(root, path)[0] == 404, path
        for method in ("POST", "PUT", "HEAD", "OPTIONS", "DELETE", "XYZ"):
            status, headers, body = get(root, at, method)
            assert (status, body, headers["Allow"]) == (404, "", None), method
        for host in ("evil.example", f"evil.example:{server.port}", "127.0.0.1.evil.example", "", "[::1]:80"):
            assert get(root, at, Host=host)[0] == 404, host
        for host in ("127.0.0.1", f"localhost:{server.port}", "localhost:9999"):  # the last through a tunnel
            assert get(root, at, Host=host)[0] == 200, host


def test_it_listens_on_this_machine_only():
    with serving() as server:
        assert server._server.socket.getsockname()[0] == "127.0.0.1"
        assert len(server.token) >= 20


def connect(server, sent=b""):
    client = socket.create_connection(("127.0.0.1", server.port))
    client.sendall(sent)
    return client


def test_clients_that_go_say_nothing_and_disturb_nobody(capfd):
    with serving() as server:
        server.page().show(PageData("x" * 5_000_000))
        ask = f"GET /{server.token}/data HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
        for sent in (b"", b"GE", ask[:30], b"\x16\x03\x01 no HTTP\r\n\r\n", b"GET " + b"x" * 70_000, ask):
            client = connect(server, sent)
            if sent == ask:
                client.recv(100)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
            client.close()
        assert data_at(server.address)[0].headline.startswith("x")
    assert capfd.readouterr() == ("", "")


def test_clients_that_stay_and_say_nothing_hold_nothing_up():
    with serving() as server:
        clients = [connect(server, b"GET /") for _ in range(70)]
        began = time.monotonic()
    assert time.monotonic() - began < 2
    for client in clients:
        client.close()


# ---- the end


def test_it_waits_for_open_pages_to_get_the_end_and_for_nobody_else():
    server = LiveServer()
    page, got = server.page("net"), []

    def poll():
        while not got or got[-1]["ended"] is None:
            got.append(data_at(server.address, Hookcb_Page="a")[1])
            time.sleep(0.5)

    poller = threading.Thread(target=poll)
    poller.start()
    while not got:
        time.sleep(0.01)
    page.show(PageData("the end"))
    server.end("with KeyError: '</script>'")
    server.close()
    poller.join()
    assert got[-1]["ended"] == "with KeyError: '</script>'"
    with pytest.raises(ConnectionError):
        get(server.address)

    server = LiveServer()
    began = time.monotonic()
    server.close()
    assert time.monotonic() - began < RECENT


def test_it_waits_for_a_page_that_could_not_ask_for_a_while(monkeypatch):
    server = LiveServer()
    page = server.page("net")
    data_at(server.address)
    with monkeypatch.context() as patched:
        now = time.monotonic() + 2 * RECENT  # the machine has stood still
        patched.setattr("hookcb.report.live.time.monotonic", lambda: now)
        page.show(PageData("the end"))
        server.end()
        closing = threading.Thread(target=server.close)
        closing.start()
        time.sleep(0.5)
        data, live, _ = data_at(server.address)
        closing.join()
    assert (data.headline, live["ended"]) == ("the end", "")


def test_it_does_not_wait_for_a_page_that_was_closed_for_longer_than_that_takes_to_see():
    server = LiveServer()
    data_at(server.address)
    began = time.monotonic()
    server.end()
    server.close()
    assert time.monotonic() - began < LINGER


def test_what_is_told_beside_the_data_ends_no_element():
    with serving() as server:
        server.page("</script><b>")
        server.page("second")
        server.end("with KeyError: '</script>'")
        for place in ("", "2/"):
            text = get(server.address, place)[2]
            assert "</script><b>" not in text
            assert "'</script>'" not in text


def test_several_models_have_pages_that_link_to_one_another():
    with serving() as server:
        one, two = server.page("one"), server.page("two")
        two.show(PageData("of two", title="two"))
        data, live, _ = data_at(f"{server.address}2/")
        assert (data.headline, live["others"]) == ("of two", [["one", "../"]])
        assert data_at(server.address)[1]["others"] == [["two", "./2/"]]
        server.give_back(one)
        assert server.page("three") is one


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (None, ""),
        (ZeroDivisionError("division by zero"), "with ZeroDivisionError: division by zero"),
        (KeyboardInterrupt(), "by Ctrl-C"),
        (SystemExit(0), ""),
    ],
)
def test_how_a_run_has_ended(error, said):
    assert how_ended(error) == said


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_process_that_is_forked_neither_ends_it_nor_keeps_it():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads and fork
        server = LiveServer()
        read, write = os.pipe()
        if not (child := os.fork()):
            with suppress(BaseException):
                server.close()
                os.read(read, 1)  # until the parent has looked
            os._exit(0)
    assert get(server.address)[0] == 200
    with mock.patch("hookcb.report.live.LINGER", 0.0):
        server.close()
    with pytest.raises(ConnectionError):
        get(server.address)
    os.write(write, b"x")
    os.waitpid(child, 0)


# ---- Report


class Opens(Callback):
    """Looks at the page in each batch, as a browser does from another thread."""

    def __init__(self, capsys):
        super().__init__()
        self.capsys, self.address, self.seen = capsys, None, []

    def after_batch(self):
        if self.address is None:
            self.address = re.search(r"^live: (http\S+)$", self.capsys.readouterr().out, re.MULTILINE)[1]
        self.seen.append(data_at(self.address))


@pytest.fixture
def often(monkeypatch):
    for share in ("MAX_SHARE", "MAX_SHARE_OPEN"):
        monkeypatch.setattr(f"hookcb.report.callback.{share}", 1e9)
    monkeypatch.setattr("hookcb.report.live.LINGER", 0.0)  # nobody is there any more


def state_of(cbs):
    """Weights and random state after a fit."""
    torch.manual_seed(3)
    net = nn.Sequential(make_model(), nn.Dropout(0.2))
    learn = Learner((make_batches(12), None), net, nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
    with learn.no_logging():
        learn.fit(2, cbs=cbs)
    return learn, [*(p.detach().clone() for p in net.parameters()), torch.get_rng_state()]


def test_a_fit_is_shown_while_it_goes_on_and_is_the_same_to_the_bit(often, capsys, tmp_path):
    _, alone = state_of([])
    threads, opens = set(threading.enumerate()), Opens(capsys)
    learn, shown = state_of([Diagnose(show=False), Report(tmp_path / "run.html", 1e-9, live=True), opens])
    assert all(map(torch.equal, alone, shown))
    assert set(threading.enumerate()) == threads
    counts = [data.n_batches for data, *_ in opens.seen]
    assert counts == sorted(counts)
    assert counts[-1] >= 22
    assert {live["ended"] for _, live, _ in opens.seen} == {None}
    assert load_report(tmp_path / "run.html").n_batches == 24
    assert learn.page.path.name == "run.html"


def test_later_fits_have_the_same_address(often, capsys):
    report = Report(None, live=True)
    addresses = []
    for _ in range(2):
        state_of([report])
        addresses += re.findall(r"live: (\S+)", capsys.readouterr().out)
    assert len(addresses) == 2
    assert addresses[0] == addresses[1]


def test_the_end_of_a_watched_loop_is_shown_with_its_error(capsys, monkeypatch):
    ends = []
    monkeypatch.setattr(
        LiveServer, "close", lambda self: ends.append(data_at(self.address)) or self._server.end()
    )
    net = make_model()
    opt = torch.optim.SGD(net.parameters(), 0.1)
    with suppress(ZeroDivisionError), watch(net, opt, cbs=[Diagnose(show=False), Report(None, live=True)]):
        for x, y in make_batches(5):
            nn.functional.mse_loss(net(x), y).backward()
            opt.step()
            opt.zero_grad()
        raise ZeroDivisionError("division by zero")
    ((data, live, _),) = ends
    assert (data.n_batches, data.every) == (5, None)
    assert live["ended"] == "with ZeroDivisionError: division by zero"


def test_a_port_in_use_is_told_with_what_to_do_and_the_training_goes_on(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=rf"port {port}: Address already in use; give another one"):
            LiveServer(port)
        with pytest.warns(UserWarning, match=f"port {port}: Address already in use"):
            state_of([Report(tmp_path / "run.html", live=port)])
    assert load_report(tmp_path / "run.html").n_batches == 24
    with serving(port=port) as server:
        assert server.address.startswith(f"http://127.0.0.1:{port}/")


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"live": "yes"}, TypeError, "live must be True, False or a port"),
        ({"live": 70_000}, ValueError, "from 1 to 65535"),
        ({"path": None}, TypeError, "path of a file"),
    ],
)
def test_wrong_arguments_are_told(arguments, error, said):
    with pytest.raises(error, match=said):
        Report(**arguments)
