"""Time spent on other things, slow layers, garbage collections and growing batches, made up."""

import math

import pytest

from hookcb.diagnosis.checks.spent import (
    garbage_collections,
    growing_batches,
    slow_layer,
    time_elsewhere,
)
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.run import Layer, Passed, Run, Series, Skipped, Spent
from hookcb.diagnosis.verdict import Finding

STEP = {"forward": 0.004, "backward": 0.004, "optimizer": 0.002}


def codes(check, evidence):
    return [result.layer or result.code for result in check(evidence) if isinstance(result, Finding)]


def only(check, evidence):
    (found,) = check(evidence)
    return found


def spent(n=20, phases=STEP, **kinds):
    return Run(spent=Spent(n, dict(phases), **kinds))


@pytest.mark.parametrize(
    ("kind", "name", "place"),
    [
        ("callbacks", "Checkpoint", "checkpoints (Checkpoint)"),
        ("callbacks", "Log", "logging (Log)"),
        ("callbacks", "Mine('x')", "the callback Mine('x')"),
    ],
)
def test_callbacks_are_told_apart(kind, name, place):
    evidence = spent(**{kind: {name: 0.01}})
    assert codes(time_elsewhere, evidence) == [place]
    assert only(time_elsewhere, evidence).value == pytest.approx(0.5)
    assert only(time_elsewhere, evidence).severity == "info"


def test_a_line_that_calls_the_model_may_take_more_than_others():
    phases = STEP | {"between": 0.008}
    assert codes(time_elsewhere, spent(phases=phases, lines={"a.py:1": 0.008})) == ["a.py:1"]
    assert codes(time_elsewhere, spent(phases=phases, steps={"a.py:1": 0.008})) == []


def test_a_loss_of_many_operations_may_take_less_than_others():
    phases = STEP | {"loss": 0.004}
    evidence = spent(phases=phases)
    assert codes(time_elsewhere, evidence) == []
    evidence.measured(Loss).n_operations = 250
    assert codes(time_elsewhere, evidence) == ["the loss function, of 250 operations"]
    evidence.measured(Loss).n_operations = 20
    assert codes(time_elsewhere, evidence) == []


def test_time_before_a_backward_is_not_the_loss_if_lines_are_known():
    """In a loop that hookcb does not run it is all that the loop does there."""
    phases = STEP | {"loss": 0.04}
    assert codes(time_elsewhere, spent(phases=phases)) == ["the loss function"]
    assert codes(time_elsewhere, spent(phases=phases, has_lines=True)) == []


def test_a_line_that_fetches_beyond_the_loader_is_named():
    phases = STEP | {"data": 0.001, "between": 0.008}
    assert codes(time_elsewhere, spent(phases=phases, fetches={"a.py:1": 0.008})) == ["a.py:1"]
    assert codes(time_elsewhere, spent(fetches={"a.py:1": 0.008})) == []  # it fetches all: `time.data_bound`


@pytest.mark.parametrize(
    "evidence",
    [
        spent(callbacks={"Log": 0.004}),  # a share of 0.29
        spent(phases={"forward": 0.0001}, callbacks={"Log": 0.0009}),  # of a tiny net
        spent(phases=STEP | {"optimizer": 0.01}),
    ],
)
def test_less_time_is_no_finding(evidence):
    assert isinstance(only(time_elsewhere, evidence), Passed)


@pytest.mark.parametrize("check", [time_elsewhere, garbage_collections])
def test_few_batches_are_not_judged(check):
    assert isinstance(only(check, spent(n=9)), Skipped)


@pytest.mark.parametrize(("seconds", "found"), [(0.003, True), (0.001, False)])
def test_garbage_collections_are_told_by_their_share(seconds, found):
    evidence = spent(phases=STEP | {"garbage collection": seconds})
    assert codes(garbage_collections, evidence) == ["time.garbage"] * found


def layers(seconds, work):
    return Run(layer_seconds=seconds, layer_work=work)


@pytest.mark.parametrize(
    ("seconds", "found"),
    [(0.02, True), (0.002, False), (1e-4, False)],
)
def test_a_layer_is_slow_beside_its_work(seconds, found):
    evidence = layers({"a": 0.001, "b": seconds}, {"a": 1e6, "b": 1e6})
    assert codes(slow_layer, evidence) == ["b"] * found


def test_a_layer_with_as_much_work_as_time_is_fine():
    assert codes(slow_layer, layers({"a": 0.001, "b": 0.1}, {"a": 1e6, "b": 1e8})) == []
    assert isinstance(only(slow_layer, layers({}, {"a": 1.0})), Skipped)


@pytest.mark.parametrize(
    ("ops", "causes", "has_loop"),
    [
        ((640, 0), ["a Python loop over samples, steps or elements: it runs 640 operations"], True),
        ((3, 1), ["numbers that Python reads, as by .item(): 1 of them"], False),
        ((1, 0), ["an operation that takes longer for an element than those of other layers"], False),
    ],
)
def test_a_slow_layer_is_said_to_have_a_loop_only_if_it_has_one(ops, causes, has_loop):
    evidence = layers({"a": 0.001, "b": 0.02}, {"a": 1e6, "b": 1e6})
    evidence.layer_ops["b"] = ops
    found = only(slow_layer, evidence)
    assert list(found.causes) == causes
    assert ("whole batch at once" in found.next_steps[0]) == has_loop


@pytest.mark.parametrize(("kind", "found"), [("LSTM", False), ("GRU", False), ("Looping", True)])
def test_the_steps_of_a_recurrent_layer_follow_each_other(kind, found):
    evidence = layers({"a": 0.001, "b": 0.02}, {"a": 1e6, "b": 1e6})
    evidence.layers["b"] = Layer("b", kind, f"{kind} 8→8", 1)
    assert codes(slow_layer, evidence) == ["b"] * found
    assert found or only(slow_layer, evidence) == Skipped(
        "Layer b takes 95% of the forward, 20.0 of 21.0 ms, but its steps follow each other"
    )


def test_a_layer_of_unknown_work_is_not_ruled_out():
    evidence = layers({"a": 0.001, "b": 0.02}, {"a": 1e6, "b": math.inf})
    assert only(slow_layer, evidence) == Skipped(
        "Layer b takes 95% of the forward, 20.0 of 21.0 ms, but the work of an operation is unknown"
    )
    evidence.layer_seconds["c"] = 0.04  # it is slow beside the first one
    assert codes(slow_layer, evidence) == ["c"]
    assert isinstance(only(slow_layer, layers({"a": 1e-5}, {"a": math.inf})), Skipped)


def growing(sizes, seconds):
    n = len(seconds)
    return Run(
        sizes=Series(list(range(len(sizes))), [float(x) for x in sizes]),
        batches=Series(list(range(n)), list(seconds)),
        waits=Series(list(range(n)), [0.0] * n),
    )


def test_batches_that_grow_are_told_only_if_they_take_longer():
    longer = [0.004 + 0.001 * i for i in range(40)]
    assert codes(growing_batches, growing(range(10, 100, 9), longer)) == ["time.growing"]
    assert codes(growing_batches, growing(range(10, 100, 9), [0.004] * 40)) == []
    assert codes(growing_batches, growing([10] * 12, longer)) == []
    assert isinstance(only(growing_batches, growing([10] * 5, longer)), Skipped)
