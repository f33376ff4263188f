"""Statistics of made-up step times: phases, percentiles, outliers, and the steps kept of a long run."""

import copy
import gc
import io
import pickle
import random
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from hookcb.core.clock import Inside
from hookcb.profiling.steps.clock import CudaStepClock, StepClock
from hookcb.profiling.steps.incidents import Incidents
from hookcb.profiling.steps.store import N_SLOWEST, StepStore
from hookcb.profiling.steps.times import (
    FIRST_BATCH,
    SHOWN_PHASES,
    STEP_PHASES,
    StepReport,
    findings,
    outliers,
    percentiles,
    samples_per_second,
    step_time,
)
from hookcb.records.store import StatStore
from tests.support import in_turn


def made_up(total=1.0, step=0, epoch=0, n_samples=32, notes=(), on_device=(), **seconds):
    """A step in which forward takes what is left of the total."""
    seconds = dict.fromkeys(STEP_PHASES, 0.0) | seconds
    seconds["forward"] = seconds["forward"] or total - sum(seconds.values())
    return step_time((total, tuple(seconds.values()), epoch, step, n_samples, tuple(notes), 0.0, on_device))


def randomly(n, seed=0):
    draw = random.Random(seed)
    return [
        made_up(total=sum(x), step=i, **dict(zip(STEP_PHASES, x, strict=True)))
        for i in range(n)
        for x in [[draw.uniform(0.1, 2) for _ in STEP_PHASES]]
    ]


class Now:
    """A clock that stands still unless told."""

    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds

    def wait(self, seconds):
        self.seconds += seconds


@pytest.fixture
def now(monkeypatch):
    now = Now()
    monkeypatch.setattr("hookcb.core.clock.perf_counter", now)
    return now


# ---- numbers


def test_a_step_has_its_phases_as_fields():
    step = step_time((2.1, (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.0), 3, 7, None, ("cancelled",), 0.0, ()))
    assert (step.epoch, step.step, step.total, step.n_samples) == (3, 7, 2.1, None)
    assert [getattr(step, phase) for phase in STEP_PHASES] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.0]
    assert step.notes == ("cancelled",)
    assert step.device_forward is step.device_total is None
    with pytest.raises(AttributeError):
        step.forward = 1.0


def test_a_step_on_a_device_has_its_seconds_too():
    step = made_up(on_device=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0))
    assert (step.device_data, step.device_callbacks, step.device_total) == (1.0, 6.0, 21.0)


@in_turn("n", [1, 2, 3, 10, 101, 500])
def test_percentiles_are_those_of_torch(n):
    steps = randomly(n)
    found = percentiles(steps)
    assert list(found) == [*SHOWN_PHASES, "workers", "total"]
    for name, of in found.items():
        seconds = torch.tensor([getattr(step, name) for step in steps], dtype=torch.float64)
        q = torch.quantile(seconds, torch.tensor([0.5, 0.9, 0.99, 1.0], dtype=torch.float64)).tolist()
        assert [of.p50, of.p90, of.p99, of.max] == pytest.approx(q)
        assert of.mean == pytest.approx(seconds.mean().item())
    assert sum(found[phase].share for phase in STEP_PHASES) == pytest.approx(1.0)
    assert found["total"].share == pytest.approx(1.0)


def test_the_longest_is_that_of_the_slowest_too_and_the_rest_is_not():
    steps = [made_up(1.0), made_up(2.0)]
    found = percentiles(steps, [made_up(50.0, data=40.0)])
    assert (found["total"].max, found["data"].max, found["total"].mean) == (50.0, 40.0, 1.5)


def test_percentiles_of_a_device_are_those_of_the_steps_that_it_told_of():
    steps = [made_up(on_device=(0.0, 1.0, 0.0, 3.0, 0.0, 0.0, 0.0)), made_up()]
    found = percentiles(steps, steps)
    assert found["device_forward"].p50 == 1.0
    assert found["device_backward"].share == 0.75
    assert found["device_total"].max == 4.0


def test_samples_per_second_is_the_median_of_the_steps_that_tell():
    steps = [made_up(total, n_samples=n) for total, n in ((1.0, 10), (1.0, 30), (0.5, 10), (1.0, None))]
    assert samples_per_second(steps) == 20
    assert samples_per_second(steps[-1:]) is None


