"""Lines of a loop are timed between two events, and nothing stays of the trace function."""

import sys
import time
from functools import partial

import pytest
import torch

from hookcb.core.batch import map_tensors
from hookcb.diagnosis.probes.lines import LineTimes, is_of_user
from tests.support import Clock


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    """As in a process of its own, whatever other tests have compiled."""
    monkeypatch.setattr("hookcb.diagnosis.probes.lines.compile_counts", lambda kind: {})
    monkeypatch.setattr("hookcb.hooks.modules.compile_counts", lambda kind: {})


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


@pytest.fixture(autouse=True)
def nothing_is_traced():
    assert sys.gettrace() is None, "these tests cannot run in a debugger"
    yield
    assert sys.gettrace() is None
    assert sys._getframe().f_trace is None


def slept(lines):
    found = lines.places(1e9)
    return {name.partition(", ")[2]: round(x / 1000) for name, x in found.items() if x > 1}


def test_each_line_has_its_time(clock):
    lines = LineTimes()
    for _ in range(5):
        lines.begin()
        clock.sleep()
        clock.sleep(2000)
        lines.end()
    assert slept(lines) == {"clock.sleep()": 3, "clock.sleep(2000)": 6}  # without the two longest
    assert lines.n == 5


def test_a_fetch_from_anything_is_the_line_of_its_for_statement(clock):
    def batches():
        for i in range(5):
            clock.sleep()
            yield i

    lines = LineTimes()
    for _ in batches():
        lines.end()
        lines.begin()
    lines.end()
    assert slept(lines) == {"for _ in batches():": 2}  # without the first, which was not traced
    assert [name for name in lines.fetches if "in batches()" in name]


def test_the_function_that_a_package_calls_is_named(clock):
    def on_batch_end(x):
        clock.sleep()
        return x

    lines = LineTimes()
    for _ in range(2):
        lines.begin()
        map_tensors(on_batch_end, [torch.ones(1), torch.ones(1)])  # a function of this package
        lines.end()
    ((name, seconds),) = slept(lines).items()
    assert name.endswith("on_batch_end()")
    assert seconds == 2


def test_a_line_that_calls_a_function_has_its_time(clock):
    work = partial(clock.sleep, 5000)

    def step():
        work()

    lines = LineTimes()
    for _ in range(3):
        lines.begin()
        step()
        lines.end()
    assert slept(lines) == {"step()": 5}


def test_the_cost_of_tracing_is_taken_from_the_lines_with_many_calls(clock):
    def call():
        clock.now += 0.1  # the cost of tracing, ten times

    lines = LineTimes()
    for _ in range(3):
        lines.begin()
        [call() for _ in range(10)]
        clock.now += 1.0
        lines.end()
    found = {name.partition(", ")[2]: x for name, x in lines.places(1.0).items()}
    assert found["clock.now += 1.0"] == pytest.approx(1.0, abs=0.01)  # without the two longest
    assert sum(found.values()) < 1.2


def test_nothing_is_traced_if_something_else_is_traced(clock):
    theirs = lambda *args: None  # noqa: E731
    sys.settrace(theirs)
    try:
        lines = LineTimes()
        lines.begin()
        assert sys.gettrace() is theirs
        lines.end()
        assert sys.gettrace() is theirs
    finally:
        sys.settrace(None)
    assert lines.places(0.0) == {}


def test_files_of_packages_are_not_of_the_user():
    from hookcb.core import loop

    assert is_of_user(__file__)
    assert is_of_user("<stdin>")
    assert not is_of_user(torch.__file__)
    assert not is_of_user(loop.__file__)
    assert not is_of_user(time.__spec__.origin or "<frozen>") or time.__spec__.origin == "built-in"


def test_nothing_is_traced_once_anything_is_compiled(monkeypatch):
    monkeypatch.setattr("hookcb.diagnosis.probes.lines.compile_counts", lambda kind: {"total": 1})
    lines = LineTimes()
    lines.begin()
    assert sys.gettrace() is None
