"""Pictures of plain data: matplotlib figures that pyplot never hears of, and bars made of text."""

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hookcb.core.randomness import random_kept

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

Size = tuple[float, float] | None  # width and height in inches; None: what the number of panels asks for
Series = Mapping[str, Sequence[float]]  # a value per record, by name
BARS = "▁▂▃▄▅▆▇█"


def color_dim(
    hists: Mapping[str, tuple[Tensor, float, float]], figsize: Size = None, ax: "Axes | None" = None
) -> "Figure":
    """Histograms over time, the 'colourful dimension': how a layer's values spread, record by record.

    `hists` has log1p of counts `(bins + 2, records)` by name of the layer, underflow first and overflow last,
    and the low and high edge of the bins between. The bands `<low` and `>high` show what lies outside. All
    layers share one colour scale; records that fall on one pixel are averaged.

    Raises:
        ModuleNotFoundError: without matplotlib.
        ValueError: when there is nothing to draw, or several layers are to share `ax`.

    Source: Stefano Giomo, "The colorful dimension", forums.fast.ai, 2019.
    """
    n, columns = len(hists), math.ceil(math.sqrt(len(hists)))
    _check_any(hists, min((counts.shape[1] for counts, *_ in hists.values()), default=0))
    if ax is not None and n > 1:
        raise ValueError(f"ax has room for one layer, not for {n}; name a layer, or leave ax out")
    panels = [ax] if ax is not None else _panels(n, columns, figsize)
    fig, size = panels[0].figure.figure, 10 if n == 1 else 8
    names = _shortened(hists, 60 if ax is not None else int(fig.get_figwidth() / columns * 105 / size))
    most = max(counts.max().item() for counts, *_ in hists.values()) or 1.0
    for i, (panel, name, hist) in enumerate(zip(panels, names, hists.values(), strict=True)):
        image = _draw_hist(panel, *hist, most)
        panel.set_title(name, fontsize=size + 1)
        panel.tick_params(labelsize=size, labelbottom=i >= n - columns)
        panel.set_xlabel("record" if i // columns == (n - 1) // columns else "", fontsize=size)
    _colour_bar(image, panels, columns, "log(1 + count)")
    return fig


def layer_lines(
    title: str, series: Series, x: Sequence[int], figsize: Size = None, axs: "Sequence[Axes] | None" = None
) -> "Figure":
    """Statistics of one layer over the steps `x`, a panel each; NaN leaves a gap, infinity a red tick below.

    Raises:
        ModuleNotFoundError: without matplotlib.
        ValueError: when there is nothing to draw, or `axs` are not as many as `series`.
    """
    _check_any(series, len(x))
    n = len(series)
    if axs is not None and len(axs) != n:
        raise ValueError(f"{n} axs are needed, one each for {', '.join(series)}; got {len(axs)}")
    panels = axs if axs is not None else _panels(n, n, figsize or (3.4 * n, 3))
    for panel, (name, values) in zip(panels, series.items(), strict=True):
        _draw_line(panel, name.replace("_", " "), values, x)
    fig = panels[0].figure.figure
    if axs is None:
        fig.suptitle(_cut(title, int(fig.get_figwidth() * 9)))
    else:  # the title of this figure is not ours to set
        panels[0].set_ylabel(_cut(title, 40))
    return fig


def share_chart(
    shares: Series, x: Sequence[int], title: str, figsize: Size = None, ax: "Axes | None" = None
) -> "Figure":
    """Heat map of shares in 0..1: a row for each layer, a column for each record, made at the steps `x`.

    The first layer is on top; grey is NaN, where a layer did not fire.

    Raises:
        ModuleNotFoundError: without matplotlib.
        ValueError: when there is nothing to draw.
    """
    _check_any(shares, len(x))
    n = len(shares)
    ax = ax if ax is not None else _panels(1, 1, figsize or (8, min(1.6 + 0.2 * n, 14)))[0]
    values = torch.tensor([list(row) for row in shares.values()])
    image = _draw_image(ax, values, -0.5, n - 0.5, 1.0)
    ax.set_ylim(n - 0.5, -0.5)
    width, height = (side / ax.figure.dpi for side in ax.bbox.size)
    every = math.ceil(n / max(1, height / 0.15))  # a label of 8 points needs 0.15 inches
    ax.set_yticks(range(0, n, every), _shortened(shares, int(5 * width))[::every], fontsize=8)
    ticks = ax.xaxis.get_major_locator().tick_values(0, len(x) - 1)
    records = [int(tick) for tick in ticks if 0 <= tick < len(x)]
    ax.set_xticks(records, [str(x[record]) for record in records])
    ax.set_xlabel("step")
    gaps = bool(values.isnan().any())
    ax.set_title(_cut(title, int(12 * width)), loc="left", fontsize=11, pad=20 if gaps else None)
    if gaps:
        ax.set_facecolor("0.85")  # shines through where there is no value
        ax.plot([], [], "s", color="0.85", markeredgecolor="0.5", label="did not fire")
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, borderpad=0, fontsize=8)
    _colour_bar(image, [ax], 1, "share")
    return ax.figure.figure


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
    _check_any(lrs, len(losses))
    ax = ax if ax is not None else _panels(1, 1, figsize)[0]
    ax.plot(lrs, _gapped(losses), ".", color="0.75", markersize=4, label="loss of the batch")
    ax.plot(lrs, _gapped(smoothed), label="smoothed")
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


