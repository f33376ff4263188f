"""Backwards that are written in Python are timed in a few batches; those of torch are not."""

import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hookcb import Diagnose
from hookcb.diagnosis.measurements.backward_times import MAX_TIMED, BackwardTimes
from hookcb.diagnosis.run import Run
from tests.support import Clock, fit, make_learner


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
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
    times.tell(Run())
    return times.seconds


def timed(function, n, n_calls=1):
    times, x = BackwardTimes(), torch.ones(3, requires_grad=True)
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
    assert "test_backward_times.py:" in name
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
    times, x = BackwardTimes(), torch.ones(3, requires_grad=True)
    follow(times, (2 * x).sum().grad_fn)
    loss = doubling(clock).apply(x).sum()
    follow(times, loss.grad_fn)
    loss.backward()
    assert seconds_of(times) == {}


def test_a_loss_without_a_graph_is_no_harm():
    times = BackwardTimes()
    follow(times, None)
    assert seconds_of(times) == {}


def test_gradients_are_the_same_and_an_error_of_the_clock_does_not_reach_them(monkeypatch):
    def broken():
        raise RuntimeError("no clock")

    times, x = BackwardTimes(), torch.ones(3, requires_grad=True)
    loss = doubling().apply(x).sum()
    follow(times, loss.grad_fn)
    monkeypatch.setattr(time, "perf_counter", broken)
    loss.backward()
    with pytest.raises(RuntimeError, match="no clock"):
        times.tell(Run())
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
    times = BackwardTimes()
    loss = checkpoint(layer, x, use_reentrant=True).sum()
    follow(times, loss.grad_fn)
    loss.backward()
    assert seconds_of(times) == {}
