"""Waiting for data or a rank, and growing memory, made up; and that no check raises, whatever it is given."""

import math
import os
import random

import pytest

from hookcb.core.threads import n_cores
from hookcb.diagnosis.checks import attenuated as checks_attenuated
from hookcb.diagnosis.checks import dead_units as checks_dead_units
from hookcb.diagnosis.checks import exploding as checks_exploding
from hookcb.diagnosis.checks import layers as checks_layers
from hookcb.diagnosis.checks import optimizer as checks_optimizer
from hookcb.diagnosis.checks import runtime as checks_runtime
from hookcb.diagnosis.checks import step_size as checks_step_size
from hookcb.diagnosis.checks import weight_decay as checks_weight_decay
from hookcb.diagnosis.checks.runtime import growing_memory, waiting_for_a_rank, waiting_for_data
from hookcb.diagnosis.fault import FAULTS
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.run import Layer, Param, Passed, Run, Series, Skipped
from hookcb.diagnosis.verdict import Finding
from hookcb.hooks.coverage import BY_CLOSURE
from hookcb.profiling.steps.stragglers import Straggler
from tests.diagnosis.checks.support import measured

MODULES = (
    checks_attenuated,
    checks_exploding,
    checks_dead_units,
    checks_layers,
    checks_step_size,
    checks_weight_decay,
    checks_optimizer,
    checks_runtime,
)
OURS = [c for c in FAULTS.values() if c.function.__module__ in {module.__name__ for module in MODULES}]
BY_NAME = [pytest.param(c, id=c.function.__name__) for c in OURS]
MB = 1e6


def series(values):
    return Series.of(range(len(values)), values)


def only(check, given):
    (found,) = check(given)
    return found


# ---- time.data_bound


def timed(wait, batch, n=20):
    return Run(waits=series([1.0] * 5 + [wait] * (n - 5)), batches=series([9.0] * 5 + [batch] * (n - 5)))


@pytest.mark.parametrize(("wait", "severity"), [(0.045, "warning"), (0.08, "error")])
def test_waiting_for_data_is_told(wait, severity):
    found = only(waiting_for_data, timed(wait, 0.1))
    assert (found.code, found.severity) == ("time.data_bound", severity)
    assert found.value == pytest.approx(10 * wait)
    assert "ms" in found.message


@pytest.mark.parametrize(
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
    found = only(waiting_for_data, timed(0.08, 0.1))
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
    assert isinstance(only(waiting_for_data, timed(wait, batch)), Passed)


@pytest.mark.parametrize(("wait", "batch", "severity"), [(0.0099, 0.012, "info"), (0.0101, 0.012, "error")])
def test_waits_of_a_few_milliseconds_are_a_note(wait, batch, severity):
    assert only(waiting_for_data, timed(wait, batch)).severity == severity


def test_short_waits_are_judged_by_the_batches_that_the_machine_has_delayed_least():
    """A toy training on a busy machine, which makes six in ten of its fetches as long as those of images."""
    waits = [0.006 if i % 10 < 6 else 0.001 for i in range(100)]
    assert isinstance(only(waiting_for_data, delayed(waits, [0.002] * 100)), Passed)
    slower = [0.06 if x > 0.002 else x for x in waits]
    assert only(waiting_for_data, delayed(slower, [0.002] * 100)).severity == "error"


def delayed(waits, rest):
    return Run(waits=series(waits), batches=series([w + x for w, x in zip(waits, rest, strict=True)]))


def test_a_few_slow_fetches_are_told():
    waits = [0.06 if i % 20 == 10 else 1e-4 for i in range(200)]
    found = only(waiting_for_data, delayed(waits, [3e-3] * 200))
    assert "One batch in 20 takes 60 ms to fetch" in found.message


def test_delays_that_a_busy_machine_spreads_over_everything_are_no_waiting():
    """Of each three delays two come in the fetch, which takes two thirds of the time anyway."""
    waits = [0.06 if i % 20 in (5, 10) else 2e-3 for i in range(200)]
    rest = [0.06 if i % 20 == 15 else 1e-3 for i in range(200)]
    assert isinstance(only(waiting_for_data, delayed(waits, rest)), Passed)
    assert not isinstance(only(waiting_for_data, delayed(waits, [1e-3] * 200)), Passed)


@pytest.mark.parametrize("every", [2, 3, 10, 1000])
def test_time_without_the_fetch_of_a_batch_is_no_waiting(every):
    waits = series([9.0 if i % every == 0 else 0.0 for i in range(41)])
    found = only(waiting_for_data, Run(waits=waits, batches=series([10.0] * 41)))
    assert isinstance(found, Skipped)
    assert "the fetch of a batch was seen before" in found.reason


def test_fourteen_batches_are_too_few_to_be_timed():
    assert isinstance(only(waiting_for_data, timed(0.09, 0.1, n=14)), Skipped)
    assert isinstance(only(waiting_for_data, Run(batches=series([1.0] * 50))), Skipped)


# ---- time.straggler


def slowest(share=0.5, excess=0.02, n_slowest=7, n_blocks=8, phase="data"):
    return Run(
        slowest_rank=Straggler(5, "node7", 0.03, 0.01, excess, share, phase, 0.019, n_slowest, n_blocks)
    )


@pytest.mark.parametrize(("phase", "cause"), [("data", "disk"), ("forward", "GPU"), ("callbacks", "logging")])
def test_a_rank_that_the_others_wait_for_is_named(phase, cause):
    found = only(waiting_for_a_rank, slowest(phase=phase))
    assert (found.code, found.severity, found.value) == ("time.straggler", "warning", 0.5)
    assert "wait for rank 5 (host node7) 50% of the time: it works 30.0 ms in a step" in found.message
    assert f"the others 10.0 ms; its {phase} takes 19.0 ms more" in found.message
    assert cause in found.causes[0]
    assert found.ranks == (5,)


@pytest.mark.parametrize("given", [{"share": 0.1}, {"excess": 2.9e-3}, {"n_slowest": 6}])
def test_a_rank_that_is_little_or_not_always_slower_is_no_straggler(given):
    assert isinstance(only(waiting_for_a_rank, slowest(**given)), Passed)


def test_four_blocks_are_too_few_for_a_straggler():
    assert isinstance(only(waiting_for_a_rank, slowest(n_slowest=4, n_blocks=4)), Skipped)
    assert isinstance(only(waiting_for_a_rank, Run()), Skipped)


# ---- memory.growth


def memory(values):
    return Run(memory=series(values))


def test_memory_that_grows_is_told():
    random_ = random.Random(0)
    found = only(growing_memory, memory([100 * MB + 3 * MB * i + random_.random() * MB for i in range(100)]))
    assert (found.code, found.severity, found.step) == ("memory.growth", "warning", 10)
    assert found.value == pytest.approx(3 * MB, rel=0.01)


def test_of_a_long_run_the_growth_so_far_is_that_of_all_its_steps():
    steps = range(0, 4_000, 4)  # of which every fourth is kept
    found = only(growing_memory, Run(memory=Series.of(steps, [2 * MB * step for step in steps])))
    assert "Memory grows by 2.0 MB per step, 7.9 GB so far" in found.message


def test_the_history_of_lbfgs_may_grow():
    given = Run(memory=series([2 * MB * i for i in range(100)]), unseen={"before_step": BY_CLOSURE})
    assert "history" in only(growing_memory, given).reason


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
    assert isinstance(only(growing_memory, memory(values)), Passed)


def test_fifty_nine_steps_are_too_few_for_growth():
    assert isinstance(only(growing_memory, memory([9 * MB * i for i in range(59)])), Skipped)


# ---- whatever the numbers


ODD = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-320, 1e308, -1e308, 1.0, -1.0, 1e-9)
STATS = ("rms", "norm", "clipped_norm", "weight_norm", "update_ratio", "drift", "zero_rows", "abs_max")
OUTPUTS = ("std", "abs_max", "zeros", "spread", "saturated")
OF_STEPS = ("total_norm", "clip_coef", "lr", "scale", "skipped")
SHAPES = ((), (0,), (4,), (0, 3), (1, 1), (8, 8), (64, 64))


