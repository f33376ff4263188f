"""`hookcb diagnose --live` shows what a script trains while it runs, and how it has ended."""

import json
import re
import socket
import subprocess
import sys
import textwrap
import time
from urllib.request import Request, urlopen

import pytest

from hookcb import load_report
from hookcb.cli.main import main
from hookcb.cli.parser import make_parser
from hookcb.cli.script import ScriptRun
from hookcb.processes.process_group import LAUNCHED
from hookcb.report.data import PageData
from hookcb.report.live import LiveServer
from tests.support import first

BEGIN = """
import os, time
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)

def train(net, n):
    opt = torch.optim.SGD(net.parameters(), 0.01)
    for i in range(n):
        x = torch.randn(32, 8)
        loss = F.mse_loss(net(x), x[:, :1])
        opt.zero_grad()
        loss.backward()
        opt.step()
        yield i
"""
WAITS = """
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
for i in train(net, 100_000):
    time.sleep(0.01)
    if os.path.exists("go on"):
        break
"""


@pytest.fixture
def script(tmp_path):
    def write(lines):
        path = tmp_path / "script.py"
        path.write_text(BEGIN + textwrap.dedent(lines))
        return str(path)

    return write


def data_at(address, tag=""):
    headers = {"If-None-Match": tag, "Hookcb-Page": "test"}
    with urlopen(Request(f"{address}data", headers=headers), timeout=20) as answer:
        text = answer.read().decode()
    return PageData.from_json(text), json.loads(text)["live"]


def wait_for(address, condition):
    """The data of a page, once they are as they should be; asks as often as an open page does."""
    end = time.monotonic() + 90
    while time.monotonic() < end:
        data, live = data_at(address)
        if condition(data, live):
            return data, live
        time.sleep(0.3)
    raise AssertionError(f"{data!r}, {live}")


@pytest.mark.parametrize(
    ("end", "code", "said"),
    first([("1 / 0", 1, "with ZeroDivisionError: division by zero"), ("", 0, "")]),
)
def test_a_script_is_shown_while_it_runs_and_at_its_end(script, tmp_path, end, code, said):
    command = [sys.executable, "-m", "hookcb", "diagnose", "--live", "--html", "run.html"]
    command.append(script(WAITS + end))
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        address = re.fullmatch(
            r"hookcb diagnose: live at (http://127.0.0.1:\S+/)\n", process.stderr.readline()
        )[1]
        assert data_at(address)[0].headline.startswith("No numbers yet")
        data, live = wait_for(address, lambda data, live: data.n_batches > 5)
        assert data.every
        assert (data.title, live["ended"]) == ("Sequential", None)
        (tmp_path / "go on").touch()
        data, live = wait_for(address, lambda data, live: live["ended"] is not None)
        out, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert live["ended"] == said
    assert not data.every
    shown = load_report(tmp_path / "run.html")
    assert (data.headline, data.n_batches) == (shown.headline, shown.n_batches)
    assert data.headline.split()[0] in out
    assert ("ZeroDivisionError" in err) == bool(end)
    with pytest.raises(OSError, match="refused"):
        data_at(address)


def ends(monkeypatch):
    """What the pages have shown when they ended."""
    seen = []

    def close(server):
        seen.extend(data_at(server.address + page.place) for page in server.pages)
        server._server.end()

    monkeypatch.setattr(LiveServer, "close", close)
    return seen


def test_each_model_has_a_page_and_the_code_is_that_of_the_verdicts(script, monkeypatch, capsys):
    seen = ends(monkeypatch)
    lines = """
    for lr in range(2):
        for i in train(nn.Linear(8, 1), 30):
            pass
    from hookcb import Learner
    batches = [(torch.randn(4, 8), torch.randn(4, 1))] * 12
    Learner((batches, None), nn.Bilinear(8, 8, 1) if 0 else nn.Sequential(nn.Linear(8, 1)), F.mse_loss).fit(1)
    """
    code = main(["diagnose", "--live", script(lines)])
    assert [data.title for data, _ in seen] == ["Linear", "Linear (2)", "Sequential"]
    assert [data.n_batches for data, _ in seen] == [30, 30, 12]
    assert seen[1][1]["ended"] == ""
    assert seen[1][1]["others"] == [["Linear", "../"], ["Sequential", "../3/"]]
    out = capsys.readouterr().out
    assert all(data.headline.split("  ")[0] in out for data, _ in seen)
    assert main(["diagnose", script(lines)]) == code


def test_findings_that_are_ignored_are_not_shown_and_a_limit_is_how_it_ended(script, monkeypatch):
    seen = ends(monkeypatch)
    lines = "for i in train(nn.Sequential(nn.Linear(8, 1), nn.Dropout(0.95)), 300): pass"
    main(["diagnose", "--live", "--ignore", "dropout.*", "--steps", "40", script(lines)])
    ((data, live),) = seen
    assert live["ended"] == "after 40 steps"
    assert ["ScriptReport", ""] in data.config["Callbacks"]
    assert "dropout.extreme" not in [finding["code"] for finding in data.verdict["findings"]]


def test_a_script_that_trains_nothing_says_so_on_the_page(script, monkeypatch):
    seen = ends(monkeypatch)
    main(["diagnose", "--live", script("pass")])
    assert seen[0][0].headline.startswith("no training was seen")


def test_a_port_in_use_is_told_before_the_script_runs(script, tmp_path, capsys):
    path = script("open('ran', 'w')")
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(SystemExit) as ended:
        main(["diagnose", "--live", "--port", f"{other.getsockname()[1]}", path])
    assert ended.value.code == 2
    assert "Address already in use; give another one, or none" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("options", [["--port", "80"], ["--live", "--port", "0"], ["--live", "--port", "x"]])
def test_a_port_without_a_page_or_one_that_is_none_is_refused(script, options, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["diagnose", *options, script("pass")])
    assert ended.value.code == 2
    assert "port" in capsys.readouterr().err


def test_of_several_ranks_only_the_first_serves(script, monkeypatch, capsys):
    options = make_parser().parse_args(["diagnose", "--live", script("pass")])
    said = []
    for rank in "10":
        for name, value in zip(LAUNCHED, (rank, "2", "127.0.0.1", "1"), strict=True):
            monkeypatch.setenv(name, value)
        ScriptRun(options.script, [], options)._tracker.end_live("")
        said.append(capsys.readouterr().err.count("live at"))
    assert said == [0, 1]
