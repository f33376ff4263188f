"""The plug-in for pytest: the fixture `healthy`, and `--hookcb`, which fails tests that train sick models."""

import re
import subprocess
import sys

import pytest

from hookcb import pytest_plugin
from tests.support import start

BEGIN = """
import pytest
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
W = torch.randn(16, 3)

def train(lr=1e-2, n=40, between=nn.ReLU()):
    net = nn.Sequential(nn.Linear(16, 32), between, nn.Linear(32, 3))
    opt = torch.optim.Adam(net.parameters(), lr)
    for _ in range(n):
        x = torch.randn(32, 16)
        loss = F.cross_entropy(net(x), (x @ W).argmax(1))
        opt.zero_grad()
        loss.backward()
        opt.step()
    return net
"""
TESTS = """
def test_healthy():
    train()

def test_short():
    train(n=3)

def test_sick(capsys, caplog):
    for _ in range(6):  # more models than are watched at a time
        train(10.0)
    assert capsys.readouterr().err == ""
    assert not caplog.records

def test_calls_only():
    assert nn.Linear(2, 3)(torch.full((4, 2), torch.nan)).isnan().all()

def test_fails_itself():
    train(10.0)
    raise KeyError("its own")

@pytest.mark.hookcb(False)
def test_off():
    train(10.0)

@pytest.mark.hookcb(ignore=["*"])
class TestMarked:
    def test_ignored(self):
        train(10.0)

    @pytest.mark.hookcb(True)
    def test_ignored_too(self):
        train(10.0)

@pytest.mark.hookcb(ignore=["updat.*"])
def test_wrong_code():
    train()

@pytest.mark.hookcb("off")
def test_wrong_argument():
    train()
"""


ALONE = ["-p", "hookcb.pytest_plugin", "-p", "xdist", "-p", "no:cacheprovider"]  # of plug-ins, see `alone`


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No plug-in is loaded but those that are named, as ours may be installed, or not yet."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)  # of plug-ins that are not loaded then


@pytest.fixture
def tested(tmp_path):
    """Runs tests in a process of their own; gives what pytest says, and the names of those that failed."""

    def tested(lines, *options):
        (tmp_path / "test_it.py").write_text(BEGIN + lines)
        options = [*ALONE, "--strict-markers", "-rf", "--rootdir", str(tmp_path), *options]
        start("-m", "pytest", *options, str(tmp_path), log=tmp_path / "log").join()
        said = (tmp_path / "log").read_text()
        return said, set(re.findall(r"^FAILED \S+::(\w+)", said, re.MULTILINE))

    return tested


def test_with_the_option_a_test_that_trains_a_sick_model_fails_with_the_verdict(tested):
    said, failed = tested(TESTS, "--hookcb", "-n0")
    assert failed == {"test_sick", "test_fails_itself", "test_wrong_code", "test_wrong_argument"}
    assert "6 passed" in said
    assert said.count("SICK  Steps are too large") >= 1
    assert "if the test trains it on purpose, write @pytest.mark.hookcb(False) or @pytest.mark" in said
    assert "hookcb(ignore=['update.too_large'])" in said
    assert "KeyError: 'its own'" in said
    assert "there is no check 'updat.*'" in said
    assert "hookcb/cli" not in said  # no frame of ours


def test_without_the_option_no_test_is_watched(tested):
    assert tested(TESTS, "-n0")[1] == {"test_fails_itself"}


@pytest.mark.parametrize("given", ["hookcb", "hookcb.pytest_plugin"])
def test_it_may_be_named_twice_as_entry_point_and_as_module(given):
    (other,) = {"hookcb", "hookcb.pytest_plugin"} - {given}
    manager = pytest.PytestPluginManager()
    manager.register(pytest_plugin, given)
    assert (manager.is_blocked(given), manager.is_blocked(other)) == (False, True)
    manager.import_plugin(other)  # would raise
    assert manager.get_plugin(given) is pytest_plugin


