"""Units that get no gradient, on made-up numbers."""

import pytest

from hookcb.diagnosis.faults.model.dead_units import UnitsWithoutGradient
from hookcb.diagnosis.measurements.dead_units import Dead, DeadUnits
from hookcb.diagnosis.run import Layer, Param, Passed, Skipped
from tests.diagnosis.support import evidence, gradient, only, series
from tests.support import in_turn


def dead(name, place, share, n_looked=10, n_examples=640, **kwargs):
    """A weight, and what was measured of it."""
    rows = {"zero_rows": series([max(share, 0.0)] * 10)}
    size = 0.0 if share >= 1 else 1.0
    param = gradient(name, place, [size] * 10, stats=rows, **kwargs)
    return param, Dead(share, share, 0, n_looked, n_examples, param.shape[0])


def judged(*given, **kwargs):
    pairs = [x for x in given if isinstance(x, tuple)]
    run = evidence(*(x[0] if isinstance(x, tuple) else x for x in given), **kwargs)
    run.measured(DeadUnits).of = {param.name: known for param, known in pairs}
    return only(UnitsWithoutGradient, run)


def bias(name, place, size):
    return Param(f"{name}.bias", name, "Linear", "", place, (8,), place, stats={"norm": series([size] * 10)})


def zeros(**shares):
    layers = [Layer(n, "", "", i, {"zeros": series([x] * 10)}) for i, (n, x) in enumerate(shares.items())]
    return {layer.name: layer for layer in layers}


@pytest.mark.parametrize(("share", "severity"), [(0.625, "warning"), (0.875, "error")])
def test_a_large_share_of_dead_units_is_found(share, severity):
    found = judged(dead("a", 0, 0.0), dead("b", 1, share), dead("c", 2, 0.0))
    assert (found.code, found.severity, found.layer) == ("unit.dead", severity, "b")
    assert f"{round(8 * share)} of 8" in found.message


def test_of_dead_layers_the_one_at_which_activations_become_zero_is_named():
    params = [dead("a", 0, 1.0), dead("b", 2, 1.0), dead("c", 4, 1.0), dead("d", 6, 0.0)]
    layers = zeros(a=0.0, act_a=0.5, b=0.0, act_b=1.0, c=0.0, act_c=0.5, d=0.0)
    assert judged(*params, layers=layers).layer == "b"


def test_without_activations_the_last_dead_layer_that_is_not_just_fed_zeros_is_named():
    params = [dead("a", 0, 1.0), dead("b", 1, 1.0), dead("c", 2, 1.0), dead("d", 3, 0.0)]
    biases = [bias("a", 0, 0.0), bias("b", 1, 0.0), bias("c", 2, 1.0), bias("d", 3, 1.0)]
    assert judged(*params, *biases).layer == "b"


def test_if_nothing_has_a_gradient_only_activations_can_tell():
    params = [dead("a", 0, 1.0), dead("head", 2, 1.0)]
    assert isinstance(judged(*params), Skipped)
    assert judged(*params, layers=zeros(a=0.0, act=1.0, head=0.0)).layer == "a"


def test_rows_that_were_zero_in_each_record_are_found_without_diagnose():
    rows = {"zero_rows": series([1.0] * 9)}
    silent = gradient("b", 1, [0.0] * 9, stats=rows)
    assert judged(gradient("a", 0), silent).layer == "b"
    silent.stats["zero_rows"].add(9, 0.9)
    assert isinstance(judged(dead("a", 0, 0.0), silent), Passed)


@in_turn(
    "params",
    [
        [dead("a", 0, 0.3)],
        [dead("a", 0, 0.0), dead("emb", 1, 0.9, kind="Embedding")],
        [dead("a", 0, 0.0), dead("out", 1, 0.9, shape=(2, 8))],
        [dead("lstm.ih", 0, 0.0, layer="lstm"), dead("lstm.hh", 1, 1.0, layer="lstm")],
    ],
)
def test_units_that_are_few_or_sparse_by_nature_give_no_finding(params):
    assert isinstance(judged(*params), Passed)


def test_dead_units_need_eight_looks_and_many_examples():
    for n_looked, n_examples in [(7, 9_999), (8, 511)]:
        assert isinstance(judged(dead("a", 0, 1.0, n_looked, n_examples)), Skipped)
    assert isinstance(judged(dead("a", 0, 0.9, 100, 511)), Skipped)
    found = judged(dead("a", 0, 0.9, 8, 512))
    assert "had no gradient in 8 steps with 512 examples" in found.message


def test_without_the_number_of_examples_no_dead_unit_is_ruled_out():
    assert isinstance(judged(gradient("a", 0), gradient("b", 1)), Skipped)
