"""Learning rates that vanish, on made-up numbers."""

import math

import pytest

from hookcb.diagnosis.faults.steps.vanished_rate import VanishedRate
from hookcb.diagnosis.run import Passed, Skipped
from tests.diagnosis.support import FALLS, STAYS, evidence, only, weight


def decaying(rate, loss=STAYS, n=100):
    return evidence(weight(), lr=[rate(i / n) for i in range(n)], loss=loss * 3)


def test_a_rate_that_vanishes_before_anything_is_learned_is_told():
    found = only(VanishedRate().findings, decaying(lambda t: 0.1 * 0.8 ** (100 * t)))
    assert (found.code, found.severity) == ("lr.vanished", "warning")
    assert found.step == 0
    assert "since step 31" in found.message  # 0.8 ** 31 is below a thousandth
    assert "in 69% of the batches" in found.message
    assert "scheduler.step()" in found.next_steps[0]


@pytest.mark.parametrize(
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
