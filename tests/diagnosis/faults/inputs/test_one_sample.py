"""Data of one sample that is given to all samples of a batch, and what is shared on purpose."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, Learner, watch
from hookcb.diagnosis.faults.inputs.one_sample import OneSample
from hookcb.diagnosis.run import Run, Skipped
from tests.support import fit

N, D = 16, 6


class Net(nn.Module):
    """Takes an input and a condition of any shape that broadcasts."""

    def __init__(self):
        super().__init__()
        self.x, self.c, self.head = nn.Linear(D, 16), nn.Linear(D, 16), nn.Linear(16, 1)

    def forward(self, x, c):
        return self.head(torch.tanh(self.x(x) + self.c(c)))


def batches(condition, n=24, target=lambda y: y):
    g = torch.Generator().manual_seed(0)
    for _ in range(n):
        x, c = torch.randn(N, D, generator=g), torch.randn(N, D, generator=g)
        yield x, condition(c), target((x + c).sum(1, keepdim=True))


def by_learner(condition, target=lambda y: y):
    torch.manual_seed(0)
    learn = Learner(list(batches(condition, target=target)), Net(), F.mse_loss, lr=1e-2)
    return fit(learn, 1, cbs=Diagnose("ignore", show=False)).diagnose()


def by_watch(condition, target=lambda y: y):
    torch.manual_seed(0)
    model = Net()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    with watch(model, opt, Diagnose("ignore", show=False)) as w:
        for x, c, y in batches(condition, target=target):
            opt.zero_grad()
            F.mse_loss(model(x, c), y).backward()
            opt.step()
        return w.diagnose()


def found(verdict):
    return [x.message.partition(" has")[0] for x in verdict.findings if x.code == "input.one_sample"]


WRONG = {"first": lambda c: c[:1], "fourth": lambda c: c[3][None], "expanded": lambda c: c[:1].expand(N, -1)}


@pytest.mark.parametrize("name", WRONG)
def test_one_sample_for_all_is_found(name):
    assert found(by_learner(WRONG[name])) == ["Input [1]"]
    assert found(by_watch(WRONG[name])) == ["Input [1]"]


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_target_of_one_sample_is_found():
    assert found(by_learner(lambda c: c, target=lambda y: y[:1])) == ["The target"]


GRID = torch.linspace(0, 1, D)[None]
RIGHT = {
    "each its own": lambda c: c,
    "a grid": lambda c: GRID,
    "a row of a grid": lambda c: GRID.expand(N, -1),
    "one condition for the batch": lambda c: c.mean(0, keepdim=True),
    "a condition that all have": lambda c: c.mean(0).expand(N, D).contiguous()[:1],
    "a copy": lambda c: c[:1].clone(),
}


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("train", [by_learner, by_watch])
def test_what_is_shared_on_purpose_is_right(name, train):
    verdict = train(RIGHT[name])
    assert found(verdict) == []
    assert "data of one sample that is given to all" in verdict.ruled_out


def test_a_sample_that_others_are_compared_with_is_right():
    torch.manual_seed(0)
    model = Net()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    with watch(model, opt, Diagnose("ignore", show=False)) as w:
        for x, _, y in batches(lambda c: c):
            opt.zero_grad()
            F.mse_loss(model(x, x[:1]), y).backward()
            opt.step()
        assert found(w.diagnose()) == []


def test_without_batches_it_is_not_ruled_out():
    (result,) = OneSample().findings(Run())
    assert isinstance(result, Skipped)
