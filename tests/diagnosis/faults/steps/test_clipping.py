"""Clipping, on made-up numbers."""

import pytest

from hookcb.diagnosis.faults.steps.clipping import ConstantClipping
from hookcb.diagnosis.run import Passed, Skipped
from tests.diagnosis.support import FALLS, STAYS, evidence, only, series, weight


def clipped(coef, is_adaptive=False, loss=STAYS, update=1e-6, kind="mse"):
    coef = coef if isinstance(coef, list) else [coef] * 40
    param = weight(is_adaptive=is_adaptive, update_ratio=[update] * 40)
    return evidence(param, loss=loss, loss_kind=kind, steps={"clip_coef": series(coef)})


@pytest.mark.parametrize(
    ("given", "severity"),
    [
        (clipped(1e-3), "error"),
        (clipped(1e-3, is_adaptive=True), "warning"),
        (clipped(1e-6, loss=FALLS), "warning"),
        (clipped(1e-3, loss=()), "error"),
    ],
)
def test_clipping_each_gradient_to_almost_nothing_is_told(given, severity):
    found = only(ConstantClipping().findings, given)
    assert (found.code, found.severity) == ("clip.always", severity)
    assert ("divides by the size" in found.message) == any(p.is_adaptive for p in given.params.values())


@pytest.mark.parametrize(
    ("is_adaptive", "kind", "is_note"), [(True, "mse", True), (False, "", True), (False, "mse", False)]
)
def test_clipping_of_steps_that_stay_large_is_a_note_for_adam_or_an_objective(is_adaptive, kind, is_note):
    found = only(ConstantClipping().findings, clipped(1e-3, is_adaptive, update=1e-3, kind=kind))
    assert (found.severity == "info", "this does little harm" in found.message) == (is_note, is_note)


@pytest.mark.parametrize(
    "given", [clipped(0.1), clipped(1.0), clipped([1e-3] * 37 + [1.0] * 3), clipped(1e-3, loss=FALLS)]
)
def test_clipping_that_is_usual_is_no_finding(given):
    assert isinstance(only(ConstantClipping().findings, given), Passed)


def test_nine_records_are_too_few_for_clipping():
    assert isinstance(only(ConstantClipping().findings, clipped([1e-9] * 9)), Skipped)
