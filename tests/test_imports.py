"""What hookcb imports, at once and later, changes no random numbers, and needs no Unix."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hookcb
from tests.support import start

ROOT = Path(hookcb.__file__).parent
MODULES = [
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(ROOT.rglob("*.py"))
    if path.parent.name != "adapters"  # see tests/interop
]
SEEDED = """
import random, numpy, torch

def seed():
    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)

def state():
    own = numpy.random.get_state()
    return random.getstate(), own[1].tobytes(), own[2:], torch.get_rng_state().numpy().tobytes()

def check(use, *args):
    before = state()
    try:
        use(*args)
    except ModuleNotFoundError as missing:  # an optional package
        print(missing)
    assert state() == before, (use, args)

seed()
"""
LATER = """
import rich.console
from hookcb import loggers
from hookcb.training import display
from hookcb.activations import plots
from hookcb.cli.demo import digits

def bar():
    display._TerminalBar(rich.console.Console(force_terminal=True)).close()

check(bar)
check(display._NotebookTable, rich.console.Console(), False)
check(plots.layer_lines, "a", {"mean": [0.0, 1.0]}, [0, 1], None, None)
check(hookcb.module_summary, torch.nn.Linear(2, 1), torch.ones(2, 2))
check(digits)
"""
TRAINING = """
def model():
    return torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))

class Batches:
    def __iter__(self):
        for _ in range(4):
            noise = random.random() + numpy.random.rand()
            x = torch.rand(4, 2) + noise
            yield x, x.sum(1, keepdim=True)

def by_hand():
    net = model()
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(2):
        for x, y in Batches():
            torch.nn.functional.mse_loss(net(x), y).backward()
            opt.step()
            opt.zero_grad()
    return net.state_dict(), state()

def watched():
    import hookcb
    learn = hookcb.Learner(
        (Batches(), None), model(), torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.01,
        cbs=[hookcb.Diagnose(), hookcb.ActivationStats(with_hist=True), hookcb.GradientHealth()],
    )
    learn.fit(2)
    print(learn.diagnose(), learn.activation_stats.report(), learn.gradient_health.report())
    return learn.model.state_dict(), state()

plain, plain_state = by_hand()
seed()
seen, seen_state = watched()
assert all(map(torch.equal, plain.values(), seen.values()))
assert plain_state == seen_state
"""
WITHOUT_UNIX = """
import os, signal, sys, types
import torch, rich.console, fastcore.foundation, multiprocessing.connection, subprocess

for name in ("resource", "fcntl", "pwd", "grp", "termios"):
    sys.modules[name] = None  # as on Windows
for name in ("getuid", "getpgid", "fork", "killpg", "uname", "sysconf", "register_at_fork"):
    delattr(os, name)
for name in ("SIGKILL", "SIGHUP", "SIGUSR1", "SIGALRM", "alarm", "pthread_kill"):
    delattr(signal, name)
sys.modules["msvcrt"] = types.SimpleNamespace(LK_NBLCK=2, locking=lambda file, mode, n: None)
sys.platform, own = "win32", sys.platform
from hookcb.training.checkpoint import folder_lock
sys.platform = own
"""
IN_USE = """
import tempfile
import hookcb
from importlib import import_module
for name in MODULES:
    import_module(name)
from hookcb.diagnosis.measurements import curves as records
records.STATM = records.Path("no such file")
learn = hookcb.synth_learner(cbs=[hookcb.Diagnose(), hookcb.ActivationStats(), hookcb.GradientHealth(),
                                  hookcb.MemoryStats(), hookcb.StepTimer()])
with tempfile.TemporaryDirectory() as folder:
    learn.fit(1, cbs=[hookcb.Checkpoint(folder), hookcb.ProfilerCallback()])
    learn.save(folder + "/weights.pt")
    learn.load(folder + "/weights.pt")
print(learn.diagnose(), learn.summary())
"""


FORGET = """
import sys
for name in list(sys.modules):
    if name.partition(".")[0] == "hookcb":
        del sys.modules[name]