TRACES = """
@pytest.mark.filterwarnings("ignore")
def test_traces():
    net = nn.Sequential(nn.Linear(16, 3), nn.BatchNorm1d(3)).eval()
    x = torch.randn(2, 16)
    assert torch.equal(torch.jit.trace(net, x)(x), net(x))
"""


def test_nothing_of_a_watch_is_in_a_trace(tested):
    said, failed = tested(TRACES, "--hookcb", "-n0")
    assert failed == set(), said
    assert "1 passed" in said


SICK = "def test_sick():\n    train(10.0)\n\ndef test_healthy():\n    train()"


@pytest.mark.slow
def test_workers_of_xdist_watch_too(tested):
    said, failed = tested(SICK, "--hookcb", "-n1")
    assert failed == {"test_sick"}
    assert "SICK  Steps are too large" in said


def test_the_project_says_what_is_ignored_and_how_strict_to_be(tested, tmp_path):
    file = tmp_path / "pyproject.toml"
    file.write_text('[tool.hookcb]\nignore = ["*"]')
    assert tested(SICK, "--hookcb", "-n0")[1] == set()
    drops = "def test_drops():\n    train(between=nn.Dropout(0.95))"
    file.write_text("[tool.hookcb]\nstrict = true")
    said, failed = tested(drops, "--hookcb", "-n0")
    assert failed == {"test_drops"}
    assert "SUSPECT  A dropout drops nearly everything" in said
    file.write_text("[tool.hookcb]\nstrict = false")
    assert tested(drops, "--hookcb", "-n0")[1] == set()
    file.write_text("[tool.hookcb]\nbudgte = 1")
    assert "has the unknown key 'budgte'; did you mean budget?" in tested(SICK, "--hookcb", "-n0")[0]
    assert tested(SICK, "-n0")[1] == set()  # nobody has asked for it


COUNTS = """
def test_counts(seen=[]):
    class Net(nn.Linear):
        def forward(self, x):
            seen.append(x)
            return super().forward(x)

    net = Net(16, 3)
    opt = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(4):
        net(torch.randn(8, 16)).log().mean().backward()
        opt.step()
        opt.zero_grad()
    assert len(seen) == 4
"""


def test_a_batch_with_a_nan_is_not_run_again_as_a_test_may_count_calls(tested):
    said, failed = tested(COUNTS, "--hookcb", "-n0")
    assert failed == {"test_counts"}
    assert "len(seen)" not in said
    assert "The model's output is finite; the first NaN or infinity" in said


OF_FIXTURE = """
def fitted(lr):
    from hookcb import Diagnose, Learner
    batches = [(x, (x @ W).argmax(1)) for x in torch.randn(40, 32, 16)]
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))
    learn = Learner((batches, None), net, F.cross_entropy, lr=lr, cbs=Diagnose("ignore", show=False))
    with learn.no_logging():
        learn.fit(1)
    return learn

def test_learner(healthy):
    assert healthy(fitted(1e-2)).status == "healthy"
    healthy(fitted(1e-2).diagnose())

def test_sick(healthy):
    healthy(fitted(10.0))

def test_else(healthy):
    healthy(nn.Linear(2, 3))
"""


def test_the_fixture_passes_what_is_healthy_and_fails_with_the_verdict(tested):
    said, failed = tested(OF_FIXTURE, "-n0")
    assert failed == {"test_sick", "test_else"}
    assert "AssertionError: SICK  Steps are too large" in said
    assert "TypeError: healthy takes a Learner, a watch or a Verdict, got Linear(" in said


LISTS = """
import sys
import pytest

class Lists:
    def pytest_sessionfinish(self):
        print("loaded", sorted({"torch", "rich", "fastcore", "hookcb.cli"} & set(sys.modules)))

pytest.main(sys.argv[1:], [Lists()])
"""


def test_the_plug_in_brings_nothing_heavy_into_a_test_suite(tmp_path):
    (tmp_path / "test_it.py").write_text("def test_it():\n    pass")
    command = [sys.executable, "-c", LISTS, *ALONE, "-s", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "1 passed" in done.stdout, done.stderr
    assert "loaded []" in done.stdout
