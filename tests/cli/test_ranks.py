"""`hookcb demo --ranks` trains on several processes and shows one verdict; scripts under torchrun, too."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hookcb.cli.main import main
from hookcb.cli.ranks import own_rank, summary
from hookcb.report.page import load_report
from tests.ranks.support import launched

ROOT = Path(__file__).parents[2]
COMMAND = """
import sys
from hookcb.cli.main import main
sys.exit(main(sys.argv[2:]))
"""
LOOP = """
import os, sys, torch, torch.distributed as dist
from datetime import timedelta
from torch import nn
dist.init_process_group("gloo", timeout=timedelta(seconds=30))
torch.manual_seed(0)
net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)))
opt = torch.optim.SGD(net.parameters(), lr=float(sys.argv[1]))
rng = torch.Generator().manual_seed(dist.get_rank())
for i in range(40):
    x = torch.randn(16, 8, generator=rng)
    y = (x.sum(1) > 0).long() * (sys.argv[2:] != ["one class"] or dist.get_rank() == 0)
    nn.functional.cross_entropy(net(x), y).backward()
    opt.step()
    opt.zero_grad()
    if i == 30 and dist.get_rank() == 1 and sys.argv[2:] == ["killed"]:
        os.kill(os.getpid(), 9)
dist.destroy_process_group()
"""
LEARNER = """
import sys, torch
from torch import nn
from hookcb import Distributed, Learner
torch.manual_seed(0)
x = torch.randn(640, 8)
data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
loaders = torch.utils.data.DataLoader(data, 8, shuffle=True), None
learn = Learner(loaders, net, nn.functional.cross_entropy, torch.optim.SGD, lr=float(sys.argv[1]),
                cbs=Distributed())
learn.fit(2)
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.slow
def test_the_demo_on_two_ranks_shows_one_verdict_that_names_the_rank(capfd):
    assert main(["demo", "--ranks", "2", "--epochs", "2", "--fault", "nan-input"]) == 0
    shown, errors = capfd.readouterr()
    told = r"^SICK  The inputs contain NaN or infinity on rank [01] of 2 \(input\.nonfinite; "
    assert len(re.findall(told, shown, re.MULTILINE)) == 1
    assert len(re.findall(r"^ +1  ", shown, re.MULTILINE)) == 1  # the row of the second epoch
    assert shown.count("planted fault: one pixel") == 1
    assert errors == ""


@pytest.mark.slow
def test_what_ranks_cannot_do_is_said_once(capfd):
    assert main(["demo", "--ranks", "2", "--resume", "--fault", "nan-input"]) == 1
    shown, errors = capfd.readouterr()
    assert shown == ""
    assert errors.count("hookcb demo: ") == 1


@pytest.mark.slow
def test_interrupting_ends_all_processes(tmp_path):
    command = [sys.executable, "-m", "hookcb", "demo", "--ranks", "2", "--epochs", "100000"]
    with open("out", "w") as out:
        process = subprocess.Popen(command, stdout=out, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    until = time.monotonic() + 60
    while "0:00" not in Path("out").read_text() and time.monotonic() < until:
        time.sleep(0.2)
    assert children_in(tmp_path)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert not children_in(tmp_path)


def children_in(folder):
    """Ids of the processes that work in a folder, but for this one."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").resolve() == folder.resolve() and entry.name != str(os.getpid()):
                found.append(entry.name)
        except OSError:
            continue
    return found


@pytest.mark.parametrize("number", ["0", "-1", "two"])
def test_ranks_must_be_a_number(number, capsys):
    with pytest.raises(SystemExit):
        main(["demo", "--ranks", number])
    assert f"ranks must be a whole number, 1 or more, got {number!r}" in capsys.readouterr().err


def test_a_process_alone_is_rank_0():
    assert own_rank() == 0


def test_our_own_messages_are_shown_once_and_others_as_they_end():
    assert summary(["Traceback", "hookcb demo: no", "hookcb demo: no", "E1123 x"], 2) == "hookcb demo: no"
    lines = [f"line {i}" for i in range(100)]
    assert summary(lines, 2).splitlines()[0] == "line 80"
    assert summary(lines, 2).endswith("torchrun failed on 2 processes; see above")
    assert "line 79" in summary(["W1123 a warning", *lines[:80], "E1123 failed", "Traceback", *lines[80:]], 2)


# ---- hookcb diagnose on ranks; under torchrun, in tests/ranks/test_hanging.py


def diagnosed(script, *args, options=()):
    """Exit codes, statuses, and all that is shown; without torchrun, which takes seconds."""
    folder = Path.cwd()
    (folder / "train.py").write_text(script)
    (folder / "command.py").write_text(COMMAND)
    ranks = launched(folder / "command.py", folder, "diagnose", *options, folder / "train.py", *args)
    shown = "".join(rank["log"] for rank in ranks)
    return (
        [rank["exit"] for rank in ranks],
        re.findall(r"^(HEALTHY|SUSPECT|SICK|UNKNOWN)", shown, re.MULTILINE),
        shown,
    )


@pytest.mark.slow
def test_a_verdict_of_all_ranks_is_shown_once_and_decides_the_exit_code():
    assert diagnosed(LEARNER, "0.1")[:2] == ([0, 0], ["HEALTHY"])
    codes, statuses, _ = diagnosed(LEARNER, "1000")
    assert 1 in codes
    assert statuses == ["SICK"]


@pytest.mark.slow
def test_a_script_that_is_watched_has_one_verdict_too_and_it_decides_on_all_ranks():
    codes, statuses, shown = diagnosed(LOOP, "0.1")
    assert (codes, statuses) == ([0, 0], ["HEALTHY"])
    assert "2 ranks" in shown
    codes, statuses, shown = diagnosed(LOOP, "0.1", "one class")
    assert (codes, statuses) == ([1, 1], ["SUSPECT"])
    assert "on rank 1 of 2 (label.single_class; " in shown


@pytest.mark.slow
def test_json_and_the_page_have_the_verdict_of_all_ranks():
    options = "--json", "--html", "page.html"
    codes, _, shown = diagnosed(LOOP, "0.1", "one class", options=options)
    (told,) = (json.loads(line) for line in shown.splitlines() if line.startswith("{"))
    (model,) = told["models"]
    assert (codes, told["exit_code"]) == ([1, 1], 1)
    assert model["verdict"]["primary"]["ranks"] == [1]
    assert "on rank 1 of 2 (label.single_class; " in load_report("page.html").headline


@pytest.mark.slow
def test_a_rank_that_is_killed_is_said_and_the_others_end():
    began = time.monotonic()
    codes, statuses, shown = diagnosed(LOOP, "0.1", "killed")
    assert (codes, statuses) == ([1, -9], ["UNKNOWN"])
    assert "rank 1 had not ended, or is gone" in shown
    assert time.monotonic() - began < 45
