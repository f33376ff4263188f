"""Where losses begin, whether they fall, rise or jump: on numbers that are made up."""

import math
import random

import pytest
import torch
from torch import nn

from hookcb import Diagnose, watch
from hookcb.diagnosis.checks.loss import (
    diverging_loss,
    first_loss,
    flat_loss,
    loss_spikes,
    unbounded_loss,
)
from hookcb.diagnosis.rules import falls_slowly
from hookcb.diagnosis.run import Layer, Passed, Run, Series, Skipped
from hookcb.diagnosis.verdict import Finding
from hookcb.hooks.coverage import BY_CLOSURE

NAN, INF = math.nan, math.inf
CE = "cross-entropy"


def evidence(values, kind=CE, guess=NAN, **kwargs):
    return Run(loss=Series.of(range(len(values)), values), loss_kind=kind, guess=guess, **kwargs)


def noisy(values, size=0.1):
    random_ = random.Random(0)
    return [x + random_.gauss(0, size) for x in values]


def only(check, given):
    (found,) = check(given)
    return found


# ---- loss.init


@pytest.mark.parametrize(
    ("first", "kind", "guess", "severity"),
    [
        (6.0, CE, 2.3, "info"),
        (30.0, CE, 2.3, "warning"),
        (3.5, "mse", 1.0, "info"),
        (90.0, "mse", 1.0, "warning"),
    ],
)
def test_a_loss_far_above_guessing_is_told(first, kind, guess, severity):
    found = only(first_loss, evidence([first] * 20, kind, guess))
    assert (found.code, found.severity, found.step, found.value) == ("loss.init", severity, 0, first)


def test_a_large_first_loss_that_is_learned_at_once_is_a_note():
    found = only(first_loss, evidence([30.0] + [2.0] * 19, CE, 2.3))
    assert (found.code, found.severity) == ("loss.init", "info")


@pytest.mark.parametrize(("first", "kind", "guess"), [(4.2, CE, 2.3), (2.5, CE, 0.69), (2.9, "mse", 1.0)])
def test_a_loss_near_guessing_is_no_finding(first, kind, guess):
    assert isinstance(only(first_loss, evidence([first], kind, guess)), Passed)


@pytest.mark.parametrize(
    ("values", "kind", "guess"),
    [([99.0], CE, NAN), ([99.0], "", 1.0), ([], CE, 1.0), ([INF], CE, 1.0), ([9.0], "mse", 0.0)],
)
def test_without_a_guess_nothing_is_said_of_the_beginning(values, kind, guess):
    assert isinstance(only(first_loss, evidence(values, kind, guess)), Skipped)


# ---- loss.flat


@pytest.mark.parametrize(
    ("level", "guess", "severity"),
    [(2.35, 2.3, "warning"), (9.0, 2.3, "warning"), (0.7, 2.3, "info"), (2.3, NAN, "info")],
)
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_a_loss_that_stays_is_told(level, guess, severity, noise):
    found = only(flat_loss, evidence(noisy([level] * 100, noise), guess=guess))
    assert (found.code, found.severity) == ("loss.flat", severity)
    assert (found.step, found.last_step) == (10, 99)


@pytest.mark.parametrize(
    "values",
    [
        noisy([2.3 - 0.005 * i for i in range(100)]),
        [2.3] * 60 + [1.0] * 40,
        [2.3 - 0.3 * i / 100 for i in range(60)],
        [-0.1 - 0.01 * i for i in range(60)],
        [2.3] + [0.5] * 99,
    ],
)
def test_a_loss_that_falls_is_not_flat(values):
    assert isinstance(only(flat_loss, evidence(values, guess=2.3)), Passed)


@pytest.mark.parametrize("n_classes", [10, 1000])
@pytest.mark.parametrize("share", [0.01, 0.03])
@pytest.mark.parametrize("bend", [0.5, 1, 3])
def test_a_loss_that_surely_falls_is_not_flat_however_little(n_classes, share, bend):
    """Steadily, faster at first, or faster at last; guessing is where it begins."""
    guess = math.log(n_classes)
    for n in (60, 150, 1000):
        values = noisy([guess * (1 - share * (i / n) ** bend) for i in range(n)], guess * share / 6)
        given = evidence(values, guess=guess)
        assert isinstance(only(flat_loss, given), Passed)
        assert falls_slowly(given)


