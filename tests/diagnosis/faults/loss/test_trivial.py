"""loss.trivial: models beside a constant prediction."""

import pytest

from hookcb.diagnosis.faults.loss.trivial import TrivialLoss
from hookcb.diagnosis.run import Passed, Skipped
from tests.diagnosis.faults.loss.support import flat
from tests.diagnosis.support import evidence, only
from tests.support import in_turn


def check(level, constant=1.0, n=100, **kwargs):
    return only(TrivialLoss, evidence(loss=flat(level, n), constant=constant, loss_kind="mse", **kwargs))


@pytest.mark.parametrize(("level", "words"), [(1.0, "as good as"), (2.5, "150% worse"), (0.99, "1% better")])
def test_a_model_that_is_no_better_than_a_constant_is_told_by_how_much(level, words):
    found = check(level)
    assert (found.code, found.severity) == ("loss.trivial", "warning")
    assert words in found.message
    assert found.value == pytest.approx(level, rel=0.01)


def test_a_model_that_is_better_is_fine():
    assert isinstance(check(0.8), Passed)


@in_turn(
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
    assert isinstance(only(TrivialLoss, evidence(loss=falls, constant=1.0, loss_kind="mse")), Skipped)


def test_the_loss_of_a_perfect_prediction_does_not_count():
    assert isinstance(check(0.9, perfect=0.85), Passed)  # a third of what can be learned is left
    assert check(0.999, perfect=0.85).code == "loss.trivial"
    assert isinstance(check(1.0, perfect=0.9999), Skipped)


def test_targets_that_vary_from_batch_to_batch_are_not_compared():
    assert isinstance(check(1.2, noise=0.8, n_targets=20), Skipped)  # 0.31 of the constant
    assert check(1.2, noise=0.3, n_targets=20).code == "loss.trivial"
