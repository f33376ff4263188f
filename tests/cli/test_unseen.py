"""A training that cannot be seen is told with the reason why."""

import re
import sys
import textwrap

import pytest

from hookcb.cli.main import main
from hookcb.hooks.modules import has_compiled
from tests.support import first

BEGIN = """
import torch
from torch import nn
from torch.nn import functional as F

net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

def train(forward, opt, n=6):
    for _ in range(n):
        loss = F.mse_loss(forward(torch.randn(4, 8, requires_grad=True)), torch.ones(4, 1))
        opt.zero_grad(); loss.backward(); opt.step()
"""


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Runs a script of these lines after `BEGIN`; gives the exit code and the output on one line."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    # another test of this process may have compiled something
    monkeypatch.setattr("hookcb.cli.unseen.has_compiled", lambda: False)

    def run(lines, *options):
        script = tmp_path / "script.py"
        script.write_text(BEGIN + textwrap.dedent(lines))
        code = main(["diagnose", *options, str(script)])
        return code, " ".join(capsys.readouterr().out.split())

    return run


def test_a_forward_that_is_called_directly_is_told(run):
    code, out = run("""
        class Layer(nn.Linear):
            def forward(self, x):
                return x @ self.weight.T + self.bias

        layer = Layer(8, 1)
        train(layer.forward, torch.optim.Adam(layer.parameters()))
        """)
    assert code == 1
    assert "no training was seen in" in out
    assert "Adam trains Layer, which is never called itself: its forward() or its weights are used" in out


def test_modules_that_are_half_made_or_of_torchscript_are_no_obstacle(run):
    _, out = run("""
        import warnings
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        half = nn.Linear.__new__(nn.Linear)
        script = torch.jit.script(net)
        train(script.forward, torch.optim.Adam(script.parameters()))
        """)
    # both have the parameters
    assert re.search("Adam trains (Sequential|RecursiveScriptModule), which is never called itself", out)


def test_a_model_that_is_called_in_a_compiled_function_is_told(run, monkeypatch):
    monkeypatch.setattr("hookcb.cli.unseen.has_compiled", has_compiled)
    _, out = run(
        "train(torch.compile(lambda x: net(x), backend='eager'), torch.optim.Adam(net.parameters()))"
    )
    assert (
        "Adam trains Sequential, which is never called where hooks run: in a function that torch.compile"
        in out
    )


def test_a_model_that_is_called_only_in_an_autograd_function_is_told(run):
    code, out = run("""
        class Adjoint(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, *params):
                ctx.save_for_backward(x, *params)
                return net(x)

            @staticmethod
            def backward(ctx, grad):
                with torch.enable_grad():
                    x, *params = (t.detach().requires_grad_() for t in ctx.saved_tensors)
                    y = torch.func.functional_call(net, dict(zip(dict(net.named_parameters()), params)), x)
                    return torch.autograd.grad(y, (x, *params), grad)

        train(lambda x: Adjoint.apply(x, *net.parameters()), torch.optim.Adam(net.parameters()))
        """)
    assert code == 1
    assert "Adam trains Sequential, which is called only inside an autograd.Function" in out


def test_a_model_that_is_no_module_is_told(run):
    code, out = run("""
        weight = nn.Parameter(torch.ones(8, 1))
        train(lambda x: x @ weight, torch.optim.Adam([weight]))
        """)
    assert code == 1
    assert "Adam trains parameters that belong to no nn.Module" in out


@pytest.mark.parametrize(
    ("given", "held"), first([("net.parameters()", 4), ('[{"params": []}, {"params": []}]', 0)])
)
def test_a_model_of_which_nothing_is_trained_has_a_verdict(run, given, held):
    code, out = run(f"net.requires_grad_(False)\ntrain(net, torch.optim.AdamW({given}))")
    assert code == 1
    assert "Sequential, not trained: none of its parameters requires a gradient SICK No parameter of" in out
    assert "Backward ran 6 times, but none of the 4 parameters of the model requires a gradient" in out
    assert f"the optimizer holds {held} of them" in out


