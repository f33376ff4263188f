"""A layer that was not called: the note is true, and never asks to remove a layer that is in use."""

import os
import sysconfig

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, Learner, watch
from tests.support import fit


class Net(nn.Module):
    """A body that is called; `use` says how the rest of the model takes part."""

    def __init__(self, use=lambda net, x: x):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.aside, self.act, self.head = (
            nn.Linear(4, 8),
            nn.Linear(8, 8),
            nn.ReLU(),
            nn.Linear(8, 1),
        )
        self.use = use

    def forward(self, x):
        return self.head(self.use(self, self.body(x)))


def batches(n=12):
    g = torch.Generator().manual_seed(0)
    return [(x := torch.randn(16, 4, generator=g), x.sum(1, keepdim=True)) for _ in range(n)]


def silent(model):
    """The note that a fit leaves, None if there is none."""
    learn = Learner(batches(), model, F.mse_loss, torch.optim.SGD, lr=0.01)
    verdict = fit(learn, 1, cbs=Diagnose(show=False)).diagnose()
    return next((f for f in verdict.findings if f.code == "hook.silent"), None)


def test_a_layer_that_is_not_used_is_told():
    found = silent(Net())
    assert (found.layer, found.severity, found.value) == ("aside", "info", 2.0)
    assert "Layer aside was not called in any of the 8 inspected batches, nor was act" in found.message
    assert "remove it" in found.next_steps[0]
    assert str(found).splitlines()[1].startswith("  Layer aside was not called")  # as it is spelled


def test_a_dropout_of_which_the_forward_reads_the_rate_is_not_asked_to_be_taken_away():
    """Attention does so: F.scaled_dot_product_attention(…, dropout_p=self.dropout.p)."""
    model = Net(lambda net, x: F.dropout(net.act(net.aside(x)), net.dropout.p))
    model.dropout = nn.Dropout(0.1)
    found = silent(model)
    assert found.layer == "dropout"
    assert any("reads only its settings" in cause for cause in found.causes)
    assert found.next_steps[0].endswith("if not, and its settings are not read there, remove it")


PACKAGE = """
from torch import nn

class GraphConv(nn.Module):  # as those of torch_geometric, which sum by another way if they can
    def __init__(self):
        super().__init__()
        self.lin, self.parts = nn.Linear(8, 8), nn.Sequential(nn.Identity(), nn.ReLU())

    def forward(self, x):
        return self.lin(x)
"""


@pytest.mark.slow
def test_internals_of_a_package_that_need_not_be_called_are_not_asked_to_be_removed():
    """A layer of the user inside of them is told all the same."""
    made = {}
    exec(compile(PACKAGE, os.path.join(sysconfig.get_path("purelib"), "graphs", "conv.py"), "exec"), made)
    model = Net(lambda net, x: net.conv(net.aside(x)))
    model.conv = made["GraphConv"]()
    found = silent(model)
    assert (found.layer, found.value) == ("act", 1.0)  # the ReLU of the model itself
    model = Net(lambda net, x: net.conv(net.act(net.aside(x))))
    model.conv, model.conv.spare = made["GraphConv"](), nn.Linear(8, 8)
    assert (silent(model).layer, silent(model).value) == ("conv.spare", 1.0)


USES = {
    "by its weights": lambda net, x: F.linear(x, net.aside.weight, net.aside.bias),
    "by its weights, with small gradients": lambda net, x: x + 1e-3 * F.linear(x, net.aside.weight),
    "by its forward": lambda net, x: net.aside.forward(x),
    "from the fifth batch on": lambda net, x: F.linear(x, net.aside.weight) if net.n > 4 else x,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_layer_that_is_used_without_being_called_is_no_finding(use):
    model = Net(use)
    model.n = 0
    model.register_forward_pre_hook(lambda m, args: setattr(m, "n", m.n + 1))
    assert silent(model) is None


def test_a_frozen_layer_that_is_used_by_its_weights_is_no_finding():
    model = Net(USES["by its weights"])
    model.aside.requires_grad_(False)
    assert silent(model).layer == "act"


def test_what_multihead_attention_uses_by_its_weights_is_no_finding():
    def use(net, x):
        return net.aside(net.act(net.attention(x[:, None], x[:, None], x[:, None])[0][:, 0]))

    model = Net(use)
    model.attention = nn.MultiheadAttention(8, 2, batch_first=True)
    assert silent(model) is None


@pytest.mark.filterwarnings("ignore:none of 3 hooked layers:UserWarning")
def test_parts_of_a_model_that_is_never_called_itself_are_seen():
    model = nn.ModuleDict({"actor": nn.Linear(4, 2), "act": nn.Tanh(), "critic": nn.Linear(4, 1)})
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, opt, Diagnose(show=False)) as w:
        for x, y in batches():
            loss = model["act"](model["actor"](x)).square().mean() + F.mse_loss(model["critic"](x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
    verdict = w.diagnose()
    assert "hook.silent" not in {f.code for f in verdict.findings}
    assert not any("hook.silent" in text for text in verdict.coverage)
