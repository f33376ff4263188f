"""Saturated units, growing activations and outputs that are all the same: on numbers that are made up."""

import pytest

from hookcb.diagnosis.faults.model.activations import ActivationScale, CollapsedActivations, SaturatedUnits
from hookcb.diagnosis.measurements.inputs import Inputs
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.run import Layer, Param, Passed, Run, Series, Skipped
from tests.diagnosis.support import measured
from tests.support import in_turn


def series(values, every=10):
    return Series.of(range(0, every * len(values), every), values)


def evidence(*layers, heads=(), **kwargs):
    """Layers in this order; those named in `heads` have weights."""
    for i, layer in enumerate(layers):
        layer.place = i
    params = [
        Param(f"{x.name}.w", x.name, "Linear", "", 0, (8, 8), x.place) for x in layers if x.name in heads
    ]
    input_std = kwargs.pop("input_std", Series())
    run = Run(layers={x.name: x for x in layers}, params={p.name: p for p in params}, **kwargs)
    return measured(run, Inputs, std=input_std)


def layer(name, kind="Linear", largest=3.4e38, **stats):
    stats = {stat: series(x if isinstance(x, list) else [x] * 8) for stat, x in stats.items()}
    return Layer(name, kind, f"{kind} 8→8", 0, stats, largest)


def only(fault, given):
    (found,) = fault().findings(given)
    return found


# ---- unit.saturated


@pytest.mark.parametrize(("share", "severity"), [(0.7, "warning"), (0.95, "error")])
def test_saturated_units_are_told_of_the_first_layer(share, severity):
    layers = [layer("a", "Tanh", saturated=0.1), layer("b", "Tanh", saturated=share)]
    seen = evidence(*layers, layer("c", "Tanh", saturated=1.0), layer("head"))
    assert only(SaturatedUnits, seen).severity == "warning"  # so early the model may do well despite them
    seen.n_batches = 50
    found = only(SaturatedUnits, seen)
    assert (found.code, found.severity, found.layer) == ("unit.saturated", severity, "b")
    assert (found.step, found.last_step, found.value) == (0, 70, share)


def test_the_step_is_that_from_which_units_stay_saturated():
    shares = [0.9] + [0.1] * 10 + [0.9] * 10
    found = only(SaturatedUnits, evidence(layer("a", "Tanh", saturated=shares), layer("head")))
    assert 80 <= found.step <= 110


@pytest.mark.parametrize(
    "given",
    [
        evidence(layer("a", "Tanh", saturated=0.3), layer("head")),
        evidence(layer("a", "Tanh", saturated=[0.9] * 8 + [0.1] * 8), layer("head")),
        evidence(
            layer("a", "Tanh", saturated=0.1), layer("head"), layer("out", "Sigmoid", saturated=1.0),
            layer("flat"), heads=("head",),
        ),
    ],
)  # fmt: skip
def test_few_or_recovered_units_and_the_output_of_the_model_may_be_saturated(given):
    assert isinstance(only(SaturatedUnits, given), Passed)


def test_saturation_after_convergence_says_nothing():
    loss = series([1.0] * 10 + [0.001] * 90, every=1)
    shares = [0.1] * 3 + [0.99] * 7
    given = evidence(layer("a", "Tanh", saturated=shares), layer("head"), loss=loss)
    assert isinstance(only(SaturatedUnits, given), Skipped)


@pytest.mark.parametrize("trained", ["body", "head"])
def test_no_other_rate_is_advised_for_what_a_frozen_layer_gives(trained):
    """Steps of the head, however large, change nothing in the layers before it."""
    layers = [layer("body"), layer("act", "Tanh", saturated=0.95, spread=1e-9, std=2e4), layer("head")]
    layers[2].stats["spread"] = series([1e-9] * 8)
    given = evidence(*layers, heads=("body", "head"), input_std=series([1.0] * 8))
    stats = {"update_ratio": series([0.5] * 8), "weight_norm": series([4.0] * 8)}
    given.params[f"{trained}.w"].stats = stats
    for check in (SaturatedUnits, ActivationScale, CollapsedActivations):
        found = only(check, given)
        assert any("learning rate" in step for step in found.next_steps) == (trained == "body")
    assert ("a step that was too large" in only(SaturatedUnits, given).causes) == (trained == "body")


# ---- act.scale


def grown(*stds, **kwargs):
    layers = [layer(f"l{i}", std=x, abs_max=[3 * i + k for k in range(8)]) for i, x in enumerate(stds)]
    return evidence(*layers, **kwargs)


def test_activations_that_grow_are_told_of_the_layer_at_which_they_do_most():
    found = only(ActivationScale, grown(1.0, 2.0, 4000.0, 8000.0, input_std=series([1.0] * 8)))
    assert (found.code, found.severity, found.layer) == ("act.scale", "warning", "l2")
    assert found.value == 8000
    assert "×2,000" in found.message


