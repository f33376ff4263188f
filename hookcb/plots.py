"""Pictures of plain data: matplotlib figures that pyplot never hears of, and bars made of text."""

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = "viridis"  # even in brightness, and told apart with any kind of colour vision
BARS = "▁▂▃▄▅▆▇█"


def color_dim(
    hists: Mapping[str, tuple[Tensor, float, float]],
    figsize: tuple[float, float] | None = None,
    ax: "Axes | None" = None,
) -> "Figure":
    """Histograms over time, the 'colourful dimension': how a layer's values spread, record by record.

    Values from the low to the high edge run upwards; the rows beyond the two thin lines hold what lies
    outside, `<low` and `>high`. All layers share one colour scale.

    Args:
        hists: by name of the layer: log1p of counts `(bins + 2, records)`, underflow first and overflow
            last; low and high edge of the bins between, in the unit of the values.
        figsize: width and height in inches; by default it grows with the number of layers.
        ax: where to draw the only layer, instead of a figure of our own.

    Raises:
        ModuleNotFoundError: without matplotlib.
        ValueError: when there is nothing to draw, or when several layers are to share `ax`.

    Source: S. Gugger and J. Howard, `ActivationStats.color_dim` in fastai.
    """
    _check_any(hists, min((counts.shape[1] for counts, *_ in hists.values()), default=0))
    if ax is not None and len(hists) > 1:
        raise ValueError(f"ax has room for one layer, not for {len(hists)}; name a layer, or leave ax out")
    n = len(hists)
    columns = math.ceil(math.sqrt(n))
    panels = [ax] if ax is not None else _grid(n, columns, figsize)
    fig = panels[0].figure.figure
    size = _font_size(n)
    room = fig.get_figwidth() / columns * 72 / (0.65 * size) if ax is None else 60
    top = max(counts.max().item() for counts, *_ in hists.values()) or 1.0
    names = _shortened(hists, int(room))
    for i, (panel, name, (counts, low, high)) in enumerate(zip(panels, names, hists.values(), strict=True)):
        _draw_hist(panel, counts, low, high, top)
        panel.set_title(name, fontsize=size)
        panel.tick_params(labelsize=size - 1, labelbottom=i >= n - columns)
        panel.set_xlabel("record" if i >= n - columns else "", fontsize=size)
    fig.colorbar(panels[0].images[-1], ax=panels, label="log(1 + count)")
    return fig


def layer_lines(
    title: str,
    series: Mapping[str, Sequence[float]],
    x: Sequence[int],
    figsize: tuple[float, float] | None = None,
    axs: "Sequence[Axes] | None" = None,
) -> "Figure":
    """Statistics of one layer over the steps, a panel each; NaN leaves a gap, infinity a red tick below.

    Args:
        title: what is shown, over all panels; with `axs` beside the first.
        series: by name of the statistic, a value per record; near zero and zeros are shares in 0..1.
        x: step of each record.
        figsize: width and height in inches.
        axs: where to draw, one for each series, instead of a figure of our own.

    Raises:
        ModuleNotFoundError: without matplotlib.
        ValueError: when there is nothing to draw, or when `axs` are not as many as `series`.
    """
    _check_any(series, len(x))
    if axs is not None and len(axs) != len(series):
        raise ValueError(f"{len(series)} axs are needed, one each for {', '.join(series)}; got {len(axs)}")
    panels = axs if axs is not None else _grid(len(series), len(series), figsize or (3.4 * len(series), 3))
    for panel, (name, values) in zip(panels, series.items(), strict=True):
        _draw_line(panel, name.replace("_", " "), values, x)
    fig = panels[0].figure.figure
    if axs is None:
        fig.suptitle(_shortened([title], int(fig.get_figwidth() * 9))[0])
    else:  # the figure's title is not ours to set
        panels[0].set_ylabel(_shortened([title], 40)[0])
    return fig


def share_chart(
    shares: Mapping[str, Sequence[float]],
    x: Sequence[int],
    title: str,
    figsize: tuple[float, float] | None = None,
    ax: "Axes | None" = None,
) -> "Figure":
    """Heat map of a share, a row for each layer and a column for each record; grey where it did not fire.

    Args:
        shares: by name of the layer, first on top: a share in 0..1 per record, NaN where there is none.
        x: step of each record.
        title: what it is a share of.
        figsize: width and height in inches; by default it grows with the number of layers.
        ax: where to draw, instead of a figure of our own.

    Raises:
        ModuleNotFoundError: without matplotlib.
        ValueError: when there is nothing to draw.
    """
    _check_any(shares, len(x))
    ax = ax or _grid(1, 1, figsize or (8, min(1.6 + 0.2 * len(shares), 14)))[0]
    values = torch.tensor([list(row) for row in shares.values()])
    image = ax.imshow(values.numpy(), aspect="auto", cmap=COLOURS, vmin=0, vmax=1)
    room = ax.bbox.height / ax.figure.dpi / 0.15  # labels of 8 points, one below the other
    every = math.ceil(len(shares) / max(1, room))
    ax.set_yticks(range(0, len(shares), every), _shortened(shares, 32)[::every], fontsize=8)
    ax.set_title(title, loc="left")
    ax.set_xlabel("step")
    ax.locator_params(axis="x", integer=True)
    ax.xaxis.set_major_formatter(lambda record, _: str(x[int(record)]) if 0 <= record < len(x) else "")
    if values.isnan().any():
        ax.set_facecolor("0.85")  # shines through where there is no value
        ax.plot([], [], "s", color="0.85", markeredgecolor="0.5", label="did not fire")
        ax.legend(loc="lower right", bbox_to_anchor=(1, 1), frameon=False, borderpad=0, fontsize=8)
    ax.figure.colorbar(image, ax=ax, label="share of elements")
    return ax.figure.figure


