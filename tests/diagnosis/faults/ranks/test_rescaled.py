"""Gradients of several ranks, on made-up numbers."""

import pytest

from hookcb.diagnosis.faults.ranks.rescaled import MIN_STEPS, RescaledGradients
from hookcb.diagnosis.run import Param, Passed, Run, Series, Skipped
from tests.support import in_turn

AFTER = [1.0, 0.7, 2.0, 0.3, 0.9]


def gradients(given, after=AFTER, world=4, is_adaptive=False):
    stats = {"clipped_norm": Series.of(range(len(given)), given)}
    param = Param("0.bias", "0", "Linear", "", 0, (4,), stats=stats, is_adaptive=is_adaptive)
    run = Run(params={"0.bias": param})
    fault = run.measured(RescaledGradients)
    fault.name, fault.norms, fault.world = "0.bias", Series.of(range(len(after)), after), world
    return run


def only(evidence):
    (found,) = evidence.measured(RescaledGradients).findings(evidence)
    return found


@pytest.mark.parametrize(("factor", "words"), [(0.25, "divided by 4"), (4.0, "multiplied by 4")])
def test_gradients_that_are_reduced_again_are_found(factor, words):
    found = only(gradients([factor * x for x in AFTER]))
    assert (found.code, found.severity, found.step, found.last_step) == ("grad.rescaled", "warning", 0, 4)
    assert f"Gradients are {words}, the number of ranks" in found.message
    assert "4 times too" in found.message


def test_an_optimizer_that_undoes_the_factor_makes_it_a_note():
    found = only(gradients([x / 4 for x in AFTER], is_adaptive=True))
    assert found.severity == "info"
    assert "the optimizer undoes that" in found.message


@in_turn(
    "given",
    [AFTER, [x / 2 for x in AFTER], [min(x, 0.25) for x in AFTER], [x / 4 for x in AFTER[:4]] + [0.9]],
)
def test_gradients_that_are_clipped_or_left_as_they_are_are_fine(given):
    assert isinstance(only(gradients(given)), Passed)


@in_turn(
    "evidence",
    [
        Run(),
        gradients(AFTER[: MIN_STEPS - 1]),
        gradients(AFTER, after=[]),
        gradients(AFTER, after=[0.0] * 5),
    ],
)
def test_few_gradients_are_not_compared(evidence):
    assert isinstance(only(evidence), Skipped)
