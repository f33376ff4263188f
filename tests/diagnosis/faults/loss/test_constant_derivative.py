"""Derivatives that enter a loss without their graph, and those that are used rightly."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, watch
from hookcb.cli.main import main
from hookcb.diagnosis.fault import FAULTS
from hookcb.diagnosis.run import Run
from tests.support import each, first

DATA = torch.linspace(0, 1, 32)[:, None]


def net(n_in=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(n_in, 16), nn.Tanh(), nn.Linear(16, 1))


def found(loss_of, n=12, n_in=1):
    model = net(n_in)
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    with watch(model, opt, Diagnose("ignore", show=False)) as w:
        for _ in range(n):
            x = torch.rand(32, n_in).requires_grad_()
            opt.zero_grad()
            w.report_loss(loss_of(model, x)).backward()
            opt.step()
    verdict = w.diagnose()
    assert not [note for note in verdict.coverage if "a part of Diagnose" in note]
    return [x for x in verdict.findings if x.code == "loss.constant_derivative"]


def decay(model, x, create_graph=False):
    u = model(x)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=create_graph, retain_graph=True)
    return (slope + 2 * u).square().mean() + (
        model[2](model[1](model[0](torch.zeros(1, 1)))) - 1
    ).square().mean()


def growth(model, x, create_graph=False):
    u = model(x)
    (slope,) = torch.autograd.grad(u, x, torch.ones_like(u), retain_graph=True, create_graph=create_graph)
    return F.mse_loss(u, torch.exp(DATA)) + F.mse_loss(slope - u, torch.zeros_like(u))


def burgers(model, x, create_graph=False):
    u = model(x)
    (slope,) = torch.autograd.grad(u.sum(), x, retain_graph=True, create_graph=create_graph)
    return (u * slope - x.sin()).square().mean()


def advection(model, x, create_graph=False):
    u = model(x)
    (slope,) = torch.autograd.grad(u.sum(), x, retain_graph=True, create_graph=create_graph)
    return F.mse_loss(u, DATA) + 0.1 * (slope[:, :1] + 3 * slope[:, -1:]).square().mean()


CASES = [(decay, "a residual"), (growth, "a residual"), (burgers, "multiplies"), (advection, "has no graph")]


@pytest.mark.parametrize(("loss_of", "how"), first(CASES))
def test_a_derivative_without_its_graph_is_found(loss_of, how):
    (one,) = found(loss_of, n_in=2 if loss_of is advection else 1)
    assert one.severity == "warning"
    assert how in one.message
    assert "create_graph=True" in one.next_steps[0]


@pytest.mark.parametrize("loss_of", first([loss_of for loss_of, _ in CASES]))
def test_one_with_its_graph_is_right(loss_of):
    n_in = 2 if loss_of is advection else 1
    assert found(lambda model, x: loss_of(model, x, create_graph=True), n_in=n_in) == []


def logged(model, x):
    u = model(x)
    (slope,) = torch.autograd.grad(u.sum(), x, retain_graph=True)
    float(slope.norm())
    return (u - DATA).square().mean()


def attacked(model, x):
    (g,) = torch.autograd.grad(F.mse_loss(model(x), DATA), x)
    worse = (x + 0.1 * g.sign()).detach()
    return F.mse_loss(model(x), DATA) + F.mse_loss(model(worse), DATA)


def balanced(model, x):
    """Weighs a loss by the norm of gradients of a parameter, as VQGAN does."""
    u = model(x)
    a, b = F.mse_loss(u, DATA), u.square().mean()
    ga, gb = (torch.autograd.grad(y, model[2].weight, retain_graph=True)[0].norm() for y in (a, b))
    return a + b * (ga / (gb + 1e-6)).detach()


def penalized(model, x):
    u = model(x)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    return F.mse_loss(u, DATA) + 10 * (slope.norm(dim=1) - 1).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("loss_of", each(2, [logged, attacked, balanced, penalized]))
def test_other_uses_of_derivatives_are_left_alone(loss_of):
    assert found(loss_of) == []


SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(30):
    t = torch.rand(64, 1, requires_grad=True)
    u = net(t)
    du = torch.autograd.grad(u, t, torch.ones_like(u), retain_graph=True)[0]
    loss = ((du + u) ** 2).mean() + (net(torch.zeros(1, 1)) - 1).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


@pytest.mark.slow
def test_the_command_finds_it(tmp_path, capsys):
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    main(["diagnose", str(file)])
    assert "loss.constant_derivative" in capsys.readouterr().out
    file.write_text(SCRIPT.replace("retain_graph", "create_graph"))
    main(["diagnose", str(file)])
    assert "loss.constant_derivative" not in capsys.readouterr().out


def test_a_run_without_events_has_no_finding():
    assert FAULTS["loss.constant_derivative"]().seen == []
    assert list(FAULTS["loss.constant_derivative"]().findings(Run()))