def sparkline(values: Sequence[float], width: int = 20) -> str:
    """Bars of text from the smallest to the largest of `values`, averaged into at most `width` bins.

    `!` stands for a bin with an infinite value, a blank for one of NaN only; NaN beside numbers is left
    out of the average. A constant is a line of the lowest bar.

    >>> sparkline([0, 1, 2, 3, float("nan"), 5, 6, 7])
    '▁▂▃▄ ▆▇█'
    """
    n = min(width, len(values))
    means = [_mean(values[i * len(values) // n : (i + 1) * len(values) // n]) for i in range(n)]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    rounding = 1e-9 * max(abs(low), abs(high))
    span = high - low if high - low > rounding else math.inf
    return "".join(
        " " if math.isnan(m) else "!" if math.isinf(m) else BARS[round((len(BARS) - 1) * (m - low) / span)]
        for m in means
    )


def _mean(values: Sequence[float]) -> float:
    """Average of what is no NaN; infinite with any infinity."""
    if any(math.isinf(value) for value in values):
        return math.inf
    numbers = [value for value in values if not math.isnan(value)]
    return sum(numbers) / len(numbers) if numbers else math.nan


def _check_any(layers: Collection[str], n_records: int) -> None:
    if not layers or not n_records:
        raise ValueError("there is nothing to draw yet; train for a batch first")


def _grid(n: int, columns: int, figsize: tuple[float, float] | None = None) -> "list[Axes]":
    """`n` panels on a new figure, `columns` side by side; pyplot and its settings stay as they are."""
    try:
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


def _shortened(names: Collection[str], room: int) -> list[str]:
    """`names` without their middle where longer than `room`; numbered where that makes them alike."""
    half = max(3, (room - 1) // 2)
    short = [name if len(name) <= 2 * half + 1 else f"{name[:half]}…{name[-half:]}" for name in names]
    alike = len(set(short)) < len(set(names))
    return [f"{i}: {name}" if alike else name for i, name in enumerate(short)]


def _font_size(n_panels: int) -> int:
    return 11 if n_panels == 1 else 9 if n_panels <= 9 else 8


def _draw_hist(ax: "Axes", counts: Tensor, low: float, high: float, top: float) -> None:
    bins, records = counts.shape[0] - 2, counts.shape[1]
    names = f"<{low:.3g}", f">{high:.3g}"
    if not high - low > 1e-9 * max(abs(low), abs(high)):  # nor a number: the axis can only count bins
        low, high = 0.0, float(bins)
    row = (high - low) / bins
    ax.imshow(
        counts.detach().float().cpu().numpy(),
        aspect="auto",
        origin="lower",
        cmap=COLOURS,
        vmin=0,
        vmax=top,
        extent=(-0.5, records - 0.5, low - row, high + row),
    )
    for edge in (low, high):
        ax.axhline(edge, color="white", linewidth=0.6)
    _tick_values(ax, low, high, row, names)
    ax.locator_params(axis="x", integer=True)


def _tick_values(ax: "Axes", low: float, high: float, row: float, names: tuple[str, str]) -> None:
    """True values of the range, where there is room beside the names of the two rows outside of it."""
    rim = 0.12 * (high - low)
    values = [v for v in ax.yaxis.get_major_locator().tick_values(low, high) if low + rim < v < high - rim]
    digits = 4 + max(0, math.ceil(math.log10(max(abs(low), abs(high)) / (high - low))))
    texts = [f"{0.0 if abs(v) < rim * 1e-6 else v:.{digits}g}" for v in values]
    ax.set_yticks([low - row / 2, *values, high + row / 2], [names[0], *texts, names[1]])


def _draw_line(ax: "Axes", name: str, values: Sequence[float], x: Sequence[int]) -> None:
    known = [math.isfinite(value) for value in values]
    alone = [
        i for i, ok in enumerate(known) if ok and not any(known[max(0, i - 1) : i] + known[i + 1 : i + 2])
    ]
    numbers = [v if ok else math.nan for v, ok in zip(values, known, strict=True)]
    ax.plot(x, numbers, marker=".", markevery=alone, zorder=3)  # above the frame, for a line along 0 or 1
    infinite = [step for step, value in zip(x, values, strict=True) if math.isinf(value)]
    if infinite:
        below = ax.get_xaxis_transform()  # steps to the right, share of the height upwards
        ax.plot(
            infinite,
            [0.03] * len(infinite),
            "|",
            color="red",
            markersize=12,
            transform=below,
            label="infinite",
        )
        ax.legend(loc="upper right", fontsize=8)
    rim = max(0.5, 0.03 * (x[-1] - x[0]))
    ax.set_xlim(x[0] - rim, x[-1] + rim)
    if name in ("near zero", "zeros"):
        ax.set_ylim(0, 1)
    ax.set_title(name)
    ax.set_xlabel("step")
    ax.locator_params(axis="x", integer=True)
