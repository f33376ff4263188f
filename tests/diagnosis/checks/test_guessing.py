"""Checks of what was learned: loss.trivial and train.unfinished."""

import pytest

from hookcb.diagnosis.checks.guessing import trivial_loss, unfinished_training
from hookcb.diagnosis.registry import Passed, Skipped
from tests.diagnosis.checks.support import evidence, only


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
