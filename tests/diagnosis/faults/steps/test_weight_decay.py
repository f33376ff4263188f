"""Weight decay, on made-up numbers."""

import pytest

from hookcb.diagnosis.faults.steps.weight_decay import DominatingDecay
from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.run import Passed, Skipped
from tests.diagnosis.support import evidence, only, weight
from tests.support import in_turn


@pytest.mark.parametrize(
    "param",
    [
        weight(weight_decay=100.0, clipped_norm=[1.0] * 40),
        weight(weight_decay=100.0, clipped_norm=[1.0] * 12, is_adaptive=True, update_ratio=[0.014] * 12),
        weight(  # AdamW in balance: its gradient holds the decay, of weights that are almost gone
            weight_decay=100.0, is_adaptive=True, lr=1e-3, weight_norm=[2.0 * 0.9**i for i in range(40)],
            update_ratio=[0.3] * 40, drift=[1 - 0.9**i for i in range(40)],
        ),
    ],
)  # fmt: skip
def test_decay_that_makes_up_the_step_or_has_eaten_the_weights_is_told(param):
    found = only(DominatingDecay().findings, evidence(param, lr=1e-3))
    assert (found.code, found.severity) == ("wd.dominates", "error")
    assert "100" in found.causes[0]


@in_turn(
    "param",
    [
        weight(weight_decay=0.0, optimizer=0),
        weight(weight_decay=5e-4),
        weight(weight_decay=0.1, clipped_norm=[0.01] * 40, is_adaptive=True, update_ratio=[3e-3] * 40),
        weight(weight_decay=9.0, clipped_norm=[1.0] * 10 + [10.0] * 30),
        weight(weight_decay=5e-4, weight_norm=[0.01] * 40, drift=[5.0] * 40),
    ],
)
def test_decay_of_usual_size_is_no_finding(param):
    assert isinstance(only(DominatingDecay().findings, evidence(param, lr=1e-3)), Passed)


def test_the_decay_of_an_optimizer_that_is_not_known_is_not_called_none():
    given = evidence(weight(weight_decay=0.0, optimizer=0))
    given.measured(Steps).is_by_hand = True
    assert only(DominatingDecay().findings, given) == Skipped("the optimizer of the parameters is not known")


def test_decay_needs_ten_records():
    assert isinstance(
        only(DominatingDecay().findings, evidence(weight(weight_decay=9.0, clipped_norm=[1.0] * 9))), Skipped
    )
