"""loss.unbounded: losses below zero."""

import pytest
import torch
from torch import nn

from hookcb import Diagnose, watch
from hookcb.diagnosis.faults.loss.flat import FlatLoss
from hookcb.diagnosis.faults.loss.init import FirstLoss
from hookcb.diagnosis.faults.loss.unbounded import UnboundedLoss
from hookcb.diagnosis.run import Passed, Skipped
from tests.diagnosis.faults.loss.support import CE, losses
from tests.diagnosis.support import only
from tests.support import first, in_turn


def test_a_loss_below_what_it_can_be_is_told_at_the_first_step():
    found = only(UnboundedLoss, losses([0.5, 0.1, -0.2, -0.1]))
    assert (found.code, found.severity, found.step, found.value) == ("loss.unbounded", "error", 2, -0.2)
    assert "log_softmax" in only(UnboundedLoss, losses([-0.5], "nll")).next_steps[0]


def test_a_sum_of_losses_is_not_below_zero_and_need_not_fall():
    of_two = losses([0.5] * 60 + [-0.2], "", kinds=("mse", "huber"))
    assert (
        only(UnboundedLoss, of_two).message
        == "The loss is -0.2 at step 60, but mse + huber is never below 0."
    )
    reason = "the loss is a sum of 2: mse, huber"
    assert only(FirstLoss, of_two).reason == reason
    assert only(FlatLoss, of_two).reason == f"{reason}, and an objective need not fall"


def test_rounding_below_zero_is_no_finding():
    assert isinstance(only(UnboundedLoss, losses([0.5, -1e-8])), Passed)


@pytest.mark.parametrize(("values", "kind"), [([-5.0], ""), ([-5.0], "cosine"), ([], CE)])
def test_a_loss_of_another_kind_may_be_below_zero(values, kind):
    assert isinstance(only(UnboundedLoss, losses(values, kind)), Skipped)


@pytest.mark.parametrize("by_another", first([True, False]))
def test_a_negated_loss_is_a_fault_unless_it_judges_another_models_output(by_another):
    """As the loss of the generator in the minimax game of the first GANs."""
    torch.manual_seed(0)
    model, judge = nn.Linear(4, 2), nn.Linear(2, 1)
    whole = model if by_another else nn.Sequential(model, judge)
    opt = torch.optim.Adam(whole.parameters(), lr=2e-3)
    bce = nn.functional.binary_cross_entropy_with_logits
    with watch(whole, opt, Diagnose("ignore", show=False)) as w:
        for _ in range(60):
            z = torch.randn(64, 4)
            (-bce(judge(model(z)) if by_another else whole(z), torch.zeros(64, 1))).backward()
            opt.step()
            opt.zero_grad()
    assert ("loss.unbounded" in [x.code for x in w.diagnose().findings]) != by_another


def test_a_loss_of_any_kind_that_falls_faster_and_faster_has_no_minimum():
    found = only(UnboundedLoss, losses([774.0 - 1.2**i for i in range(150)], ""))
    assert (found.code, found.severity) == ("loss.unbounded", "warning")
    assert "fell faster and faster" in found.message
    assert found.step == 0  # it is what leads to all the rest


@in_turn(
    "values",
    [
        [5 - 1e6 * (1 - 0.95**i) for i in range(150)],  # slower and slower
        [5 - 1e4 * i for i in range(150)],  # at a constant speed
        [5 - 1.05**i for i in range(150)],  # not far below its size
        [5e6 - 1.2**i for i in range(120)],  # likewise
        [774.0 - 1.2**i for i in range(40)],  # of few batches
        [1.0] * 60 + [-1e9] + [1.0] * 60,
        [2.0] * 120,
    ],
    ids=["saturates", "linear", "small", "large at first", "few", "one outlier", "never below zero"],
)
def test_other_negative_losses_of_unknown_kinds_are_left_alone(values):
    assert isinstance(only(UnboundedLoss, losses(values, "")), Skipped)


@pytest.mark.slow
def test_a_bonus_without_a_bound_is_found_in_a_sum():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    opt = torch.optim.Adam(model.parameters(), lr=0.05)
    with watch(model, opt, Diagnose("ignore", show=False)) as w:
        for _ in range(100):
            x, y = torch.randn(32, 8), torch.randint(4, (32,))
            scores = model(x)
            bonus = scores.exp().mean()
            w.report_loss(nn.functional.cross_entropy(scores, y) - bonus).backward()
            opt.step()
            opt.zero_grad()
    assert "loss.unbounded" in [x.code for x in w.diagnose().findings]
