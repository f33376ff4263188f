"""Figures of GradientHealth; matplotlib is imported when one is drawn, pyplot never."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hookcb.core.randomness import random_kept

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
from hookcb.records.plots import (
    ALARM,
    BLUE,
    ORANGE,
    ByName,
    Size,
    check_any,
    cut_name,
    gapped,
    limit_steps,
    make_panels,
    mark_odd,
    name_columns,
    shortened_names,
)

USUAL = -3  # log10 of the ratio of updates to weights in a healthy training
N_NAMED = 5


def flow_bars(
    layers: Sequence[tuple[str, float, float]], figsize: Size = None, ax: "Axes | None" = None
) -> "Figure":
    """Mean and largest |gradient| of layers in the order of the model, on a logarithmic axis.

    `layers` has name, mean and largest; a value that is 0 or not finite leaves a gap, marked by a cross.

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
    ax.bar(range(n), gapped(maxima, above=0.0), width=0.7, color=BLUE, alpha=0.35, label="largest")
    ax.plot(range(n), gapped(means, above=0.0), "o-", color=ORANGE, markersize=4, label="mean")
    ax.set_ylim(bottom, high * (high / low) ** 0.05 * 1.3)
    mark_odd(ax, [i for i in range(n) if not (0 < means[i] < math.inf and maxima[i] < math.inf)])
    ax.set_xlim(-0.6, n - 0.4)
    name_columns(ax, names)
    ax.set_ylabel("|gradient|")
    ax.grid(axis="y", color="0.9")
    ax.set_axisbelow(True)
    ax.set_title("gradient flow, first layer to last", loc="left", fontsize=11)
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), frameon=False, fontsize=8, ncols=3, borderpad=0)
    return ax.figure.figure


def update_lines(
    ratios: ByName, x: Sequence[int], figsize: Size = None, ax: "Axes | None" = None
) -> "Figure":
    """Log10 of ‖Δw‖/‖w‖ of parameters over the steps `x`, with a line at 1e-3.

    A step without a change leaves a gap. Colors go from dark for the first parameter to light for the last.
    Of more than 12, the five that end farthest from 1e-3 are named beside their ends.

    Source: A. Karpathy, "Building makemore part 3", 2022.
    """
    check_any(ratios, len(x))
    few = len(ratios) <= 12
    ax = ax if ax is not None else make_panels(1, 1, figsize or (8 if few else 6.4, 4))[0]
    with random_kept():
        import matplotlib

    colors = matplotlib.colormaps["viridis"]
    for i, (name, values) in enumerate(zip(shortened_names(ratios, 30), ratios.values(), strict=True)):
        logs = [math.log10(value) for value in gapped(values, above=0.0)]
        alone = [k for k, value in enumerate(logs) if not math.isnan(value) and len(logs) == 1]
        color = colors(0.92 * i / max(1, len(ratios) - 1))
        ax.plot(x, logs, color=color, linewidth=1, marker=".", markevery=alone, label=name)
    ax.axhline(USUAL, color=ALARM, linestyle="--", linewidth=1)
    ax.annotate("1e-3, usual", (1, USUAL), xycoords=("axes fraction", "data"), color=ALARM, fontsize=8,
                xytext=(-3, 3), textcoords="offset points", ha="right")  # fmt: skip
    limit_steps(ax, x)
    ax.set_ylabel("log10 of ‖Δw‖ / ‖w‖")
    ax.set_title("size of updates", loc="left", fontsize=11)
    if few:
        ax.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
    else:
        ax.set_title(f"{len(ratios)} parameters, dark to light", loc="right", fontsize=8)
        _name_ends(ax, ratios)
    return ax.figure.figure


def _name_ends(ax: "Axes", ratios: ByName) -> None:
    """Names the lines that end farthest from the usual ratio, from the top down and not over one another."""
    ends = {
        name: next((x for x in reversed(gapped(values, above=0.0)) if x == x), None)
        for name, values in ratios.items()
    }
    logs = {name: math.log10(x) for name, x in ends.items() if x is not None}
    worst = sorted(logs, key=lambda name: -abs(logs[name] - USUAL))[:N_NAMED]
    low, high = ax.get_ylim()
    line = (high - low) * 0.15 * ax.figure.dpi / ax.bbox.height  # a label of 8 points needs 0.15 inches
    at = math.inf
    for name in sorted(worst, key=lambda name: -logs[name]):
        at = min(logs[name], at - line)
        ax.annotate(cut_name(name, 30), (1.01, at), xycoords=("axes fraction", "data"), fontsize=8,
                    va="center", annotation_clip=False)  # fmt: skip