# ---- outliers


def test_an_outlier_says_what_took_longer_than_its_own_median_and_what_happened():
    usual = [made_up(0.01, step=i, data=0.004, backward=0.004) for i in range(9)]
    slow = made_up(0.1, step=9, epoch=1, data=0.005, callbacks=0.085, notes=["validation", "cancelled"])
    (found,) = outliers([*usual, slow], 3.0)
    assert (found.epoch, found.step, found.phase, found.seconds) == (1, 9, "callbacks", 0.1)
    assert found.ratio == pytest.approx(10)
    assert found.extra == pytest.approx(0.085)
    assert str(found) == (
        "step 9, epoch 1: 100 ms, 10 times the median; callbacks took 85 ms more than usual; "
        "validation, cancelled"
    )


def test_the_phase_of_an_outlier_is_not_the_one_that_is_long_anyway():
    usual = [made_up(1.0, step=i, backward=0.9) for i in range(9)]
    (found,) = outliers([*usual, made_up(4.0, step=9, backward=1.5, data=2.4)], 3.0)
    assert found.phase == "data"


def test_an_outlier_exceeds_the_factor_and_does_not_just_reach_it():
    steps = [made_up(1.0), made_up(1.0), made_up(1.0), made_up(3.0, step=3)]
    assert outliers(steps, 3.0) == []
    assert [outlier.step for outlier in outliers(steps, 2.9)] == [3]
    assert "; callbacks" not in str(outliers(steps, 2.9)[0])


def test_a_large_multiple_is_a_plain_number():
    (found,) = outliers([*(made_up(0.001, step=i) for i in range(9)), made_up(1.5204, step=9)], 3.0)
    assert "1,520 times the median" in str(found)


def test_medians_may_be_of_other_steps():
    slow = [made_up(9.0, step=i) for i in range(3)]
    assert outliers(slow, 3.0) == []
    assert len(outliers(slow, 3.0, usual=[made_up(1.0)])) == 3


# ---- words


def shown(thing):
    out = io.StringIO()
    Console(file=out, width=200, color_system=None).print(thing)
    return out.getvalue()


def test_the_report_says_it_in_a_table_and_in_words():
    steps = [made_up(0.01, step=i, data=0.004, n_samples=64) for i in range(99)]
    steps.append(made_up(0.2, step=99, data=0.004, notes=[FIRST_BATCH]))
    text = shown(StepReport(percentiles(steps), 6_400.0, outliers(steps, 3.0), 3.0, "100 steps of training"))
    assert "100 steps of training, 6,400 samples per second" in text
    assert "backward" not in text  # which took nothing
    assert "on the device" not in text
    row = next(line for line in text.splitlines() if "data" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "data",
        "33%",
        "4 ms",
        "4 ms",
        "4 ms",
        "4 ms",
    ]
    assert " ".join(text.split()).count("33% of the time is spent waiting for data") == 1
    assert "1 step took more than 3 times the median, 1 of them the first of an epoch" in " ".join(
        text.split()
    )


def test_the_report_says_how_long_workers_took_to_start_as_a_part_of_the_start():
    row = (1.0, (0.4, 0.6, 0.0, 0.0, 0.0, 0.0, 0.0), 0, 0, 1, (FIRST_BATCH,), 0.3)
    steps = [step_time((*row, ())), *(made_up(1.0, step=i) for i in (1, 2))]
    found = percentiles(steps)
    assert (found["start"].p50, found["workers"].p50, found["workers"].share) == (0.4, 0.3, 0.3 / 3)
    text = shown(StepReport(found, None, [], 3.0, "3 steps"))
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines()]
    assert [row[:3] for row in rows if row[0].startswith(("start", "…"))] == [
        ["start of the loader", "13%", "400 ms"],
        ["… its workers", "10%", "300 ms"],
    ]
    assert (
        "0% of the time is spent waiting for data, 13% for the loader to start, 10% for its workers" in text
    )
    on_device = percentiles([step_time((*row, (0.1, 0.9, 0.0, 0.0, 0.0, 0.0, 0.0)))])
    assert "… its workers" in shown(StepReport(on_device, None, [], 3.0, "1 step"))


