"""Figures of GradientHealth; matplotlib is imported when one is drawn, pyplot never."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hookcb.core.randomness import random_kept

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
from hookcb.records.plots import Series, Size, check_any, make_panels, shortened_names


def flow_bars(
    layers: Sequence[tuple[str, float, float]], figsize: Size = None, ax: "Axes | None" = None
) -> "Figure":
    """Mean and largest |gradient| of layers in the order of the model, on a logarithmic axis.

    `layers` has name, mean and largest; a value that is 0 or not finite leaves a gap, marked by a red cross.

    Raises:
        ModuleNotFoundError: Without matplotlib.
        ValueError: If there is nothing to draw.

    Source: A. Rossi ("RoshanRane"), "Check gradient flow in network", discuss.pytorch.org, 2018.
    """
    check_any(layers, len(layers))
    n = len(layers)
    ax = ax if ax is not None else make_panels(1, 1, figsize or (min(12, max(6.4, 1.6 + 0.3 * n)), 4.2))[0]
    names, means, maxima = zip(*layers, strict=True)
    ax.set_yscale("log")
    known = [x for x in (*means, *maxima) if 0 < x < math.inf]
    low, high = min(known, default=0.1), max(known, default=1.0)
    bottom = low / (high / low) ** 0.08 / 1.3
    ax.bar(range(n), [_positive(x) for x in maxima], width=0.7, color="C0", alpha=0.35, label="largest")
    ax.plot(range(n), [_positive(x) for x in means], "o-", color="C1", markersize=4, label="mean")
    odd = [i for i in range(n) if not (0 < means[i] < math.inf and maxima[i] < math.inf)]
    if odd:
        ax.plot(odd, [bottom] * len(odd), "rx", clip_on=False, zorder=3, label="0, NaN or inf")
    ax.set_ylim(bottom, high * (high / low) ** 0.05 * 1.3)
    ax.set_xlim(-0.6, n - 0.4)
    width = ax.bbox.width / ax.figure.dpi
    every = math.ceil(n / max(1, width / 0.17))  # inches for a vertical label
    ax.set_xticks(range(0, n, every), shortened_names(names, 24)[::every], rotation=90, fontsize=8)
    ax.set_ylabel("|gradient|")
    ax.grid(axis="y", color="0.9")
    ax.set_axisbelow(True)
    ax.set_title("gradient flow, first layer to last", loc="left", fontsize=11)
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), frameon=False, fontsize=8, ncols=3, borderpad=0)
    return ax.figure.figure


def _positive(x: float) -> float:
    return x if 0 < x < math.inf else math.nan


def update_lines(
    ratios: Series, x: Sequence[int], figsize: Size = None, ax: "Axes | None" = None
) -> "Figure":
    """Log10 of ‖Δw‖/‖w‖ of parameters over the steps `x`, with a line at 1e-3.

    A step without a change leaves a gap. Colors go from dark for the first parameter to light for the last;
    more than 12 have no legend.

    Raises:
        ModuleNotFoundError: Without matplotlib.
        ValueError: If there is nothing to draw.

    Source: A. Karpathy, "Building makemore part 3", 2022.
    """
    check_any(ratios, len(x))
    few = len(ratios) <= 12
    ax = ax if ax is not None else make_panels(1, 1, figsize or (8 if few else 6.4, 4))[0]
    with random_kept():
        import matplotlib

    colors = matplotlib.colormaps["viridis"]
    for i, (name, values) in enumerate(zip(shortened_names(ratios, 30), ratios.values(), strict=True)):
        logs = [math.log10(value) if 0 < value < math.inf else math.nan for value in values]
        alone = [k for k, value in enumerate(logs) if not math.isnan(value) and len(logs) == 1]
        color = colors(0.92 * i / max(1, len(ratios) - 1))
        ax.plot(x, logs, color=color, linewidth=1, marker=".", markevery=alone, label=name)
    ax.axhline(-3, color="C3", linestyle="--", linewidth=1)
    ax.annotate("1e-3, usual", (1, -3), xycoords=("axes fraction", "data"), color="C3", fontsize=8,
                xytext=(-3, 3), textcoords="offset points", ha="right")  # fmt: skip
    ax.set_xlabel("step")
    ax.set_ylabel("log10 of ‖Δw‖ / ‖w‖")
    rim = max(0.5, 0.03 * (x[-1] - x[0]))
    ax.set_xlim(x[0] - rim, x[-1] + rim)
    ax.locator_params(axis="x", integer=True, min_n_ticks=1)
    ax.set_title("size of updates", loc="left", fontsize=11)
    if few:
        ax.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
    else:
        first, *_, last = shortened_names(ratios, 24)
        ends = f"{len(ratios)} parameters: dark {first}, light {last}"
        ax.set_title(ends, loc="right", fontsize=8)
    return ax.figure.figure
