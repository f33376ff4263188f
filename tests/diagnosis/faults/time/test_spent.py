"""Time that is spent on other things and on garbage collections, made up."""

import pytest

from hookcb.diagnosis.faults.time.spent import Garbage, OtherWork
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.spent import SpentTime
from hookcb.diagnosis.run import Passed, Run, Skipped
from tests.diagnosis.faults.time.support import only, places

STEP = {"forward": 0.004, "backward": 0.004, "optimizer": 0.002}


def spent(n=20, phases=STEP, **kinds):
    run = Run()
    vars(run.measured(SpentTime)).update(n=n, phases=dict(phases), **kinds)
    return run


@pytest.mark.parametrize(
    ("kind", "name", "place"),
    [
        ("callbacks", "Checkpoint", "checkpoints (Checkpoint)"),
        ("callbacks", "Log", "logging (Log)"),
        ("callbacks", "Mine('x')", "the callback Mine('x')"),
    ],
)
def test_callbacks_are_told_apart(kind, name, place):
    run = spent(**{kind: {name: 0.01}})
    assert places(OtherWork, run) == [place]
    assert only(OtherWork, run).value == pytest.approx(0.5)
    assert only(OtherWork, run).severity == "info"


def test_a_line_that_calls_the_model_may_take_more_than_others():
    phases = STEP | {"between": 0.008}
    assert places(OtherWork, spent(phases=phases, lines={"a.py:1": 0.008})) == ["a.py:1"]
    assert places(OtherWork, spent(phases=phases, steps={"a.py:1": 0.008})) == []


def test_a_loss_of_many_operations_may_take_less_than_others():
    phases = STEP | {"loss": 0.004}
    run = spent(phases=phases)
    assert places(OtherWork, run) == []
    run.measured(Loss).n_operations = 250
    assert places(OtherWork, run) == ["the loss function, of 250 operations"]
    run.measured(Loss).n_operations = 20
    assert places(OtherWork, run) == []


def test_time_before_a_backward_is_not_the_loss_if_lines_are_known():
    """In a loop that hookcb does not run it is all that the loop does there."""
    phases = STEP | {"loss": 0.04}
    assert places(OtherWork, spent(phases=phases)) == ["the loss function"]
    assert places(OtherWork, spent(phases=phases, has_lines=True)) == []


def test_a_line_that_fetches_beyond_the_loader_is_named():
    phases = STEP | {"data": 0.001, "between": 0.008}
    assert places(OtherWork, spent(phases=phases, fetches={"a.py:1": 0.008})) == ["a.py:1"]
    assert places(OtherWork, spent(fetches={"a.py:1": 0.008})) == []  # it fetches all: `time.data_bound`


@pytest.mark.parametrize(
    "run",
    [
        spent(callbacks={"Log": 0.004}),  # a share of 0.29
        spent(phases={"forward": 0.0001}, callbacks={"Log": 0.0009}),  # of a tiny net
        spent(phases=STEP | {"optimizer": 0.01}),
    ],
)
def test_less_time_is_no_finding(run):
    assert isinstance(only(OtherWork, run), Passed)


@pytest.mark.parametrize("kind", [OtherWork, Garbage])
def test_few_batches_are_not_judged(kind):
    assert isinstance(only(kind, spent(n=9)), Skipped)


@pytest.mark.parametrize(("seconds", "found"), [(0.003, True), (0.001, False)])
def test_garbage_collections_are_told_by_their_share(seconds, found):
    run = spent(phases=STEP | {"garbage collection": seconds})
    assert places(Garbage, run) == ["time.garbage"] * found
