"""Updates, clipping, weight decay and weights that stay: on numbers that are made up."""

import math

import pytest

from hookcb.diagnosis.checks.optimizer import (
    collapsed_scale,
    constant_clipping,
    dominating_decay,
    large_updates,
    small_updates,
    unmoved_parameters,
)
from hookcb.diagnosis.evidence import Evidence, Param, Series
from hookcb.diagnosis.registry import Passed, Skipped


def series(values, every=1):
    return Series.of(range(0, every * len(values), every), values)


def weight(name="body", kind="Linear", shape=(16, 16), **kwargs):
    """A weight of usual size; what is in `Param` goes there, what is not is a statistic."""
    given = {key: kwargs.pop(key) for key in list(kwargs) if key in Param.__dataclass_fields__}
    stats = {"weight_norm": [4.0] * 40, "clipped_norm": [1.0] * 40} | kwargs
    return Param(
        f"{name}.weight", name, kind, kind, 0, shape, 0,
        stats={stat: series(x) for stat, x in stats.items()}, **given,
    )  # fmt: skip


def evidence(*params, lr=0.1, loss=(), **kwargs):
    rates = series(lr if isinstance(lr, list) else [lr] * 40)
    return Evidence(params={p.name: p for p in params}, lr=rates, loss=series(loss), **kwargs)


def only(check, given):
    (found,) = check(given)
    return found


FALLS = [1.0 - 0.015 * i for i in range(40)]
STAYS, RISES = [1.0] * 40, [1.0 + i for i in range(40)]


# ---- update.too_large


def test_steps_larger_than_the_weights_are_an_error():
    large = weight("b", update_ratio=[20.0, 3.0, 0.4] + [0.1] * 37, weight_norm=[46.0, 90.0] + [99.0] * 38)
    params = weight("a", update_ratio=[0.01] * 40), large
    found = only(large_updates, evidence(*params, loss=STAYS))
    assert (found.code, found.severity, found.layer) == ("update.too_large", "error", "b")
    assert (found.step, found.value) == (0, pytest.approx(20.0, rel=0.01))
    assert "1,000" in found.next_steps[0]


@pytest.mark.parametrize("ratios", [[0.3] * 4 + [0.01] * 36, [0.01] * 20 + [0.08] * 20])
def test_large_steps_of_which_no_harm_is_known_are_no_finding(ratios):
    assert isinstance(only(large_updates, evidence(weight(update_ratio=ratios), loss=())), Passed)


@pytest.mark.parametrize(("loss", "severity"), [(STAYS, "warning"), (RISES, "error")])
@pytest.mark.parametrize("ratios", [[0.3] * 4 + [0.01] * 36, [0.01] * 20 + [0.08] * 20])
def test_large_steps_that_last_are_told(ratios, loss, severity):
    assert only(large_updates, evidence(weight(update_ratio=ratios), loss=loss)).severity == severity


@pytest.mark.parametrize(
    ("param", "loss"),
    [
        (weight(update_ratio=[0.15] * 10 + [0.03] * 30), STAYS),
        (weight(update_ratio=[5.0] + [0.01] * 39), STAYS),
        (weight(update_ratio=[math.inf, math.inf] + [0.01] * 38), STAYS),
        (weight(update_ratio=[0.01] * 20 + [0.3] * 4 + [0.01] * 16), STAYS),
        (weight(update_ratio=[0.3] * 10 + [0.08] * 30), FALLS),
        (  # a layer that begins near zero
            weight(
                update_ratio=[10.0, 2.0, 1.5] + [0.01] * 37,
                weight_norm=[0.1, 0.2, 0.3] + [1.5] * 37,
            ),
            STAYS,
        ),
        (weight(update_ratio=[9.0] * 40, kind="Embedding"), STAYS),
    ],
)
def test_large_steps_that_have_their_reason_are_no_finding(param, loss):
    given = evidence(param, weight("other", update_ratio=[0.001] * 40), loss=loss)
    assert isinstance(only(large_updates, given), Passed)


def test_a_weight_that_runs_away_from_its_usual_size_is_no_small_start():
    param = weight(update_ratio=[8.0, 4.0, 1.0] + [0.1] * 37, weight_norm=[20.0, 60.0] + [200.0] * 38)
    assert only(large_updates, evidence(param, loss=STAYS)).severity == "error"