def flow_bars(
    layers: Sequence[tuple[str, float, float]], figsize: Size = None, ax: "Axes | None" = None
) -> "Figure":
    """Mean and largest |gradient| of layers in the order of the model, on a logarithmic axis.

    `layers` has name, mean and largest; what is 0 or not finite leaves a gap, and a red cross below says so.

    Raises:
        ModuleNotFoundError: without matplotlib.
        ValueError: when there is nothing to draw.

    Source: A. Rossi ("RoshanRane"), "Check gradient flow in network", discuss.pytorch.org, 2018.
    """
    _check_any(layers, len(layers))
    n = len(layers)
    ax = ax if ax is not None else _panels(1, 1, figsize or (min(12, max(6.4, 1.6 + 0.3 * n)), 4.2))[0]
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
    every = math.ceil(n / max(1, width / 0.17))  # a label upright needs 0.17 inches
    ax.set_xticks(range(0, n, every), _shortened(names, 24)[::every], rotation=90, fontsize=8)
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
    """Log10 of ‖Δw‖/‖w‖ of parameters over the steps `x`, with a line at 1e-3; of many without a legend.

    A step without a change leaves a gap. Colours go from the first parameter, dark, to the last, light.

    Raises:
        ModuleNotFoundError: without matplotlib.
        ValueError: when there is nothing to draw.

    Source: A. Karpathy, "Building makemore part 3", 2022.
    """
    _check_any(ratios, len(x))
    few = len(ratios) <= 12
    ax = ax if ax is not None else _panels(1, 1, figsize or (8 if few else 6.4, 4))[0]
    with random_kept():
        import matplotlib

    colours = matplotlib.colormaps["viridis"]
    for i, (name, values) in enumerate(zip(_shortened(ratios, 30), ratios.values(), strict=True)):
        logs = [math.log10(value) if 0 < value < math.inf else math.nan for value in values]
        alone = [k for k, value in enumerate(logs) if not math.isnan(value) and len(logs) == 1]
        colour = colours(0.92 * i / max(1, len(ratios) - 1))
        ax.plot(x, logs, color=colour, linewidth=1, marker=".", markevery=alone, label=name)
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
        first, *_, last = _shortened(ratios, 24)
        ends = f"{len(ratios)} parameters: dark {first}, light {last}"
        ax.set_title(ends, loc="right", fontsize=8)
    return ax.figure.figure


def _gapped(values: Sequence[float]) -> list[float]:
    return [value if math.isfinite(value) else math.nan for value in values]


def _heights(losses: Sequence[float], smoothed: Sequence[float]) -> tuple[float, float] | None:
    """Bounds for losses that fall and then shoot up; None where they do not fall."""
    finite = [value for value in smoothed if math.isfinite(value)]
    top = max(finite[: finite.index(min(finite)) + 1]) if finite else 0.0
    low = min(filter(math.isfinite, (*losses, *smoothed)), default=0.0)
    return (low - 0.05 * (top - low), top + 0.3 * (top - low)) if top > low else None