def test_a_frozen_model_beside_one_that_is_trained_has_no_verdict(run):
    _, out = run("""
        fixed = nn.Linear(8, 8).requires_grad_(False)
        train(lambda x: net(fixed(x)), torch.optim.AdamW(net.parameters()))
        """)
    assert "Sequential, trained by AdamW" in out
    assert "No parameter of the model is trained" not in out
    assert "Linear," not in out


@pytest.mark.slow
def test_models_that_take_turns_keep_their_place_before_copies_that_are_only_called(run):
    """As the targets of SAC, if they are computed with gradients on."""
    _, out = run("""
        nets = {name: nn.Linear(8, 1) for name in ("actor", "target_1", "target_2", "critic_1", "critic_2")}
        opts = [torch.optim.Adam(nets[name].parameters()) for name in ("actor", "critic_1", "critic_2")]
        for _ in range(5):
            x = torch.randn(4, 8)
            target = (nets["actor"](x) + nets["target_1"](x) + nets["target_2"](x)).detach()
            for name, opt in zip(("critic_1", "critic_2", "actor"), opts[1:] + opts[:1]):
                opt.zero_grad(); F.mse_loss(nets[name](x), target + 1).backward(); opt.step()
        """)
    for name, opt in ("actor", "Adam"), ("critic_1", "Adam (2)"), ("critic_2", "Adam (3)"):
        assert f"nets['{name}'] (Linear), trained by {opt} HEALTHY" in out
    assert "not trained" not in out
    assert out.count("Inspected: 5 batches") == 3


@pytest.mark.slow
def test_more_models_in_turns_than_are_watched_are_told(run):
    _, out = run("""
        nets = [nn.Linear(8, 1) for _ in range(5)]
        opts = [torch.optim.Adam(net.parameters()) for net in nets]
        for _ in range(3):
            for net, opt in zip(nets, opts):
                train(net, opt, 1)
        """)
    assert out.count("Inspected: 3 batches") == 4
    assert "Linear was not watched: no more than 4 models that are trained in turns are" in out


PLAYERS = """
critic_of = {critic_of}
actor, critic = nn.Linear(8, 2), nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 1))
a, c = torch.optim.Adam(actor.parameters()), torch.optim.Adam(critic.parameters())
for _ in range(8):
    x, action = torch.randn(4, 8), torch.rand(4, 2)
    loss = F.mse_loss(critic(torch.cat([x, action], 1)), x[:, :1])
    c.zero_grad(); loss.backward(); c.step()
    loss = -critic_of(torch.cat([x, actor(x)], 1)).mean()
    a.zero_grad(); loss.backward(); a.step()
"""


@pytest.mark.parametrize(
    "critic_of", first(["lambda x: critic(x)", "lambda x: critic[2](critic[1](critic[0](x)))"])
)
def test_checks_of_a_loss_that_is_that_of_another_player_too_do_not_apply(run, critic_of):
    """As for the actor of DDPG, and that of TD3, which calls parts of the critic."""
    _, out = run(PLAYERS.format(critic_of=critic_of), "--coverage")
    seen = {
        name: out.partition(f"{name}, trained by")[2].partition("trained by")[0]
        for name in ("Sequential", "Linear")
    }
    n = {name: int(re.search(r"of (\d+) checks ran", text)[1]) for name, text in seen.items()}
    assert n["Linear"] < n["Sequential"] - 15
    assert "needs a known loss" not in seen["Linear"]
    assert "loss.flat" not in seen["Linear"]
    assert "loss.flat" in seen["Sequential"]  # too few batches


