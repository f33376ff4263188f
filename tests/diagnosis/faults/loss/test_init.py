"""loss.init: first losses beside that of guessing."""

import pytest

from hookcb.diagnosis.faults.loss.init import FirstLoss
from hookcb.diagnosis.run import Passed, Skipped
from tests.diagnosis.faults.loss.support import CE, INF, NAN, losses
from tests.diagnosis.support import only
from tests.support import in_turn


@in_turn(
    ("first", "kind", "guess", "severity"),
    [
        (6.0, CE, 2.3, "info"),
        (30.0, CE, 2.3, "warning"),
        (3.5, "mse", 1.0, "info"),
        (90.0, "mse", 1.0, "warning"),
    ],
)
def test_a_loss_far_above_guessing_is_told(first, kind, guess, severity):
    found = only(FirstLoss, losses([first] * 20, kind, guess))
    assert (found.code, found.severity, found.step, found.value) == ("loss.init", severity, 0, first)


def test_a_large_first_loss_that_is_learned_at_once_is_a_note():
    found = only(FirstLoss, losses([30.0] + [2.0] * 19, CE, 2.3))
    assert (found.code, found.severity) == ("loss.init", "info")


@pytest.mark.parametrize(("first", "kind", "guess"), [(4.2, CE, 2.3), (2.5, CE, 0.69), (2.9, "mse", 1.0)])
def test_a_loss_near_guessing_is_no_finding(first, kind, guess):
    assert isinstance(only(FirstLoss, losses([first], kind, guess)), Passed)


@in_turn(
    ("values", "kind", "guess"),
    [([99.0], CE, NAN), ([99.0], "", 1.0), ([], CE, 1.0), ([INF], CE, 1.0), ([9.0], "mse", 0.0)],
)
def test_without_a_guess_nothing_is_said_of_the_beginning(values, kind, guess):
    assert isinstance(only(FirstLoss, losses(values, kind, guess)), Skipped)
