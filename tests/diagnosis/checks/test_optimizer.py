"""Parameters that never change, on made-up numbers."""

import math

import pytest

from hookcb.diagnosis.checks.optimizer import unmoved_parameters
from hookcb.diagnosis.run import Passed, Skipped
from tests.diagnosis.checks.support import STAYS, evidence, only, weight


def still(**kwargs):
    n = {"update_ratio": [0.0] * 40, "zero_rows": [0.0] * 40, "rms": [1.0] * 40, "abs_max": [4.0] * 40}
    return weight("still", **(n | kwargs))


MOVES = weight("moves", update_ratio=[1e-3] * 40)


def test_a_parameter_that_has_gradients_and_stays_is_told():
    param = still(update_ratio=[1e-3] * 10 + [0.0] * 30)
    found = only(unmoved_parameters, evidence(MOVES, param))
    assert (found.code, found.severity, found.param) == ("param.not_stepped", "error", "still.weight")
    assert (found.step, found.last_step) == (10, 39)


@pytest.mark.parametrize(
    "param",
    [
        still(is_optimized=False),
        still(kind="Embedding"),
        still(clipped_norm=[1e-7] * 40),
        still(clipped_norm=[1e-2] * 40, resolution=2.0**-8),  # swallowed by bfloat16
        still(zero_rows=[0.5] * 40),
        still(shape=(100, 100), rms=[0.01] * 40),  # too sparse for a sample of elements
        still(update_ratio=[0.0] * 36 + [1e-3] * 4),
        still(clipped_norm=[math.nan] * 40),  # skipped
        still(update_ratio=[1e-3] * 36 + [0.0] * 4),
    ],
)
def test_parameters_that_stay_for_a_reason_are_no_finding(param):
    assert isinstance(only(unmoved_parameters, evidence(MOVES, param)), Passed)


@pytest.mark.parametrize("lr", [[0.1] * 20 + [0.0] * 20, [0.0] * 40])
def test_a_learning_rate_that_was_driven_to_zero_is_told_with_its_step(lr):
    found = only(unmoved_parameters, evidence(MOVES, lr=lr, loss=STAYS))
    assert (found.code, found.step, found.layer) == ("param.not_stepped", lr.index(0.0), "")
    assert ("scheduler" in found.next_steps[0]) == (lr[0] > 0)


@pytest.mark.parametrize(
    ("lr", "loss"),
    [
        ([0.1 * (1 + math.cos(math.pi * i / 39)) / 2 for i in range(40)], STAYS),
        ([0.0, *(0.01 * i for i in range(39))], STAYS),
        ([0.0] * 15 + [0.1] * 25, STAYS),
        ([0.1] * 31 + [0.0] * 9, STAYS),
        ([0.1] * 188 + [0.0] * 12, STAYS),
        ([0.1] * 60 + [0.0] * 40, [1.0] * 10 + [1e-3] * 90),
    ],
)
def test_a_rate_of_zero_at_the_ends_of_a_schedule_is_no_finding(lr, loss):
    assert isinstance(only(unmoved_parameters, evidence(MOVES, lr=lr, loss=loss)), Passed)


def test_four_steps_are_too_few_to_stay():
    assert isinstance(only(unmoved_parameters, evidence(weight(update_ratio=[0.0] * 4))), Skipped)
