"""Waiting for data, made up."""

import os

import pytest

from hookcb.core.threads import n_cores
from hookcb.diagnosis.faults.time.data_bound import DataBound
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.run import Passed, Run, Skipped
from tests.diagnosis.faults.time.support import only
from tests.diagnosis.support import series
from tests.support import in_turn


def fetched(waits, batches):
    run = Run()
    vars(run.measured(Curves)).update(waits=series(waits), batches=series(batches))
    return run


def timed(wait, batch, n=20):
    return fetched([1.0] * 5 + [wait] * (n - 5), [9.0] * 5 + [batch] * (n - 5))


@pytest.mark.parametrize(("wait", "severity"), [(0.045, "warning"), (0.08, "error")])
def test_DataBound_is_told(wait, severity):
    found = only(DataBound, timed(wait, 0.1))
    assert (found.code, found.severity) == ("time.data_bound", severity)
    assert found.value == pytest.approx(10 * wait)
    assert "ms" in found.message


@in_turn(
    ("n", "advised"),
    [
        (1, "num_workers=1, as this process may use 1 processor"),
        (2, "num_workers=2, as this process may use 2 processors"),
        (4, "num_workers=4"),
        (64, "num_workers=4"),
    ],
)
def test_no_more_workers_are_advised_than_the_process_may_use_processors(monkeypatch, n, advised):
    monkeypatch.setattr(os, "process_cpu_count", lambda: n, raising=False)
    found = only(DataBound, timed(0.08, 0.1))
    assert found.next_steps[0] == f"Give the DataLoader persistent_workers=True and {advised}"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes have no affinity here")
def test_processors_count_that_the_process_may_use():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert n_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert n_cores() == len(before)


@pytest.mark.parametrize(("wait", "batch"), [(0.02, 0.1), (0.002, 0.003), (1e-9, 1e-9)])
def test_short_waits_are_no_finding(wait, batch):
    assert isinstance(only(DataBound, timed(wait, batch)), Passed)


@pytest.mark.parametrize(("wait", "batch", "severity"), [(0.0099, 0.012, "info"), (0.0101, 0.012, "error")])
def test_waits_of_a_few_milliseconds_are_a_note(wait, batch, severity):
    assert only(DataBound, timed(wait, batch)).severity == severity


def test_short_waits_are_judged_by_the_batches_that_the_machine_has_delayed_least():
    """A toy training on a busy machine, which makes six in ten of its fetches as long as those of images."""
    waits = [0.006 if i % 10 < 6 else 0.001 for i in range(100)]
    assert isinstance(only(DataBound, delayed(waits, [0.002] * 100)), Passed)
    slower = [0.06 if x > 0.002 else x for x in waits]
    assert only(DataBound, delayed(slower, [0.002] * 100)).severity == "error"


def delayed(waits, rest):
    return fetched(waits, [w + x for w, x in zip(waits, rest, strict=True)])


def test_a_few_slow_fetches_are_told():
    waits = [0.06 if i % 20 == 10 else 1e-4 for i in range(200)]
    found = only(DataBound, delayed(waits, [3e-3] * 200))
    assert "One batch in 20 takes 60 ms to fetch" in found.message


def test_delays_that_a_busy_machine_spreads_over_everything_are_no_waiting():
    """Of each three delays two come in the fetch, which takes two thirds of the time anyway."""
    waits = [0.06 if i % 20 in (5, 10) else 2e-3 for i in range(200)]
    rest = [0.06 if i % 20 == 15 else 1e-3 for i in range(200)]
    assert isinstance(only(DataBound, delayed(waits, rest)), Passed)
    assert not isinstance(only(DataBound, delayed(waits, [1e-3] * 200)), Passed)


@in_turn("every", [2, 3, 10, 1000])
def test_time_without_the_fetch_of_a_batch_is_no_waiting(every):
    found = only(DataBound, fetched([9.0 if i % every == 0 else 0.0 for i in range(41)], [10.0] * 41))
    assert isinstance(found, Skipped)
    assert "the fetch of a batch was seen before" in found.reason


def test_fourteen_batches_are_too_few_to_be_timed():
    assert isinstance(only(DataBound, timed(0.09, 0.1, n=14)), Skipped)
    assert isinstance(only(DataBound, fetched([], [1.0] * 50)), Skipped)
