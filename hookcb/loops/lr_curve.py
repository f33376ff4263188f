"""LRFind: losses of a learning rate search, and the rate that they suggest."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hookcb.records.plots import BLUE, ORANGE, Size, check_any, gapped, make_panels
from hookcb.records.series import Smoothed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, repr=False)
class LRFind:
    """Losses of a training in which each batch had a higher learning rate than the one before.

    Attributes:
        lrs: the learning rate of each batch.
        losses: the loss of each batch, in the loss function's unit.

    >>> from hookcb import synth_learner
    >>> found = synth_learner().lr_find()
    >>> found.lrs[0] < found.suggestion < found.lrs[-1]
    True
    """

    lrs: list[float]
    losses: list[float]

    @property
    def smoothed(self) -> list[float]:
        """Exponential moving average of the losses, with a weight of 0.98 for the past."""
        average = Smoothed()
        return [average.add(loss) for loss in self.losses]

    @property
    def suggestion(self) -> float:
        """A learning rate at which the loss falls well, by the valley rule.

        Takes the longest falling subsequence of the smoothed losses, and the batch at two thirds of it: past
        the flat beginning, and well before the loss rises.

        Raises:
            ValueError: If the loss falls nowhere.

        Source: `valley` of fastai, github.com/fastai/fastai/pull/3377, which takes the middle.
        """
        falling = longest_fall(self.smoothed)
        if len(falling) < 2:
            raise ValueError(
                f"the loss falls at none of {len(self.lrs)} rates{self._range()}, so there is no suggestion; "
                "try a lower start_lr or a larger num_it, and see whether the model learns at all"
            )
        return self.lrs[falling[2 * (len(falling) - 1) // 3]]

    @property
    def valley(self) -> float:
        """Fastai's name of `suggestion`."""
        return self.suggestion

    def plot(self, ax: "Axes | None" = None) -> "Figure":
        """Plots the loss over the learning rate, with the suggestion, on `ax` or a new figure.

        Raises:
            ModuleNotFoundError: Without matplotlib.
            ValueError: If no batch was recorded.
        """
        return lr_curve(self.lrs, self.losses, self.smoothed, self._suggested(), ax=ax)

    def _suggested(self) -> float | None:
        try:
            return self.suggestion
        except ValueError:
            return None

    def _range(self) -> str:
        return f" from {self.lrs[0]:.2g} to {self.lrs[-1]:.2g}" if self.lrs else ""

    def __repr__(self) -> str:
        suggested = self._suggested()
        text = "no suggestion" if suggested is None else f"suggestion {suggested:.2g}"
        return f"LRFind({text}, of {len(self.lrs)} rates{self._range()})"


def longest_fall(values: Sequence[float]) -> list[int]:
    """Indices of a longest falling subsequence of `values`; values that are not finite are ignored.

    Source: M. Fredman, "On computing the length of longest increasing subsequences", Discrete Math. 11, 1975.

    >>> longest_fall([5.0, 6.0, 4.0, 4.5, 3.0, 9.0])
    [1, 3, 4]
    """
    ends: list[int] = []  # index of the highest last value of a falling subsequence, by length - 1
    depths: list[float] = []  # those values negated, so that they rise
    before: dict[int, int | None] = {}
    for i, value in enumerate(values):
        if not math.isfinite(value):
            continue
        length = bisect_left(depths, -value)
        before[i] = ends[length - 1] if length else None
        ends[length : length + 1], depths[length : length + 1] = [i], [-value]
    falling: list[int] = []
    i_last = ends[-1] if ends else None
    while i_last is not None:
        falling.append(i_last)
        i_last = before[i_last]
    return falling[::-1]


def lr_curve(
    lrs: Sequence[float],
    losses: Sequence[float],
    smoothed: Sequence[float],
    suggestion: float | None = None,
    figsize: Size = None,
    ax: "Axes | None" = None,
) -> "Figure":
    """Plots loss over learning rate, on a logarithmic axis: dots for batches, a line for the smoothed loss.

    The suggestion is a dot on the line. The y-axis ends a little above the line's beginning, as it does not
    matter how far the loss rises in the end.

    Raises:
        ModuleNotFoundError: Without matplotlib.
        ValueError: If there is nothing to draw.
    """
    check_any(lrs, len(losses))
    ax = ax if ax is not None else make_panels(1, 1, figsize)[0]
    ax.plot(lrs, gapped(losses), ".", color="0.75", markersize=4, label="loss of the batch")
    ax.plot(lrs, gapped(smoothed), color=BLUE, label="smoothed")
    ax.set_xscale("log")
    if suggestion is not None:
        height = smoothed[min(range(len(lrs)), key=lambda i: abs(lrs[i] - suggestion))]
        ax.plot([suggestion], [height], "o", color=ORANGE, label=f"suggestion {suggestion:.2g}")
    limits = _y_limits(losses, smoothed)
    if limits:
        ax.set_ylim(*limits)
    ax.set_xlabel("learning rate")
    ax.set_ylabel("loss")
    ax.legend(frameon=False, fontsize=9)
    return ax.figure.figure


def _y_limits(losses: Sequence[float], smoothed: Sequence[float]) -> tuple[float, float] | None:
    """Limits of the y-axis for losses that fall and then shoot up; None if they do not fall."""
    finite = [value for value in smoothed if math.isfinite(value)]
    top = max(finite[: finite.index(min(finite)) + 1]) if finite else 0.0
    low = min(filter(math.isfinite, (*losses, *smoothed)), default=0.0)
    return (low - 0.05 * (top - low), top + 0.3 * (top - low)) if top > low else None
