"""Gradients that vanish, that explode, and units that get none: on numbers that are made up."""

import pytest

from hookcb.diagnosis.checks.gradients import attenuated_gradients, dead_units, exploding_gradients
from hookcb.diagnosis.evidence import Evidence, Layer, Param, Series
from hookcb.diagnosis.registry import Passed, Skipped

NAN = float("nan")


def series(values, every=1):
    return Series.of(range(0, every * len(values), every), values)


def weight(name, place, rms=(1.0,) * 20, kind="Linear", shape=(8, 8), layer=None, **kwargs):
    layer = layer or name
    stats = {"rms": series(rms), "norm": series([8 * x for x in rms])} | kwargs.pop("stats", {})
    return Param(f"{name}.weight", layer, kind, f"{kind} 8→8", place, shape, place, stats=stats, **kwargs)


def evidence(*params, **kwargs):
    return Evidence(params={p.name: p for p in params}, **kwargs)


def stack(factors, n=20):
    """Weights from the input to the head, whose gradients have these sizes."""
    return [weight(f"layers.{i}", i, [x] * n) for i, x in enumerate(factors)]


def only(check, given):
    """The one thing that a check has to say."""
    (found,) = check(given)
    return found


# ---- grad.attenuated


def test_a_gradient_that_falls_from_layer_to_layer_is_told_of_the_lowest_one():
    found = only(attenuated_gradients, evidence(*stack([0.05**k for k in range(5, -1, -1)])))
    assert (found.code, found.severity, found.layer) == ("grad.attenuated", "error", "layers.0")
    assert found.value == pytest.approx(0.05**5)
    assert (found.step, found.last_step) == (0, 19)
    assert "×0.05 per layer over 5 layers" in found.message


def test_a_gradient_that_falls_at_once_is_told_of_the_layer_where_it_does():
    found = only(attenuated_gradients, evidence(*stack([1e-5, 2e-5, 1e-5, 0.7, 1.0])))
    assert (found.severity, found.layer) == ("warning", "layers.2")


def test_the_activations_in_series_are_named_as_the_cause():
    layers = {f"act{i}": Layer(f"act{i}", "Sigmoid", "Sigmoid", i) for i in range(8)}
    found = only(attenuated_gradients, evidence(*stack([1e-7, 1.0]), layers=layers))
    assert found.causes[0].startswith("8 Sigmoid layers in series")


@pytest.mark.parametrize(
    "params",
    [
        stack([3e-4, 0.1, 1.0]),
        stack([1.0, 1e-6]),  # what is small is nearest to the loss: nothing is behind it
        [weight("lora_a", 0, [0.0] * 2 + [1e-5] + [0.01] * 17), weight("head", 1)],
        [weight("body", 0, [0.0] * 20), weight("mid", 1), weight("head", 2)],  # of unit.dead
        [weight("expert", 0, ([0.0] * 4 + [0.5]) * 5), weight("head", 1, [1.0] * 25)],
        [weight("emb", 0, [1e-9] * 20, kind="Embedding"), weight("mid", 1), weight("head", 2)],
        [weight("mid", 0, [1e-6] * 10 + [0.1] * 10), weight("head", 1)],  # it got over it
    ],
)
def test_gradients_that_are_small_by_nature_are_no_finding(params):
    assert isinstance(only(attenuated_gradients, evidence(*params)), Passed)


def test_records_after_convergence_do_not_count():
    loss = series([1.0] * 10 + [0.001] * 90)
    late = [0.1] * 26 + [1e-9] * 66  # the moving average takes a while
    params = [weight("body", 0, late), weight("head", 1, [1.0] * 92)]
    assert isinstance(only(attenuated_gradients, evidence(*params, loss=loss)), Passed)
    assert only(attenuated_gradients, evidence(*params)).layer == "body"


def test_four_records_are_too_few_to_speak_of_vanishing():
    assert isinstance(only(attenuated_gradients, evidence(*stack([1e-9, 1.0], n=4))), Skipped)


# ---- grad.exploding


def test_a_gradient_that_grows_towards_the_input_is_told_of_the_largest():
    found = only(exploding_gradients, evidence(*stack([1e5, 100.0, 10.0, 1.0, 1.0])))
    assert (found.code, found.severity, found.layer) == ("grad.exploding", "error", "layers.0")
    assert found.value == pytest.approx(1e4)


def test_a_recurrent_layer_with_several_weights_counts_once():
    rnn = [weight(f"rnn.{k}", i, [1e6] * 8, "RNN", layer="rnn") for i, k in enumerate("ih")]
    found = only(exploding_gradients, evidence(*rnn, weight("head", 2)))
    assert (found.layer, found.next_steps[0][:4]) == ("rnn", "Clip")


@pytest.mark.parametrize("sizes", [[600.0, 1.0, 1.0, 1.0], [1e-9, 1e-8, 1e-4, 1.0], [500.0, 1.0]])
def test_gradients_of_healthy_or_vanishing_ratios_do_not_explode(sizes):
    assert isinstance(only(exploding_gradients, evidence(*stack(sizes))), Passed)


