"""Figure of a Recorder; matplotlib is imported when it is drawn, pyplot never."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hookcb.records.plots import (
    ALARM,
    BLUE,
    ORANGE,
    Size,
    check_any,
    gapped,
    limit_steps,
    make_panels,
)
from hookcb.records.smoothed import Smoothed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOSSES = ("train_loss", "valid_loss")
SMOOTH = 0.04  # share of the batches over which losses are smoothed
NO_METRICS = ("epoch", "time", *LOSSES)


def run_lines(
    losses: Sequence[float],
    lrs: Sequence[float],
    rows: Sequence[Mapping[str, float]],
    ends: Sequence[int],
    figsize: Size = None,
) -> "Figure":
    """Losses, metrics and learning rate of a training over its batches, a panel each.

    Args:
        losses: loss of each batch.
        lrs: learning rate of each batch.
        rows: results of each epoch.
        ends: number of batches when each epoch ended, where its results are drawn.
        figsize: width and height in inches.

    Raises:
        ModuleNotFoundError: Without matplotlib.
        ValueError: If there is nothing to draw.
    """
    check_any(losses, len(losses))
    names = dict.fromkeys(name for row in rows for name in row if name not in NO_METRICS)
    metrics = {name: [float(row.get(name, math.nan)) for row in rows] for name in names}
    panels = make_panels(n := 2 + len(metrics), min(n, 3), figsize)
    _draw_losses(panels[0], losses, [row.get("valid_loss", math.nan) for row in rows], ends)
    for panel, (name, values) in zip(panels[1:], metrics.items(), strict=False):
        panel.plot(ends, gapped(values), "o-", color=ORANGE, markersize=4)
        panel.set_title(name.replace("_", " "))
    panels[-1].plot(range(len(lrs)), gapped(lrs), color=BLUE)
    panels[-1].set_title("learning rate")
    panels[-1].set_ylim(bottom=0)
    for panel in panels:
        limit_steps(panel, (0, max(1, len(losses) - 1)))
    return panels[0].figure.figure


def _draw_losses(ax: "Axes", losses: Sequence[float], valid: Sequence[float], ends: Sequence[int]) -> None:
    average = Smoothed(1 - 1 / max(1.0, SMOOTH * len(losses)))
    smoothed = [average.add(loss) if math.isfinite(loss) else math.nan for loss in losses]
    ax.plot(range(len(losses)), gapped(losses), ".", color="0.8", markersize=2, label="of a batch")
    ax.plot(range(len(losses)), smoothed, color=BLUE, label="smoothed")
    if not all(map(math.isnan, valid)):
        ax.plot(ends, gapped(valid), "o-", color=ORANGE, markersize=4, label="validation")
    odd = [step for step, loss in enumerate(losses) if not math.isfinite(loss)]
    if odd:
        low, high = ax.get_ylim()
        ax.plot(odd, [low] * len(odd), "|", color=ALARM, markersize=14, label="NaN or inf")
        ax.set_ylim(low, high)
    ax.set_title("loss")
    ax.legend(frameon=False, fontsize=8)
