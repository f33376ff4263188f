"""A GradScaler that skips steps, on made-up numbers."""

import pytest

from hookcb.diagnosis.faults.numbers.scale import CollapsedScale
from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.run import Passed, Run, Skipped
from tests.diagnosis.support import only, series
from tests.support import in_turn


def scaled(n_skipped=0, **kwargs):
    given = Run(**kwargs)
    given.measured(Steps).n_skipped = n_skipped
    return given


@pytest.mark.parametrize(
    "given",
    [
        scaled(n_steps=100, n_skipped=30, steps={"skipped": series([0.0] * 7 + [1.0] * 30)}),
        scaled(n_steps=100, steps={"scale": series([65536.0] * 7 + [0.5])}),
    ],
)
def test_many_skipped_steps_or_a_scale_below_one_are_told(given):
    found = only(CollapsedScale().findings, given)
    assert (found.code, found.severity, found.step) == ("amp.scale_collapse", "error", 7)


@in_turn(("n_steps", "n_skipped"), [(20, 4), (100, 10), (1_000, 50), (50, 0)])
def test_a_few_skipped_steps_are_how_a_scaler_begins(n_steps, n_skipped):
    scale = {"scale": series([1.0] * 20)}
    given = scaled(n_steps=n_steps, n_skipped=n_skipped, steps=scale)
    assert isinstance(only(CollapsedScale().findings, given), Passed)


def test_without_a_step_nothing_is_said_of_the_scale():
    assert isinstance(only(CollapsedScale().findings, Run()), Skipped)
