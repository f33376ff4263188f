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

def fit(model, opt):
    for _ in range(5):
        step(model, opt)
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


def test_a_model_that_is_wrapped_after_its_first_step_is_one_model(run):
    _, out = run("""
        model = Net()
        opt = torch.optim.SGD(model.parameters(), 1e-2)
        step(model, opt)
        compiled = torch.compile(model, backend="eager")
        for _ in range(6):
            step(compiled, opt)
        """)
    assert headings(out) == ["Net, trained by SGD"]
    assert "Inspected: 6 batches" in out


def test_a_model_without_its_head_is_the_same_model_as_far_as_it_has_its_layers(run):
    _, out = run("""
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        opt = torch.optim.SGD(model.parameters(), 1e-2)
        for _ in range(6):
            step(model, opt)
            nn.Sequential(Around(model[0]))(torch.randn(4, 8))
        """)
    assert headings(out) == ["Sequential, trained by SGD"]
    assert "Inspected: 6 batches" in out


# what a script does with a model `Net`, and the line above each verdict
HARD = {
    "moved after its optimizer was made": (
        """
        net = Net()
        opt = torch.optim.SGD(net.parameters(), 1e-2)
        net = net.double().float().to("cpu")
        fit(net, opt)
        """,
        ["Net, trained by SGD"],
    ),
    "made in a function and dropped, twice": (
        """
        def run():
            net = Net()
            fit(net, torch.optim.SGD(net.parameters(), 1e-2))
        run()
        run()
        """,
        ["Net, trained by SGD", "Net (2), trained by SGD (2)"],
    ),
    "trained twice": (
        """
        net = Net()
        fit(net, torch.optim.SGD(net.parameters(), 1e-2))
        fit(net, torch.optim.Adam(net.parameters(), 1e-3))
        """,
        ["Net, trained by SGD, Adam"],
    ),
    "trained by a subclass of Optimizer": (
        """
        class Own(torch.optim.Optimizer):
            @torch.no_grad()
            def step(self):
                for p in self.param_groups[0]["params"]:
                    p.sub_(0.01 * p.grad)
        net = Net()
        fit(net, Own(net.parameters(), {}))
        """,
        ["Net, trained by Own"],
    ),
    "copied, and averaged": (
        """
        net = Net()
        opt, average = torch.optim.SGD(net.parameters(), 1e-2), torch.optim.swa_utils.AveragedModel(net)
        for _ in range(5):
            step(net, opt)
            average.update_parameters(net)
            average(torch.randn(4, 8))
        """,
        ["Net, trained by SGD"],
    ),
    "frozen, with an adapter in it": (
        """
        class Adapted(Around):
            def __init__(self, func):
                super().__init__(func.requires_grad_(False))
                self.a, self.b = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
            def forward(self, x):
                return self.func(x) + self.b(self.a(x))
        net = Net().requires_grad_(False)
        net.body = Adapted(net.body)
        fit(net, torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 1e-2))
        """,
        ["Net, trained by SGD"],
    ),
    "thawed on the way": (
        """
        net = Net()
        net.body.requires_grad_(False)
        opt = torch.optim.SGD(net.parameters(), 1e-2)
        fit(net, opt)
        net.body.requires_grad_(True)
        fit(net, opt)
        """,
        ["Net, trained by SGD"],
    ),
    "with tied parameters": (
        """
        net = Net()
        net.extra = nn.Linear(8, 8)
        net.extra.weight = net.body.weight
        fit(net, torch.optim.SGD(net.parameters(), 1e-2))
        """,
        ["Net, trained by SGD"],
    ),
    "beside another one with the same body": (
        """
        body = nn.Linear(8, 8)
        actor, critic = nn.Sequential(body, nn.Linear(8, 1)), nn.Sequential(body, nn.Linear(8, 1))
        opt = torch.optim.SGD(dict.fromkeys([*actor.parameters(), *critic.parameters()]), 1e-2)
        fit(lambda x: actor(x) + critic(x), opt)
        """,
        ["actor (Sequential), trained by SGD", "critic (Sequential), trained by SGD"],
    ),
    "called by functional_call": (
        """
        net = Net()
        call = lambda x: torch.func.functional_call(net, dict(net.named_parameters()), (x,))
        fit(call, torch.optim.SGD(net.parameters(), 1e-2))
        """,
        ["Net, trained by SGD"],
    ),
    "in the module that computes the loss": (
        """
        class Loss(Around):
            def forward(self, x):
                return F.mse_loss(self.func(x), x.sum(1, keepdim=True))
        net = Net()
        loss = Loss(net)
        net(torch.randn(2, 8))
        opt = torch.optim.SGD(net.parameters(), 1e-2)
        for _ in range(5):
            opt.zero_grad(); loss(torch.randn(16, 8)).backward(); opt.step()
        """,
        ["Loss, trained by SGD"],
    ),
    "trained in a module that holds its optimizer": (
        """
        class Owner(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = Net()
                self.opt = torch.optim.SGD(self.net.parameters(), 1e-2)
            def learn(self):
                fit(self.net, self.opt)
        Owner().learn()
        """,
        ["Net, trained by SGD"],
    ),
    "first alone, then as a part of a larger one": (
        """
        net = Net()
        fit(net, torch.optim.SGD(net.parameters(), 1e-2))
        larger = nn.Sequential(net, nn.Linear(1, 1))
        fit(larger, torch.optim.Adam(larger.parameters(), 1e-3))
        """,
        ["Net, trained by SGD", "Sequential, trained by SGD, Adam"],
    ),
    "tried, then given to DistributedDataParallel": (
        """
        import os
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        torch.distributed.init_process_group("gloo", rank=0, world_size=1)
        net = Net()
        net(torch.randn(2, 8)).sum().backward()
        ddp = nn.parallel.DistributedDataParallel(net)
        fit(ddp, torch.optim.SGD(ddp.parameters(), 1e-2))
        torch.distributed.destroy_process_group()
        """,
        ["Net, trained by SGD"],
    ),
}


@pytest.mark.parametrize("case", HARD)
def test_a_model_is_known_by_its_parameters(run, case):
    lines, expected = HARD[case]
    _, out = run(lines)
    assert headings(out) == expected


def test_looking_for_a_name_keeps_no_tensor_alive():
    net = nn.Linear(2, 2)
    net.seen = x = nn.Parameter(net.weight.detach().clone()) * 2
    gone = weakref.ref(x)
    del net.seen
    assert kept_by_script(net) == (net, "net")
    del x
    assert gone() is None
