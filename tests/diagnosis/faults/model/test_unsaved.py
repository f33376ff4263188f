"""load.left_out: a state that no state_dict has, in trainings that are resumed."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, watch
from tests.diagnosis.faults.support import from_start


class Scaling:
    """Scales inputs by means that it has seen; `kept` beside them does not change."""

    def __init__(self):
        self.mean, self.kept = torch.zeros(4), torch.ones(4)

    def __call__(self, x):
        self.mean += 0.1 * (x.detach().mean(0) - self.mean)
        return x - self.mean


class Buffer(nn.Module):
    def __init__(self, persistent=False):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4), persistent=persistent)
        self.last = torch.zeros(4)

    def forward(self, x):
        self.last = x.detach().mean(0)
        if self.training:
            self.mean.lerp_(self.last, 0.1)
        return x - self.mean


class Saved(Buffer):
    def __init__(self):
        super().__init__(persistent=True)


class Net(nn.Module):
    def __init__(self, scaling):
        super().__init__()
        self.scaling, self.head = scaling(), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.scaling(x))


def made(scaling):
    net = Net(scaling)
    return net, torch.optim.Adam(net.parameters(), lr=0.01)


def train(net, opt, n=12):
    with watch(net, opt, Diagnose(show=False)) as w:
        for _ in range(n):
            opt.zero_grad()
            F.cross_entropy(net(torch.randn(16, 4)), torch.randint(3, (16,))).backward()
            opt.step()
    return [x for x in w.diagnose().findings if x.code == "load.left_out"]


def resumed(scaling, model=True, optimizer=True, n=12):
    with from_start():
        net, opt = made(scaling)
        train(net, opt)
        again, new = made(scaling)
        if model:
            again.load_state_dict(net.state_dict())
        if optimizer:
            new.load_state_dict(opt.state_dict())
        return train(again, new, n)


@pytest.mark.parametrize("scaling", [Scaling, Buffer])
def test_a_state_that_each_step_changes_and_no_state_dict_has_is_a_note(scaling):
    (found,) = resumed(scaling)
    assert (found.severity, found.layer, found.step) == ("info", "scaling", 0)
    assert "but scaling.mean, which each step changes, is in no state_dict()" in found.message


def test_what_is_saved_fine_tuned_reset_or_hardly_trained_is_not_told():
    assert not resumed(Saved)
    assert not resumed(Scaling, optimizer=False)
    assert not resumed(Scaling, model=False)
    assert not resumed(Scaling, n=4)
    assert not train(*made(Scaling))