def jump(after, at=20, height=50.0):
    norms = series([1.0] * at + [height] + [1.0] * 20)
    loss = series([2.0] * (at + 1) + [after] * 20)
    params = [weight("a", 0, [0.1] * 41), weight("b", 1, [0.1] * at + [5.0] + [0.1] * 20)]
    return evidence(*params, steps={"total_norm": norms}, loss=loss)


def test_a_jump_of_the_norm_after_which_the_loss_is_higher_is_told_with_its_layer():
    found = only(exploding_gradients, jump(after=9.0))
    assert (found.severity, found.step, found.layer) == ("warning", 20, "b")
    assert found.value == pytest.approx(50)


@pytest.mark.parametrize("given", [jump(2.0), jump(1.0), jump(9.0, height=9.0), jump(9.0, at=4)])
def test_a_jump_without_consequence_or_history_is_no_finding(given):
    assert isinstance(only(exploding_gradients, given), Passed)


def test_a_single_record_cannot_explode():
    assert isinstance(only(exploding_gradients, evidence(*stack([1e9, 1.0, 1.0], n=1))), Skipped)


# ---- unit.dead


def dead(name, place, share, n_looked=10, n_examples=640, **kwargs):
    rows = {"zero_rows": series([max(share, 0.0)] * 10)}
    size = 0.0 if share >= 1 else 1.0
    return weight(
        name, place, [size] * 10, dead=share, n_looked=n_looked, n_examples=n_examples, stats=rows, **kwargs
    )


def bias(name, place, size):
    return Param(f"{name}.bias", name, "Linear", "", place, (8,), place, stats={"norm": series([size] * 10)})


def zeros(**shares):
    layers = [Layer(n, "", "", i, {"zeros": series([x] * 10)}) for i, (n, x) in enumerate(shares.items())]
    return {layer.name: layer for layer in layers}


@pytest.mark.parametrize(("share", "severity"), [(0.625, "warning"), (0.875, "error")])
def test_a_share_of_dead_units_is_told(share, severity):
    found = only(dead_units, evidence(dead("a", 0, 0.0), dead("b", 1, share), dead("c", 2, 0.0)))
    assert (found.code, found.severity, found.layer) == ("unit.dead", severity, "b")
    assert f"{round(8 * share)} of 8" in found.message


def test_dead_layers_are_told_of_the_one_where_the_activations_become_zero():
    params = [dead("a", 0, 1.0), dead("b", 2, 1.0), dead("c", 4, 1.0), dead("d", 6, 0.0)]
    layers = zeros(a=0.0, act_a=0.5, b=0.0, act_b=1.0, c=0.0, act_c=0.5, d=0.0)
    assert only(dead_units, evidence(*params, layers=layers)).layer == "b"


def test_dead_layers_without_activations_are_told_of_the_last_that_is_not_just_fed_zeros():
    params = [dead("a", 0, 1.0), dead("b", 1, 1.0), dead("c", 2, 1.0), dead("d", 3, 0.0)]
    biases = [bias("a", 0, 0.0), bias("b", 1, 0.0), bias("c", 2, 1.0), bias("d", 3, 1.0)]
    assert only(dead_units, evidence(*params, *biases)).layer == "b"


def test_where_nothing_has_a_gradient_only_activations_can_tell():
    params = [dead("a", 0, 1.0), dead("head", 2, 1.0)]
    assert isinstance(only(dead_units, evidence(*params)), Skipped)
    assert only(dead_units, evidence(*params, layers=zeros(a=0.0, act=1.0, head=0.0))).layer == "a"


def test_rows_that_were_zero_in_each_record_do_without_diagnose():
    rows = {"zero_rows": series([1.0] * 9)}
    silent = weight("b", 1, [0.0] * 9, stats=rows)
    assert only(dead_units, evidence(weight("a", 0), silent)).layer == "b"
    silent.stats["zero_rows"].add(9, 0.9)
    assert isinstance(only(dead_units, evidence(dead("a", 0, 0.0), silent)), Passed)


@pytest.mark.parametrize(
    "params",
    [
        [dead("a", 0, 0.3)],
        [dead("a", 0, 0.0), dead("emb", 1, 0.9, kind="Embedding")],
        [dead("a", 0, 0.0), dead("out", 1, 0.9, shape=(2, 8))],
        [dead("lstm.ih", 0, 0.0, layer="lstm"), dead("lstm.hh", 1, 1.0, layer="lstm")],
    ],
)
def test_units_that_are_few_or_sparse_by_nature_are_no_finding(params):
    assert isinstance(only(dead_units, evidence(*params)), Passed)


def test_dead_units_need_eight_looks_and_many_examples():
    for n_looked, n_examples in [(7, 9_999), (8, 511)]:
        assert isinstance(only(dead_units, evidence(dead("a", 0, 1.0, n_looked, n_examples))), Skipped)
    assert isinstance(only(dead_units, evidence(dead("a", 0, 0.9, 100, 511))), Skipped)
    found = only(dead_units, evidence(dead("a", 0, 0.9, 8, 512)))
    assert "had no gradient in 8 looks at 512 examples" in found.message


def test_without_the_number_of_examples_no_dead_unit_is_ruled_out():
    assert isinstance(only(dead_units, evidence(weight("a", 0), weight("b", 1))), Skipped)
