"""Clipping, rates that vanish and a GradScaler that skips, on made-up numbers."""

import math

import pytest

from hookcb.diagnosis.checks.optimizer import (
    collapsed_scale,
    constant_clipping,
    vanished_rate,
)
from hookcb.diagnosis.run import Passed, Run, Skipped
from tests.diagnosis.checks.support import FALLS, STAYS, evidence, only, series, weight

# ---- clip.always


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
    found = only(constant_clipping, given)
    assert (found.code, found.severity) == ("clip.always", severity)
    assert ("divides by the size" in found.message) == any(p.is_adaptive for p in given.params.values())


@pytest.mark.parametrize(
    ("is_adaptive", "kind", "is_note"), [(True, "mse", True), (False, "", True), (False, "mse", False)]
)
def test_clipping_of_steps_that_stay_large_is_a_note_for_adam_or_an_objective(is_adaptive, kind, is_note):
    found = only(constant_clipping, clipped(1e-3, is_adaptive, update=1e-3, kind=kind))
    assert (found.severity == "info", "this does little harm" in found.message) == (is_note, is_note)


@pytest.mark.parametrize(
    "given", [clipped(0.1), clipped(1.0), clipped([1e-3] * 37 + [1.0] * 3), clipped(1e-3, loss=FALLS)]
)
def test_clipping_that_is_usual_is_no_finding(given):
    assert isinstance(only(constant_clipping, given), Passed)


def test_nine_records_are_too_few_for_clipping():
    assert isinstance(only(constant_clipping, clipped([1e-9] * 9)), Skipped)


# ---- amp.scale_collapse


@pytest.mark.parametrize(
    "given",
    [
        Run(n_steps=100, n_skipped=30, steps={"skipped": series([0.0] * 7 + [1.0] * 30)}),
        Run(n_steps=100, steps={"scale": series([65536.0] * 7 + [0.5])}),
    ],
)
def test_many_skipped_steps_or_a_scale_below_one_are_told(given):
    found = only(collapsed_scale, given)
    assert (found.code, found.severity, found.step) == ("amp.scale_collapse", "error", 7)


@pytest.mark.parametrize(("n_steps", "n_skipped"), [(20, 4), (100, 10), (1_000, 50), (50, 0)])
def test_a_few_skipped_steps_are_how_a_scaler_begins(n_steps, n_skipped):
    scale = {"scale": series([1.0] * 20)}
    given = Run(n_steps=n_steps, n_skipped=n_skipped, steps=scale)
    assert isinstance(only(collapsed_scale, given), Passed)


def test_without_a_step_nothing_is_said_of_the_scale():
    assert isinstance(only(collapsed_scale, Run()), Skipped)


# ---- lr.vanished


def decaying(rate, loss=STAYS, n=100):
    return evidence(weight(), lr=[rate(i / n) for i in range(n)], loss=loss * 3)


def test_a_rate_that_vanishes_before_anything_is_learned_is_told():
    found = only(vanished_rate, decaying(lambda t: 0.1 * 0.8 ** (100 * t)))
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
    assert isinstance(only(vanished_rate, given), Passed)


def test_forty_nine_rates_are_too_few():
    assert isinstance(only(vanished_rate, decaying(lambda t: 0.1, n=49)), Skipped)
