"""ActivationReadings: recorded activations as histograms, pictures and a report."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from fastcore.foundation import L
from torch import Tensor

from hookcb.activations import plots
from hookcb.activations.reducer import Reducer
from hookcb.activations.stats import LAYER_STATS, SAMPLED, WHOLE, Sample
from hookcb.core.arguments import check_count
from hookcb.core.text import join_names
from hookcb.records.plots import sparkline
from hookcb.records.readings import PHASES, Layer, SavedReadings
from hookcb.records.store import StatStore
from hookcb.records.tables import COUNT, Column, Ranked, Report, Worst

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOM = 64 * WHOLE  # elements that wait to be reduced, of all layers: 16 MB
SERIES = ("mean", "std", "near_zero")


class ActivationReadings(SavedReadings):
    """Reads what `ActivationStats` has recorded.

    Attributes:
        columns: names of the statistics.
        outputs: by layer, its type and the shape of its last output.
        left_out: what has no statistics by path, with its type.
    """

    columns = LAYER_STATS
    options = "with_hist", "eps", "bins", "hist_range", "sample", "keep"
    saved = frozenset((*options, "outputs", "left_out", "stores", "edges"))

    def _set_up(
        self,
        with_hist: bool,
        eps: float,
        bins: int,
        hist_range: tuple[float, float] | None,
        sample: Sample,
        keep: int,
    ) -> None:
        _check(eps, bins, hist_range, sample, keep)
        self.with_hist, self.eps, self.bins, self.hist_range = with_hist, eps, bins, hist_range
        self.sample, self.keep = sample, keep
        self.clear()

    def clear(self) -> None:
        """Forgets what was recorded."""
        columns = [*LAYER_STATS, *(f"bin {i}" for i in range(self.bins + 2) if self.with_hist)]
        self._stores = {phase: StatStore(columns, self.keep) for phase in PHASES}
        self._reducers: dict[tuple[str, str], Reducer] = {}  # by phase and name
        self.outputs: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.left_out: dict[str, str] = {}

    def add_record(self, phase: str, epoch: int, step: int, batch: Mapping[str, list[Any]]) -> None:
        """Adds what was taken of a batch: by path of each call elements, moments, type of layer and shape.

        What is no tensor comes as the name of its type.
        """
        record = None
        room = max(WHOLE, min(4 * WHOLE, ROOM // max(1, len(batch))))
        for path, calls in batch.items():
            for k, taken in enumerate(calls):
                name = path if len(calls) == 1 else f"{path}#{k}"
                if isinstance(taken, str):
                    self.left_out[name] = taken
                    continue
                record = self._stores[phase].begin(epoch, step) if record is None else record
                elements, exact, kind, shape = taken
                self.outputs[name] = kind, shape
                self._reducer(phase, name, self.hist_range).add(record, elements, exact, room)

    def _reducer(self, phase: str, name: str, edges: tuple[float, float] | None) -> Reducer:
        if (phase, name) not in self._reducers:
            bins = self.bins if self.with_hist else 0
            self._reducers[phase, name] = Reducer(name, self._stores[phase], self.eps, bins, edges)
        return self._reducers[phase, name]

    def flush(self) -> None:
        """Sends what waits on a device on its way to the host; nothing waits for it."""
        for phase in PHASES:
            self.store_of(phase).flush()

    def store_of(self, phase: str) -> StatStore:
        """The records of training, "train", or of validation, "valid"."""
        for (of, _), reducer in self._reducers.items():
            if of == phase:
                reducer.reduce()
        return self._stores[phase]

    def _saved(self) -> dict[str, Any]:
        state: dict[str, Any] = {name: getattr(self, name) for name in (*self.options, "left_out")}
        state["outputs"] = {name: (kind, tuple(shape)) for name, (kind, shape) in self.outputs.items()}
        state["stores"] = {phase: self.store_of(phase).state() for phase in PHASES}
        state["edges"] = [(*key, reducer.edges) for key, reducer in self._reducers.items()]
        return state

    def _restore(self, state: dict[str, Any]) -> None:
        self.outputs, self.left_out = state["outputs"], state["left_out"]
        self._stores = {phase: StatStore.of(of) for phase, of in state["stores"].items()}
        for phase, name, edges in state["edges"]:
            self._reducer(phase, name, edges)

    def layer_stats(self, layer: Layer) -> Any:
        """Mean, standard deviation and share near zero of a layer: an `L` of three series."""
        return self.of_layers(layer, self._three)

    def hist(self, layer: Layer, phase: str = "train") -> Any:
        """Histograms of a layer, `(bins + 2, n_records)`: log(1 + count), 0 where the layer was not called.

        The first row is what lies below the range, the last what lies above it, see `hist_edges`.

        Raises:
            RuntimeError: where no histograms were recorded.
        """
        self._check_hist()
        store = self.store_of(phase)

        def of(name: str) -> Tensor:
            return store.series(name)[:, len(self.columns) :].T.nan_to_num(0).log1p()

        return self.of_layers(layer, of)

    def hist_edges(self, layer: Layer, phase: str = "train") -> Any:
        """The edges of a layer's bins, `(bins + 1,)`, in the unit of its output."""
        self._check_hist()
        store = self.store_of(phase)  # which sets the ranges

        def of(name: str) -> Tensor:
            low, high = self._reducers[phase, name].edges or (math.nan, math.nan)
            return torch.linspace(low, high, self.bins + 1, dtype=torch.float64).to(store.series(name).dtype)

        return self.of_layers(layer, of)

    def color_dim(
        self,
        layer: Layer | None = None,
        figsize: tuple[float, float] | None = None,
        ax: "Axes | None" = None,
    ) -> "Figure":
        """The colourful dimension: a layer's histograms side by side, one column a record; by default of all.

        Source: Stefano Giomo, "The colorful dimension", forums.fast.ai, 2019.

        Raises:
            RuntimeError: where no histograms were recorded.
            ModuleNotFoundError: without matplotlib.
        """
        names = self.names_of(layer)
        edges = {name: self.hist_edges(name).tolist() for name in names}
        return plots.color_dim(
            {name: (self.hist(name), edges[name][0], edges[name][-1]) for name in names}, figsize, ax
        )

    def plot_layer_stats(
        self, layer: Layer, figsize: tuple[float, float] | None = None, axs: Any = None
    ) -> Any:
        """A figure of mean, standard deviation and share near zero of a layer over the steps."""
        return self.of_layers(
            layer,
            lambda name: plots.layer_lines(
                name, dict(zip(SERIES, self._three(name), strict=True)), self.steps(), figsize, axs
            ),
        )

    def dead_chart(self, figsize: tuple[float, float] | None = None, ax: "Axes | None" = None) -> "Figure":
        """Share of near-zero elements of every layer over the steps, a row each."""
        title = f"share of activations within ±{self.eps:g} of zero"
        shares = {name: self.series(name, "near_zero") for name in self.names}
        return plots.share_chart(shares, self.steps(), title, figsize, ax)

    def report(self, *, worst: Worst = "auto", depth: int | None = None) -> "ActivationReport":
        """The layers with the statistics of the last record, as a table; `print` shows it.

        The worst rows are those with a mark, in the order of the marks: NaN or inf, nearly all near zero,
        hardly any spread, a spread that grew or fell; then those with the larger share near zero.

        Args:
            worst: how many rows to show, the worst first; None for all, in the order of the model. By default
                all of up to 30, and the 20 worst of more.
            depth: shows of all layers whose names have the first `depth` parts in common the worst, with the
                number of them: `encoder.0.fc` and `encoder.1.fc` have one part in common.

        Raises:
            TypeError, ValueError: If `worst` or `depth` is invalid.
        """
        records = self.stats
        last = dict(zip(self.names, records[-1], strict=True)) if records else {}
        rows = [self._row(name, stats) for name, stats in last.items()]
        return ActivationReport(
            rows,
            f"activations in the last of {len(records)} recorded batches",
            worst=worst,
            depth=depth,
            caption=self._caption(),
        )

    def _row(self, name: str, last: dict[str, float]) -> "ActivationRow":
        kind, shape = self.outputs[name]
        spread = self.series(name, "std")
        alarm, mark = _mark(last, spread)
        near_zero = 0.0 if math.isnan(last["near_zero"]) else last["near_zero"]
        weight = alarm, last["nonfinite"] if alarm else 0.0, near_zero
        return ActivationRow(
            name=name, module=name, weight=weight, type=kind, shape=shape, last=last, spread=spread, mark=mark
        )

    def _caption(self) -> str:
        left_out = [f"{name} ({kind})" for name, kind in self.left_out.items()]
        lines = [self._of_what() or "", f"no statistics: {join_names(left_out)}" if left_out else ""]
        return "\n".join(filter(None, lines))

    def _of_what(self) -> str | None:
        """Where not every element was looked at, at how many."""
        largest = max((math.prod(shape) for _, shape in self.outputs.values()), default=0)
        if self.sample == "auto" and largest > WHOLE:
            return f"near zero of outputs above {WHOLE:,} elements: from {SAMPLED:,} of them"
        if isinstance(self.sample, int) and largest > self.sample:
            return f"from {self.sample:,} elements of each output"
        return None

    def _three(self, name: str) -> Any:
        return L(self.series(name, stat) for stat in SERIES)

    def _check_hist(self) -> None:
        if not self.with_hist:
            raise RuntimeError("no histograms were recorded; pass with_hist=True to ActivationStats")


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationRow(Ranked):
    """A layer in an `ActivationReport`.

    Attributes:
        type: its class.
        shape: of its last output.
        last: the statistics of the last record, by name.
        spread: standard deviation in each record.
        mark: what looks wrong at a glance, or "".
    """

    type: str
    shape: tuple[int, ...]
    last: dict[str, float]
    spread: list[float]
    mark: str

    def text(self, stat: str, form: str = ".3g") -> str:
        """A number of the last record; "" if the layer was not called there."""
        return "" if math.isnan(self.last["nonfinite"]) else format(self.last[stat], form)


