"""When batches are looked at, by durations that are made up."""

import itertools

import pytest

from hookcb.diagnosis.schedule import Schedule

GROWING = [0, 1, 2, 3, 4, 5, 7, 10, 14, 19, 26, 36, 49, 67, 91, 123, 167, 226, 306, 414, 559, 755]
DOUBLING = [0, 1, 2, 3, 4, 5, 7, 10, 14, 19, 38, 76, 152, 304, 608]


def looks(n, budget=0.02, other=1.0, extra=0.0, schedule=None):
    """Batches looked at of n that take `other` seconds, and `extra` more where they are looked at."""
    schedule, found = schedule or Schedule(budget), []
    for i in range(n):
        due = schedule.is_due()
        found += [i] * due
        schedule.took((other(i) if callable(other) else other) + extra * due, due)
    return found


def cost(found, extra, n, other=1.0):
    """Share of the training's time that looking has taken."""
    return len(found) * extra / (n * other + len(found) * extra)


def test_the_first_six_batches_are_looked_at_then_one_whenever_35_percent_more_have_passed():
    found = looks(800)
    assert found == GROWING
    for last, due in itertools.pairwise(found[5:]):
        assert due - 1 < 1.35 * last <= due


@pytest.mark.parametrize("extra", [0.0, 1e-6, -0.5])
def test_looking_that_costs_nothing_goes_on_whatever_the_budget(extra):
    assert looks(800, budget=0.0 if extra <= 0 else 0.02, extra=extra) == GROWING


def test_up_to_batch_20_it_looks_whatever_it_costs():
    assert looks(20, budget=0.0, extra=1e6) == [i for i in GROWING if i < 20]


@pytest.mark.parametrize("budget", [0.0, 1e-9])
def test_what_it_cannot_afford_it_does_whenever_the_batches_have_doubled(budget):
    assert looks(800, budget=budget, extra=5.0) == DOUBLING


@pytest.mark.parametrize("budget", [0.005, 0.02, 0.1, 0.5])
@pytest.mark.parametrize("extra", [0.05, 0.3, 1.0, 3.0])
def test_the_budget_is_kept_but_for_what_it_does_at_least(budget, extra):
    n = 8_000
    found = looks(n, budget, extra=extra)
    at_least = cost(looks(n, 0.0, extra=extra), extra, n)
    assert cost(found, extra, n) <= max(budget, at_least)
    for i, due in enumerate(found):  # each beyond that was affordable when it was made
        if i and due >= 20 and due < 2 * found[i - 1]:
            assert (i + 1) * extra <= budget * (due + i * extra) * (1 + 1e-9)


def test_a_higher_budget_never_looks_less():
    counts = [len(looks(5_000, budget, extra=2.0)) for budget in (0.0, 0.005, 0.01, 0.02, 0.05, 0.2, 1.0)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


def test_looks_that_were_too_expensive_come_back_when_the_training_has_gone_on_for_long():
    found = looks(20_000, 0.02, extra=1.0)
    gaps = [b / a for a, b in itertools.pairwise(found) if a >= 19]
    assert max(gaps) == pytest.approx(2.0, rel=0.02)
    assert min(gaps) == pytest.approx(1.35, rel=0.02)


@pytest.mark.parametrize("slow", [(0,), (3,), (0, 1, 2), (8, 9), (30, 60, 90, 120)])
def test_a_few_batches_that_took_long_change_nothing(slow):
    found = looks(800, other=lambda i: 1e4 if i in slow else 1.0, extra=1e-3)
    assert found == GROWING


def test_the_unit_of_time_does_not_matter():
    for scale in (1e-6, 1e3):
        assert looks(5_000, other=scale, extra=0.7 * scale) == looks(5_000, extra=0.7)


def test_without_durations_it_looks_as_if_it_cost_nothing():
    schedule = Schedule(0.0)
    assert [i for i in range(800) if schedule.is_due()] == GROWING


def test_it_counts_batches_and_looks():
    schedule = Schedule(0.02)
    found = looks(300, schedule=schedule)
    assert (schedule.n_batches, schedule.n_looked) == (300, len(found))


def test_a_long_training_keeps_few_numbers():
    schedule = Schedule(0.02)
    looks(5_000, extra=0.01, schedule=schedule)
    assert max(len(x) for x in vars(schedule).values() if hasattr(x, "__len__")) <= 64
