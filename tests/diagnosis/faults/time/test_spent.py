"""Time that is spent on other things and on garbage collections, and in backwards in Python."""

import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hookcb import Diagnose
from hookcb.diagnosis.faults.time.spent import MAX_TIMED, Garbage, OtherWork
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.spent import SpentTime
from hookcb.diagnosis.run import Passed, Run, Skipped
from tests.diagnosis.faults.time.support import only, places
from tests.support import Clock, fit, make_learner

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


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr("hookcb.core.clock.perf_counter", clock)
    return clock


def doubling(clock=None, seconds=1000.0):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            if clock is not None:
                clock.sleep(seconds)
            return 2 * grad

    return Double


def follow(times, node):
    if not times.done:
        times.on_loss(Run(loop=SimpleNamespace(loss_node=node)))


def seconds_of(times):
    return {name: min(x) for name, x in times.backwards.items()}


def timed(function, n, n_calls=1):
    times, x = OtherWork(), torch.ones(3, requires_grad=True)
    for _ in range(n):
        y = x * 3
        for _ in range(n_calls):
            y = function(y)
        loss = y.sum()
        follow(times, loss.grad_fn)
        loss.backward()
    return seconds_of(times)


@pytest.mark.parametrize("n_calls", [1, 3])
def test_a_backward_in_python_is_timed_and_named(clock, n_calls):
    (name, seconds), *others = timed(doubling(clock).apply, 3, n_calls).items()
    assert not others
    assert "test_spent.py:" in name
    assert name.startswith("the backward of ")
    assert name.endswith("Double.backward()")
    assert seconds == pytest.approx(1000 * n_calls, abs=50)


def test_backwards_of_torch_are_not_timed():
    assert timed(torch.relu, 3) == {}


def test_the_least_of_a_few_batches_counts(clock):
    waits = iter([5000.0, 1000.0, 3000.0, 2000.0, 1.0, 1.0])
    function = doubling()

    class Waiting(function):
        @staticmethod
        def backward(ctx, grad):
            clock.sleep(next(waits))
            return 2 * grad

    (seconds,) = timed(Waiting.apply, MAX_TIMED + 2).values()
    assert seconds == pytest.approx(1000, abs=50)


def test_no_other_graph_is_read_if_the_first_has_none(clock):
    times, x = OtherWork(), torch.ones(3, requires_grad=True)
    follow(times, (2 * x).sum().grad_fn)
    loss = doubling(clock).apply(x).sum()
    follow(times, loss.grad_fn)
    loss.backward()
    assert seconds_of(times) == {}


def test_a_loss_without_a_graph_is_no_harm():
    times = OtherWork()
    follow(times, None)
    assert seconds_of(times) == {}


def test_gradients_are_the_same_and_an_error_of_the_clock_does_not_reach_them(monkeypatch):
    def broken():
        raise RuntimeError("no clock")

    times, x = OtherWork(), torch.ones(3, requires_grad=True)
    loss = doubling().apply(x).sum()
    follow(times, loss.grad_fn)
    monkeypatch.setattr(time, "perf_counter", broken)
    loss.backward()
    assert str(times.failure) == "no clock"
    assert torch.equal(x.grad, torch.full((3,), 2.0))


def test_a_backward_that_loops_in_python_is_named_by_a_diagnosis(clock):
    function = doubling(clock, 20_000.0)

    class Layer(nn.Module):
        def forward(self, x):
            return function.apply(x)

    model = nn.Sequential(nn.Linear(2, 3), Layer(), nn.Linear(3, 1))
    learn = make_learner(60, model=model, lr=0.01, cbs=Diagnose(on_sick="ignore"))
    fit(learn)
    (found,) = (x for x in learn.diagnose().findings if x.code == "time.other")
    assert "Double.backward()" in found.layer
    assert "loop" in found.causes[0]


def test_backwards_of_torch_that_are_written_in_python_are_none_of_the_user(clock):
    layer, x = nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True)
    times = OtherWork()
    loss = checkpoint(layer, x, use_reentrant=True).sum()
    follow(times, loss.grad_fn)
    loss.backward()
    assert seconds_of(times) == {}