"""


@pytest.fixture
def run(tmp_path):
    """Runs code in a process that has imported hookcb, and has forgotten it; what it says."""

    def run(code):
        log = tmp_path / "log"
        process = start("-c", FORGET + code, log=log)
        process.join()
        assert process.exitcode == 0, log.read_text()[-2000:]
        return log.read_text()

    return run


def test_importing_any_module_of_ours_draws_no_random_number(run):
    each = f"from importlib import import_module\nfor name in {MODULES!r}: check(import_module, name)\n"
    run(SEEDED + each)


@pytest.mark.slow  # with Matplotlib and scikit-learn
def test_importing_what_is_needed_later_draws_no_random_number(run):
    run(f"{SEEDED}import hookcb\n{LATER}")


def test_a_script_that_seeds_before_it_imports_hookcb_trains_the_same_weights(run):
    run(SEEDED + TRAINING)


def test_hookcb_is_imported_and_trains_where_there_is_no_unix(run):
    run(f"{WITHOUT_UNIX}MODULES = {MODULES!r}\n{IN_USE}")


def test_importing_hookcb_imports_no_optional_package_and_draws_no_random_number_and_at_first_no_torch():
    alone = (
        "import sys, hookcb; assert 'torch' not in sys.modules; assert not hasattr(hookcb, '__wrapped__');"
        "assert 'torch' not in sys.modules, 'tools look for such names'; hookcb.testing.count_hooks\n"
    )
    code = (
        "import sysconfig, fastcore.foundation, rich.console; sysconfig.get_config_vars();"
        "others = [m for m in sys.modules if m.partition('.')[0] in ('numpy', 'sympy', 'triton')];"
        "[sys.modules.pop(m) for m in others]; before = set(sys.modules);"
        "import hookcb; check(getattr, hookcb, 'Learner');"
        "new = {m.partition('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names);"
        "print(*sorted(new))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", alone + SEEDED + FORGET + code]  # a process that has imported nothing
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    new = set(done.stdout.split())
    assert "hookcb" in new
    assert new <= {
        "hookcb",
        "torch",
        "fastcore",
        "rich",
        "pygments",
        "markdown_it",
        "mdurl",
    }


FIRST = """
import sys
for name in list(sys.modules):
    if name.partition(".")[0] in ("hookcb", "rich", "fastcore"):
        del sys.modules[name]
check(import_module, PATH)
"""


@pytest.mark.parametrize("path", ["hookcb.public", "hookcb.testing", "hookcb.loggers", "hookcb.core"])
def test_whatever_is_imported_first_draws_no_random_number(path, run):
    run(f"from importlib import import_module\nPATH = {path!r}\n{SEEDED}{FIRST}")


def test_all_public_names_are_there_and_documented():
    for name in hookcb.__all__:
        assert getattr(hookcb, name).__doc__, f"{name} has no docstring"


@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_an_adapter_of_a_missing_package_says_what_to_install(name, monkeypatch):
    for there in [*sys.modules]:
        if there.partition(".")[0] in (name, "pytorch_lightning") or there == f"hookcb.adapters.{name}":
            monkeypatch.delitem(sys.modules, there)
    monkeypatch.setattr(sys, "meta_path", [Without({name, "pytorch_lightning"}), *sys.meta_path])
    monkeypatch.delitem(vars(hookcb.adapters), name, raising=False)
    with pytest.raises(ModuleNotFoundError, match=rf"needs {name}: pip install 'hookcb\[{name}\]'"):
        getattr(hookcb.adapters, name)


class Without:
    """A finder that finds no package of these names."""

    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_no_module_opens_a_connection():
    """Sockets are for the name of this host, for pairs in this process, and for pages on this machine."""
    nets = {"asyncio", "ftplib", "http", "requests", "smtplib", "ssl", "urllib", "urllib3", "xmlrpc"}
    for path in sorted(Path(hookcb.__file__).parent.rglob("*.py")):
        text = path.read_text("utf-8")
        if path.parts[-2:] == ("report", "live.py"):
            assert text.count('HOST = "127.0.0.1"') == text.count("_Server((HOST, port)") == 1
            text = text.replace("from http.server import BaseHTTPRequestHandler", "")
            text = text.replace("self.socket.shutdown(", "")
        imported = set(re.findall(r"^\s*(?:import|from) (\w+)", text, re.MULTILINE))
        assert not imported & nets, path
        assert set(re.findall(r"\bsocket\.(\w+)", text)) <= {"gethostname", "socketpair"}, path


def test_an_adapter_that_there_is_not_is_told():
    with pytest.raises(AttributeError, match="has no attribute 'keras'; it has lightning, transformers"):
        hookcb.adapters.keras  # noqa: B018
