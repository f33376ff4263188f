"""Single batches whose inputs or gradients are all zero, and those in which they may be."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, Learner, watch
from hookcb.diagnosis.fault import FAULTS
from hookcb.diagnosis.run import Run, Skipped
from tests.support import first, fit

CODES = ("input.zero", "grad.zero")


def found(lose=(), clear=(), n=40, x_of=None, loss_func=F.cross_entropy, model=None):
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 3))
    opt = torch.optim.SGD(model.parameters(), 0.05)
    with watch(model, opt, Diagnose("ignore", show=False)) as w:
        for i in range(n):
            x = torch.randn(8, 20) if x_of is None else x_of(i)
            y = x.abs().sum(1).long() % 3
            loss = w.report_loss(loss_func(model(x * 0 if i in lose else x), y))
            opt.zero_grad()
            loss.backward()
            if i in clear:
                opt.zero_grad(set_to_none=i % 2 == 0)
            opt.step()
    verdict = w.diagnose()
    assert not [note for note in verdict.coverage if "a part of Diagnose" in note]
    return {x.code: x for x in verdict.findings if x.code in CODES}


@pytest.mark.slow
def test_a_batch_of_zeros_between_others_is_found():
    one = found(lose=[23])["input.zero"]
    assert (one.severity, one.step, one.value) == ("warning", 23, 1.0)
    assert "All inputs of batch 23 are zero" in one.message
    assert "batches 7, 9, 23 and 1 other are" in found(lose=[7, 9, 23, 31])["input.zero"].message


@pytest.mark.parametrize("step", first([17, 18]))
def test_gradients_that_are_gone_at_single_steps_are_found(step):
    one = found(clear=[step])["grad.zero"]
    assert (one.severity, one.step) == ("warning", step)


def test_a_learner_is_told_too():
    torch.manual_seed(0)
    batches = [(torch.randn(8, 20) * (i != 11), torch.arange(8) % 3) for i in range(30)]
    learn = Learner(batches, nn.Linear(20, 3), F.cross_entropy, torch.optim.SGD, lr=0.01)
    verdict = fit(learn, 1, cbs=[Diagnose("ignore", show=False)]).diagnose()
    assert [x.step for x in verdict.findings if x.code == "input.zero"] == [11]


@pytest.mark.slow
def test_zeros_that_come_often_are_meant():
    assert "input.zero" not in found(lose=range(0, 40, 3))
    assert "grad.zero" not in found(clear=range(0, 40, 3))


def sparse(i):
    x = torch.zeros(8, 20)
    x[i % 8, i % 20] = 1.0
    return x


def hinge(pred, y):
    return F.multi_margin_loss(10 * pred, y) * (pred.detach().sum() > 0)


def masked(pred, y):
    keep = (y == y[0]) & (y[0] > 0)
    return (F.cross_entropy(pred, y, reduction="none") * keep).sum() / keep.sum().clamp(min=1)


@pytest.mark.parametrize("loss_func", first([hinge, masked]))
def test_losses_with_zeros_of_their_own_are_left_alone(loss_func):
    assert found(loss_func=loss_func) == {}


@pytest.mark.slow
def test_sparse_inputs_single_samples_and_dead_units_are_left_alone():
    assert found(x_of=sparse) == {}
    assert found(x_of=lambda i: torch.randn(1, 20) * (i % 9 > 0)) == {}
    assert found(x_of=lambda i: torch.randn(8, 2) * (i % 9 > 0), model=nn.Linear(2, 3)) == {}  # points
    dead = nn.Sequential(nn.Linear(20, 2), nn.ReLU(), nn.Linear(2, 3, bias=False))
    assert found(x_of=lambda i: torch.randn(1, 20), model=dead) == {}


def test_a_second_step_with_nothing_left_to_do_is_no_finding():
    model = nn.Linear(20, 3)
    opt = torch.optim.SGD(model.parameters(), 0.05)
    with watch(model, opt, Diagnose("ignore", show=False)) as w:
        for i in range(40):
            w.report_loss(F.cross_entropy(model(torch.randn(8, 20)), torch.arange(8) % 3)).backward()
            opt.step()
            opt.zero_grad()
            if i % 10 == 9:
                opt.step()  # of a rest that was accumulated, if there is one
    assert not [x for x in w.diagnose().findings if x.code in CODES]


class Skips(nn.Module):
    """Leaves out a block at random, as in stochastic depth."""

    def __init__(self):
        super().__init__()
        self.first, self.block, self.head = nn.Linear(20, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x):
        x = self.first(x).relu()
        return self.head(x + self.block(x).relu() if torch.rand(()) > 0.1 else x)


@pytest.mark.slow
def test_a_block_that_is_left_out_is_not_looked_at():
    assert found(model=Skips()) == {}


@pytest.mark.parametrize("code", CODES)
def test_a_run_without_events_skips(code):
    assert [type(x) for x in FAULTS[code]().findings(Run())] == [Skipped]
