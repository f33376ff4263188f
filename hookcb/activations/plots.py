"""Figures of ActivationStats; matplotlib is imported when one is drawn, pyplot never.

Each raises ModuleNotFoundError without matplotlib, and ValueError if there is nothing to draw, or not as many
axes are given as there are panels.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hookcb.records.plots import (
    ALARM,
    BLUE,
    MISSING,
    ORANGE,
    ByName,
    Size,
    add_colorbar,
    check_any,
    cut_name,
    draw_image,
    gapped,
    label_steps,
    limit_steps,
    make_panels,
    mark_odd,
    name_columns,
    shortened_names,
)

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

SHARES = ("near zero", "zeros")


class Hist(NamedTuple):
    """Histograms of a layer, one per record.

    Attributes:
        counts: log(1 + count), `(bins + 2, records)`, underflow first and overflow last; NaN in records in
            which the layer was not called.
        edges: edges of the bins between, `bins + 1`, in the unit of the layer's output.
        nonfinite: share of NaN and infinite elements in each record, which no bin counts.
    """

    counts: Tensor
    edges: Sequence[float]
    nonfinite: Sequence[float] = ()


def color_dim(
    hists: Mapping[str, Hist], x: Sequence[int], figsize: Size = None, ax: "Axes | None" = None
) -> "Figure":
    """Histograms over the steps `x`, the "colorful dimension": how a layer's values spread, record by record.

    All bins are equally high; the bands `<low` and `>high` show the values outside. A mark on top is a record
    with NaN or infinite values. All layers share one color scale; records that share a pixel are averaged.

    Source: Stefano Giomo, "The colorful dimension", forums.fast.ai, 2019.
    """
    n, columns = len(hists), math.ceil(math.sqrt(len(hists)))
    check_any(hists, len(x))
    if ax is not None and n > 1:
        raise ValueError(f"ax has room for one layer, not for {n}; name a layer, or leave ax out")
    panels = [ax] if ax is not None else make_panels(n, columns, figsize)
    fig, size = panels[0].figure.figure, 10 if n == 1 else 8
    names = shortened_names(hists, 60 if ax is not None else int(fig.get_figwidth() / columns * 92 / size))
    shown = list(hists.values())
    most = max(hist.counts.nan_to_num(0).max().item() for hist in shown) or 1.0
    for i, (panel, name, hist) in enumerate(zip(panels, names, shown, strict=True)):
        image = _draw_hist(panel, hist, most)
        label_steps(panel, x)
        panel.set_title(name, fontsize=size + 1)
        panel.tick_params(labelsize=size, labelbottom=i >= n - columns)
        panel.set_xlabel("step" if i // columns == (n - 1) // columns else "", fontsize=size)
        panel.set_ylabel("" if i % columns else "value", fontsize=size)
    add_colorbar(image, panels, columns, "log(1 + count)")
    _add_legend(panels, shown)
    return fig


def layer_lines(
    title: str, series: ByName, x: Sequence[int], figsize: Size = None, axs: "Sequence[Axes] | None" = None
) -> "Figure":
    """Statistics of a layer over the steps `x`, a panel each; NaN leaves a gap, infinity a red tick."""
    check_any(series, len(x))
    n = len(series)
    if axs is not None and len(axs) != n:
        raise ValueError(f"{n} axs are needed, one each for {', '.join(series)}; got {len(axs)}")
    panels = axs if axs is not None else make_panels(n, n, figsize or (3.4 * n, 3))
    for panel, (name, values) in zip(panels, series.items(), strict=True):
        _draw_line(panel, name.replace("_", " "), values, x)
    fig = panels[0].figure.figure
    if axs is None:
        fig.suptitle(cut_name(title, int(fig.get_figwidth() * 9)))
    else:  # the figure is the user's
        panels[0].set_ylabel(cut_name(title, 40))
    return fig


def depth_lines(
    layers: Sequence[str], stds: ByName, figsize: Size = None, ax: "Axes | None" = None
) -> "Figure":
    """Standard deviation of the layers' outputs in the order of the model, a line for each name in `stds`.

    The axis is logarithmic; a value that is 0 or not finite leaves a gap, marked by a cross.
    """
    n = len(layers)
    check_any(stds, n)
    ax = ax if ax is not None else make_panels(1, 1, figsize or (min(12, max(6.4, 1.6 + 0.3 * n)), 4.2))[0]
    ax.set_yscale("log")
    for (label, values), color in zip(stds.items(), (ORANGE, BLUE), strict=False):
        ax.plot(range(n), gapped(values, above=0.0), "o-", color=color, markersize=4, label=label)
    mark_odd(ax, [i for i in range(n) if not all(0 < x[i] < math.inf for x in stds.values())])
    ax.set_xlim(-0.6, n - 0.4)
    name_columns(ax, layers)
    ax.set_ylabel("std of the output")
    ax.grid(axis="y", color="0.9")
    ax.set_axisbelow(True)
    ax.set_title("signal over depth, first layer to last", loc="left", fontsize=11)
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), frameon=False, fontsize=8, ncols=3, borderpad=0)
    return ax.figure.figure


def layer_chart(
    rows: ByName,
    x: Sequence[int],
    title: str,
    figsize: Size = None,
    ax: "Axes | None" = None,
    is_share: bool = True,
) -> "Figure":
    """Heat map of shares in 0..1: a row for each layer, a column for each record, made at the steps `x`.

    Of other numbers, which are magnitudes, it shows the logarithm; 0 and infinity have the colors of the
    smallest and the largest of the others. The first layer is on top; gray is NaN: the layer was not called.
    """
    check_any(rows, len(x))
    n = len(rows)
    ax = ax if ax is not None else make_panels(1, 1, figsize or (8, min(1.6 + 0.2 * n, 14)))[0]
    values = torch.tensor([list(row) for row in rows.values()], dtype=torch.float64, device="cpu")
    ends = 0.0, 1.0
    if not is_share:
        values = values.log10()
        known = values[values.isfinite()]
        ends = (known.min().item(), known.max().item()) if len(known) else ends
        values = values.clamp(*ends)
    image = draw_image(ax, values, -0.5, n - 0.5, 1.0)
    image.set_clim(ends[0], ends[1] if ends[1] > ends[0] else ends[0] + 1)
    ax.set_ylim(n - 0.5, -0.5)
    width, height = (side / ax.figure.dpi for side in ax.bbox.size)
    every = math.ceil(n / max(1, height / 0.15))  # a label of 8 points needs 0.15 inches
    ax.set_yticks(range(0, n, every), shortened_names(rows, int(5 * width))[::every], fontsize=8)
    label_steps(ax, x)
    ax.set_xlabel("step")
    gaps = bool(values.isnan().any())
    ax.set_title(cut_name(title, int(12 * width)), loc="left", fontsize=11, pad=20 if gaps else None)
    if gaps:
        _mark_missing(ax)
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, borderpad=0, fontsize=8)
    add_colorbar(image, [ax], 1, "share" if is_share else "log10")
    return ax.figure.figure


def _mark_missing(ax: "Axes") -> None:
    """Shows cells without a value in gray."""
    ax.set_facecolor(MISSING)
    ax.plot([], [], "s", color=MISSING, markeredgecolor="0.5", label="did not fire")


def _add_legend(panels: "Sequence[Axes]", hists: Sequence[Hist]) -> None:
    """Explains gray records and marks, in the first panel that has them."""
    handles: dict[str, Artist] = {}
    for panel, hist in zip(panels, hists, strict=True):
        if hist.counts.isnan().any():
            _mark_missing(panel)
        found, labels = panel.get_legend_handles_labels()
        handles |= dict(zip(labels, found, strict=True))
    if handles:
        panels[0].legend(list(handles.values()), list(handles), loc="upper left", fontsize=8, framealpha=0.9)


def _draw_hist(ax: "Axes", hist: Hist, most: float) -> "AxesImage":
    counts, edges, nonfinite = hist
    n = len(edges) - 1
    rim = 0.06 * n
    draw_image(ax, counts[:1], -rim, 0, most)
    draw_image(ax, counts[-1:], n, n + rim, most)
    image = draw_image(ax, counts[1:-1], 0, n, most)
    odd = [record for record, share in enumerate(nonfinite) if share > 0]
    if odd:
        ax.plot(odd, [n + 1.75 * rim] * len(odd), "|", color=ALARM, markersize=6, label="NaN or inf")
    ax.set_ylim(-rim, n + rim * (2.5 if odd else 1))
    for end in (0, n):
        ax.axhline(end, color="white", linewidth=0.8)
    inner = _ticks(edges)
    labels = [f"<{edges[0]:.3g}", *(f"{edges[i]:.3g}" for i in inner), f">{edges[-1]:.3g}"]
    ax.set_yticks([-rim / 2, *inner, n + rim / 2], labels)
    return image


def _ticks(edges: Sequence[float]) -> list[int]:
    """Places of a few edges to label, 0 among them if it is one, and none near an end."""
    n = len(edges) - 1
    middle = min(range(n + 1), key=lambda i: abs(edges[i]))
    step = max(1, -(-n // 5))
    return [i for i in range(middle % step, n + 1, step) if 0.12 * n < i < 0.88 * n]


def _draw_line(ax: "Axes", name: str, values: Sequence[float], x: Sequence[int]) -> None:
    known = [False, *map(math.isfinite, values), False]
    alone = [i for i in range(len(values)) if known[i : i + 3] == [False, True, False]]
    # above the frame: a line may run along 0 or 1
    ax.plot(x, gapped(values), color=BLUE, marker=".", markevery=alone, zorder=3)
    infinite = [step for step, value in zip(x, values, strict=True) if math.isinf(value)]
    if infinite:
        low, high = ax.get_ylim()
        ax.plot(infinite, [low] * len(infinite), "|", color=ALARM, markersize=14, label="infinite")
        ax.set_ylim(low, high)
        ax.legend(loc="lower right", bbox_to_anchor=(1, 1), frameon=False, fontsize=8, markerscale=0.6)
    limit_steps(ax, x)
    if name in SHARES:
        ax.set_ylim(0, 1)
    ax.set_ylabel("share of elements" if name in SHARES else "unit of the output")
    ax.set_title(name)
