"""train.unfinished: losses that are far from their end."""

import pytest
import torch
from torch import nn

from hookcb import Diagnose, Learner, diagnose
from hookcb.diagnosis.faults.loss.unfinished import UnfinishedTraining
from hookcb.diagnosis.run import Passed, Skipped
from tests.diagnosis.faults.loss.support import flat
from tests.diagnosis.support import evidence, only, weight


def test_a_loss_that_still_falls_is_a_note():
    found = only(UnfinishedTraining, evidence(loss=[2.0 - 0.01 * i for i in range(100)]))
    assert (found.code, found.severity) == ("train.unfinished", "info")
    assert isinstance(only(UnfinishedTraining, evidence(loss=flat(1.0))), Passed)
    assert isinstance(only(UnfinishedTraining, evidence(loss=flat(1.0, 30))), Skipped)


def test_a_loss_that_has_nearly_all_of_its_fall_behind_it_is_no_note():
    curve = [0.1 + 2.0 * 0.97**i for i in range(150)]
    assert isinstance(only(UnfinishedTraining, evidence(loss=curve)), Passed)
    assert only(UnfinishedTraining, evidence(loss=curve[:50])).value > 0.25
    falls = [1.0 - 0.015 * i for i in range(60)]
    assert only(UnfinishedTraining, evidence(loss=falls, perfect=0.0)).value < 0.25  # nothing is left


@pytest.mark.parametrize(("size", "is_noted"), [(1e-3, True), (1e-2, False)])
def test_a_flat_loss_of_weights_that_barely_moved_is_unfinished(size, is_noted):
    given = evidence(weight(update_ratio=[size] * 40), loss=flat(1.0), guess=1.0, constant=1.0)
    found = only(UnfinishedTraining, given)
    if is_noted:
        assert "all 100 steps together change the median weight by at most 10.0% of its size" in found.message
    else:
        assert isinstance(found, Passed)


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
    found = only(UnfinishedTraining, evidence(loss=loss, constant=constant, loss_kind="mse"))
    assert (found.code, found.severity, found.next_steps) == ("train.unfinished", "info", ("Train longer",))
    assert words in found.message


@pytest.mark.parametrize("loss", [[1.0, 0.9, 0.8], [0.2, 0.1, 0.2, 0.1], [float("nan")] * 4], ids=str)
def test_few_batches_are_not_noted_if_they_say_nothing_or_the_model_does_well(loss):
    assert isinstance(only(UnfinishedTraining, evidence(loss=loss, constant=1.0)), Skipped)


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
    found = only(UnfinishedTraining, evidence(weight(update_ratio=[ratio] * 40), loss=falls))
    assert found.next_steps[0].startswith(advice)


def test_a_high_rate_at_the_beginning_is_not_raised():
    ratios = [0.1] * 5 + [2e-5] * 35
    found = only(
        UnfinishedTraining, evidence(weight(update_ratio=ratios), loss=[2 - 0.01 * i for i in range(99)])
    )
    assert found.next_steps == ("Train longer",)


@pytest.mark.slow
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