def test_the_report_of_a_device_shows_its_median_and_believes_its_data():
    steps = [made_up(1.0, data=0.9, on_device=(0.0, 0.5, 0.0, 0.5, 0.0, 0.0, 0.0))]
    text = shown(StepReport(percentiles(steps), None, [], 3.0, "1 step"))
    assert "on the device" in text
    assert "500 ms" in text
    assert "samples" not in text
    assert "waiting for data" not in text  # the host waits, and the device does not


def test_findings_are_few():
    steps = [made_up(1.0) for _ in range(20)] + [made_up(10.0 + i, step=20 + i) for i in range(8)]
    lines = findings(percentiles(steps), outliers(steps, 3.0), 3.0)
    assert lines[0] == "8 steps took more than 3 times the median"
    assert [line.split(",")[0] for line in lines[1:6]] == [f"- step {i}" for i in (27, 26, 25, 24, 23)]
    assert lines[6:] == ["- and 3 more"]
    quiet = [made_up(1.0, data=0.04)]
    none = "no step took more than 2.5 times the median"
    assert findings(percentiles(quiet), [], 2.5) == ["4% of the time is spent waiting for data", none]
    assert findings(percentiles([made_up(1.0)]), [], 2.5) == [none]


# ---- what stays


def a_row(step, total=1.0, *notes):
    return total, (0.0, total, 0.0, 0.0, 0.0, 0.0, 0.0), 0, step, 1, notes, 0.0, ()


@in_turn("keep", [2, 3, 4, 7, 50])
def test_the_same_steps_stay_as_in_a_stat_store(keep):
    store, other = StepStore(keep), StatStore(("x",), keep)
    for step in range(130):
        store.add(a_row(step))
        other.begin(0, step)
        assert [time.step for time in store.times()] == [info.step for info in other.infos]
        assert store.n == step + 1


def test_the_slowest_stay_whatever_is_dropped_and_first_batches_only_in_turn():
    store = StepStore(keep=2)
    totals = [1 + random.Random(i).random() for i in range(1_000)]
    for i, total in enumerate(totals):
        store.add(a_row(i, total + 100 * (i % 50 == 0), *[FIRST_BATCH] * (i % 50 == 0)))
    rest = [i for i in range(1_000) if i % 50]
    slowest = set(sorted(rest, key=lambda i: -totals[i])[:N_SLOWEST])
    even = {time.step for time in store.times()}
    assert len(even) <= 2
    assert {time.step for time in store.times_and_slowest()} == slowest | even
    steps = [time.step for time in store.times_and_slowest()]
    assert steps == sorted(steps)


def test_notes_go_with_their_steps():
    store = StepStore(keep=4)
    for i in range(3_000):
        store.add(a_row(i, 50.0, "slow") if i == 1_001 else a_row(i, 1.0, f"note {i}"))
    assert all(time.notes == (f"note {time.step}",) for time in store.times())
    assert [time.notes for time in store.times_and_slowest() if time.step == 1_001] == [("slow",)]


def test_memory_is_bounded():
    store = StepStore(keep=64)
    for i in range(20_000):
        store.add(a_row(i, 1 + i % 777, "note"))
        store.add_device(i, (0.0,) * 7)
        if i % 1_000 == 0:
            assert len(store.times()) <= 65
            assert len(store.times_and_slowest()) <= 65 + N_SLOWEST


def test_a_store_is_copied_whole():
    store = StepStore(keep=8)
    for i in range(20):
        store.add(a_row(i, i + 1.0, *["note"] * (i % 2)))
    for copied in (pickle.loads(pickle.dumps(store)), copy.deepcopy(store)):
        assert copied.times_and_slowest() == store.times_and_slowest()
        copied.add(a_row(20))
        assert (copied.n, store.n) == (21, 20)


# ---- clocks


def a_step(clock, now, *phases):
    for phase, seconds in phases:
        clock.enter(phase)
        now.wait(seconds)


WHOLE = [("data", 1), ("forward", 2), ("loss", 3), ("callbacks", 4), ("backward", 5), ("optimizer", 6)]