# of every report on layers, whatever was recorded of them
FIRST_COLUMNS: tuple[Column[ActivationRow], ...] = (
    COUNT,
    Column("type", lambda row: row.type, 4, is_text=True),
    Column("output", lambda row: "×".join(map(str, row.shape)), 6),
)
LAST_COLUMNS: tuple[Column[ActivationRow], ...] = (
    Column("std, trend", lambda row: sparkline(row.spread, 10), 5),
    Column("look at", lambda row: row.mark, is_text=True, style="yellow"),
)


class ActivationReport(Report[ActivationRow]):
    """Statistics of layers in the last recorded batch."""

    missing = "the report has no layer"
    columns = (
        *FIRST_COLUMNS,
        Column("mean", lambda row: row.text("mean"), 3),
        Column("std", lambda row: row.text("std"), 1),
        Column("near zero", lambda row: row.text("near_zero", ".0%"), 2),
        *LAST_COLUMNS,
    )


def _mark(last: dict[str, float], spread: list[float]) -> tuple[int, str]:
    """How bad a layer looks at a glance, and why; rough limits of our own, the verdict looks closer."""
    known = [x for x in spread if x == x and x > 0]
    if math.isnan(last["nonfinite"]):
        return 0, "not called in this batch"
    if last["nonfinite"]:
        return 5, "NaN or inf"
    if last["near_zero"] > 0.9:
        return 4, "nearly all near zero"
    if last["std"] < 1e-3 * max(1.0, abs(last["mean"])):
        return 3, "hardly any spread"
    if known and last["std"] > 100 * known[0]:  # the scores of a classifier that learns grow 10-fold
        return 2, f"spread grew {last['std'] / known[0]:.0f}-fold"
    if known and last["std"] < known[0] / 10:
        return 1, f"spread fell {known[0] / last['std']:.0f}-fold"
    return 0, ""


def _check(eps: float, bins: int, hist_range: Any, sample: Sample, keep: int) -> None:
    if not isinstance(eps, int | float) or not eps >= 0:
        raise ValueError(f"eps is {eps!r}; give a magnitude of 0 or more")
    check_count("bins", bins)
    check_count("keep", keep, "records", least=2)
    if sample is not None and sample != "auto":
        check_count("sample", sample, "elements", least=2, hint=", 'auto', or None for every one")
    if hist_range is None:
        return
    try:
        low, high = map(float, hist_range)
    except (TypeError, ValueError):
        low = high = math.nan
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"hist_range is {hist_range!r}; give two finite numbers, (low, high), or None")
