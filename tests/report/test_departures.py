"""Where runs depart from one another, and that those which only have other seeds do not."""

import math
import random

import pytest

from hookcb.diagnosis.run import Series
from hookcb.records.content import Recorded
from hookcb.report.data import PageData
from hookcb.report.departures import departures
from tests.support import in_turn


def page(seed, change=None, n=100, names=("a", "b", "c")):
    """A page of layers whose std drifts, and noise of a tenth; `change(name, step)` multiplies it."""
    rng, data = random.Random(seed), PageData("x")
    for name in names:
        drift = rng.gauss(0, 0.1)
        values = [math.exp(drift + rng.gauss(0, 0.1) + 0.003 * step) for step in range(n)]
        if change is not None:
            values = [x * change(name, step) for step, x in enumerate(values)]
        steps = range(0, 5 * n, 5)
        data.layers[name] = Recorded(name, stats={"std": Series(list(steps), list(values))})
        data.params[f"{name}.weight"] = Recorded(name, stats={"norm": Series(list(steps), list(values))})
    return data


def test_runs_with_other_seeds_do_not_depart():
    found = [departures(page(seed), page(seed + 100)) for seed in range(60)]
    assert not any(found)


@in_turn("factor", [5, 0.1, math.inf, math.nan])
def test_the_layer_that_changes_first_is_named_with_its_step(factor):
    def change(name, step):
        return factor if step >= {"b": 60, "c": 70}.get(name, math.inf) else 1.0

    first, *others = departures(page(0), page(1, change))
    assert (first.name, first.stat, first.step, first.is_from_start) == ("b", "std", 300, False)
    assert [own.name for own in others] == ["b.weight", "c", "c.weight"]
    assert (math.isinf(first.ratio)) is (not math.isfinite(factor))
    assert "from step 300" in str(first)


def test_what_differs_from_the_start_is_told():
    first, *_ = departures(page(0), page(1, lambda name, step: 40.0 if name == "c" else 1.0))
    assert (first.name, first.step, first.is_from_start) == ("c", 0, True)
    assert first.ratio == pytest.approx(40, rel=0.5)
    assert "from the start" in str(first)


def test_norms_after_clipping_are_compared_with_their_like_only_and_named_so():
    def clipped(data):
        for own in data.params.values():
            own.stats["clipped_norm"] = own.stats.pop("norm")
        data.layers = {}
        return data

    def large(name, step):
        return 40.0 if name == "c" else 1.0

    (found,) = departures(clipped(page(0)), clipped(page(1, large)))
    assert str(found).startswith("c.weight: norm of the gradient after clipping differs from the start")
    assert departures(clipped(page(0)), page(1, large)) == []


def test_a_single_outlier_is_no_departure():
    assert departures(page(0), page(1, lambda name, step: 50.0 if step == 70 else 1.0)) == []


def test_a_dead_layer_and_zeros_in_both_are_no_departure():
    dead = page(0, lambda name, step: 0.0)
    assert departures(dead, dead) == []


@pytest.mark.parametrize("other", [PageData("x"), page(1, names=("d",)), page(1, n=5)])
def test_runs_that_cannot_be_compared_depart_nowhere(other):
    assert departures(page(0), other) == []


def test_only_steps_that_both_have_are_compared():
    other = page(1, lambda name, step: 9.0 if step >= 60 else 1.0)
    for own in (*other.layers.values(), *other.params.values()):
        for series in own.stats.values():
            series.steps[:], series.values[:] = series.steps[::2], series.values[::2]
    assert departures(page(0), other)[0].step == 300
