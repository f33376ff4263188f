"""What lr_find gives: the curve, the rate it suggests, and a picture of both."""

import copy
import math

import pytest

from hookcb import (
    LRFind,
)
from tests.training.support import (
    batches_of,
    quiet,
)


def test_smoothed_is_an_average_with_its_bias_corrected():
    losses = [4.0, 1.0, 3.0, 2.5]
    average, expected = 0.0, []
    for i, loss in enumerate(losses, 1):
        average = 0.98 * average + 0.02 * loss
        expected.append(average / (1 - 0.98**i))
    assert list(LRFind([1e-3, 1e-2, 1e-1, 1.0], losses).smoothed) == pytest.approx(expected)


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


@pytest.mark.parametrize("losses", [[1.0, 2.0, 3.0, 9.0], [1.0] * 4, [math.nan] * 4, [1.0, math.inf, 2, 3]])
def test_where_the_loss_falls_nowhere_nothing_is_suggested(losses):
    with pytest.raises(ValueError, match="falls at none"):
        _ = LRFind([1e-4, 1e-3, 1e-2, 1e-1], losses).suggestion


def test_a_curve_without_a_suggestion_is_shown_too():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    assert LRFind([1e-3, 1e-2, 1e-1], [1.0, 2.0, math.nan]).plot().axes
    pyplot.close("all")


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
