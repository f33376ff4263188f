"""What lr_find gives: the curve, the rate it suggests, and a picture of both."""

import copy
import math
import random
from itertools import pairwise

import pytest
from torch.optim import SGD, Adam

from hookcb import LRFind, synth_learner
from hookcb.loops.lr_curve import longest_fall
from hookcb.loops.lr_find import find_lr
from hookcb.records.series import Smoothed
from tests.support import fit, in_turn
from tests.training.support import batches_of, quiet


@pytest.mark.parametrize("n", [20, 100])
def test_the_suggestion_lies_where_the_curve_falls(n):
    lrs = [10 ** (-7 + 8 * i / (n - 1)) for i in range(n)]
    losses = [
        2.3 - 2 / (1 + math.exp(-3 * (math.log10(lr) + 3))) + max(0, math.log10(lr / 0.3)) * 20 for lr in lrs
    ]
    found = LRFind(lrs, losses)
    assert 1e-5 < found.suggestion < 0.3
    i = min(range(n), key=lambda i: abs(found.lrs[i] - found.suggestion))
    smoothed = list(found.smoothed)
    assert smoothed[max(0, i - 1)] > smoothed[min(n - 1, i + 1)]


@pytest.mark.parametrize("losses", [[5.0, 4.0, 3.0, math.nan], [2.0, 1.0, 0.5, 0.1], [9.0, 1.0, 9.0, 9.0]])
def test_a_suggestion_is_one_of_the_rates_tried(losses):
    lrs = [1e-4, 1e-3, 1e-2, 1e-1]
    assert LRFind(lrs, losses).suggestion in lrs
    assert LRFind(lrs[:2], losses[:2]).suggestion in lrs[:2]


@in_turn("losses", [[1.0, 2.0, 3.0, 9.0], [1.0] * 4, [math.nan] * 4, [1.0, math.inf, 2, 3]])
def test_where_the_loss_falls_nowhere_nothing_is_suggested(losses):
    with pytest.raises(ValueError, match="falls at none"):
        _ = LRFind([1e-4, 1e-3, 1e-2, 1e-1], losses).suggestion


def test_what_was_found_cannot_be_changed_and_is_shown_on_a_log_axis():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    found = quiet(batches_of([4, 3])).lr_find(num_it=20)
    with pytest.raises(AttributeError):
        found.lrs = []
    assert copy.deepcopy(found) == found
    figure, ax = pyplot.subplots()
    assert found.plot(ax) is figure
    assert ax.get_xscale() == "log"
    assert ax.get_xlabel()
    assert ax.get_ylabel()
    other = found.plot()
    assert other is not figure
    pyplot.close("all")


def test_the_smoothed_loss_is_the_corrected_exponential_average():
    losses = [3.0, 1.0, 4.0, 1.0, 5.0]
    smoothed = LRFind([1, 2, 3, 4, 5], losses).smoothed
    for i in range(5):
        past = [0.98 ** (i - j) for j in range(i + 1)]
        assert smoothed[i] == pytest.approx(
            sum(w * x for w, x in zip(past, losses, strict=False)) / sum(past)
        )
    assert Smoothed().add(7.0) == pytest.approx(7.0)


def test_the_longest_fall_is_the_longest_of_all():
    for seed in range(50):
        values = [random.Random(seed * 100 + i).randrange(8) for i in range(10)]
        best = 0
        for mask in range(1 << 10):
            picked = [values[i] for i in range(10) if mask >> i & 1]
            if all(a > b for a, b in pairwise(picked)):
                best = max(best, len(picked))
        found = longest_fall(values)
        assert len(found) == best
        assert all(i < j and values[i] > values[j] for i, j in pairwise(found))
    assert longest_fall([math.nan, math.inf, 2.0, math.nan, 1.0]) == [2, 4]


@pytest.mark.parametrize("opt_func", [SGD, Adam])
def test_the_suggestion_is_where_the_loss_falls_and_trains_well(opt_func):
    learn = synth_learner(opt_func=opt_func)
    found = find_lr(learn)
    i = found.lrs.index(found.suggestion)
    smoothed = found.smoothed
    assert 0 < i < smoothed.index(min(smoothed))
    assert smoothed[i + 1] < smoothed[i] < smoothed[i - 1]
    fit(learn, 10, lr=found.suggestion)
    assert learn.recorder.rows[-1]["valid_loss"] < 0.1 * found.losses[0]


def test_without_a_suggestion_a_curve_says_so():
    found = LRFind([0.1, 0.2, 0.3], [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="falls at none of 3 rates"):
        found.suggestion  # noqa: B018
    assert repr(found) == "LRFind(no suggestion, of 3 rates from 0.1 to 0.3)"
    assert repr(LRFind([], [])) == "LRFind(no suggestion, of 0 rates)"


def test_the_picture_shows_rates_losses_and_suggestion():
    pytest.importorskip("matplotlib")
    found = find_lr(synth_learner())
    fig = found.plot()
    ax = fig.axes[0]
    assert (ax.get_xscale(), ax.get_xlabel(), ax.get_ylabel()) == ("log", "learning rate", "loss")
    dots, line, suggestion = ax.lines
    assert (list(dots.get_xdata()), list(line.get_ydata())) == (found.lrs, found.smoothed)
    assert suggestion.get_xdata() == [found.suggestion]
    low, high = ax.get_ylim()
    assert low < min(found.losses) < max(found.smoothed[:50]) < high
    assert found.plot(ax) is fig
    fig.savefig("/dev/null", format="png")
    LRFind([0.1, 0.2], [math.nan, math.inf]).plot()
    with pytest.raises(ValueError, match="nothing to draw"):
        LRFind([], []).plot()
