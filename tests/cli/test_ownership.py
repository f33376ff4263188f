"""A model is known by the parameters that are trained, and named as the script names it."""

import sys
import textwrap
import weakref
from itertools import pairwise

import pytest
from torch import nn

from hookcb.cli.main import main
from hookcb.cli.ownership import kept_by_script
from tests.support import first

BEGIN = """
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 1)
    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))

class Around(nn.Module):
    def __init__(self, func):
        super().__init__()
        self.func = func
    def forward(self, x):
        return self.func(x)

class Agent:
    pass

def step(model, opt):
    x = torch.randn(16, 8)
    loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
    opt.zero_grad(); loss.backward(); opt.step()
"""


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Runs a script of these lines after `BEGIN`; gives the exit code and the output."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setenv("COLUMNS", "120")

    def run(lines, *options):
        script = tmp_path / "script.py"
        script.write_text(BEGIN + textwrap.dedent(lines))
        code = main(["diagnose", *options, str(script)])
        return code, capsys.readouterr().out

    return run


def headings(out):
    """The line above each verdict."""
    statuses = "HEALTHY", "SUSPECT", "SICK", "UNKNOWN"
    return [a for a, b in pairwise(out.splitlines()) if b.startswith(statuses)]


def test_a_module_made_around_the_model_in_each_step_is_no_model_of_its_own(run):
    _, out = run("""
        def solve(func, x):
            func = Around(Around(func))
            return x.sum(1, keepdim=True) + func(x) + func(x)

        model = Net()
        opt = torch.optim.Adam(model.parameters(), 1e-3)
        for _ in range(6):
            step(lambda x: solve(model, x), opt)
        """)
    assert headings(out) == ["Net, trained by Adam"]
    assert "Inspected: 6 batches" in out


def test_a_module_that_turns_out_to_be_made_anew_gives_way_to_what_it_is_made_around(run):
    _, out = run("""
        class Deep:
            def __init__(self):
                self.inside = {"a": {"net": Net()}}

        deep = Deep()
        opt = torch.optim.Adam(deep.inside["a"]["net"].parameters(), 1e-3)
        for _ in range(6):
            step(Around(deep.inside["a"]["net"]), opt)
        """)
    assert headings(out) == ["Net, trained by Adam"]
    assert "Inspected: 5 batches" in out


@pytest.mark.parametrize(
    ("made", "names"),
    first(
        [
            ("first, second = Net(), Net(); other = second", ["first", "second"]),
            ("agent = Agent(); agent.a, agent.b = first, second = Net(), Net()", ["agent.a", "agent.b"]),
            ("nets = [Net(), Net()]; first, second = nets", ["nets[0]", "nets[1]"]),
            ("first, second = map(torch.nn.DataParallel, (Net(), Net()))", ["first", "second"]),
        ]
    ),
)
def test_models_of_one_class_have_the_first_name_that_the_script_gives_them(run, made, names):
    _, out = run(f"""
        def main():
            {made}
            opts = [torch.optim.SGD(net.parameters(), 1e-2) for net in (first, second)]
            for _ in range(3):
                for net, opt in zip((first, second), opts):
                    step(net, opt)
        main()
        """)
    assert [heading.partition(",")[0] for heading in headings(out)] == [f"{name} (Net)" for name in names]


def test_what_stands_beside_the_model_in_a_module_around_it_is_watched_too(run):
    _, out = run("""
        model = Net()
        def fit():
            net = nn.Sequential(model, nn.Identity())
            opt = torch.optim.Adam(net.parameters(), 1e-3)
            for _ in range(3):
                step(net, opt)
        fit()
        """)
    assert headings(out) == ["Sequential, trained by Adam"]


def test_looking_for_a_name_keeps_no_tensor_alive():
    net = nn.Linear(2, 2)
    net.seen = x = nn.Parameter(net.weight.detach().clone()) * 2
    gone = weakref.ref(x)
    del net.seen
    assert kept_by_script(net) == (net, "net")
    del x
    assert gone() is None