@pytest.mark.parametrize("size", [0.1, 0.4])
def test_a_loss_whose_noise_hides_whether_it_falls_is_not_called_flat(size):
    values = noisy([2.3] * 60, size)
    found = only(flat_loss, evidence(values, guess=2.3))
    assert isinstance(found, Skipped)
    assert only(flat_loss, evidence(noisy([2.3] * 1000, 0.1), guess=2.3)).severity == "warning"


def test_noise_is_not_taken_for_a_fall():
    random_ = random.Random(1)
    fell = 0
    for _ in range(200):
        values = [2.3 + random_.gauss(0, 0.02) for _ in range(100)]
        fell += isinstance(only(flat_loss, evidence(values, guess=2.3)), Passed)
    assert fell <= 2  # three standard deviations leave one in seven hundred


def test_a_loss_of_an_unknown_kind_may_be_an_objective_that_need_not_fall():
    values = noisy([2.3] * 100)
    assert "need not fall" in only(flat_loss, evidence(values, "")).reason
    assert only(flat_loss, evidence(values, "mse")).severity == "info"


def test_a_short_run_or_a_warm_up_is_not_called_flat():
    assert isinstance(only(flat_loss, evidence([2.3] * 49)), Skipped)
    rising = Series(list(range(60)), [1e-4 * i for i in range(60)])
    assert isinstance(only(flat_loss, evidence([2.3] * 60, lr=rising)), Skipped)


# ---- loss.diverging


@pytest.mark.parametrize(
    "values",
    [
        [1.0] * 20 + [5.0] * 80,
        [1.0] * 10 + [9.0] * 15,
        [1.0, 90.0, 400.0] + [50.0] * 60,
        [-1.0] * 10 + [3.0] * 90,
    ],
)
def test_a_loss_that_rises_and_stays_high_is_told(values):
    found = only(diverging_loss, evidence(values))
    assert (found.code, found.severity, found.last_step) == ("loss.diverging", "error", len(values) - 1)
    assert found.value > found.limit
    assert found.step > 0 or values[1] > 5


