"""What hookcb imports, at the start and later, changes no random numbers and asks for no Unix."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import fit, make_learner, same, weights

import hookcb

ROOT = Path(hookcb.__file__).parent
NAMES = [
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(ROOT.rglob("*.py"))
]
SEEDED = """
import random, sys, numpy, torch
random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
def state():
    own = numpy.random.get_state()
    return random.getstate(), own[1].tobytes(), own[2:], torch.get_rng_state().tolist()
"""
IMPORTS = """
from importlib import import_module
def check(name):
    before = state()
    try:
        import_module(name)
    except ModuleNotFoundError:  # an adapter to a package that is not installed
        assert ".adapters." in name, name
    assert state() == before, name
"""
LATER = """
import rich.console
from hookcb.display import _NotebookTable, _TerminalBar

def display():
    _TerminalBar(rich.console.Console(force_terminal=True)).close()
def notebook():
    _NotebookTable(False).close()
def pictures():
    from hookcb.plots import layer_lines
    layer_lines("a", {"mean": [0.0, 1.0]}, [0, 1], None, None)
def flops():
    hookcb.module_summary(torch.nn.Linear(2, 1), torch.ones(2, 2))
def demo():
    from hookcb.demo import digits
    digits()
for use in (display, notebook, pictures, flops, demo):
    before = state()
    try:
        use()
    except ModuleNotFoundError:  # its package is not installed
        pass
    assert state() == before, use.__name__
"""


def run(code, *options):
    done = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_importing_any_module_of_ours_draws_no_random_number():
    run(SEEDED + IMPORTS + f"for name in {NAMES!r}: check(name)\n" + LATER.replace("import rich", "import hookcb, rich", 1))