def test_where_all_layers_grow_alike_the_first_is_told():
    assert only(ActivationScale, grown(10.0, 100.0, 1e3, 1e4, input_std=series([1.0] * 8))).layer == "l0"


def test_without_an_input_of_floats_the_first_layer_counts():
    assert only(ActivationScale, grown(0.02, 1.0, 50.0)).layer == "l1"


@in_turn(
    "given",
    [
        grown(1.0, 2.0, 900.0, input_std=series([1.0] * 8)),
        grown(1.0, 1.0, input_std=series([1e-5] * 8)),  # a norm after a tiny input
        grown(1.0, [0.5] * 3 + [1e5] * 5, input_std=series([1.0] * 8)),  # a regression that has learned
        grown(1.0, [1e5] + [1.0] * 7, input_std=series([1.0] * 8)),
        evidence(layer("a", std=1.0), layer("scores", std=4e8, abs_max=1e9), input_std=series([1.0] * 8)),
    ],
)
def test_scales_that_have_their_reason_are_no_finding(given):
    assert isinstance(only(ActivationScale, given), Passed)


def test_numbers_near_the_end_of_their_dtype_are_an_error():
    half = layer("a", std=1.0, abs_max=[9e3, 1e4, 1.2e4, 1.3e4], largest=65504.0)
    half.stats["std"] = series([1.0] * 4)
    found = only(ActivationScale, evidence(layer("x", std=1.0), half))
    assert (found.severity, found.layer, found.limit) == ("error", "a", 0.1)


def test_two_records_are_too_few_for_a_scale():
    assert isinstance(only(ActivationScale, grown([1.0] * 2, [1e9] * 2)), Skipped)


# ---- act.collapse


def collapse(*spreads, heads=("l4",), kinds=()):
    names = [f"l{i}" for i in range(len(spreads))]
    kinds = {**dict.fromkeys(names, "Linear"), **dict(kinds)}
    return evidence(*(layer(n, kinds[n], spread=x) for n, x in zip(names, spreads, strict=True)), heads=heads)


def test_a_collapse_is_told_of_the_layer_from_which_on_all_is_the_same():
    found = only(CollapsedActivations, collapse(1.0, 0.5, 1e-8, 1e-9, 1e-9))
    assert (found.code, found.severity, found.layer) == ("act.collapse", "error", "l2")
    assert found.value == pytest.approx(1e-8)


def test_the_spread_of_a_late_collapse_is_that_since_it_began():
    found = only(CollapsedActivations, collapse(1.0, 0.5, *([[0.5] * 9 + [1e-8] * 6] * 2), 1e-9))
    assert (found.layer, found.step, found.value) == ("l2", 90, pytest.approx(1e-8))
    assert "1e-08 of their second moment (limit 1e-06)" in found.message


@in_turn(
    "given",
    [
        collapse(1.0, 0.5, 0.1, 0.1, 1e-5),
        collapse(1.0, 1e-9, 0.5, 0.5, 0.5),  # constant by design, or normalized again
        collapse(1.0, 0.5, 0.1, 0.1, 1e-9),  # targets far from zero
        collapse(1.0, 1.0, [0.0] * 2 + [0.5] * 6, [0.0] * 2 + [0.5] * 6, 0.5),  # a branch that begins at zero
        collapse(1.0, 1.0, 0.5, [0.0] * 2 + [1.0] * 6, [0.0] * 2 + [1.0] * 6),
    ],
)
def test_outputs_that_are_constant_in_places_are_no_finding(given):
    assert isinstance(only(CollapsedActivations, given), Passed)


@pytest.mark.parametrize(("constant", "severity"), [(1.0, "warning"), (2.0, "info")])
def test_a_spread_lost_layer_by_layer_is_a_warning_if_nothing_is_learned(constant, severity):
    given = collapse(1.0, 1e-2, 1e-4, 1e-6 / 2, 1e-8)
    given.loss = series([1.0] * 60, every=1)
    measured(given, Loss, constant=constant)
    assert only(CollapsedActivations, given).severity == severity


def test_outputs_of_zeros_are_the_same_for_all():
    given = collapse(1.0, [], [], [], [])
    for name in ("l1", "l2", "l3", "l4"):
        given.layers[name].stats["abs_max"] = series([0.0] * 8)
    assert only(CollapsedActivations, given).layer == "l1"


def test_embeddings_of_positions_are_passed_over():
    given = collapse(1e-9, 1.0, 1.0, 1.0, 1e-9, kinds={"l0": "Embedding"})
    assert isinstance(only(CollapsedActivations, given), Passed)


def test_four_records_are_too_few_for_a_collapse():
    assert isinstance(only(CollapsedActivations, collapse([1e-9] * 4, [1e-9] * 4)), Skipped)