def test_an_optimizer_that_is_none_of_torch_is_named(run):
    _, out = run(
        """
        class Own:
            def __init__(self, params):
                self.param_lists = [list(params)]
            def step(self):
                for p in self.param_lists[0]:
                    p.data.add_(p.grad, alpha=-0.01)
            def zero_grad(self):
                for p in self.param_lists[0]:
                    p.grad = None
        train(net, Own(net.parameters()))
        """,
        "--coverage",
    )
    assert "Sequential, trained by Own of __main__" in out
    assert "without a torch.optim.Optimizer, at an unknown learning rate" in out


def test_layers_that_are_no_submodules_are_told(run):
    """As those of Keras, which registers only the parameters."""
    _, out = run("""
        class Outer(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers_in_a_list = [net]
                self.all = nn.ParameterList(net.parameters())
            def forward(self, x):
                return self.layers_in_a_list[0](x)
        outer = Outer()
        train(outer, torch.optim.Adam(outer.parameters()))
        """)
    assert "Outer, trained by Adam" in out
    assert "no call of a layer was seen, as none is a submodule" in out


@pytest.mark.slow
def test_layers_and_the_optimizer_of_keras_have_their_names(run):
    """Keras keeps parameters in a dictionary by path, and its optimizers have variables and no step()."""
    _, out = run(
        """
        class Dense(nn.Module):
            def __init__(self):
                super().__init__()
                kernels = {"dense/kernel": torch.randn(8, 32), "dense_1/kernel": torch.randn(32, 8)}
                biases = {"dense/bias": torch.full((32,), -90.0), "dense_1/bias": torch.zeros(8)}
                self._torch_params = nn.ParameterDict(kernels | biases)
            def forward(self, x):
                p = self._torch_params
                x = (x @ p["dense/kernel"] + p["dense/bias"]).relu()
                return x @ p["dense_1/kernel"] + p["dense_1/bias"]
        class Variable:
            def __init__(self, value):
                self._value = value
        class Descent:
            def __init__(self, params):
                self._trainable_variables = [Variable(p) for p in params]
            def apply_gradients(self, pairs):
                with torch.no_grad():
                    for gradient, variable in pairs:
                        variable._value -= 0.01 * gradient
        net = Dense()
        opt = Descent(net.parameters())
        for _ in range(30):
            x = torch.randn(64, 8)
            net.zero_grad()
            F.mse_loss(net(x), x).backward()
            opt.apply_gradients([(v._value.grad, v) for v in opt._trainable_variables])
        """,
        "--coverage",
    )
    assert "Dense, trained by Descent of __main__ SICK Units of a layer get no gradient" in out
    assert ": _torch_params.dense (unit.dead; " in out
    assert "Layer _torch_params.dense: 100% of its units (32 of 32) had no gradient" in out
    assert "only one layer" not in out
    assert "Note: no call of a layer was seen, as none is a submodule" in out
    assert "outputs of no layer, 4 parameters" in out


@pytest.mark.slow
def test_a_network_that_gives_targets_is_not_said_to_be_trained_wrongly(run):
    """A target network, computed with gradients and copied now and then; no optimizer has it."""
    code, out = run("""
        import copy
        target = copy.deepcopy(net)
        opt = torch.optim.Adam(net.parameters(), lr=1e-3)
        for i in range(30):
            x, y = torch.randn(16, 8), torch.randn(16, 8)
            loss = (net(x).mean(1) - target(y).mean(1)).pow(2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
        """)
    assert "INFO Parameters never change" in out
    assert "nothing uses them" in out
    assert code == 0


@pytest.mark.slow
def test_a_loss_behind_a_detach_is_no_backward_that_is_missing(run):
    """As the loss of a generator, computed from its detached output by another network."""
    _, out = run("""
        judge = nn.Linear(1, 1)
        opt = torch.optim.Adam([*net.parameters(), *judge.parameters()], lr=1e-3)
        for i in range(30):
            loss = judge(net(torch.randn(16, 8)).detach()).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
        """)
    assert "SICK A layer gets no gradient" in out
    assert "Parameters never change" not in out
