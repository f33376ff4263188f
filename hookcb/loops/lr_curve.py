"""LRFind: what a search for the learning rate has seen, and which rate that suggests."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
from hookcb.records.plots import Size, check_any, gapped, make_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BETA = 0.98  # weight of the past in the smoothed loss, as in fastai


class Smoothed:
    """An exponential average of numbers as they come, corrected for its beginning at zero.

    Source: D. Kingma, J. Ba, "Adam", arxiv.org/abs/1412.6980, section 3.

    >>> smoothed = Smoothed(beta=0.5)
    >>> smoothed.add(3.0), smoothed.add(6.0)
    (3.0, 5.0)
    """

    def __init__(self, beta: float = BETA) -> None:
        self.beta, self._sum, self._weight = beta, 0.0, 0.0

    def add(self, value: float) -> float:
        """Takes in a number, gives the average with it."""
        self._sum = self.beta * self._sum + (1 - self.beta) * value
        self._weight = self.beta * self._weight + (1 - self.beta)
        return self._sum / self._weight


@dataclass(frozen=True, slots=True, repr=False)
class LRFind:
    """The losses of a training in which each batch had a higher learning rate than the last.

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
        """The losses, each averaged with those before it, in which the past weighs 0.98 a batch."""
        average = Smoothed()
        return [average.add(loss) for loss in self.losses]

    @property
    def suggestion(self) -> float:
        """A learning rate at which the loss falls well, by the valley rule.

        Of the longest series of batches, not all neighbours, whose smoothed losses fall from each to the
        next, the one two thirds along: past the flat beginning, and well before the loss rises.

        Raises:
            ValueError: where the loss falls nowhere.

        Source: `valley` of fastai, github.com/fastai/fastai/pull/3377, which takes the middle.
        """
        falling = longest_fall(self.smoothed)
        if len(falling) < 2:
            raise ValueError(
                f"the loss falls at none of {len(self.lrs)} rates{self._range()}, so none can be suggested; "
                "try a lower start_lr or a larger num_it, and see whether the model learns at all"
            )
        return self.lrs[falling[2 * (len(falling) - 1) // 3]]

    def plot(self, ax: "Axes | None" = None) -> "Figure":
        """Loss over learning rate, with the suggestion; on `ax`, or a new figure.

        Raises:
            ModuleNotFoundError: without matplotlib.
            ValueError: where no batch was recorded.
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
    """Indices of a longest series in `values`, not all neighbours, in which each is below the last.

    What is not finite is left out.

    Source: M. Fredman, "On computing the length of longest increasing subsequences", Discrete Math. 11, 1975.

    >>> longest_fall([5.0, 6.0, 4.0, 4.5, 3.0, 9.0])
    [1, 3, 4]
    """
    ends: list[int] = []  # index of the highest last value that a falling series of each length can have
    depths: list[float] = []  # those values with their signs changed: they rise
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
    """Loss over learning rate, on a logarithmic axis: each batch a dot, the smoothed loss a line.

    The suggestion is a dot on the line. Heights end a little above the line's beginning: how far the loss
    rises in the end says nothing.

    Raises:
        ModuleNotFoundError: without matplotlib.
        ValueError: when there is nothing to draw.
    """
    check_any(lrs, len(losses))
    ax = ax if ax is not None else make_panels(1, 1, figsize)[0]
    ax.plot(lrs, gapped(losses), ".", color="0.75", markersize=4, label="loss of the batch")
    ax.plot(lrs, gapped(smoothed), label="smoothed")
    ax.set_xscale("log")
    if suggestion is not None:
        height = smoothed[min(range(len(lrs)), key=lambda i: abs(lrs[i] - suggestion))]
        ax.plot([suggestion], [height], "o", color="C3", label=f"suggestion {suggestion:.2g}")
    bounds = _heights(losses, smoothed)
    if bounds:
        ax.set_ylim(*bounds)
    ax.set_xlabel("learning rate")
    ax.set_ylabel("loss")
    ax.legend(frameon=False, fontsize=9)
    return ax.figure.figure


def _heights(losses: Sequence[float], smoothed: Sequence[float]) -> tuple[float, float] | None:
    """Bounds for losses that fall and then shoot up; None where they do not fall."""
    finite = [value for value in smoothed if math.isfinite(value)]
    top = max(finite[: finite.index(min(finite)) + 1]) if finite else 0.0
    low = min(filter(math.isfinite, (*losses, *smoothed)), default=0.0)
    return (low - 0.05 * (top - low), top + 0.3 * (top - low)) if top > low else None
