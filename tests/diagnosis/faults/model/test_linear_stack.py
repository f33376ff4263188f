"""Linear layers in a row, as the autograd graph shows them."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hookcb import Diagnose, Learner, diagnose
from hookcb.diagnosis.faults.model.linear_stack import LinearStack, linear_links
from hookcb.diagnosis.run import Run
from tests.support import in_turn, pairs


class Net(nn.Module):
    """Two linear layers, and what is between them."""

    def __init__(self, between=lambda x: x, width=8, bias=True, out=4):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, width, bias=bias), nn.Linear(width, out, bias=bias)
        self.between = between

    def forward(self, x):
        return self.fc2(self.between(self.fc1(x)))


def found(model, x, dtype=None):
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
        loss = model(x).float().square().mean()
    fault = LinearStack()
    fault.on_first_graph(Run(loop=SimpleNamespace(model=model, loss_node=loss.grad_fn)))
    assert not fault.unless
    return [(seen.code, seen.layer) for seen in fault.seen]


@in_turn(("shape", "bias", "dtype"), pairs([(3, 8), (2, 3, 8)], [True, False], [None, "bf16"]))
def test_linear_layers_in_a_row_are_found_in_any_forward(shape, bias, dtype):
    assert found(Net(bias=bias), torch.randn(shape), dtype) == [("model.linear_stack", "fc1")]


HEALTHY = {
    "an activation": Net(torch.relu),
    "a norm": Net(nn.LayerNorm(8)),
    "a residual connection": Net(lambda h: h + h.tanh()),
    "a low rank": Net(width=2),
    "a mixer, which mixes another axis": Net(lambda h: h.transpose(1, 2), width=8, out=8),
}


@in_turn("name", HEALTHY)
def test_layers_with_something_between_are_not(name):
    assert found(HEALTHY[name], torch.randn(2, 8, 8)) == []


def test_an_output_that_is_used_elsewhere_too_is_not_in_a_row():
    net = Net()
    x = torch.randn(3, 8)
    hidden = net.fc1(x)
    loss = net.fc2(hidden).square().mean() + hidden.tanh().mean()
    assert linear_links(loss.grad_fn) == []


def test_a_graph_that_hides_a_part_says_nothing():
    net = Net()
    x = torch.randn(3, 8, requires_grad=True)
    hidden = checkpoint(torch.nn.functional.relu, net.fc1(x), use_reentrant=True)
    assert linear_links(net.fc2(hidden).sum().grad_fn) is None
    for _ in range(1400):
        x = (x * 2).tanh() + 1
    assert linear_links(net(x).sum().grad_fn) is None


def test_without_a_graph_there_is_no_link():
    assert linear_links(None) == []


@pytest.mark.parametrize("is_before", [True, False])
def test_the_verdict_notes_it_once(is_before):
    model, batch = Net(), (torch.randn(16, 8), torch.randn(16, 4))
    if is_before:
        verdict = diagnose(model, batch, nn.functional.mse_loss)
    else:
        learn = Learner([batch] * 3, model, nn.functional.mse_loss)
        with learn.no_logging():
            learn.fit(1, cbs=Diagnose(show=False))
        verdict = learn.diagnose()
    (note,) = [f for f in verdict.findings if f.code == "model.linear_stack"]
    assert (note.severity, note.layer) == ("info", "fc1")
    assert "fc1 and fc2 follow one another" in note.message


def test_a_sequential_is_not_noted_twice():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    verdict = diagnose(model, (torch.randn(16, 8), torch.randn(16, 4)), nn.functional.mse_loss)
    (note,) = [f for f in verdict.findings if f.code == "model.linear_stack"]
    assert "The same is true" not in note.message


# ---- in an nn.Sequential


def noted(model):
    fault = LinearStack()
    fault.on_model(Run(loop=SimpleNamespace(model=model)))
    return [seen.layer for seen in fault.seen]


L = nn.Linear
STACKS = {
    "two": ([L(8, 8), L(8, 4)], ["0"]),
    "three": ([L(8, 8), L(8, 8), L(8, 4)], ["0", "1"]),
    "dropout and identity between": ([L(8, 8), nn.Dropout(0.5), nn.Identity(), L(8, 4)], ["0"]),
    "a wider inner": ([L(8, 64), L(64, 8)], ["0"]),
    "narrower to the end": ([L(8, 6), L(6, 4)], ["0"]),
    "an activation between": ([L(8, 8), nn.ReLU(), L(8, 4)], []),
    "a norm between": ([L(8, 8), nn.LayerNorm(8), L(8, 4)], []),
    "a low rank": ([L(8, 2), L(2, 8)], []),
    "a weight norm": ([nn.utils.parametrizations.weight_norm(L(8, 8)), L(8, 4)], []),
}


@in_turn("name", STACKS)
def test_linear_layers_in_a_row_are_noted(name):
    torch.manual_seed(0)
    layers, expected = STACKS[name]
    assert noted(nn.Sequential(*layers)) == expected
    inner = nn.ModuleDict({"body": nn.Sequential(*layers)})
    assert noted(inner) == [f"body.{at}" for at in expected]


def test_only_the_order_in_a_sequential_is_known():
    class Residual(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x).relu()

    layers = [L(8, 8), L(8, 8)]
    assert noted(nn.ModuleList(layers)) == noted(Residual(*layers)) == []
