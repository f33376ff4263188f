"""Figures of ActivationStats; matplotlib is imported when one is drawn, pyplot never."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hookcb.records.plots import (
    Series,
    Size,
    add_colorbar,
    check_any,
    cut_name,
    draw_image,
    gapped,
    make_panels,
    shortened_names,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage


def color_dim(
    hists: Mapping[str, tuple[Tensor, float, float]], figsize: Size = None, ax: "Axes | None" = None
) -> "Figure":
    """Histograms over time, the "colorful dimension": how a layer's values spread, record by record.

    `hists` has log1p of counts `(bins + 2, records)` by layer name, underflow first and overflow last, and
    the low and high edge of the bins between. The bands `<low` and `>high` show values outside. All layers
    share one color scale; records that share a pixel are averaged.

    Raises:
        ModuleNotFoundError: Without matplotlib.
        ValueError: If there is nothing to draw, or `ax` is given for several layers.

    Source: Stefano Giomo, "The colorful dimension", forums.fast.ai, 2019.
    """
    n, columns = len(hists), math.ceil(math.sqrt(len(hists)))
    check_any(hists, min((counts.shape[1] for counts, *_ in hists.values()), default=0))
    if ax is not None and n > 1:
        raise ValueError(f"ax has room for one layer, not for {n}; name a layer, or leave ax out")
    panels = [ax] if ax is not None else make_panels(n, columns, figsize)
    fig, size = panels[0].figure.figure, 10 if n == 1 else 8
    names = shortened_names(hists, 60 if ax is not None else int(fig.get_figwidth() / columns * 105 / size))
    most = max(counts.max().item() for counts, *_ in hists.values()) or 1.0
    for i, (panel, name, hist) in enumerate(zip(panels, names, hists.values(), strict=True)):
        image = _draw_hist(panel, *hist, most)
        panel.set_title(name, fontsize=size + 1)
        panel.tick_params(labelsize=size, labelbottom=i >= n - columns)
        panel.set_xlabel("record" if i // columns == (n - 1) // columns else "", fontsize=size)
    add_colorbar(image, panels, columns, "log(1 + count)")
    return fig


def layer_lines(
    title: str, series: Series, x: Sequence[int], figsize: Size = None, axs: "Sequence[Axes] | None" = None
) -> "Figure":
    """Statistics of a layer over the steps `x`, a panel each; NaN leaves a gap, infinity a red tick.

    Raises:
        ModuleNotFoundError: Without matplotlib.
        ValueError: If there is nothing to draw, or the numbers of `axs` and `series` differ.
    """
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


def share_chart(
    shares: Series, x: Sequence[int], title: str, figsize: Size = None, ax: "Axes | None" = None
) -> "Figure":
    """Heat map of shares in 0..1: a row for each layer, a column for each record, made at the steps `x`.

    The first layer is on top; gray is NaN: the layer was not called.

    Raises:
        ModuleNotFoundError: Without matplotlib.
        ValueError: If there is nothing to draw.
    """
    check_any(shares, len(x))
    n = len(shares)
    ax = ax if ax is not None else make_panels(1, 1, figsize or (8, min(1.6 + 0.2 * n, 14)))[0]
    values = torch.tensor([list(row) for row in shares.values()])
    image = draw_image(ax, values, -0.5, n - 0.5, 1.0)
    ax.set_ylim(n - 0.5, -0.5)
    width, height = (side / ax.figure.dpi for side in ax.bbox.size)
    every = math.ceil(n / max(1, height / 0.15))  # a label of 8 points needs 0.15 inches
    ax.set_yticks(range(0, n, every), shortened_names(shares, int(5 * width))[::every], fontsize=8)
    ticks = ax.xaxis.get_major_locator().tick_values(0, len(x) - 1)
    records = [int(tick) for tick in ticks if 0 <= tick < len(x)]
    ax.set_xticks(records, [str(x[record]) for record in records])
    ax.set_xlabel("step")
    gaps = bool(values.isnan().any())
    ax.set_title(cut_name(title, int(12 * width)), loc="left", fontsize=11, pad=20 if gaps else None)
    if gaps:
        ax.set_facecolor("0.85")  # visible in cells without a value
        ax.plot([], [], "s", color="0.85", markeredgecolor="0.5", label="did not fire")
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, borderpad=0, fontsize=8)
    add_colorbar(image, [ax], 1, "share")
    return ax.figure.figure


def _draw_hist(ax: "Axes", counts: Tensor, low: float, high: float, most: float) -> "AxesImage":
    edges = low, high
    if not high - low > 1e-9 * max(abs(low), abs(high)):  # also for NaN: the axis then counts bins
        low, high = 0.0, counts.shape[0] - 2.0
    rim = 0.06 * (high - low)
    draw_image(ax, counts[:1], low - rim, low, most)
    draw_image(ax, counts[-1:], high, high + rim, most)
    image = draw_image(ax, counts[1:-1], low, high, most)
    ax.set_ylim(low - rim, high + rim)
    for edge in (low, high):
        ax.axhline(edge, color="white", linewidth=0.8)
    ticks = ax.yaxis.get_major_locator().tick_values(low, high)
    inner = [tick for tick in ticks if low + 2 * rim < tick < high - 2 * rim]
    digits = 3 + max(0, math.ceil(math.log10(max(abs(low), abs(high)) / (high - low))))
    texts = [f"{v:.{digits}g}" for v in (*inner, *edges)]
    labels = [f"<{texts[-2]}", *texts[:-2], f">{texts[-1]}"]
    ax.set_yticks([low - rim / 2, *inner, high + rim / 2], labels)
    return image


def _draw_line(ax: "Axes", name: str, values: Sequence[float], x: Sequence[int]) -> None:
    known = [False, *map(math.isfinite, values), False]
    alone = [i for i in range(len(values)) if known[i : i + 3] == [False, True, False]]
    # above the frame: a line may run along 0 or 1
    ax.plot(x, gapped(values), marker=".", markevery=alone, zorder=3)
    infinite = [step for step, value in zip(x, values, strict=True) if math.isinf(value)]
    if infinite:
        low, high = ax.get_ylim()
        ax.plot(infinite, [low] * len(infinite), "r|", markersize=14, label="infinite")
        ax.set_ylim(low, high)
        ax.legend(loc="lower right", bbox_to_anchor=(1, 1), frameon=False, fontsize=8, markerscale=0.6)
    rim = max(0.5, 0.03 * (x[-1] - x[0]))
    ax.set_xlim(x[0] - rim, x[-1] + rim)
    if name in ("near zero", "zeros"):
        ax.set_ylim(0, 1)
    ax.set_title(name)
    ax.set_xlabel("step")
    ax.locator_params(axis="x", integer=True, min_n_ticks=1)
