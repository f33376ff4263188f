"""Figures of plain data: matplotlib figures without pyplot, and bars made of text."""

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

Size = tuple[float, float] | None  # width and height in inches; None: by the number of panels
Series = Mapping[str, Sequence[float]]  # a value per record, by name
BARS = "▁▂▃▄▅▆▇█"


def gapped(values: Sequence[float]) -> list[float]:
    """`values` with NaN, which leaves a gap in a line, in place of each nonfinite value."""
    return [value if math.isfinite(value) else math.nan for value in values]


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
            return BARS[round((len(BARS) - 1) * (mean - low) / span)]
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


def cut_name(name: str, room: int) -> str:
    """`name` without its middle if it is longer than about `room` letters."""
    half = max(3, room // 2)
    return name if len(name) <= 2 * half else f"{name[:half]}…{name[1 - half :]}"


def shortened_names(names: Collection[str], room: int) -> list[str]:
    """`names` in `room` letters each, all numbered if two would be equal without their middles."""
    short = [cut_name(name, room) for name in names]
    alike = len(set(short)) < len(names)
    return [cut_name(f"{i}: {name}", room) for i, name in enumerate(names)] if alike else short


def draw_image(ax: "Axes", values: Tensor, bottom: float, top: float, most: float) -> "AxesImage":
    """`values` `(rows, records)`, first row at the bottom; records that share a pixel are averaged."""
    step = math.ceil(values.shape[1] / max(1, int(ax.bbox.width)))
    padded = torch.nn.functional.pad(values.float().cpu(), (0, -values.shape[1] % step), value=math.nan)
    columns = padded.reshape(len(values), -1, step).nanmean(2)
    image = ax.imshow(columns.numpy(), "viridis", aspect="auto", interpolation="nearest", origin="lower")
    image.set_extent((-0.5, columns.shape[1] * step - 0.5, bottom, top))
    image.set_clim(0, most)
    ax.set_xlim(-0.5, values.shape[1] - 0.5)
    ax.locator_params(axis="x", integer=True, min_n_ticks=1)
    return image


def add_colorbar(image: "AxesImage", panels: "Sequence[Axes]", columns: int, label: str) -> None:
    """Adds a color bar, 0.18 inches wide for any number of panels."""
    width, height = (side / panels[0].figure.dpi for side in panels[0].bbox.size)
    share, aspect = min(0.15, 0.3 / (width * columns)), height * math.ceil(len(panels) / columns) / 0.18
    panels[0].figure.colorbar(
        image, ax=list(panels), label=label, fraction=share, pad=share / 3, aspect=aspect
    )
