"""loss.diverging: losses that rise, on numbers that are made up."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, watch
from hookcb.diagnosis.faults.loss.diverging import DivergingLoss
from hookcb.diagnosis.measurements.shifts import Growth, Shifts
from hookcb.diagnosis.run import Layer, Passed, Series, Skipped
from hookcb.diagnosis.verdict import Finding
from hookcb.hooks.coverage import BY_CLOSURE
from tests.diagnosis.faults.loss.support import losses, noisy
from tests.diagnosis.support import only
from tests.support import in_turn


@in_turn(
    "values",
    [
        [1.0] * 20 + [5.0] * 80,
        [1.0] * 10 + [9.0] * 15,
        [1.0, 90.0, 400.0] + [50.0] * 60,
        [-1.0] * 10 + [3.0] * 90,
    ],
)
def test_a_loss_that_rises_and_stays_high_is_told(values):
    found = only(DivergingLoss, losses(values))
    assert (found.code, found.severity, found.last_step) == ("loss.diverging", "error", len(values) - 1)
    assert found.value > found.limit
    assert found.step > 0 or values[1] > 5


@in_turn(
    "values",
    [
        [1.0] * 10 + [1e-5] * 50 + [3e-5] * 40,  # noise of what is learned by heart
        [1.0] * 100,
        [1.0] * 50 + [9.0] * 5 + [1.0] * 60,
        noisy([1.0] * 100, 0.4),
        [3.0] * 10 + [1.0] * 50 + [3.5] * 60,  # higher than its minimum, not than its beginning
        [-1.0 - 0.1 * i for i in range(60)],
    ],
)
def test_a_loss_that_rises_for_a_while_or_a_little_does_not_diverge(values):
    assert isinstance(only(DivergingLoss, losses(values)), Passed)


def squared_errors(size):
    """Mean squared errors 1 to 4, and outputs that grow to `size`, of which each tenth batch is looked at."""
    values = [1.0] * 40 + [1.0 + i / 20 for i in range(60)] + [4.0] * 60
    head = Layer("head", "Linear", "Linear 2→1", 0)
    head.stats["std"] = Series.of(range(0, 160, 10), [0.1] * 4 + [size * i / 12 for i in range(1, 13)])
    head.stats["mean"] = Series.of(range(0, 160, 10), [0.0] * 16)
    return losses(values, kind="mse", layers={"head": head})


def test_a_squared_error_that_only_larger_targets_explain_does_not_diverge():
    """Errors of 2 with outputs of up to 4.9 need targets of 2.9, and the first were 1.1 at most."""
    assert isinstance(only(DivergingLoss, squared_errors(size=4.9)), Passed)


def test_targets_that_have_grown_are_named_first_and_are_a_note_if_outputs_follow_them():
    run = squared_errors(size=4.9)
    run.measured(Shifts).growth = Growth(70, 1.0, 9.0)
    assert isinstance(only(DivergingLoss, run), Passed)
    run.measured(Shifts).growth = Growth(70, 1.0, 900.0)
    found = only(DivergingLoss, run)
    assert found.severity == "info"
    assert found.message.startswith("The targets have grown from 1 to 900 since step 70: they may be made by")
    run = squared_errors(size=2.9)
    run.measured(Shifts).growth = Growth(70, 1.0, 9.0)
    assert only(DivergingLoss, run).severity == "error"
    run.measured(Shifts).growth = Growth(140, 1.0, 9.0)  # long after the loss
    assert only(DivergingLoss, run).message.startswith("The loss has risen")


def test_bootstrapped_targets_that_feed_on_themselves_are_named():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3))
    old, diagnose = copy.deepcopy(net).requires_grad_(False), Diagnose("ignore", show=False)
    states = torch.randn(500, 6)
    others, rewards = torch.tanh(states @ torch.randn(6, 6)), states[:, 0]
    opt = torch.optim.Adam(net.parameters(), 1e-3)
    with watch(net, opt, diagnose) as w:
        for step in range(260):
            if step % 10 == 0:
                old.load_state_dict(net.state_dict())
            i = torch.randint(500, (64,))
            goal = rewards[i] + (20 if step >= 120 else 0.8) * old(others[i]).amax(1)
            w.report_loss(F.smooth_l1_loss(net(states[i])[:, 0], goal)).backward()
            opt.step()
            opt.zero_grad()
    assert diagnose.verdict is not None
    found = diagnose.verdict.primary
    assert (found.code, found.severity) == ("loss.diverging", "error")
    assert "The targets have grown from " in found.message
    assert " since step 120: they may be made by the model itself." in found.message
    assert "discount" in found.next_steps[0]


def test_a_squared_error_that_outputs_explain_by_themselves_diverges():
    """Errors of 2 with outputs of 2.9 or less may be of targets of 1."""
    assert only(DivergingLoss, squared_errors(size=2.9)).severity == "error"


@pytest.mark.parametrize(("size", "kind"), [(4.9, Passed), (0.9, Finding)])
def test_of_outputs_that_were_not_inspected_since_the_rise_the_last_before_count(size, kind):
    seen = squared_errors(size)
    for stat in ("std", "mean"):
        values = seen.layers["head"].stats[stat].values
        seen.layers["head"].stats[stat] = Series.of([*range(5), 45], [*values[:5], values[-1]])
    assert isinstance(only(DivergingLoss, seen), kind)


def test_a_loss_of_unknown_kind_may_be_one_side_of_a_game():
    assert isinstance(only(DivergingLoss, losses([0.7] * 10 + [2.5] * 90, kind="")), Passed)
    assert only(DivergingLoss, losses([0.7] * 10 + [9.0] * 90, kind="")).severity == "info"


def test_a_loss_of_any_kind_that_lbfgs_minimizes_does_not_rise_on_purpose():
    reasons = {"before_step": Skipped(BY_CLOSURE)}
    found = only(DivergingLoss, losses([0.7] * 10 + [9.0] * 90, kind="", reasons=reasons))
    assert found.severity == "error"


def test_a_loss_that_began_at_zero_and_rises_by_rounding_does_not_diverge():
    values = [0.0] * 20 + [6e-11] * 80
    assert isinstance(only(DivergingLoss, losses(values, guess=2.3)), Passed)
    assert isinstance(only(DivergingLoss, losses(values)), Skipped)
    assert only(DivergingLoss, losses([0.0] * 20 + [0.5] * 80, guess=2.3)).severity == "error"


def test_points_that_lbfgs_tries_and_leaves_do_not_diverge():
    values = [1.0] * 30 + [50.0] * 25
    assert only(DivergingLoss, losses(values)).severity == "error"
    by_closure = losses(values, reasons={"before_step": Skipped(BY_CLOSURE)})
    assert isinstance(only(DivergingLoss, by_closure), Passed)
    by_closure.loss = Series.of(range(90), [1.0] * 30 + [50.0] * 60)
    assert only(DivergingLoss, by_closure).severity == "error"


def test_nineteen_batches_are_too_few_to_diverge():
    assert isinstance(only(DivergingLoss, losses([1.0] * 9 + [99.0] * 10)), Skipped)


def test_a_small_first_loss_among_losses_that_vary_is_no_divergence_in_a_short_run():
    """Batches of four samples, of which nothing is learned; a rise by more than the noise is one."""
    values = [0.198, 2.814, 1.417, 0.294, 1.124, 2.292, 1.149, 0.409, 3.11, 0.433, 0.346, 1.916, 0.478, 1.318]
    values += [1.192, 1.792, 0.277, 1.157, 1.345, 0.759]
    seen = losses(values, "mse", sources={"loss"}, n_batches=20)
    assert not [x for x in DivergingLoss().findings(seen) if isinstance(x, Finding)]
    seen.loss = Series.of(range(20), [0.02, *values[1:]])
    assert [x.code for x in DivergingLoss().findings(seen) if isinstance(x, Finding)] == ["loss.diverging"]