@pytest.mark.parametrize(
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
    assert isinstance(only(diverging_loss, evidence(values)), Passed)


def squared_errors(size):
    """Mean squared errors 1 to 4, and outputs that grow to `size`, of which each tenth batch is looked at."""
    values = [1.0] * 40 + [1.0 + i / 20 for i in range(60)] + [4.0] * 60
    head = Layer("head", "Linear", "Linear 2→1", 0)
    head.stats["std"] = Series.of(range(0, 160, 10), [0.1] * 4 + [size * i / 12 for i in range(1, 13)])
    head.stats["mean"] = Series.of(range(0, 160, 10), [0.0] * 16)
    return evidence(values, kind="mse", layers={"head": head})


def test_a_squared_error_that_only_larger_targets_explain_does_not_diverge():
    """Errors of 2 with outputs of up to 4.9 need targets of 2.9, and the first were 1.1 at most."""
    assert isinstance(only(diverging_loss, squared_errors(size=4.9)), Passed)


def test_a_squared_error_that_outputs_explain_by_themselves_diverges():
    """Errors of 2 with outputs of 2.9 or less may be of targets of 1."""
    assert only(diverging_loss, squared_errors(size=2.9)).severity == "error"


@pytest.mark.parametrize(("size", "kind"), [(4.9, Passed), (0.9, Finding)])
def test_of_outputs_that_were_not_inspected_since_the_rise_the_last_before_count(size, kind):
    seen = squared_errors(size)
    for stat in ("std", "mean"):
        values = seen.layers["head"].stats[stat].values
        seen.layers["head"].stats[stat] = Series.of([*range(5), 45], [*values[:5], values[-1]])
    assert isinstance(only(diverging_loss, seen), kind)


def test_a_loss_of_unknown_kind_may_be_one_side_of_a_game():
    assert isinstance(only(diverging_loss, evidence([0.7] * 10 + [2.5] * 90, kind="")), Passed)
    assert only(diverging_loss, evidence([0.7] * 10 + [9.0] * 90, kind="")).severity == "info"


def test_a_loss_of_any_kind_that_lbfgs_minimizes_does_not_rise_on_purpose():
    unseen = {"before_step": BY_CLOSURE}
    found = only(diverging_loss, evidence([0.7] * 10 + [9.0] * 90, kind="", unseen=unseen))
    assert found.severity == "error"


def test_a_loss_that_began_at_zero_and_rises_by_rounding_does_not_diverge():
    values = [0.0] * 20 + [6e-11] * 80
    assert isinstance(only(diverging_loss, evidence(values, guess=2.3)), Passed)
    assert isinstance(only(diverging_loss, evidence(values)), Skipped)
    assert only(diverging_loss, evidence([0.0] * 20 + [0.5] * 80, guess=2.3)).severity == "error"


def test_points_that_lbfgs_tries_and_leaves_do_not_diverge():
    values = [1.0] * 30 + [50.0] * 25
    assert only(diverging_loss, evidence(values)).severity == "error"
    by_closure = evidence(values, unseen={"before_step": BY_CLOSURE})
    assert isinstance(only(diverging_loss, by_closure), Passed)
    by_closure.loss = Series.of(range(90), [1.0] * 30 + [50.0] * 60)
    assert only(diverging_loss, by_closure).severity == "error"


def test_nineteen_batches_are_too_few_to_diverge():
    assert isinstance(only(diverging_loss, evidence([1.0] * 9 + [99.0] * 10)), Skipped)


# ---- loss.unbounded


def test_a_loss_below_what_it_can_be_is_told_at_the_first_step():
    found = only(unbounded_loss, evidence([0.5, 0.1, -0.2, -0.1]))
    assert (found.code, found.severity, found.step, found.value) == ("loss.unbounded", "error", 2, -0.2)
    assert "log_softmax" in only(unbounded_loss, evidence([-0.5], "nll")).next_steps[0]


def test_a_sum_of_losses_is_not_below_zero_and_need_not_fall():
    of_two = evidence([0.5] * 60 + [-0.2], "", loss_kinds=("mse", "huber"))
    assert (
        only(unbounded_loss, of_two).message
        == "The loss is -0.2 at step 60, but mse + huber is never below 0."
    )
    reason = "the loss is a sum of 2: mse, huber"
    assert only(first_loss, of_two).reason == reason
    assert only(flat_loss, of_two).reason == f"{reason}, and an objective need not fall"


def test_rounding_below_zero_is_no_finding():
    assert isinstance(only(unbounded_loss, evidence([0.5, -1e-8])), Passed)


@pytest.mark.parametrize(("values", "kind"), [([-5.0], ""), ([-5.0], "cosine"), ([], CE)])
def test_a_loss_of_another_kind_may_be_below_zero(values, kind):
    assert isinstance(only(unbounded_loss, evidence(values, kind)), Skipped)


# ---- loss.spike


def test_two_jumps_are_a_note():
    values = noisy([1.0] * 200, 0.05)
    values[80], values[150] = 5.0, 9.0
    found = only(loss_spikes, evidence(values))
    assert (found.code, found.severity) == ("loss.spike", "info")
    assert (found.step, found.last_step, found.value) == (80, 150, 9.0)


@pytest.mark.parametrize("at", [(), (80,), (5, 10)])
def test_noise_one_jump_and_the_beginning_are_no_spikes(at):
    values = noisy([1.0] * 200, 0.05)
    for i in at:
        values[i] = 5.0
    assert isinstance(only(loss_spikes, evidence(values)), Passed)


def test_thirty_two_batches_are_too_few_for_spikes():
    assert isinstance(only(loss_spikes, evidence([1.0] * 31 + [9.0])), Skipped)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_loss_that_an_optimizer_maximizes_is_not_judged(sign):
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, maximize=True)
    with watch(model, opt, Diagnose("ignore", show=False)) as w:
        for _ in range(60):
            x = torch.randn(32, 6)
            (sign * nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long())).backward()
            opt.step()
            opt.zero_grad()
    verdict = w.diagnose()
    assert not [x for x in verdict.findings if x.code.startswith("loss.")]
    assert "the optimizer maximizes the loss" in " ".join(verdict.coverage)


@pytest.mark.parametrize("by_another", [True, False])
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


def test_a_small_first_loss_among_losses_that_vary_is_no_divergence_in_a_short_run():
    """Batches of four samples, of which nothing is learned; a rise by more than the noise is one."""
    noisy = [0.198, 2.814, 1.417, 0.294, 1.124, 2.292, 1.149, 0.409, 3.11, 0.433, 0.346, 1.916, 0.478, 1.318]
    noisy += [1.192, 1.792, 0.277, 1.157, 1.345, 0.759]
    seen = Run(sources={"loss"}, loss=Series.of(range(20), noisy), n_batches=20, loss_kind="mse")
    assert not [x for x in diverging_loss(seen) if isinstance(x, Finding)]
    seen.loss = Series.of(range(20), [0.02, *noisy[1:]])
    assert [x.code for x in diverging_loss(seen) if isinstance(x, Finding)] == ["loss.diverging"]
