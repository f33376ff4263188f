"""ActivationRecords: recorded statistics of layers' outputs, with histograms, pictures and a report."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self, overload

import torch
from fastcore.foundation import L
from torch import Tensor
from torch.compiler import is_compiling

from hookcb.activations import plots
from hookcb.activations.bins import Bins, from_levels, trimmed
from hookcb.activations.buffer import OutputBuffer
from hookcb.activations.groups import merged_stats
from hookcb.activations.merge import Merger
from hookcb.activations.report import ActivationReport, ActivationRow
from hookcb.activations.slab import Output
from hookcb.activations.stats import LAYER_STATS, SAMPLED, STORED, WHOLE, Sample, has_stats, kind_of
from hookcb.core.arguments import check_count
from hookcb.core.text import as_layer, join_names
from hookcb.core.torch_private import in_transform, is_jit_tracing
from hookcb.hooks.hook import detached
from hookcb.records.content import MAX_RECORDS, Content, HistogramOverTime, Recorded
from hookcb.records.recording import Histogram, Reading, picked
from hookcb.records.records import PHASES, Layer, SavedRecords, module_of
from hookcb.records.series import Series
from hookcb.records.store import StatStore
from hookcb.records.tables import NO_MARK, VerdictLike, Worst, marks_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SERIES = ("mean", "std", "near_zero")
SHARES = ("near_zero", "zeros")
MAPS = ("rms", "kurtosis", "near_zero")  # of all layers, which a log gets during the training
OPTIONS = ("with_hist", "eps", "bins", "hist_range", "sample", "keep")
STATE = ("outputs", "left_out", "slices", "of_ranks")


@dataclass(repr=False, eq=False)
class ActivationRecords(SavedRecords):
    """Statistics of layers' outputs, batch by batch.

    `ActivationStats` records into one, `learn.activation_stats.records`. `load` reads one from a file.

    Args:
        with_hist, eps, bins, hist_range, sample, keep: see `ActivationStats`.

    Attributes:
        columns: names of the statistics.
        outputs: type of each layer and shape of its last output, by name.
        left_out: type of what has no statistics, by path.
        slices: outputs of which other ranks have other parts that are not merged, and whose part was seen, by
            path.
        of_ranks: the ranks whose samples were seen, "rank 0 of 2"; "" if there is only one.

    >>> import torch
    >>> from hookcb import ActivationRecords
    >>> records = ActivationRecords()
    >>> records.take("fc", torch.tensor([1.0, 3.0]), "Linear")
    >>> records.end_batch("train", epoch=0, step=0)
    >>> records.stats[0]["fc"]["mean"]
    2.0
    """

    with_hist: bool = False
    eps: float = 0.05
    bins: int = 60
    hist_range: tuple[float, float] | None = None
    sample: Sample = "auto"
    keep: int = 5_000

    columns = LAYER_STATS
    keys = frozenset((*OPTIONS, *STATE, "stores", "ranges"))

    def __post_init__(self) -> None:
        if not isinstance(self.with_hist, bool):
            raise TypeError(
                f"with_hist must be True or False, got {self.with_hist!r:.80}; choose layers by modules="
            )
        if not isinstance(self.eps, int | float) or not self.eps >= 0:
            raise ValueError(f"eps must be a magnitude of 0 or more, got {self.eps!r}")
        check_count("bins", self.bins)
        check_count("keep", self.keep, "records", least=2)
        if self.sample is not None and self.sample != "auto":
            check_count("sample", self.sample, "elements", least=2, hint=", 'auto', or None for every one")
        _check_range(self.hist_range)
        self.merger: Merger | None = None  # during a fit on several ranks
        self.of_ranks = ""
        self.clear()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"merger": None}

    def clear(self) -> None:
        """Forgets what was recorded."""
        bins = Bins(self.bins, self.hist_range) if self.with_hist else None
        columns = [*STORED, *(f"bin {i}" for i in range(bins.n + 2 if bins else 0))]
        self._stores = {phase: StatStore(columns, self.keep) for phase in PHASES}
        self.buffer = OutputBuffer(self._stores, self.eps, bins, self.sample)
        self.outputs: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.left_out: dict[str, str] = {}
        self.slices: dict[str, str] = {}

    # ---- recording

    def take(
        self,
        path: str,
        output: Any,
        kind: str,
        shape: tuple[int, ...] | None = None,
        copies: int = 1,
        written: Tensor | None = None,
    ) -> None:
        """Takes what statistics need of a call's output, in the running batch; waits for no device.

        Args:
            path: name of the layer, or of a tensor in its output.
            output: a tensor; anything else is noted as left out.
            kind: class of the layer.
            shape: shape of the whole output, if this is a part of it.
            copies: number of ranks that have the same part; 0 if that is unknown.
            written: what compiled code gives its operator to write to.
        """
        if not has_stats(output):
            self.leave_out(path, kind_of(output))
            return
        is_plain = not (is_compiling() or in_transform() or is_jit_tracing())
        x, is_merged = output if is_plain else detached(output), self.merger is not None
        self.buffer.take(path, x, kind, is_plain, is_merged, written)
        if shape is not None or copies != 1:
            calls = self.buffer.batch[path]
            calls[-1] = calls[-1]._replace(shape=shape or calls[-1].shape, copies=copies)

    def leave_out(self, path: str, kind: str) -> None:
        """Takes a call's output of a kind that has no statistics, in the running batch."""
        self.buffer.batch.setdefault(path, []).append(Output(kind))

    def drop_batch(self) -> None:
        """Forgets what was taken in the running batch."""
        self.buffer.drop_batch()

    def end_batch(self, phase: str, epoch: int, step: int) -> None:
        """Makes a record of what was taken in the running batch."""
        outputs = self.buffer.take_batch()
        for name, output in outputs.items():
            if not output.has_stats:
                self.left_out[name] = output.type
            elif self.outputs.get(name) != (output.type, output.shape):
                self.outputs[name] = output.type, tuple(output.shape)
        if self.merger is None:
            self.buffer.keep(outputs, phase, epoch, step)
        elif phase == "train":
            self.merger.merge(self.buffer, outputs, epoch, step)
            self.outputs = self.merger.elsewhere | self.outputs
        else:
            self.merger.keep(self.buffer, outputs)

    def end_validation(self, epoch: int, step: int) -> None:
        """Makes records of the validation batches, if they are those of several ranks."""
        if self.merger is not None:
            self.merger.merge_kept(self.buffer, epoch, step)
            self.outputs = self.merger.elsewhere | self.outputs

    def flush(self) -> None:
        """Starts the transfer to the host of what is on a device; nothing waits for it."""
        self.buffer.reduce()
        for store in self._stores.values():
            store.flush()

    # ---- reading

    def store_of(self, phase: str) -> StatStore:
        """Store of the records of training, "train", or validation, "valid"."""
        if phase not in PHASES:
            raise ValueError(f"phase must be 'train' or 'valid', got {phase!r:.80}")
        self.buffer.read()
        return self._stores[phase]

    def merged(self, layer: Layer, stat: str, phase: str = "train", batches: int = 1) -> Series:
        """One statistic of several layers together, as if their outputs were one.

        All statistics merge, exactly to the digits of the records; the kurtosis of large outputs keeps the
        error of its samples. A layer that was not called adds nothing; NaN if none was.

        Each record is that of one batch. If gradients accumulate over n batches, `batches=n` gives the
        statistics of all samples of a step, of one layer or of several.

        Args:
            layer: index, name, slice, or glob on names: `"blocks.*.mlp"`.
            stat: name of the statistic.
            phase: "train" or "valid".
            batches: merges the records of this many training batches, of batches 0 to n - 1, of n to 2n - 1 …

        Returns:
            A value for each record; for several batches one, at the step of the first that was recorded.

        Raises:
            LookupError: If there is no such layer or statistic.
            ValueError: If `batches` is above 1 in validation, or an older version has made the records.

        >>> from hookcb import synth_learner, ActivationStats
        >>> learn = synth_learner()
        >>> with learn.no_logging():
        ...     learn.fit(1, cbs=ActivationStats())
        >>> both = learn.activation_stats.merged("*", "max")
        >>> both.values == [max(pair) for pair in zip(*learn.activation_stats.series("*", "max"))]
        True
        """
        if check_count("batches", batches, "batches") > 1 and phase == "valid":
            raise ValueError(
                f"batches must be 1 in validation, where no batch is a part of a step, got {batches}"
            )
        at, names, steps = self.place_of(stat), self.names_of(layer), self.steps(phase)
        keys = range(len(steps)) if batches == 1 else [step // batches for step in steps]
        numbers: dict[int, int] = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        rows = torch.cat([self.store_of(phase).series(name)[:, : len(STORED)].double() for name in names])
        found = merged_stats(rows, [numbers[key] for key in keys] * len(names))
        first = {numbers[key]: step for key, step in zip(reversed(keys), reversed(steps), strict=True)}
        return Series([first[i] for i in range(len(numbers))], found[:, at].tolist())

    def layer_stats(self, layer: Layer) -> Any:
        """Mean, standard deviation and share near zero of a layer: an `L` of three series."""
        return self.of_layers(layer, self._three)

    @overload
    def hist(self, layer: int, phase: str = "train") -> Tensor: ...
    @overload
    def hist(self, layer: slice, phase: str = "train") -> Sequence[Tensor]: ...
    @overload
    def hist(self, layer: str, phase: str = "train") -> Tensor | Sequence[Tensor]: ...
    def hist(self, layer: Layer, phase: str = "train") -> Any:
        """Histograms of a layer, `(bins + 2, n_records)`: log(1 + count), 0 if the layer was not called.

        The first row counts elements below the bins, the last those above them, see `hist_edges`.

        Raises:
            RuntimeError: If no histograms were recorded.
        """
        self._check_hist()
        return self.of_layers(layer, lambda name: self.layer_hist(name, phase).T.nan_to_num(0).log1p())

    @overload
    def hist_edges(self, layer: int, phase: str = "train") -> Tensor: ...
    @overload
    def hist_edges(self, layer: slice, phase: str = "train") -> Sequence[Tensor]: ...
    @overload
    def hist_edges(self, layer: str, phase: str = "train") -> Tensor | Sequence[Tensor]: ...
    def hist_edges(self, layer: Layer, phase: str = "train") -> Any:
        """Edges of the bins, `(bins + 1,)`, in the unit of the output: the same for all layers and records.

        Raises:
            RuntimeError: If no histograms were recorded.
        """
        self._check_hist()
        return self.of_layers(layer, lambda name: self.edges.to(self.store_of(phase).series(name).dtype))

    @property
    def edges(self) -> Tensor:
        """Edges of the bins, `(bins + 1,)`, float64."""
        return Bins(self.bins, self.hist_range).edges

    def layer_hist(self, name: str, phase: str = "train") -> Tensor:
        """Elements in each bin, `(n_records, bins + 2)`, NaN if the layer was not called."""
        return self.store_of(phase).series(name)[:, len(STORED) :]

    def shown_hist(self, name: str) -> tuple[Tensor, Tensor]:
        """Counts of a layer in training, `(n_records, m + 2)`, and edges, of bins that hold 99 % of them."""
        return trimmed(self.layer_hist(name), self.edges)

    def color_dim(
        self,
        layer: Layer | None = None,
        figsize: tuple[float, float] | None = None,
        ax: "Axes | None" = None,
    ) -> "Figure":
        """The colorful dimension: a layer's histograms side by side, a column for each record.

        By default of all layers. Shows the bins that hold 99 % of the values in all records.

        Raises:
            RuntimeError: If no histograms were recorded.
            ModuleNotFoundError: Without matplotlib.

        Source: Stefano Giomo, "The colorful dimension", forums.fast.ai, 2019.
        """
        self._check_hist()

        def hist(name: str) -> plots.Hist:
            counts, edges = self.shown_hist(name)
            return plots.Hist(counts.T.log1p(), edges.tolist(), self.layer_series(name, "nonfinite"))

        return plots.color_dim({name: hist(name) for name in self.names_of(layer)}, self.steps(), figsize, ax)

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

    def plot_depth(
        self, step: int | None = None, figsize: tuple[float, float] | None = None, ax: "Axes | None" = None
    ) -> "Figure":
        """Signal over depth: the standard deviation of every layer's output, first layer to last.

        Draws the first record beside the last one, or the last one up to `step`.

        Raises:
            ValueError: If nothing was recorded, or nothing up to `step`.
            ModuleNotFoundError: Without matplotlib.
        """
        steps = self.steps()
        last = len(steps) if step is None else sum(x <= step for x in steps)
        if steps and not last:
            raise ValueError(f"no batch was recorded up to step {step!r}; the first is at step {steps[0]}")
        stds = {name: self.layer_series(name, "std") for name in self.names}
        shown = {f"step {steps[i]}": [x[i] for x in stds.values()] for i in sorted({0, last - 1}) if last}
        return plots.depth_lines(list(stds), shown, figsize, ax)

    def dead_chart(self, figsize: tuple[float, float] | None = None, ax: "Axes | None" = None) -> "Figure":
        """Share of near-zero elements of every layer over the steps, a row for each layer."""
        title = f"share of activations within ±{self.eps:g} of zero"
        shares = {name: self.layer_series(name, "near_zero") for name in self.names}
        return plots.layer_chart(shares, self.steps(), title, figsize, ax)

    def plot_layers(
        self, stat: str = "rms", figsize: tuple[float, float] | None = None, ax: "Axes | None" = None
    ) -> "Figure":
        """Heat map of one statistic of every layer over the steps, a row for each layer.

        Shares are drawn as they are, of other statistics the logarithm, so it is of no use for the mean.

        Raises:
            LookupError: If there is no such statistic.
            ValueError: If nothing was recorded.
            ModuleNotFoundError: Without matplotlib.
        """
        rows = {name: self.layer_series(name, stat) for name in self.names}
        return plots.layer_chart(rows, self.steps(), stat, figsize, ax, stat in SHARES)

    def report(
        self, *, worst: Worst = "auto", depth: int | None = None, verdict: VerdictLike | None = None
    ) -> ActivationReport:
        """The layers with their statistics in the last record, as a table; `print` shows it.

        The worst rows are layers that `verdict` has findings about, then layers with the most NaN or infinite
        elements, then layers with the largest share near zero.

        Args:
            worst: number of rows to show, the worst first; None for all, in the order of the model. By
                default all of up to 30, and the 20 worst of more.
            depth: shows one row, the worst, for all layers whose names agree in the first `depth` parts, and
                their number: `encoder.0.fc` and `encoder.1.fc` agree in one part.
            verdict: marks the layers that it has findings about: `report(verdict=learn.diagnose())`.
        """
        return ActivationReport(
            list(self.rows(verdict)),
            f"activations in the last of {len(self.stats)} recorded batches",
            worst=worst,
            depth=depth,
            caption=self._caption(),
        )

    def rows(self, verdict: VerdictLike | None = None, share: str = "near_zero") -> Iterator[ActivationRow]:
        """The rows of a report, in the order of the model; without findings `share` decides on the worst."""
        marks, records = marks_of(verdict, "layer"), self.stats
        for name, last in zip(self.names, records[-1], strict=True) if records else ():
            kind, shape = self.outputs[name]
            mark = marks.get(module_of(name), NO_MARK)
            facts = (0.0 if math.isnan(last[stat]) else last[stat] for stat in ("nonfinite", share))
            yield ActivationRow(
                name=name,
                module=name,
                weight=(mark.weight, *facts),
                type=kind,
                shape=shape,
                last=last,
                spread=self.layer_series(name, "std"),
                mark=mark.text,
            )

    def _caption(self) -> str:
        left_out = [f"{as_layer(name)} ({kind})" for name, kind in self.left_out.items()]
        lines = [
            f"numbers are those of {self.of_ranks}" if self.of_ranks else "",
            f"slices: {join_names(map(as_layer, self.slices))}" if self.slices else "",
            self._sampling(),
            f"no statistics: {join_names(left_out)}" if left_out else "",
        ]
        return "\n".join(filter(None, lines))

    def _sampling(self) -> str:
        """Number of elements that statistics are computed from, as text; "" if from all."""
        largest = max((math.prod(shape) for _, shape in self.outputs.values()), default=0)
        if self.sample == "auto" and largest > WHOLE and not self.buffer.slabs:
            return f"near zero of outputs above {WHOLE:,} elements: from {SAMPLED:,} of them"
        if self.sample == "auto" and largest > WHOLE and self.with_hist:
            return f"histograms of outputs above {WHOLE:,} elements: from {SAMPLED:,} of them or more"
        if isinstance(self.sample, int) and largest > self.sample:
            return f"from {self.sample:,} elements of each output"
        return ""

    def _three(self, name: str) -> Any:
        return L(self.layer_series(name, stat) for stat in SERIES)

    def _check_hist(self) -> None:
        if not self.with_hist:
            raise RuntimeError("no histograms were recorded; pass with_hist=True to ActivationStats")

    # ---- shown by others

    def show_on(self, page: Content) -> None:
        """Shows statistics and histograms of each layer in training."""
        steps, page.layers = self.steps(), {}
        shown = [stat for stat in self.columns if stat != "rms"]  # which mean and std show, in less space
        for path in self.names:
            kind, shape = self.outputs.get(path, ("", ()))
            hist = self._hist_over_time(path, steps) if self.with_hist else None
            series = self.shown_series(path, steps, shown)
            page.layers[path] = Recorded(module_of(path), f"{kind} {tuple(shape)}", series, hist)

    def _hist_over_time(self, path: str, steps: Sequence[int]) -> HistogramOverTime:
        counts, edges = self.shown_hist(path)
        rows = picked(counts, MAX_RECORDS // 4)
        kept = [steps[i] for i in rows.tolist()]
        return HistogramOverTime(edges.tolist(), [Series(kept, row) for row in counts[rows].T.tolist()])

    def newest(self, seen: Mapping[str, int], part: str = "") -> Iterator[Reading]:
        """Last record of training, with histograms, unless its number is `seen[part]`; waits for a GPU."""
        for reading in super().newest(seen, part):
            if self.with_hist:
                reading.hists.update(self._hists(reading))
            yield reading

    def _hists(self, reading: Reading) -> Iterator[tuple[str, Histogram]]:
        """Histograms of the layers that were called in a record."""
        store, edges = self.store_of("train"), tuple(self.edges.tolist())
        for name in store.names:
            if f"{name}/min" in reading.values:
                below, *counts, above = store.row(reading.record, name)[len(STORED) :].tolist()
                low, high = reading.values[f"{name}/min"], reading.values[f"{name}/max"]
                yield name, Histogram(edges[0], edges[-1], tuple(counts), below, above, low, high, edges)

    def figures(self, name: str) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Signal over depth, and histograms."""
        if len(self.stats):
            yield f"{name}/depth", self.plot_depth
            if self.with_hist:
                yield f"{name}/histograms", self.color_dim

    def maps(self, name: str) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Heat maps of all layers over the steps."""
        if len(self.stats):
            yield from ((f"{name}/{stat}", partial(self.plot_layers, stat)) for stat in MAPS)

    # ---- saving

    def state(self) -> dict[str, Any]:
        """All that was recorded, of types that `torch.load(weights_only=True)` reads."""
        state: dict[str, Any] = {name: getattr(self, name) for name in (*OPTIONS, *STATE)}
        state["stores"] = {phase: self.store_of(phase).state() for phase in PHASES}
        state["ranges"] = []  # of histograms of older versions
        return state

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """New records from what `state` has returned."""
        records = cls(**{option: state[option] for option in OPTIONS})
        for name in STATE:
            setattr(records, name, state[name])
        for phase, store in state["stores"].items():
            if "level" in store["columns"]:
                ranges = {name: own for of, name, own in state["ranges"] if of == phase}
                store = from_levels(store, ranges, records.edges)
            records._stores[phase] = StatStore.from_state(store, records._stores[phase].columns)
        return records


def _check_range(hist_range: Any) -> None:
    if hist_range is None:
        return
    try:
        low, high = map(float, hist_range)
    except (TypeError, ValueError):
        low = high = math.nan
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"hist_range must be two finite numbers, (low, high), or None, got {hist_range!r}")
