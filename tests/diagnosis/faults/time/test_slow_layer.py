"""Layers that are slow for their work, made up."""

import math

import pytest

from hookcb.diagnosis.faults.time.slow_layer import SlowLayer
from hookcb.diagnosis.measurements.layer_times import LayerTimes
from hookcb.diagnosis.run import Layer, Run, Skipped
from tests.diagnosis.faults.time.support import only, places


def layers(seconds, work):
    run = Run()
    vars(run.measured(LayerTimes)).update(seconds=seconds, work=work)
    return run


@pytest.mark.parametrize(
    ("seconds", "found"),
    [(0.02, True), (0.002, False), (1e-4, False)],
)
def test_a_layer_is_slow_beside_its_work(seconds, found):
    run = layers({"a": 0.001, "b": seconds}, {"a": 1e6, "b": 1e6})
    assert places(SlowLayer, run) == ["b"] * found


def test_a_layer_with_as_much_work_as_time_is_fine():
    assert places(SlowLayer, layers({"a": 0.001, "b": 0.1}, {"a": 1e6, "b": 1e8})) == []
    assert isinstance(only(SlowLayer, layers({}, {"a": 1.0})), Skipped)


@pytest.mark.parametrize(
    ("ops", "causes", "has_loop"),
    [
        ((640, 0), ["a Python loop over samples, steps or elements: it runs 640 operations"], True),
        ((3, 1), ["numbers that Python reads, as by .item(): 1 of them"], False),
        ((1, 0), ["an operation that takes longer for an element than those of other layers"], False),
    ],
)
def test_a_SlowLayer_is_said_to_have_a_loop_only_if_it_has_one(ops, causes, has_loop):
    run = layers({"a": 0.001, "b": 0.02}, {"a": 1e6, "b": 1e6})
    times = run.measured(LayerTimes)
    times.n_ops["b"], times.n_reads["b"] = ops
    found = only(SlowLayer, run)
    assert list(found.causes) == causes
    assert ("whole batch at once" in found.next_steps[0]) == has_loop


@pytest.mark.parametrize(("kind", "found"), [("LSTM", False), ("GRU", False), ("Looping", True)])
def test_the_steps_of_a_recurrent_layer_follow_each_other(kind, found):
    run = layers({"a": 0.001, "b": 0.02}, {"a": 1e6, "b": 1e6})
    run.layers["b"] = Layer("b", kind, f"{kind} 8→8", 1)
    assert places(SlowLayer, run) == ["b"] * found
    assert found or only(SlowLayer, run) == Skipped(
        "Layer b takes 95% of the forward, 20.0 of 21.0 ms, but its steps follow each other"
    )


def test_a_layer_of_unknown_work_is_not_ruled_out():
    run = layers({"a": 0.001, "b": 0.02}, {"a": 1e6, "b": math.inf})
    assert only(SlowLayer, run) == Skipped(
        "Layer b takes 95% of the forward, 20.0 of 21.0 ms, but the work of an operation is unknown"
    )
    run.measured(LayerTimes).seconds["c"] = 0.04  # it is slow beside the first one
    assert places(SlowLayer, run) == ["c"]
    assert isinstance(only(SlowLayer, layers({"a": 1e-5}, {"a": math.inf})), Skipped)


def test_a_layer_is_not_compared_with_none():
    assert only(SlowLayer, layers({"a": 0.02}, {"a": 1e6})) == Skipped(
        "Layer a takes 100% of the forward, 20.0 of 20.0 ms, but no other was timed whose work is known"
    )
