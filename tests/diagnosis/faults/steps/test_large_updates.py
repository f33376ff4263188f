"""Updates that are too large, on made-up numbers."""

import math

import pytest

from hookcb.diagnosis.faults.steps.large_updates import LargeUpdates
from hookcb.diagnosis.judge import judge
from hookcb.diagnosis.measurements.dead_units import Dead, DeadUnits
from hookcb.diagnosis.run import Layer, Passed
from tests.diagnosis.support import FALLS, RISES, STAYS, evidence, only, series, weight
from tests.support import in_turn


def test_steps_larger_than_the_weights_are_an_error():
    large = weight("b", update_ratio=[20.0, 3.0, 0.4] + [0.1] * 37, weight_norm=[46.0, 90.0] + [99.0] * 38)
    params = weight("a", update_ratio=[0.01] * 40), large
    found = only(LargeUpdates().findings, evidence(*params, loss=STAYS))
    assert (found.code, found.severity, found.layer) == ("update.too_large", "error", "b")
    assert (found.step, found.value) == (0, pytest.approx(20.0, rel=0.01))
    assert "1,000" in found.next_steps[0]


@pytest.mark.parametrize("ratios", [[0.3] * 4 + [0.01] * 36, [0.01] * 20 + [0.08] * 20])
def test_large_steps_of_which_no_harm_is_known_are_no_finding(ratios):
    assert isinstance(only(LargeUpdates().findings, evidence(weight(update_ratio=ratios), loss=())), Passed)


@in_turn(("loss", "severity"), [(STAYS, "warning"), (RISES, "error")])
@in_turn("ratios", [[0.3] * 4 + [0.01] * 36, [0.01] * 20 + [0.08] * 20])
def test_large_steps_that_last_are_told(ratios, loss, severity):
    assert (
        only(LargeUpdates().findings, evidence(weight(update_ratio=ratios), loss=loss)).severity == severity
    )


@in_turn(
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
    assert isinstance(only(LargeUpdates().findings, given), Passed)


def test_a_weight_that_runs_away_from_its_usual_size_is_no_small_start():
    param = weight(update_ratio=[8.0, 4.0, 1.0] + [0.1] * 37, weight_norm=[20.0, 60.0] + [200.0] * 38)
    assert only(LargeUpdates().findings, evidence(param, loss=STAYS)).severity == "error"


def test_a_loss_that_jumps_at_once_does_not_pass_for_converged():
    loss = [2.3, 400.0, 900.0] + [300.0] * 10 + [3.0] * 27
    given = evidence(weight(update_ratio=[3.0] * 40, weight_norm=[9.0] * 40), loss=loss)
    assert given.converged_at() == math.inf
    assert only(LargeUpdates().findings, given).severity == "error"


def test_a_language_model_that_only_learns_the_shares_of_its_tokens_has_not_learned():
    param = weight(update_ratio=[0.8, 0.5, 0.3] + [0.01] * 37)
    loss = [4.6, 4.0, 3.5] + [3.2 + 0.01 * (-1) ** i for i in range(97)]
    assert isinstance(only(LargeUpdates().findings, evidence(param, loss=loss)), Passed)
    found = only(LargeUpdates().findings, evidence(param, loss=loss, constant=3.2))
    assert (found.code, found.severity, found.limit) == ("update.too_large", "warning", 0.2)
    assert isinstance(only(LargeUpdates().findings, evidence(param, loss=loss, constant=4.0)), Passed)


@pytest.mark.parametrize(
    ("dead_since", "ratio", "is_cause"), [(12, 0.08, True), (0, 0.08, False), (12, 0.03, False)]
)
def test_smaller_steps_are_too_large_if_units_die_after_them(dead_since, ratio, is_cause):
    given = evidence(weight(update_ratio=[ratio] * 8 + [0.01] * 32), loss=STAYS)
    given.measured(DeadUnits).of = {"body.weight": Dead(0.9, 0.9, dead_since, 8, 512, 16)}
    found = only(LargeUpdates().findings, given)
    assert (found.limit, found.step) == (0.05, 0) if is_cause else isinstance(found, Passed)


def test_the_first_steps_stand_above_the_units_that_die_of_them_though_the_loss_falls():
    """One step may do, as may three; what the loss does later changes nothing about the cause."""
    for first in ([0.69], [0.69, 0.5, 0.3]):
        ratios = first + [0.01] * (40 - len(first))
        loss = [2.3 - 0.03 * i for i in range(40)]
        given = evidence(weight(update_ratio=ratios), loss=loss, sources={"gradients", "loss"})
        given.measured(DeadUnits).of = {"body.weight": Dead(0.9, 0.9, len(first), 8, 512, 16)}
        verdict = judge(given)
        assert (verdict.primary.code, verdict.primary.step) == ("update.too_large", 0)
        dead = next(f for f in verdict.findings if f.code == "unit.dead")
        assert dead.consequence_of == "update.too_large"


@pytest.mark.parametrize(
    ("head", "begins"),
    [([0.09, 2.7, 2.0], 0), ([0.02, 2.7, 2.0], 1), ([0.3, 0.02, 0.02, 2.7, 2.0], 2)],
)
def test_too_large_steps_begin_with_the_first_in_a_row_of_any_weight(head, begins):
    """Not with those of the weight that changes most, so that the loss does not rise before its cause."""
    ratios = {"a": [0.01, 0.01, 4.0, 3.0], "b": head}
    params = [weight(name, update_ratio=x + [0.01] * (40 - len(x))) for name, x in ratios.items()]
    sources = {"gradients", "loss"}
    verdict = judge(evidence(*params, loss=[0.01] + [60.0] * 39, constant=1.4, sources=sources))
    found = {f.code: f for f in verdict.findings}
    assert (found["update.too_large"].layer, found["update.too_large"].step) == ("a", begins)
    assert found["loss.diverging"].step == 1
    assert verdict.primary.code == ("update.too_large" if begins < 2 else "loss.diverging")


def test_outputs_that_become_the_same_for_all_samples_count_as_well():
    spreads = {"spread": series([0.5] * 10 + [1e-9] * 10)}
    layers = {name: Layer(name, "Linear", "Linear 8→8", i, spreads) for i, name in enumerate(("a", "body"))}
    given = evidence(weight(update_ratio=[0.08] * 8 + [0.01] * 32), loss=STAYS)
    given.layers, given.params["body.weight"].place_of_layer = layers, 2
    assert only(LargeUpdates().findings, given).limit == 0.05
