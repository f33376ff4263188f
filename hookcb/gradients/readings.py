"""GradientReadings: recorded gradients and weights as tables, words and pictures."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from fastcore.foundation import L
from torch import Tensor

from hookcb.core.precision import moved, scaled_norm
from hookcb.core.text import join_names
from hookcb.gradients import plots
from hookcb.gradients.capture import Columns, GradientReader, StepTaken, numbers_on, reduce_steps
from hookcb.gradients.checks import GradientCheck, GradientHistory, ParamHistory, check_history
from hookcb.gradients.flow import READ, GradientFlow, flow_of
from hookcb.gradients.outputs import OutputGradients
from hookcb.gradients.stats import BUFFER_STATS, GRAD_STATS, STEP_STATS
from hookcb.gradients.steps import SkipCount
from hookcb.hooks.params import Param
from hookcb.records.plots import sparkline
from hookcb.records.readings import Layer, LayerReadings, SavedReadings
from hookcb.records.store import StatStore
from hookcb.records.tables import COUNT, Column, Ranked, Report, Worst

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STATE = ("about", "without_grad", "frozen", "left_out", "not_optimized", "first_bad")
MOST_STEPS, ROOM = 64, 2**19  # so many steps, or elements (2 MB), wait to be reduced together
STEP = "step"  # name of what is of a whole step, in its store


class BufferReadings(LayerReadings):
    """Smallest and largest of running statistics, by name of the buffer."""

    columns = BUFFER_STATS

    def __init__(self, store: StatStore) -> None:
        self._store = store

    def store_of(self, phase: str) -> StatStore:
        """The records of training; those of validation are empty."""
        return self._store if phase == "train" else StatStore(self.columns, self._store.keep)


class GradientReadings(SavedReadings):
    """Reads what `GradientHealth` has recorded.

    Attributes:
        columns: names of the statistics of a parameter.
        without_grad: names of the parameters that require a gradient and had none in the last record.
        frozen: names of those that require none.
        left_out: parameters whose elements cannot be had, by name, with the type.
        not_optimized: parameters that are in no optimizer that has made a step.
        output_stats: with `activations=True` the gradients of layers' outputs, an `ActivationReadings`.
    """

    columns = GRAD_STATS
    options = "every", "activations", "on_nonfinite", "keep"
    saved = frozenset((*options, *STATE, "stores", "outputs", "skipped"))

    def _set_up(self, every: int, activations: bool, on_nonfinite: str, keep: int) -> None:
        self.every, self.activations, self.on_nonfinite, self.keep = every, activations, on_nonfinite, keep
        self.clear()

    def clear(self) -> None:
        """Forgets what was recorded."""
        of = {"params": READ, "steps": STEP_STATS, "buffers": BUFFER_STATS}
        self._stores = {name: StatStore(columns, self.keep) for name, columns in of.items()}
        self._waiting: list[StepTaken] = []
        self._n_elements = 0
        self.about: dict[str, tuple[int, int, str]] = {}  # numel, n_dims and type of module, by parameter
        self.without_grad: list[str] = []
        self.frozen: list[str] = []
        self.left_out: dict[str, str] = {}
        self.not_optimized: list[str] = []
        self.first_bad: dict[str, tuple[int, float]] = {}
        self.output_stats = OutputGradients(self.keep) if self.activations else None
        self.skips = SkipCount()

    def wants(self, i: int) -> bool:
        """Whether step `i`, counted from 0, is looked at."""
        return i % self.every == 0

    @property
    def skipped(self) -> int:
        """Number of steps without an update, in all of the fit; to look waits for the device."""
        return int(self.skips)

    # ---- records

    def add_step(self, taken: StepTaken, reader: GradientReader, epoch: int, step: int) -> None:
        """Adds what a reader has taken of a step."""
        (taken.record, *_) = [store.begin(epoch, step) for store in self._stores.values()]
        taken.at = step
        self.without_grad, self.frozen, self.left_out = reader.without_grad, reader.frozen, reader.left_out
        if not all(of.layout.is_known for of in taken.takens):
            self._introduce(taken, reader.params)
        self._waiting.append(taken)
        self._n_elements += taken.n_elements
        if len(self._waiting) == MOST_STEPS or self._n_elements > ROOM:
            self.reduce()

    def _introduce(self, taken: StepTaken, params: Sequence[Param]) -> None:
        """Notes what parameters there are, in the order of the model."""
        new = {param.name for of in taken.takens for param in of.layout.params} - self.about.keys()
        for name, p, kind in params:
            if name in new:
                self._stores["params"].add(name)
                self.about[name] = p.numel(), p.ndim, kind
        for of in taken.takens:
            of.layout.is_known = True

    def reduce(self) -> None:
        """Puts what waits into the stores."""
        waiting, self._waiting, self._n_elements = self._waiting, [], 0
        for steps, by_device in reduce_steps(waiting):
            for columns in by_device:
                self._note_bad(steps, columns)
                for name, values in columns.items():
                    self._stores["params"].put(name, [step.record for step in steps], values)
            self._stores["steps"].put(STEP, [step.record for step in steps], _of_steps(steps, by_device))
            self._put_buffers(steps)

    def _note_bad(self, steps: Sequence[StepTaken], columns: Columns) -> None:
        """Remembers where NaN came first, as its record may be dropped; on a CPU, where looking is free."""
        counts = torch.stack([values[:, GRAD_STATS.index("nonfinite")] for values in columns.values()])
        if not counts.is_cpu or not bool(counts.any()):
            return
        for name, of in zip(columns, counts.tolist(), strict=True):
            for step, n in zip(steps, of, strict=True):
                is_scalers = float(step.skipped) > 0 and float(step.scale) > 1
                if n and not is_scalers:
                    self.first_bad.setdefault(name, (step.at, n))

    def _put_buffers(self, steps: Sequence[StepTaken]) -> None:
        for device in {device for step in steps for device in step.buffers}:
            there = [(step.record, *step.buffers[device]) for step in steps if device in step.buffers]
            for sizes, group in groupby(there, lambda item: item[1]):
                records, _, values = zip(*group, strict=True)
                of_buffers = torch.split(torch.stack(values), [*sizes.values()], dim=1)
                for name, of in zip(sizes, of_buffers, strict=True):
                    ends = torch.stack(torch.aminmax(of, dim=1), 1).float()
                    self._stores["buffers"].put(name, list(records), ends)

    def flush(self) -> None:
        """Sends what waits on a device on its way to the host; nothing waits for it."""
        self.reduce()
        for store in self._stores.values():
            store.flush()
        if self.output_stats is not None:
            self.output_stats.flush()

    # ---- numbers

    def store_of(self, phase: str) -> StatStore:
        """The records of training, "train"; there are none of validation."""
        self.reduce()
        return self._stores["params"] if phase == "train" else StatStore(READ, self.keep)

    @property
    def step_stats(self) -> L:
        """Of each record a dict of what `hookcb.gradients.stats.STEP_STATS` names.

        `total_norm`, `clipped_total_norm` (NaN where the step was skipped) and `mean_norm` over parameters,
        L2 all; `lr` of the last parameter group; `scale` of a GradScaler, else 1; `skipped`, 1.0 where no
        optimizer made a step; `clip_coef`, what clipping has left of the total norm, 0..1.
        """
        self.reduce()
        rows = self._stores["steps"].series(STEP).tolist()
        return L(dict(zip(STEP_STATS, row, strict=True)) for row in rows)

    def step_series(self, stat: str) -> list[float]:
        """One of these, a float for each record.

        Raises:
            LookupError: for one that is not there.
        """
        if stat not in STEP_STATS:
            raise LookupError(f"there is no statistic {stat!r} of a step; there are {', '.join(STEP_STATS)}")
        self.reduce()
        numbers: list[float] = self._stores["steps"].series(STEP)[:, STEP_STATS.index(stat)].tolist()
        return numbers

    @property
    def buffer_stats(self) -> L:
        """Of running_mean and running_var: `buffer_stats[record][buffer]` is a dict of min and max."""
        return self._buffers.stats

    def buffer_series(self, buffer: Layer, stat: str) -> Any:
        """One statistic of such a buffer, a float for each record."""
        return self._buffers.series(buffer, stat)

    @property
    def _buffers(self) -> BufferReadings:
        self.reduce()
        return BufferReadings(self._stores["buffers"])

    # ---- words and pictures

    def check(self) -> GradientCheck:
        """What is wrong, in words: a list of findings, empty where nothing was found; it prints as sentences.

        NaN and infinite gradients by parameter and first step, vanishing and exploding ones relative to the
        model's own scale, weights that do not move, parameters without gradient or optimizer; the limits are
        in `hookcb.gradients.checks`. What needs several steps is silent before there are five records.
        """
        numbers = {name: self._numbers(name) for name in self.names}
        params = {
            name: ParamHistory(kind, n_dims, numbers[name])
            for name, (_, n_dims, kind) in self.about.items()
            if name in numbers
        }
        history = GradientHistory(
            steps=self.steps(),
            total_norm=self.step_series("total_norm"),
            mean_norm=self.step_series("mean_norm"),
            lr=self.step_series("lr"),
            scale=self.step_series("scale"),
            skipped=self.step_series("skipped"),
            params=params,
            without_grad=self.without_grad,
            not_optimized=self.not_optimized,
            first_bad=self.first_bad,
        )
        return check_history(history)

    def _numbers(self, name: str) -> dict[str, list[float]]:
        """All series of a parameter, by statistic."""
        return dict(zip(self.columns, self.store_of("train").series(name).T.tolist(), strict=False))

    def flow(self, record: int = -1) -> GradientFlow:
        """Mean and largest |gradient| of each layer in the order of the model, of a record, before clipping.

        Of parameters above 65,536 elements the mean is that of 1,024 of them, off by 3 % as a rule.

        Raises:
            ValueError: where nothing is recorded.
            IndexError: where there is no such record.
        """
        store = self.store_of("train")
        if not store.infos:
            raise ValueError("nothing is recorded yet; train for a step first")
        if not -len(store.infos) <= record < len(store.infos):
            raise IndexError(f"there is no record {record}; there are {len(store.infos)}")
        rows = {
            name: dict(zip(READ, store.series(name)[record].tolist(), strict=True)) for name in store.names
        }
        return flow_of({name: about[0] for name, about in self.about.items()}, rows)

    def plot_flow(
        self, ax: "Axes | None" = None, *, figsize: tuple[float, float] | None = None, record: int = -1
    ) -> "Figure":
        """The classic gradient-flow figure of a record, by default the last.

        Raises:
            ModuleNotFoundError: without matplotlib.
            ValueError: when there is nothing to draw.
        """
        return self.flow(record).plot(figsize, ax)

    def plot_updates(
        self,
        ax: "Axes | None" = None,
        *,
        figsize: tuple[float, float] | None = None,
        params: Layer | None = None,
    ) -> "Figure":
        """Log10 of the update ratio of each parameter over the steps, with a line at 1e-3, which is usual.

        By default of weights with two dimensions or more, as in the source, all parameters where none has.

        Raises:
            ModuleNotFoundError: without matplotlib.
            ValueError: when there is nothing to draw.

        Source: A. Karpathy, "Building makemore part 3", 2022.
        """
        names = self.names_of(params)
        if params is None:
            names = [name for name in names if self.about[name][1] > 1] or names
        series = {name: self.series(name, "update_ratio") for name in names}
        return plots.update_lines(series, self.steps(), figsize, ax)

    def report(self, *, worst: Worst = "auto", depth: int | None = None) -> "GradientReport":
        """The parameters with the statistics of the last record, as a table; `print` shows it.

        The worst rows are those that `check()` has something to say of, in its order; then those without a
        gradient; then those whose gradient norm is the most times larger or smaller than the median.

        Args:
            worst: how many rows to show, the worst first; None for all, in the order of the model. By default
                all of up to 30, and the 20 worst of more.
            depth: shows of all parameters of modules whose names have the first `depth` parts in common the
                worst, with the number of them.

        Raises:
            TypeError, ValueError: If `worst` or `depth` is invalid.
        """
        check = self.check()
        rows = [*self._rows(check), *(_without_grad(name) for name in self.without_grad)]
        title = f"gradients in the last of {len(self.steps())} recorded steps"
        return GradientReport(rows, title, worst=worst, depth=depth, caption=self._caption(check))

    def _rows(self, check: GradientCheck) -> Iterator["ParamRow"]:
        numbers = {name: self._numbers(name) for name in self.names}
        norms = [of["norm"][-1] for of in numbers.values() if of["norm"] and of["norm"][-1] > 0]
        usual = statistics.median(norms) if norms else math.nan
        first = {finding.param: i for i, finding in reversed(list(enumerate(check)))}
        for name, series in numbers.items():
            last = {stat: values[-1] if values else math.nan for stat, values in series.items()}
            mark = check[first[name]].code.replace("_", " ") if name in first else ""
            weight = (len(check) - first[name] if name in first else 0, 0, _times(last["norm"], usual))
            yield ParamRow(name=name, module=_owner(name), weight=weight, last=last, series=series, mark=mark)

    def _caption(self, check: GradientCheck) -> str:
        lines = [check.summary] if self.steps() else []
        lines += [f"{len(self.frozen)} frozen: {join_names(self.frozen, 4)}"] if self.frozen else []
        skipped = sum(x > 0 for x in self.step_series("skipped"))
        lines += [f"{skipped} of these steps were skipped"] if skipped else []
        return "\n".join(lines)

    # ---- on disk

    def _saved(self) -> dict[str, Any]:
        self.reduce()
        state: dict[str, Any] = {name: getattr(self, name) for name in (*self.options, *STATE)}
        state["stores"] = {name: store.state() for name, store in self._stores.items()}
        state["skipped"] = self.skipped
        state["outputs"] = None if self.output_stats is None else self.output_stats.state()
        return state

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.clear()
        for name in STATE:
            setattr(self, name, state[name])
        self._stores = {name: StatStore.of(of) for name, of in state["stores"].items()}
        self.skips = SkipCount(state["skipped"])
        if self.output_stats is not None and state["outputs"] is not None:
            self.output_stats = OutputGradients.from_state(state["outputs"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamRow(Ranked):
    """A parameter in a `GradientReport`.

    Attributes:
        last: the statistics of the last record, by name; empty if it has no gradient.
        series: those of all records.
        mark: what `check` has found, or "".
    """

    last: dict[str, float]
    series: dict[str, list[float]]
    mark: str

    def text(self, stat: str, form: str = ".2g") -> str:
        """A number of the last record."""
        return format(self.last[stat], form) if self.last else ""

    def trend(self, stat: str) -> str:
        """How a size went, as bars."""
        return sparkline(_logs(self.series.get(stat, [])), 8)


class GradientReport(Report[ParamRow]):
    """Statistics of parameters and their gradients in the last recorded step."""

    head, missing = "parameter", "the report has no parameter"
    columns = (
        COUNT,
        Column("norm", lambda row: row.text("norm") or "none", 2),
        Column("largest", lambda row: row.text("abs_max"), 4),
        Column("weights", lambda row: row.text("weight_norm"), 5),
        Column("update", lambda row: row.text("update_ratio", ".1e"), 3),
        Column("norms", lambda row: row.trend("norm"), 6),
        Column("updates", lambda row: row.trend("update_ratio"), 7),
        Column("look at", lambda row: row.mark, is_text=True, style="yellow"),
    )


def _without_grad(name: str) -> ParamRow:
    return ParamRow(name=name, module=_owner(name), weight=(0, 1, 0.0), last={}, series={}, mark="")


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _times(norm: float, usual: float) -> float:
    """How many times larger or smaller a norm is, as a logarithm; 0 if that is not known."""
    if math.isnan(norm) or math.isnan(usual):
        return 0.0
    return abs(math.log(norm / usual)) if 0 < norm < math.inf else math.inf


def _of_steps(steps: Sequence[StepTaken], by_device: Sequence[Columns]) -> Tensor:
    """`STEP_STATS` of steps, `(R, 7)`, from the columns of their parameters."""
    norms = [x[:, :2] for columns in by_device for x in columns.values()]
    device = norms[0].device if norms else torch.device("cpu")
    own = {
        "lr": [s.lr for s in steps],
        "scale": [s.scale for s in steps],
        "skipped": [s.skipped for s in steps],
    }
    lr, scale, skipped = (numbers_on(device, of) for of in own.values())
    if norms:
        whole = torch.stack([moved(x, device) for x in norms])  # (n_params, R, 2)
        (total, clipped), mean = scaled_norm(whole, dim=0).unbind(1), whole[..., 0].mean(0)
    else:
        total, clipped = torch.zeros_like(lr), torch.where(skipped == 0, 0.0, torch.nan)
        mean = torch.full_like(lr, torch.nan)
    coef = torch.where(total == 0, torch.where(clipped == 0, 1.0, clipped), clipped / total)
    is_double = any(x.dtype is torch.float64 for x in norms)
    return torch.stack([total, clipped, mean, lr, scale, skipped, coef], 1).to(
        torch.float64 if is_double else torch.float32
    )


def _logs(values: Sequence[float]) -> list[float]:
    """Of sizes, which go by factors; NaN for 0, and for an update of weights that were all zero."""
    return [math.log10(x) if 0 < x < math.inf else math.nan for x in values]