def sparkline(values: Sequence[float], width: int = 20) -> str:
    """Bars of text from the smallest to the largest of `values`, averaged into at most `width` bins.

    `!` is a bin with an infinite value, a blank one of NaN only, a constant a line of lowest bars.

    >>> sparkline([0, 1, 2, 3, float("nan"), 5, 6, 7])
    '▁▂▃▄ ▆▇█'
    """
    n = min(width, len(values))
    means = [_mean(values[i * len(values) // n : (i + 1) * len(values) // n]) for i in range(n)]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = high - low if high - low > 1e-9 * max(abs(low), abs(high)) else math.inf  # less is rounding

    def bar(mean: float) -> str:
        if math.isfinite(mean):
            return BARS[round((len(BARS) - 1) * (mean - low) / span)]
        return "!" if math.isinf(mean) else " "

    return "".join(map(bar, means))


def _mean(values: Sequence[float]) -> float:
    numbers = [value for value in values if not math.isnan(value)]
    if any(map(math.isinf, numbers)):
        return math.inf
    return sum(value / len(numbers) for value in numbers) if numbers else math.nan


def _check_any(layers: Collection[object], n_records: int) -> None:
    if not layers or not n_records:
        raise ValueError("there is nothing to draw yet; train for a batch first")


def _panels(n: int, columns: int, figsize: Size) -> "list[Axes]":
    """`n` panels on a new figure, `columns` side by side; pyplot and its settings stay as they are."""
    try:
        with random_kept():
            import matplotlib.figure
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            "pictures are drawn by matplotlib, which is not installed; pip install 'hookcb[plot]'"
        ) from missing
    rows = math.ceil(n / columns)
    width, height = (6.4, 3.6) if n == 1 else (3.2, 2.3) if n <= 9 else (2.2, 1.6)
    fig = matplotlib.figure.Figure(figsize or (width * columns + 0.8, height * rows), layout="constrained")
    vars(fig)["_repr_png_"] = partial(_png, fig)  # notebooks know figures only once pyplot is imported
    return [fig.add_subplot(rows, columns, i + 1) for i in range(n)]


def _png(fig: "Figure") -> bytes:
    with BytesIO() as file:
        fig.savefig(file, format="png")
        return file.getvalue()


def _cut(name: str, room: int) -> str:
    half = max(3, room // 2)
    return name if len(name) <= 2 * half else f"{name[:half]}…{name[1 - half :]}"


def _shortened(names: Collection[str], room: int) -> list[str]:
    """`names` in `room` letters each, all numbered where without their middles two would be alike."""
    short = [_cut(name, room) for name in names]
    alike = len(set(short)) < len(names)
    return [_cut(f"{i}: {name}", room) for i, name in enumerate(names)] if alike else short


def _draw_image(ax: "Axes", values: Tensor, bottom: float, top: float, most: float) -> "AxesImage":
    """`values` `(rows, records)`, first row at the bottom; each column the records of one pixel, averaged."""
    step = math.ceil(values.shape[1] / max(1, int(ax.bbox.width)))
    padded = torch.nn.functional.pad(values.float().cpu(), (0, -values.shape[1] % step), value=math.nan)
    columns = padded.reshape(len(values), -1, step).nanmean(2)
    image = ax.imshow(columns.numpy(), "viridis", aspect="auto", interpolation="nearest", origin="lower")
    image.set_extent((-0.5, columns.shape[1] * step - 0.5, bottom, top))
    image.set_clim(0, most)
    ax.set_xlim(-0.5, values.shape[1] - 0.5)
    ax.locator_params(axis="x", integer=True, min_n_ticks=1)
    return image


def _draw_hist(ax: "Axes", counts: Tensor, low: float, high: float, most: float) -> "AxesImage":
    edges = low, high
    if not high - low > 1e-9 * max(abs(low), abs(high)):  # NaN too: what is left is to count bins
        low, high = 0.0, counts.shape[0] - 2.0
    rim = 0.06 * (high - low)
    _draw_image(ax, counts[:1], low - rim, low, most)
    _draw_image(ax, counts[-1:], high, high + rim, most)
    image = _draw_image(ax, counts[1:-1], low, high, most)
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


def _colour_bar(image: "AxesImage", panels: "Sequence[Axes]", columns: int, label: str) -> None:
    """A bar of 0.18 inches beside however many panels."""
    width, height = (side / panels[0].figure.dpi for side in panels[0].bbox.size)
    share, aspect = min(0.15, 0.3 / (width * columns)), height * math.ceil(len(panels) / columns) / 0.18
    panels[0].figure.colorbar(
        image, ax=list(panels), label=label, fraction=share, pad=share / 3, aspect=aspect
    )


def _draw_line(ax: "Axes", name: str, values: Sequence[float], x: Sequence[int]) -> None:
    known = [False, *map(math.isfinite, values), False]
    alone = [i for i in range(len(values)) if known[i : i + 3] == [False, True, False]]
    numbers = [value if math.isfinite(value) else math.nan for value in values]
    ax.plot(x, numbers, marker=".", markevery=alone, zorder=3)  # above the frame: a line may run along 0 or 1
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