def test_a_clock_adds_up_each_phase(now):
    clock = StepClock(store := StepStore(10))
    clock.start()
    a_step(clock, now, *WHOLE, ("callbacks", 10), ("optimizer", 20), ("callbacks", 30))
    clock.end(0, 0, 4)
    a_step(clock, now, *WHOLE)
    clock.end(0, 1, 4)
    clock.read()
    first, second = store.times()
    assert [getattr(first, phase) for phase in SHOWN_PHASES] == [1, 0, 2, 3, 5, 26, 44, 0]
    assert first.total == 81
    assert [getattr(second, phase) for phase in STEP_PHASES] == [1, 2, 3, 5, 6, 4, 0]
    assert (first.notes, second.notes) == ((FIRST_BATCH,), ())


def test_what_comes_before_a_start_belongs_to_no_step(now):
    clock = StepClock(store := StepStore(10))
    clock.start()
    a_step(clock, now, *WHOLE)
    clock.end(0, 0, 4)
    a_step(clock, now, ("data", 1000), ("forward", 1000), ("callbacks", 1000))  # and then it was cancelled
    clock.note("validation")
    clock.start()
    a_step(clock, now, *WHOLE)
    clock.end(1, 1, 4)
    clock.read()
    assert [step.total for step in store.times()] == [21, 21]
    assert store.times()[1].notes == (FIRST_BATCH,)


def test_a_step_of_which_the_beginning_was_missed_is_none(now):
    clock = StepClock(store := StepStore(10))
    a_step(clock, now, ("loss", 1), ("backward", 1))
    clock.end(0, 0, 4)
    clock.read()
    assert store.n == 0
    a_step(clock, now, *WHOLE)
    clock.end(0, 1, 4)
    clock.read()
    assert [step.step for step in store.times()] == [1]


def test_notes_are_of_the_step_in_progress(now):
    clock = StepClock(store := StepStore(10))
    clock.start()
    for step, texts in enumerate((["a", "b"], [], ["c"])):
        a_step(clock, now, *WHOLE)
        for text in texts:
            clock.note(text)
        clock.end(0, step, 4)
    clock.read()
    assert [step.notes for step in store.times()] == [(FIRST_BATCH, "a", "b"), (), ("c",)]


class Device:
    """A device that finishes its events later than the host, and whose events fail if waited for."""

    def __init__(self, now):
        self.now, self.made, self.asked, self.is_done = now, 0, 0, True

    def event(self):
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, device):
        self.device, self.at = device, None

    def record(self, stream):
        assert stream == "stream of cuda:1"
        self.at = self.device.now()

    def query(self):
        return self.device.is_done

    def elapsed_time(self, other):
        assert self.device.is_done, "CUDA raises here"
        self.device.asked += 1
        return (other.at - self.at) * 1e3 * 10  # milliseconds; it takes ten times as long


@pytest.fixture
def on_cuda(now):
    device, store = Device(now), StepStore(1_000)
    clock = CudaStepClock(store, torch.device("cuda:1"), device.event, lambda device: f"stream of {device}")
    return device, clock, store


def test_a_device_tells_the_same_phases_by_its_own_clock(on_cuda, now):
    _, clock, store = on_cuda
    clock.start()
    for step in range(2):
        a_step(clock, now, *WHOLE)
        clock.end(0, step, 4)
    for step in store.times():
        assert step.total == 21
        waited = [0, 10] if step.step else [10, 0]
        on_device = [getattr(step, f"device_{phase}") for phase in SHOWN_PHASES]
        assert on_device == [*waited, 20, 30, 50, 60, 40, 0]
        assert step.device_total == 210


def test_a_device_is_not_waited_for(on_cuda, now):
    device, clock, store = on_cuda
    clock.start()
    device.is_done = False
    for step in range(3):
        a_step(clock, now, *WHOLE)
        clock.end(0, step, 4)
    clock.read()
    assert [step.device_total for step in store.times()] == [None] * 3
    device.is_done = True
    clock.read()
    assert [step.device_total for step in store.times()] == [210] * 3


