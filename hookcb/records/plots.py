"""Figures of plain data: matplotlib figures without pyplot, and bars made of text."""

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING

import torch
from rich.cells import cell_len
from torch import Tensor

from hookcb.core.console import BARS
from hookcb.core.randomness import random_kept

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

Size = tuple[float, float] | None  # width and height in inches; None: by the number of panels
ByName = Mapping[str, Sequence[float]]  # a value per record, by name
# can be told apart by the color-blind; Source: M. Okabe, K. Ito, "Color Universal Design", 2008
BLUE, ORANGE, GREEN, PINK, SKY = "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9"
ALARM = "#d55e00"  # NaN, inf and limits
MISSING = "0.85"  # gray of what was not recorded
MIN_ROOM = 6  # letters of a name


def gapped(values: Sequence[float], above: float = -math.inf) -> list[float]:
    """`values` with NaN, which leaves a gap in a line, in place of those not finite or not above a limit.

    For a logarithmic axis, that is 0.
    """
    return [x if above < x < math.inf else math.nan for x in values]


def sparkline(values: Sequence[float], width: int = 20) -> str:
    """Bars of text from the smallest to the largest of `values`, averaged into at most `width` bins.

    `!` is a bin with an infinite value, a blank is a bin of NaN only; a constant gives the lowest bars.

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
            return list(BARS)[round((len(BARS) - 1) * (mean - low) / span)]
        return "!" if math.isinf(mean) else " "

    return "".join(map(bar, means))


def _mean(values: Sequence[float]) -> float:
    numbers = [value for value in values if not math.isnan(value)]
    if any(map(math.isinf, numbers)):
        return math.inf
    return sum(value / len(numbers) for value in numbers) if numbers else math.nan


def check_any(layers: Collection[object], n_records: int) -> None:
    """Raises ValueError if there is nothing to draw."""
    if not layers or not n_records:
        raise ValueError("there is nothing to draw yet; train for a batch first")


def make_panels(n: int, columns: int, figsize: Size) -> "list[Axes]":
    """`n` panels on a new figure, `columns` side by side; pyplot and its settings are not involved."""
    try:
        with random_kept():
            import matplotlib.figure
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            "figures need matplotlib, which is not installed; pip install 'hookcb[plot]'"
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


def cut_name(name: str, room: int, cut: str = "…") -> str:
    """A name, or its end after `cut`, in `room` columns; layers differ at the end of their names."""
    if cell_len(name) <= room:
        return name
    kept = name[-room:]
    while kept and cell_len(kept) + len(cut) > room:
        kept = kept[1:]
    return f"{cut}{kept}"


def shortened_names(names: Collection[str], room: int) -> list[str]:
    """`names` in `room` letters each.

    If one is longer, all lose the parts with which all begin, then those with which all end, then their first
    letters. All are numbered if two would be equal.
    """
    shown = list(names)
    for at_end in (False, True):
        if any(len(name) > room for name in shown):
            shown = without_common_parts(shown, at_end=at_end)
    short = [cut_name(name, max(MIN_ROOM, room)) for name in shown]
    if len(set(short)) == len(short):
        return short
    digits = len(str(len(short)))
    room = max(MIN_ROOM, room - digits - 2)
    return [f"{i}: {cut_name(name, room)}" for i, name in enumerate(shown)]


def without_common_parts(names: Sequence[str], *, at_end: bool) -> list[str]:
    """`names` without the dotted parts with which all of them begin, or end; one part stays."""
    parts = [name.split(".")[:: -1 if at_end else 1] for name in names]
    n = 0
    while len({x[n] for x in parts}) == 1 and all(len(x) > n + 1 for x in parts):
        n += 1
    if not at_end:
        return [".".join(x[n:]) for x in parts]
    return [".".join(x[: n - 1 : -1] if n else x[::-1]) + "…" * bool(n) for x in parts]


def draw_image(ax: "Axes", values: Tensor, bottom: float, top: float, most: float) -> "AxesImage":
    """`values` `(rows, records)`, first row at the bottom; records that share a pixel are averaged."""
    step = math.ceil(values.shape[1] / max(1, int(ax.bbox.width)))
    padded = torch.nn.functional.pad(values.float().cpu(), (0, -values.shape[1] % step), value=math.nan)
    columns = padded.reshape(len(values), -1, step).nanmean(2)
    image = ax.imshow(columns.numpy(), "viridis", aspect="auto", interpolation="nearest", origin="lower")
    image.set_extent((-0.5, columns.shape[1] * step - 0.5, bottom, top))
    image.set_clim(0, most)
    ax.set_xlim(-0.5, values.shape[1] - 0.5)
    return image


def label_steps(ax: "Axes", steps: Sequence[int]) -> None:
    """Labels records on the x axis with the steps at which they were made."""
    ax.locator_params(axis="x", integer=True, min_n_ticks=1)
    ticks = ax.xaxis.get_major_locator().tick_values(0, len(steps) - 1)
    records = [int(tick) for tick in ticks if 0 <= tick < len(steps) and tick == int(tick)]
    ax.set_xticks(records, [str(steps[record]) for record in records])


def limit_steps(ax: "Axes", steps: Sequence[int]) -> None:
    """Gives lines over `steps` a margin, labels in whole numbers, and the name of the axis."""
    rim = max(0.5, 0.03 * (steps[-1] - steps[0]))
    ax.set_xlim(steps[0] - rim, steps[-1] + rim)
    ax.locator_params(axis="x", integer=True, min_n_ticks=1)
    ax.set_xlabel("step")


def add_colorbar(image: "AxesImage", panels: "Sequence[Axes]", columns: int, label: str) -> None:
    """Adds a color bar, 0.18 inches wide for any number of panels."""
    width, height = (side / panels[0].figure.dpi for side in panels[0].bbox.size)
    share, aspect = min(0.15, 0.3 / (width * columns)), height * math.ceil(len(panels) / columns) / 0.18
    panels[0].figure.colorbar(
        image, ax=list(panels), label=label, fraction=share, pad=share / 3, aspect=aspect
    )


def name_columns(ax: "Axes", names: Sequence[str]) -> None:
    """Labels the x axis with names, as many as there is room for."""
    width = ax.bbox.width / ax.figure.dpi
    every = math.ceil(len(names) / max(1, width / 0.17))  # inches for a vertical label
    ax.set_xticks(range(0, len(names), every), shortened_names(names, 24)[::every], rotation=90, fontsize=8)


def mark_odd(ax: "Axes", columns: Sequence[int]) -> None:
    """Marks columns that have no place on a logarithmic axis, at its lower end."""
    if columns:
        bottom, top = ax.get_ylim()
        ax.plot(
            columns, [bottom] * len(columns), "x", color=ALARM, clip_on=False, zorder=3, label="0, NaN or inf"
        )
        ax.set_ylim(bottom, top)
