"""Checks of what was learned: loss.trivial and train.unfinished."""

import pytest
import torch
from torch import nn

from hookcb import Diagnose, Learner, diagnose
from hookcb.diagnosis.checks.guessing import dominant_penalty, stuck_head, trivial_loss, unfinished_training
from hookcb.diagnosis.checks.observed import loss_of_values
from hookcb.diagnosis.run import Absent, Observation, Passed, Series, Skipped
from tests.diagnosis.checks.support import evidence, only, weight


def flat(level, n=100):
    return [level + 0.02 * (-1) ** i for i in range(n)]


def check(level, constant=1.0, n=100, **kwargs):
    return only(trivial_loss, evidence(loss=flat(level, n), constant=constant, loss_kind="mse", **kwargs))


@pytest.mark.parametrize(("level", "words"), [(1.0, "as good as"), (2.5, "150% worse"), (0.99, "1% better")])
def test_a_model_that_is_no_better_than_a_constant_is_told_by_how_much(level, words):
    found = check(level)
    assert (found.code, found.severity) == ("loss.trivial", "warning")
    assert words in found.message
    assert found.value == pytest.approx(level, rel=0.01)


def test_a_model_that_is_better_is_fine():
    assert isinstance(check(0.8), Passed)


@pytest.mark.parametrize(
    "given",
    [
        {"level": 1.0, "n": 40},
        {"level": 1.0, "constant": float("nan")},
        {"level": 1.0, "constant": 0.0},
        {"level": 1.0, "lr": [1e-3 * i for i in range(100)]},
    ],
    ids=["few batches", "unknown constant", "targets that are all the same", "warm-up"],
)
def test_where_nothing_can_be_said_nothing_is(given):
    assert isinstance(check(**given), Skipped)


def test_a_loss_that_will_soon_be_below_that_of_a_constant_is_left_alone():
    falls = [4.0 - 0.025 * i for i in range(100)]
    assert isinstance(only(trivial_loss, evidence(loss=falls, constant=1.0, loss_kind="mse")), Skipped)


def test_a_loss_that_still_falls_is_a_note():
    found = only(unfinished_training, evidence(loss=[2.0 - 0.01 * i for i in range(100)]))
    assert (found.code, found.severity) == ("train.unfinished", "info")
    assert isinstance(only(unfinished_training, evidence(loss=flat(1.0))), Passed)
    assert isinstance(only(unfinished_training, evidence(loss=flat(1.0, 30))), Skipped)


def test_a_loss_that_has_nearly_all_of_its_fall_behind_it_is_no_note():
    curve = [0.1 + 2.0 * 0.97**i for i in range(150)]
    assert isinstance(only(unfinished_training, evidence(loss=curve)), Passed)
    assert only(unfinished_training, evidence(loss=curve[:50])).value > 0.25
    falls = [1.0 - 0.015 * i for i in range(60)]
    assert only(unfinished_training, evidence(loss=falls, perfect=0.0)).value < 0.25  # nothing is left


@pytest.mark.parametrize(("size", "is_noted"), [(1e-3, True), (1e-2, False)])
def test_a_flat_loss_of_weights_that_barely_moved_is_unfinished(size, is_noted):
    given = evidence(weight(update_ratio=[size] * 40), loss=flat(1.0), guess=1.0, constant=1.0)
    found = only(unfinished_training, given)
    if is_noted:
        assert "all 100 steps together change the median weight by at most 10.0% of its size" in found.message
    else:
        assert isinstance(found, Passed)


def test_the_loss_of_a_perfect_prediction_does_not_count():
    assert isinstance(check(0.9, perfect=0.85), Passed)  # a third of what can be learned is left
    assert check(0.999, perfect=0.85).code == "loss.trivial"
    assert isinstance(check(1.0, perfect=0.9999), Skipped)


def test_targets_that_vary_from_batch_to_batch_are_not_compared():
    assert isinstance(check(1.2, noise=0.8, n_targets=20), Skipped)  # 0.31 of the constant
    assert check(1.2, noise=0.3, n_targets=20).code == "loss.trivial"


def test_a_validation_that_is_no_better_than_a_constant_is_a_note():
    found = check(0.3, validation=1.4)
    assert (found.code, found.severity) == ("loss.trivial", "info")
    assert "0.3 in training but 1.4 in validation" in found.message
    assert isinstance(check(0.3, validation=0.9), Passed)
    assert check(1.0, validation=1.4).severity == "warning"


# ---- penalties


def penalized(first, last, rest=1.0, n=100, **kwargs):
    steps = list(range(0, n, 8))
    sizes = [first + (last - first) * step / steps[-1] for step in steps]
    loss = [rest + 0.02 * (-1) ** i + first + (last - first) * min(i / steps[-1], 1) for i in range(n)]
    return evidence(loss=loss, penalty=Series(steps, sizes), constant=1.0, loss_kind="mse", **kwargs)


@pytest.mark.parametrize(("first", "last"), [(99.0, 99.0), (99.0, 0.1), (12.0, 99.0)])
def test_a_penalty_that_leaves_nothing_to_learn_is_named_with_its_size(first, last):
    given = penalized(first, last)
    found = only(dominant_penalty, given)
    assert (found.code, found.severity) == ("loss.penalty", "warning")
    assert found.value == pytest.approx(max(first, last) / (max(first, last) + 1), rel=0.01)
    assert "Divide the weight of the penalty by" in found.next_steps[0]
    assert "the loss without its penalty is 1" in only(trivial_loss, given).message


