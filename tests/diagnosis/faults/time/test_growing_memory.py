"""Memory that grows, made up."""

import random

import pytest

from hookcb.diagnosis.faults.time.growing_memory import GrowingMemory
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.run import Passed, Run, Series, Skipped
from hookcb.hooks.coverage import BY_CLOSURE
from tests.diagnosis.faults.time.support import only

MB = 1e6


def memory(values, steps=None, **about):
    run = Run(**about)
    run.measured(Curves).memory = Series.of(range(len(values)) if steps is None else steps, values)
    return run


def test_memory_that_grows_is_told():
    random_ = random.Random(0)
    found = only(GrowingMemory, memory([100 * MB + 3 * MB * i + random_.random() * MB for i in range(100)]))
    assert (found.code, found.severity, found.step) == ("memory.growth", "warning", 10)
    assert found.value == pytest.approx(3 * MB, rel=0.01)


def test_of_a_long_run_the_growth_so_far_is_that_of_all_its_steps():
    steps = range(0, 4_000, 4)  # of which every fourth is kept
    found = only(GrowingMemory, memory([2 * MB * step for step in steps], steps))
    assert "Memory grows by 2.0 MB per step, 7.9 GB so far" in found.message


def test_the_history_of_lbfgs_may_grow():
    given = memory([2 * MB * i for i in range(100)], unseen={"before_step": BY_CLOSURE})
    assert "history" in only(GrowingMemory, given).reason


@pytest.mark.parametrize(
    "values",
    [
        [100 * MB] * 100,
        [100 * MB + 0.5 * MB * i for i in range(100)],
        [30 * MB * i for i in range(10)] + [300 * MB] * 90,
        [100 * MB] * 60 + [900 * MB] * 40,
        [100 * MB + 500 * MB * (i % 2) for i in range(100)],
    ],
)
def test_memory_that_stays_jumps_once_or_swings_is_no_finding(values):
    assert isinstance(only(GrowingMemory, memory(values)), Passed)


def test_fifty_nine_steps_are_too_few_for_growth():
    assert isinstance(only(GrowingMemory, memory([9 * MB * i for i in range(59)])), Skipped)