class Odd:
    """Makes up evidence of odd numbers; `values` are what is drawn from."""

    def __init__(self, seed, values, n):
        self.random, self.values, self.n = random.Random(seed), values, n

    def number(self):
        return self.random.choice(self.values)

    def series(self):
        n = self.n if self.n < 2 else self.random.choice((0, 1, self.n, self.n))
        steps = range(n) if self.random.random() < 0.8 else [0] * n
        return Series(list(steps), [self.number() for _ in range(n)])

    def param(self, i):
        name, shape = f"l{i % 4}.w{i}", self.random.choice(SHAPES)
        kind, place = self.random.choice(("Linear", "RNN", "Embedding")), self.random.choice((None, i))
        stats = {stat: self.series() for stat in STATS if self.random.random() < 0.9}
        numbers = {key: self.number() for key in ("resolution", "lr", "weight_decay", "dead")}
        flags = {"is_optimized": bool(i % 3), "is_adaptive": bool(i % 2), "n_looked": 40, "n_examples": 0}
        return Param(name, name[:2], kind, "", i, shape, place, stats=stats, **numbers, **flags)

    def layer(self, i):
        kind = self.random.choice(("Sigmoid", "Linear", "Embedding"))
        return Layer(f"l{i}", kind, "", i, {stat: self.series() for stat in OUTPUTS}, self.number())

    def evidence(self):
        given = ("lr", "loss", "input_std", "input_rms", "waits", "batches", "memory")
        kind = self.random.choice(("", "cross-entropy", "nll", "mse"))
        run = Run(
            layers={x.name: x for x in map(self.layer, range(5))},
            params={x.name: x for x in map(self.param, range(8))},
            steps={stat: self.series() for stat in OF_STEPS},
            n_steps=self.random.choice((0, 1, 100)),
            n_skipped=self.random.choice((0, 50)),
            **{name: self.series() for name in given},
            slowest_rank=self.rank(),
        )
        return measured(run, Loss, kind=kind, guess=self.number())

    def rank(self):
        seconds = [self.number() for _ in range(5)]
        return Straggler(3, "a", *seconds[:4], "data", seconds[4], 4, self.random.choice((2, 5)))


@pytest.mark.parametrize("check", BY_NAME)
def test_no_check_raises_and_each_says_one_thing(check):
    given = [Run()]
    for seed in range(12):
        for n in (0, 1, 2, 12, 70):
            draws = ODD if seed % 3 else [random.Random(seed).choice(ODD)]
            given.append(Odd(seed, draws, n).evidence())
    for evidence in given:
        (found,) = check.function(evidence)
        assert isinstance(found, Finding | Passed | Skipped)
        if isinstance(found, Finding):
            assert found.code == check.code
            assert found.message
            assert found.next_steps
            assert str(found)


@pytest.mark.parametrize("check", BY_NAME)
def test_without_any_number_a_check_is_unable(check):
    (found,) = check.function(Run())
    is_unable = isinstance(found, Skipped)
    assert is_unable or found == Passed("weight decay (none)")


def test_all_checks_of_these_files_are_registered_with_a_text():
    assert len(OURS) == 22
    assert all(c.doc for c in OURS)