def test_a_loss_that_jumps_at_once_does_not_pass_for_converged():
    loss = [2.3, 400.0, 900.0] + [300.0] * 10 + [3.0] * 27
    given = evidence(weight(update_ratio=[3.0] * 40, weight_norm=[9.0] * 40), loss=loss)
    assert given.converged_at() == math.inf
    assert only(large_updates, given).severity == "error"


# ---- update.too_small


@pytest.mark.parametrize(("size", "severity"), [(3e-6, "warning"), (1e-8, "error")])
def test_tiny_steps_are_told(size, severity):
    found = only(small_updates, evidence(weight(update_ratio=[size] * 40), loss=STAYS))
    assert (found.code, found.severity, found.value) == ("update.too_small", severity, size)
    assert (found.step, found.last_step) == (0, 39)


@pytest.mark.parametrize(
    "given",
    [
        evidence(weight(update_ratio=[1e-4] * 40)),
        evidence(weight(update_ratio=[1e-7] * 40), loss=FALLS),
        evidence(weight(update_ratio=[1e-3] * 25 + [1e-9] * 15), lr=[0.1] * 25 + [1e-7] * 15, loss=STAYS),
        evidence(
            weight("a", update_ratio=[1e-7] * 40), weight("b", update_ratio=[1e-3] * 40),
            weight("c", update_ratio=[1e-3] * 40), loss=STAYS,
        ),
    ],
)  # fmt: skip
def test_steps_that_do_their_work_or_end_a_decay_are_no_finding(given):
    assert isinstance(only(small_updates, given), Passed)


def test_small_steps_of_a_warm_up_say_nothing():
    given = evidence(weight(update_ratio=[1e-8] * 40), lr=[1e-6 * i for i in range(40)])
    assert isinstance(only(small_updates, given), Skipped)
    assert isinstance(only(small_updates, evidence(weight(update_ratio=[1e-8] * 4))), Skipped)
    assert isinstance(only(small_updates, evidence(weight(update_ratio=[1e-8] * 40), lr=0.0)), Skipped)


# ---- clip.always


def clipped(coef, is_adaptive=False, loss=STAYS):
    coef = coef if isinstance(coef, list) else [coef] * 40
    return evidence(weight(is_adaptive=is_adaptive), loss=loss, steps={"clip_coef": series(coef)})


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
    "given", [clipped(0.1), clipped(1.0), clipped([1e-3] * 37 + [1.0] * 3), clipped(1e-3, loss=FALLS)]
)
def test_clipping_that_is_usual_is_no_finding(given):
    assert isinstance(only(constant_clipping, given), Passed)


def test_nine_records_are_too_few_for_clipping():
    assert isinstance(only(constant_clipping, clipped([1e-9] * 9)), Skipped)


# ---- wd.dominates


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
    found = only(dominating_decay, evidence(param, lr=1e-3))
    assert (found.code, found.severity) == ("wd.dominates", "error")
    assert "100" in found.causes[0]


@pytest.mark.parametrize(
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
    assert isinstance(only(dominating_decay, evidence(param, lr=1e-3)), Passed)


def test_decay_needs_ten_records():
    assert isinstance(
        only(dominating_decay, evidence(weight(weight_decay=9.0, clipped_norm=[1.0] * 9))), Skipped
    )


# ---- param.not_stepped


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


# ---- amp.scale_collapse


@pytest.mark.parametrize(
    "given",
    [
        Evidence(n_steps=100, n_skipped=30, steps={"skipped": series([0.0] * 7 + [1.0] * 30)}),
        Evidence(n_steps=100, steps={"scale": series([65536.0] * 7 + [0.5])}),
    ],
)
def test_many_skipped_steps_or_a_scale_below_one_are_told(given):
    found = only(collapsed_scale, given)
    assert (found.code, found.severity, found.step) == ("amp.scale_collapse", "error", 7)


@pytest.mark.parametrize(("n_steps", "n_skipped"), [(20, 4), (100, 10), (1_000, 50), (50, 0)])
def test_a_few_skipped_steps_are_how_a_scaler_begins(n_steps, n_skipped):
    scale = {"scale": series([1.0] * 20)}
    given = Evidence(n_steps=n_steps, n_skipped=n_skipped, steps=scale)
    assert isinstance(only(collapsed_scale, given), Passed)


def test_without_a_step_nothing_is_said_of_the_scale():
    assert isinstance(only(collapsed_scale, Evidence()), Skipped)