def test_a_listener_is_told_the_times_of_the_device_once_they_are_known(on_cuda, now):
    device, clock, _ = on_cuda
    told = []
    clock.listener = told.append
    clock.start()
    device.is_done = False
    for step in range(3):
        a_step(clock, now, *WHOLE)
        clock.end(0, step, 4)
    assert told == []
    device.is_done = True
    clock.read()
    assert told == [(10, 20, 30, 50, 60, 40, 0)] * 2  # the first of an epoch is left out
    clock.read()
    assert len(told) == 2


def test_a_listener_is_told_of_steps_that_do_not_stay(now):
    device, store = Device(now), StepStore(2)
    clock = CudaStepClock(store, torch.device("cuda:1"), device.event, lambda device: f"stream of {device}")
    told = []
    clock.listener = told.append
    clock.start()
    for step in range(500):
        a_step(clock, now, *WHOLE)
        clock.end(0, step, 4)
    assert len(told) == 499


def test_a_phase_inside_another_counts_by_itself(now):
    clock = StepClock(store := StepStore(10))
    clock.start()
    inside = Inside(clock, "other")
    for step in range(2):
        a_step(clock, now, ("data", 1))
        inside.begin()
        now.wait(3)
        inside.begin()  # as of a dataset that reads from a loader
        now.wait(4)
        inside.end()
        inside.end()
        now.wait(1)
        clock.end(0, step, 4)
    assert [(x.start + x.data, x.other) for x in store.times()] == [(2, 7), (2, 7)]


def test_events_are_used_again(on_cuda, now):
    device, clock, _ = on_cuda
    clock.start()
    for step in range(50):
        a_step(clock, now, *WHOLE)
        clock.end(0, step, 4)
        if step % 7 == 0:
            a_step(clock, now, ("data", 1), ("forward", 1))
            clock.start()
    assert device.made <= 2 * (len(WHOLE) + 1)


def test_of_steps_that_do_not_stay_the_device_is_not_asked(now):
    device, store = Device(now), StepStore(2)
    clock = CudaStepClock(store, torch.device("cuda:1"), device.event, lambda device: f"stream of {device}")
    clock.start()
    device.is_done = False
    for step in range(500):
        a_step(clock, now, *WHOLE)
        clock.end(0, step, 4)
    device.is_done = True
    clock.read()
    assert all(step.device_total == 210 for step in store.times_and_slowest())
    assert device.asked <= (N_SLOWEST + 3) * (len(WHOLE) + 1)


# ---- what happens besides


def test_long_collections_are_told_and_those_of_all_objects():
    told = []
    listener = Incidents(told.append)
    for generation, seconds in ((0, 0.0001), (0, 0.02), (2, 0.0001)):
        listener._at_collection(generation, seconds)
    assert told == ["garbage collection of 20 ms", "garbage collection of 100 µs"]


def test_a_listener_is_open_once_and_closed_twice():
    before = list(gc.callbacks)
    told = []
    listener, other = Incidents(told.append), Incidents(told.append)
    listener.open()
    other.open()
    gc.collect()
    assert len(told) == 2
    listener.close()
    listener.close()
    gc.collect()
    assert len(told) == 3
    assert len(gc.callbacks) == len(before) + 1
    other.close()
    assert gc.callbacks == before


def test_what_is_written_and_compiled_is_told_once(monkeypatch):
    frames = Counter(total=3)
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace(counters={"frames": frames}))
    told, writer = [], SimpleNamespace(n_written=5)
    listener = Incidents(told.append)
    listener.follow([object(), writer])
    listener.report_changes()
    assert told == []
    writer.n_written += 1
    listener.report_changes()
    listener.report_changes()
    assert told == ["checkpoint written"]
    frames["total"] += 2
    listener.report_changes()
    listener.report_changes()
    assert told == ["checkpoint written", "compilation"]
    writer.n_written += 1
    listener.follow([writer])  # written between two steps
    listener.report_changes()
    assert len(told) == 2


def test_a_torch_that_has_compiled_nothing_is_left_alone(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils", raising=False)
    told = []
    listener = Incidents(told.append)
    listener.follow([])
    listener.report_changes()
    assert told == []
    assert "torch._dynamo.utils" not in sys.modules