def test_a_penalty_beside_which_the_model_learns_is_fine():
    assert isinstance(only(dominant_penalty, penalized(99.0, 0.1, rest=0.5)), Passed)
    assert isinstance(only(dominant_penalty, penalized(0.5, 0.5)), Passed)
    assert isinstance(only(trivial_loss, penalized(99.0, 99.0, rest=0.5)), Passed)


def test_before_50_batches_it_is_a_note():
    assert only(dominant_penalty, penalized(99.0, 99.0, n=20)).severity == "info"


def test_without_a_penalty_the_check_does_not_apply():
    assert isinstance(only(dominant_penalty, evidence(loss=flat(1.0))), Absent)
    assert isinstance(only(dominant_penalty, evidence(loss=flat(1.0), observed={"penalty"})), Skipped)


# ---- classes in a loss of values


@pytest.mark.parametrize(("level", "severity"), [(1.0, "warning"), (0.5, "info")])
def test_classes_in_a_loss_of_values_are_a_warning_if_nothing_is_learned(level, severity):
    seen = Observation("loss.of_values", "head", text="The targets are classes.")
    given = evidence(loss=flat(level), constant=1.0, loss_kind="mse", observations=[seen])
    assert only(loss_of_values, given).severity == severity


@pytest.mark.parametrize(
    ("loss", "constant", "words"),
    [
        ([1.0, 0.9, 0.85, 0.8], float("nan"), "the loss fell with each of them, from 1 to 0.8"),
        (
            [1.2, 1.0, 1.1, 0.99],
            1.0,
            "the loss is 0.99; always predicting the mean of the targets would give 1",
        ),
    ],
)
def test_few_batches_that_have_learned_little_are_a_note(loss, constant, words):
    found = only(unfinished_training, evidence(loss=loss, constant=constant, loss_kind="mse"))
    assert (found.code, found.severity, found.next_steps) == ("train.unfinished", "info", ("Train longer",))
    assert words in found.message


@pytest.mark.parametrize("loss", [[1.0, 0.9, 0.8], [0.2, 0.1, 0.2, 0.1], [float("nan")] * 4], ids=str)
def test_few_batches_are_not_noted_if_they_say_nothing_or_the_model_does_well(loss):
    assert isinstance(only(unfinished_training, evidence(loss=loss, constant=1.0)), Skipped)


@pytest.mark.parametrize(
    ("ratio", "advice"),
    [
        (2e-5, "Multiply the learning rate by 50: a step changes"),
        (5e-4, "Train longer"),
        (0.0, "Train longer"),
    ],
)
def test_small_steps_are_the_reason_to_raise_the_rate_of_an_unfinished_training(ratio, advice):
    falls = [2.0 - 0.01 * i for i in range(100)]
    found = only(unfinished_training, evidence(weight(update_ratio=[ratio] * 40), loss=falls))
    assert found.next_steps[0].startswith(advice)


def test_a_high_rate_at_the_beginning_is_not_raised():
    ratios = [0.1] * 5 + [2e-5] * 35
    found = only(
        unfinished_training, evidence(weight(update_ratio=ratios), loss=[2 - 0.01 * i for i in range(99)])
    )
    assert found.next_steps == ("Train longer",)


def test_a_rate_that_is_too_low_and_a_training_that_is_too_short_get_the_same_advice():
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    opt = torch.optim.SGD(model.parameters(), lr=1e-6)
    learn = Learner([(x, x[:, :1] + 2)] * 100, model, nn.functional.mse_loss, opt)
    with learn.no_logging():
        learn.fit(1, cbs=Diagnose("ignore", show=False))
    verdict = learn.diagnose()
    rates = {
        step.split(":")[0].split(",")[0]
        for f in verdict.findings
        for step in f.next_steps
        if "the learning rate" in step
    }
    assert verdict.primary.code == "update.too_small"
    assert len(rates) == 1


def test_steps_that_are_only_tried_out_are_not_called_unfinished():
    x = torch.randn(16, 4)
    model = nn.Linear(4, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    verdict = diagnose(model, (x, x[:, :1]), nn.functional.mse_loss, opt, steps=8)
    assert "train.unfinished" not in {finding.code for finding in verdict.findings}


# ---- heads that are stuck


def stuck(*shares, n=100):
    steps = list(range(len(shares)))
    return only(stuck_head, evidence(loss=flat(1.0, n), stuck=Series(steps, list(shares))))


def test_outputs_that_a_relu_holds_at_0_are_named():
    found = stuck(0.2, 0.6, 0.9, 0.7)
    assert (found.code, found.severity, found.value) == ("head.stuck", "warning", 0.6)
    assert "60% of the error" in found.message


@pytest.mark.parametrize("shares", [(0.7, 0.3, 0.0, 0.0), (0.9, 0.9, 0.2), (1.0, 1.0, 0.39)])
def test_few_of_them_or_for_a_while_are_fine(shares):
    assert isinstance(stuck(*shares), Passed)


def test_before_50_batches_only_a_head_that_is_dead_counts():
    assert isinstance(stuck(0.7, 0.9, n=5), Passed)
    assert stuck(1.0, 1.0, n=5).code == "head.stuck"


def test_without_a_relu_as_the_head_there_is_nothing_to_check():
    assert isinstance(only(stuck_head, evidence(loss=flat(1.0))), Absent)
