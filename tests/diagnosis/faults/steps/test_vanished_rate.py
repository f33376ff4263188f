"""Learning rates that vanish, on made-up numbers."""

import math

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from hookcb import Diagnose, watch
from hookcb.diagnosis.faults.steps.vanished_rate import VanishedRate
from hookcb.diagnosis.run import Passed, Skipped
from tests.diagnosis.support import FALLS, STAYS, evidence, only, weight
from tests.support import first, in_turn


def decaying(rate, loss=STAYS, n=100):
    return evidence(weight(), lr=[rate(i / n) for i in range(n)], loss=loss * 3)


def test_a_rate_that_vanishes_before_anything_is_learned_is_told():
    found = only(VanishedRate().findings, decaying(lambda t: 0.1 * 0.8 ** (100 * t)))
    assert (found.code, found.severity) == ("lr.vanished", "warning")
    assert found.step == 0
    assert "since step 31" in found.message  # 0.8 ** 31 is below a thousandth
    assert "in 69% of the batches" in found.message
    assert "scheduler.step()" in found.next_steps[0]


@in_turn(
    "given",
    [
        decaying(lambda t: 0.05 * (1 + math.cos(math.pi * t))),
        decaying(lambda t: 0.1 * min(1, 10 * t) * (1 - t)),
        decaying(lambda t: 0.1 * 0.8 ** (100 * t), loss=FALLS),
        decaying(lambda t: 1e-9),
        decaying(lambda t: 1e-6 if t < 0.6 else 0.1),  # before the largest rate
        decaying(lambda t: 0.1 if t < 0.55 else 1e-6),
    ],
)
def test_usual_schedules_and_trainings_that_learn_are_no_finding(given):
    assert isinstance(only(VanishedRate().findings, given), Passed)


def test_forty_nine_rates_are_too_few():
    assert isinstance(only(VanishedRate().findings, decaying(lambda t: 0.1, n=49)), Skipped)


def trained(schedule, n=300, noise=0.3, opt_class=torch.optim.SGD, rate=0.1):
    """Codes of a training whose scheduler is stepped in each batch, unless it is of a plateau."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    opt, true = opt_class(model.parameters(), lr=rate), torch.randn(6, 1)
    scheduler = schedule(opt)
    with watch(model, opt, Diagnose("ignore", show=False)) as w:
        for i in range(n):
            x = torch.randn(32, 6)
            loss = nn.functional.mse_loss(model(x), (x @ true).tanh() + noise * torch.randn(32, 1))
            opt.zero_grad()
            loss.backward()
            opt.step()
            if not isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
                scheduler.step()
            elif i % 10 == 9:
                scheduler.step(loss.item())
    return {x.code: x for x in w.diagnose().findings if x.severity != "info"}


@pytest.mark.parametrize(
    ("opt_class", "rate"), first([(torch.optim.SGD, 0.1), (torch.optim.Adam, 3e-2)]), ids=["SGD", "Adam"]
)
def test_steps_that_are_lost_in_rounding_are_told_though_the_model_has_learned(opt_class, rate):
    found = trained(lambda opt: lr_scheduler.StepLR(opt, 5, 0.3), opt_class=opt_class, rate=rate)[
        "lr.vanished"
    ]
    assert found.severity == "warning"
    assert "No weight changes" in found.message


SCHEDULES = {
    "cosine": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 300),
    "linear": lambda opt: lr_scheduler.LinearLR(opt, 1.0, 0.0, 300),
    "plateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=1, eps=0),
    "warm-up": lambda opt: lr_scheduler.LambdaLR(opt, lambda i: min(1.0, max(0, i - 100) / 100)),
    "steps": lambda opt: lr_scheduler.MultiStepLR(opt, [150, 225]),
    "zero after it has converged": lambda opt: lr_scheduler.LambdaLR(opt, lambda i: float(i < 200)),
    "constant": lambda opt: lr_scheduler.ConstantLR(opt, 1.0),
}


@pytest.mark.parametrize("name", first(SCHEDULES))
def test_rates_that_end_at_zero_or_follow_the_loss_are_no_fault(name):
    assert "lr.vanished" not in trained(SCHEDULES[name])
