"""Recorder: the losses and learning rates of a fit, and a row of numbers per epoch."""

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from fastcore.foundation import L
from torch import Tensor

from hookcb.core import orders
from hookcb.core.batch import batch_size
from hookcb.core.callback import Callback
from hookcb.core.optim import detached_scalar
from hookcb.records.content import Content
from hookcb.records.frames import frame_of
from hookcb.records.plots import ALARM, BLUE, ORANGE, Size, check_any, gapped, limit_steps, make_panels
from hookcb.records.recording import Recording
from hookcb.records.series import Series, Smoothed
from hookcb.records.store import read_numbers
from hookcb.training.metrics import SampleMean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMOOTH = 0.04  # share of the batches over which losses are smoothed in the figure
NO_METRICS = ("epoch", "time", "train_loss", "valid_loss")


class Recorder(Callback, Recording):
    """Records losses and learning rates, and a row for each epoch; every `Learner` has one.

    Losses stay on their device until they are read or the epoch ends, so that no batch waits for a GPU. A
    cancelled batch is not recorded, and neither is validating or predicting outside a fit.

    Attributes:
        losses: the loss of each training batch, in the loss function's unit.
        lrs: the learning rate of each of these batches, from the optimizer's last parameter group.
        ends: number of training batches when each epoch ended.
        rows: a dict per epoch: `epoch`, `train_loss`, `valid_loss`, what other callbacks put into
            `learn.row`, and `time` in seconds. Losses are averages over samples.

    >>> from hookcb import synth_learner
    >>> learn = synth_learner()
    >>> with learn.no_logging():
    ...     learn.fit(2)
    >>> len(learn.recorder.losses), len(learn.recorder.rows)
    (20, 2)
    """

    order = orders.RECORD
    has_rank_state = True
    keys = frozenset(("losses", "sizes", "lrs", "rows", "first", "ends"))  # of its state

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self.before_fit()

    def before_fit(self) -> None:
        self.rows = L()
        self._train = SampleMean()
        self._lrs: list[float | Tensor] = []
        self._first = 0  # first batch of this epoch
        self.ends: list[int] = []

    @property
    def losses(self) -> list[float]:
        return read_numbers(self._train.values)

    @property
    def lrs(self) -> list[float]:
        return read_numbers(self._lrs)

    def before_epoch(self) -> None:
        self._began = time.perf_counter()

    def before_train(self) -> None:
        self._first = len(self._train.values)

    def after_loss(self) -> None:
        learn = self.learn
        # copied now: the loss may be scaled for backward, and the rate may change before the batch ends
        has_rate = learn.training and learn.opt is not None  # a watched loop may have no optimizer yet
        lr = detached_scalar(learn.opt.param_groups[-1]["lr"]) if has_rate else float("nan")
        self.phase_state["batch"] = detached_scalar(self.loss), lr, batch_size((*learn.yb, learn.xb))

    def after_cancel_batch(self) -> None:
        self.phase_state.pop("batch", None)

    def after_batch(self) -> None:
        learn, state = self.learn, self.phase_state
        if "batch" not in state:
            return
        loss, lr, size = state.pop("batch")
        if not learn.training:
            state.setdefault("losses", SampleMean()).add(loss, size)
        elif learn.fitting:
            self._train.add(loss, size)
            self._lrs.append(lr)

    def after_train(self) -> None:
        total, n = self.learn.ranks.sum(self._train.sums(self._first))
        self.learn.row["train_loss"] = total / n if n else math.nan

    def after_validate(self) -> None:
        losses: SampleMean = self.phase_state.get("losses", SampleMean())
        total, n = self.learn.ranks.sum(losses.sums())
        if n or losses.values:
            self.learn.row["valid_loss"] = total / n if n else math.nan

    def after_epoch(self) -> None:
        self.learn.row["time"] = time.perf_counter() - self._began
        self.rows.append({"epoch": self.epoch, **self.learn.row})
        self.ends.append(len(self._train.values))

    def to_frame(self) -> Any:
        """A DataFrame of pandas or polars with a row for each training batch: `step`, `epoch`, `loss`, `lr`.

        `rows` has what was recorded by epoch.

        Raises:
            ModuleNotFoundError: If neither is installed.
        """
        values = zip(self.losses, self.lrs, strict=True)
        return frame_of(
            [
                {"step": step, "epoch": bisect_right(self.ends, step), "loss": loss, "lr": lr}
                for step, (loss, lr) in enumerate(values)
            ]
        )

    @property
    def values(self) -> list[list[float]]:
        """Numbers of each epoch, as in fastai: losses and metrics, without the epoch and its time."""
        return [[x for name, x in row.items() if name not in ("epoch", "time")] for row in self.rows]

    @property
    def metric_names(self) -> list[str]:
        return list(self.rows[-1]) if self.rows else []

    def plot(self, figsize: Size = None, axs: "Sequence[Axes] | None" = None) -> "Figure":
        """A figure of losses, metrics and learning rate over the batches.

        Args:
            figsize: width and height in inches.
            axs: axes to draw on, of the losses, of each metric, and of the rate; by default a new figure's.

        Raises:
            ModuleNotFoundError: Without matplotlib.
            ValueError: If no batch was recorded, or `axs` has another number of axes.
        """
        losses, lrs, rows = self.losses, self.lrs, self.rows
        check_any(losses, len(losses))
        names = dict.fromkeys(name for row in rows for name in row if name not in NO_METRICS)
        n = 2 + len(names)
        panels = make_panels(n, min(n, 3), figsize) if axs is None else list(axs)
        if len(panels) != n:
            shown = ", ".join(["the losses", *names, "the learning rate"])
            raise ValueError(f"axs must have {n} axes, one for each of {shown}; it has {len(panels)}")
        _draw_losses(panels[0], losses, [row.get("valid_loss", math.nan) for row in rows], self.ends)
        for panel, name in zip(panels[1:], names, strict=False):
            values = [float(row.get(name, math.nan)) for row in rows]
            panel.plot(self.ends, gapped(values), "o-", color=ORANGE, markersize=4)
            panel.set_title(name.replace("_", " "))
        panels[-1].plot(range(len(lrs)), gapped(lrs), color=BLUE)
        panels[-1].set_title("learning rate")
        panels[-1].set_ylim(bottom=0)
        for panel in panels:
            limit_steps(panel, (0, max(1, len(losses) - 1)))
        figure: Figure = panels[0].figure.figure
        return figure

    plot_loss = plot_sched = plot  # fastai's names

    def show_on(self, page: Content) -> None:
        """Shows losses, rates, and the numbers of each epoch."""
        if losses := self.losses:
            steps = list(range(len(losses)))
            page.run |= {"loss": Series(steps, losses), "lr": Series(steps, self.lrs)}
        page.epochs = {}
        for end, row in zip(self.ends, self.rows, strict=False):
            for name, x in row.items():
                if name not in ("epoch", "time") and isinstance(x, int | float):
                    page.epochs.setdefault(name, Series()).add(max(end - 1, 0), float(x))

    def figures(self, name: str) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Losses, metrics and rates."""
        if self.losses:
            yield "run", self.plot

    def state_dict(self) -> dict[str, Any]:
        return {
            "losses": torch.tensor(self.losses, dtype=torch.float64, device="cpu"),
            "sizes": torch.tensor(self._train.sizes, dtype=torch.int64, device="cpu"),
            "lrs": torch.tensor(self.lrs, dtype=torch.float64, device="cpu"),
            "rows": [dict(row) for row in self.rows],
            "first": self._first,
            "ends": list(self.ends),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """New recorder from what `state_dict` has returned."""
        recorder = cls()
        recorder.load_state_dict(state)
        return recorder

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._train.values, self._train.sizes = state["losses"].tolist(), state["sizes"].tolist()
        self._lrs, self.rows, self._first = state["lrs"].tolist(), L(state["rows"]), state["first"]
        self.ends = list(state["ends"])


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
