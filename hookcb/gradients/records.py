"""GradientRecords: recorded gradients, weights and updates, as numbers, tables and figures."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from fastcore.foundation import L
from torch import Tensor

from hookcb.activations.plots import layer_chart
from hookcb.core.arguments import check_count
from hookcb.core.text import join_names
from hookcb.gradients import plots
from hookcb.gradients.capture import About, StepCapture, reduce_steps, step_columns
from hookcb.gradients.flow import STORED, GradientFlow, flow_of
from hookcb.gradients.groups import merged_series
from hookcb.gradients.outputs import OutputGradients
from hookcb.gradients.report import GradientReport, param_rows
from hookcb.gradients.stats import BUFFER_STATS, GRAD_STATS, STEP_STATS, Number
from hookcb.records.content import MAX_RECORDS, Content, Recorded
from hookcb.records.memory import Memory
from hookcb.records.recording import Reading, with_numbers
from hookcb.records.records import Layer, LayerRecords, SavedRecords, Stats
from hookcb.records.series import Series
from hookcb.records.store import StatStore
from hookcb.records.tables import VerdictLike, Worst, marks_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STATE = ("about", "without_grad", "frozen", "left_out", "not_optimized", "first_bad", "shard")
MAX_STEPS, MAX_ELEMENTS = 256, 2**20  # captured steps, or elements (4 MB), that are reduced together
STEP = "step"  # name of whole steps in their store
NORMS = ("norm", "total_norm", "mean_norm")
COPIES = ("clipped_norm", "clipped_total_norm")  # of norms that were read after clipping
NOTHING_DONE = {"clip_coef": 1.0, "scale": 1.0, "skipped": 0.0}  # these are not shown

T = TypeVar("T")


def is_unread(abs_max: float, nonfinite: float) -> bool:
    """Whether details of a gradient were not read: it has no largest element, though all are finite."""
    return math.isnan(abs_max) and nonfinite == 0


class BufferRecords(LayerRecords):
    """Minimum and maximum of running statistics, by name of the buffer."""

    columns = BUFFER_STATS

    def __init__(self, store: StatStore) -> None:
        self._store = store

    def store_of(self, phase: str) -> StatStore:
        """The records of training; those of validation are empty."""
        return self._store if phase == "train" else StatStore(self.columns, self._store.keep)


class GradientRecords(SavedRecords):
    """Records of `GradientHealth`, one for each recorded step.

    Args:
        keep: maximum number of records, see `GradientHealth`.
        activations: whether to keep the gradients of layers' outputs, too.

    Attributes:
        columns: names of the statistics of a parameter.
        about: number of elements, number of dimensions and type of the module, by parameter.
        without_grad: names of the parameters that require a gradient and had none in the last record.
        frozen: names of the parameters that require no gradient.
        left_out: types of the parameters with unreadable elements, by name.
        not_optimized: names of the parameters that are in no optimizer that has made a step.
        first_bad: first step with NaN or infinite gradients and their number, by parameter; on a CPU even
            if its record was dropped.
        shard: whose part of the parameters was read, "the shard of rank 1"; "" if they are whole.
        is_clipped: whether the loop has clipped the gradients before they were read; not saved.
        output_stats: gradients of layers' outputs, with `activations=True`; else None.

    Raises:
        TypeError, ValueError: If `keep` is not a whole number of at least 2.

    >>> from hookcb import GradientHealth, synth_learner
    >>> learn = synth_learner()
    >>> with learn.no_logging():
    ...     learn.fit(1, cbs=GradientHealth())
    >>> records = learn.gradient_health.records
    >>> records.names
    ['0.weight', '0.bias', '2.weight', '2.bias']
    >>> len(records.series("0.weight", "norm"))
    10
    """

    columns = GRAD_STATS
    is_clipped = False
    keys = frozenset((*STATE, "keep", "stores", "outputs", "skipped"))

    def __init__(self, keep: int = 5_000, activations: bool = False) -> None:
        self.keep = check_count("keep", keep, "records", least=2)
        columns = {"params": STORED, "steps": STEP_STATS, "buffers": BUFFER_STATS}
        self._stores = {name: StatStore(stats, keep) for name, stats in columns.items()}
        self._waiting: list[StepCapture] = []
        self._n_elements = 0
        self.memory, self._n_lent = Memory(), 0  # which lends to captured steps; number of those that wait
        self._last_about: About = {}
        self._skipped: Number = 0  # steps, on the device if only it knows
        self.about: About = {}
        self.without_grad: list[str] = []
        self.frozen: list[str] = []
        self.left_out: dict[str, str] = {}
        self.not_optimized: list[str] = []
        self.first_bad: dict[str, tuple[int, float]] = {}
        self.shard = ""
        self.output_stats = OutputGradients(keep) if activations else None

    # ---- adding

    def count_step(self, skipped: Number) -> None:
        """Counts a step, recorded or not; `skipped` is 1 if it was not made."""
        self._skipped = self._skipped + skipped

    def add_step(self, capture: StepCapture, epoch: int, step: int) -> None:
        """Adds a record."""
        (capture.record, *_) = [store.begin(epoch, step) for store in self._stores.values()]
        capture.step = step
        self.without_grad, self.frozen = capture.without_grad, capture.frozen
        self.left_out, self.not_optimized = capture.left_out, capture.not_optimized
        if capture.about is not self._last_about:
            self._last_about = capture.about
            for name in [name for name in capture.about if name not in self.about]:
                self.about[name] = capture.about[name]
                self._stores["params"].add(name)
        self._waiting.append(capture)
        self._n_elements += capture.n_elements
        self._n_lent = self.memory.n_lent
        if len(self._waiting) == MAX_STEPS or self._n_elements > MAX_ELEMENTS:
            self.reduce()

    @property
    def n_added(self) -> int:
        """Number of records of the fit, with those that are no longer kept."""
        infos = self._stores["params"].infos
        return infos[-1].record + 1 if infos else 0

    def reduce(self) -> None:
        """Moves the waiting steps into the stores."""
        waiting, self._waiting, self._n_elements = self._waiting, [], 0
        for steps, by_device in reduce_steps(waiting):
            records = [step.record for step in steps]
            for names, values in by_device:
                self._note_nonfinite(steps, names, values)
                for name, own in zip(names, values.unbind(), strict=True):
                    self._stores["params"].put(name, records, own)
            self._stores["steps"].put(STEP, records, step_columns(steps, by_device))
            self._put_buffers(steps)
        self.memory.take_back(slice(self._n_lent))  # not what the step in progress has
        self._n_lent = 0

    def _note_nonfinite(self, steps: Sequence[StepCapture], names: Sequence[str], values: Tensor) -> None:
        """Remembers the first NaN, as its record may be dropped; only on a CPU, which needs no sync."""
        counts = values[..., GRAD_STATS.index("nonfinite")]
        if not counts.is_cpu or not bool(counts.any()):
            return
        for name, numbers in zip(names, counts.tolist(), strict=True):
            for step, n in zip(steps, numbers, strict=True):
                is_overflow = float(step.skipped) > 0 and float(step.scale) > 1  # a GradScaler handles it
                if n and not is_overflow:
                    self.first_bad.setdefault(name, (step.step, n))

    def _put_buffers(self, steps: Sequence[StepCapture]) -> None:
        for device in {device for step in steps for device in step.buffers}:
            on_device = [(step.record, *step.buffers[device]) for step in steps if device in step.buffers]
            for sizes, group in groupby(on_device, lambda item: item[1]):
                records, _, values = zip(*group, strict=True)
                buffers = torch.split(torch.stack(values), [*sizes.values()], dim=1)
                for name, buffer in zip(sizes, buffers, strict=True):
                    ends = torch.stack(torch.aminmax(buffer, dim=1), 1).float()
                    self._stores["buffers"].put(name, list(records), ends)

    def flush(self) -> None:
        """Starts the transfer of numbers from their device to the host, and does not wait for it."""
        self.reduce()
        for store in self._stores.values():
            store.flush()
        if self.output_stats is not None:
            self.output_stats.flush()

    # ---- reading

    def store_of(self, phase: str) -> StatStore:
        """The records of training; those of validation are empty."""
        self.reduce()
        return self._stores["params"] if phase == "train" else StatStore(STORED, self.keep)

    @property
    def skipped(self) -> int:
        """Number of steps without an update in the whole fit; reading it waits for the device."""
        return int(self._skipped)

    @property
    def step_stats(self) -> L:
        """Statistics of whole steps: `step_stats[record]` is a dict with the keys of `STEP_STATS`.

        `total_norm`, `clipped_total_norm` (NaN if the step was skipped) and `mean_norm` over parameters, all
        L2; `lr` of the last parameter group; `scale` of a GradScaler, else 1; `skipped`, 1.0 if no optimizer
        made a step; `clip_coef`, clipped total norm / total norm, 0..1.
        """
        self.reduce()
        rows = self._stores["steps"].series(STEP).tolist()
        return L(dict(zip(STEP_STATS, row, strict=True)) for row in rows)

    def step_series(self, stat: str) -> list[float]:
        """One statistic of whole steps, a float for each record; see `step_stats`.

        Raises:
            LookupError: If `stat` is not one of `STEP_STATS`.
        """
        if stat not in STEP_STATS:
            raise LookupError(f"no statistic {stat!r} of a step; available: {', '.join(STEP_STATS)}")
        self.reduce()
        numbers: list[float] = self._stores["steps"].series(STEP)[:, STEP_STATS.index(stat)].tolist()
        return numbers

    @property
    def buffer_stats(self) -> Any:
        """Running statistics: `buffer_stats[record][buffer]` is a dict with `min` and `max`."""
        return self._buffers.stats

    def buffer_series(self, buffer: Layer, stat: str) -> Any:
        """One statistic of a buffer with running statistics, a float for each record."""
        return self._buffers.series(buffer, stat)

    @property
    def _buffers(self) -> BufferRecords:
        self.reduce()
        return BufferRecords(self._stores["buffers"])

    def merged(self, param: Layer, stat: str) -> Series:
        """One statistic of several parameters together, as if they were one, a value for each record.

        See `merged_series` for the statistics that merge: a norm is the root of the sum of squares.

        Args:
            param: index, name, slice, or glob on names: `"blocks.*.mlp.*"`.
            stat: name of the statistic.

        Raises:
            LookupError: If there is no such parameter or statistic.
            ValueError: If the statistic of several parameters does not follow from those of each.
        """
        at, names, store = self.place_of(stat), self.names_of(param), self.store_of("train")
        rows = torch.stack([store.series(name) for name in names])
        columns = {stat: rows[..., at], "nonfinite": rows[..., self.place_of("nonfinite")]}
        return Series(self.steps(), merged_series(stat, columns, [self.about[x][0] for x in names]).tolist())

    def detailed(self, name: str) -> list[int]:
        """Indices of the records with details of a parameter, see `GradientHealth`."""
        pairs = zip(self.layer_series(name, "abs_max"), self.layer_series(name, "nonfinite"), strict=True)
        return [i for i, (size, n) in enumerate(pairs) if not is_unread(size, n)]

    def flow(self, record: int | None = None) -> GradientFlow:
        """Mean and largest |gradient| of each layer in one record, in the order of the model, unclipped.

        By default in the last record with details; in others, those of large parameters are NaN. The mean of
        a parameter with more than 65,536 elements is that of 1,024 of them, usually within 3 %.

        Raises:
            ValueError: If nothing is recorded.
            IndexError: If `record` does not exist.
        """
        store = self.store_of("train")
        if not store.infos:
            raise ValueError("nothing is recorded yet; train for a step first")
        if record is None:
            n = len(store.infos)
            with_all = set(range(n)).intersection(
                *(self.detailed(name) for name in store.names if self.about[name][0])
            )
            record = max(with_all, default=n - 1)
        if not -len(store.infos) <= record < len(store.infos):
            raise IndexError(f"record {record} does not exist; {len(store.infos)} are kept")
        rows = {
            name: dict(zip(STORED, store.series(name)[record].tolist(), strict=True)) for name in store.names
        }
        return flow_of({name: about[0] for name, about in self.about.items()}, rows)

    def plot_flow(
        self,
        ax: "Axes | None" = None,
        *,
        figsize: tuple[float, float] | None = None,
        record: int | None = None,
    ) -> "Figure":
        """Plots the gradient flow of a record, by default the last with details.

        Raises:
            ModuleNotFoundError: Without matplotlib.
            ValueError: If there is nothing to draw.
        """
        return self.flow(record).plot(figsize, ax)

    def plot_updates(
        self,
        ax: "Axes | None" = None,
        *,
        figsize: tuple[float, float] | None = None,
        params: Layer | None = None,
    ) -> "Figure":
        """Plots log10 of the update ratio of each parameter over the steps, with a line at the usual 1e-3.

        By default it shows weights with two or more dimensions, as in the source, or all parameters if there
        are none.

        Raises:
            ModuleNotFoundError: Without matplotlib.
            ValueError: If there is nothing to draw.

        Source: A. Karpathy, "Building makemore part 3", 2022.
        """
        names = self.names_of(params)
        if params is None:
            names = [name for name in names if self.about[name][1] > 1] or names
        series = {name: self.layer_series(name, "update_ratio") for name in names}
        return plots.update_lines(series, self.steps(), figsize, ax)

    def report(
        self, *, worst: Worst = "auto", depth: int | None = None, verdict: VerdictLike | None = None
    ) -> GradientReport:
        """Table of the parameters with the statistics of the last record; `print` shows it.

        The worst rows are those with a finding of the verdict, the worst first; then those without a
        gradient; then those with a gradient norm farthest from the median, as a factor.

        Args:
            worst: number of rows to show, the worst first; None shows all, in the order of the model. By
                default up to 30 rows are all shown, and of more the 20 worst.
            depth: group parameters by the first `depth` parts of their module's name, and show the worst
                parameter of each group, with the size of the group.
            verdict: verdict of `learn.diagnose()`; its findings mark the rows.

        Raises:
            TypeError, ValueError: If `worst` or `depth` is invalid.
        """
        params = {name: self._all_series(name) for name in self.names}
        rows = list(param_rows(params, self.without_grad, marks_of(verdict, "param")))
        title = f"gradients in the last of {len(self.steps())} recorded steps"
        return GradientReport(rows, title, worst=worst, depth=depth, caption=self._caption())

    def _caption(self) -> str:
        steps = self.step_stats
        lines = []
        if steps:
            last, step = steps[-1], self.steps()[-1]
            total, mean = last["total_norm"], last["mean_norm"]
            after = ", after clipping" if self.is_clipped else ""
            lines.append(f"total norm {total:.3g}, mean norm {mean:.3g} at step {step}{after}")
        if self.shard:
            lines.append(f"numbers are those of {self.shard}, not of whole parameters")
        largest = [self.detailed(name)[-1:] for name in self.names]
        if (oldest := min((i for (i,) in filter(None, largest)), default=len(steps) - 1)) < len(steps) - 1:
            lines.append(f"some of the largest elements are those at step {self.steps()[oldest]}")
        if self.frozen:
            lines.append(f"{len(self.frozen)} frozen: {join_names(self.frozen, 4)}")
        if skipped := sum(step["skipped"] > 0 for step in steps):
            lines.append(f"{skipped} of these steps were skipped")
        return "\n".join(lines)

    def _all_series(self, name: str) -> dict[str, list[float]]:
        return dict(zip(self.columns, self.store_of("train").series(name).T.tolist(), strict=False))

    # ---- shown by others

    def named(self, stats: Mapping[str, T]) -> dict[str, T]:
        """Statistics by names that say which norms were read after clipping."""
        if not self.is_clipped:
            return dict(stats)
        return {f"clipped_{x}" if x in NORMS else x: own for x, own in stats.items() if x not in COPIES}

    def show_on(self, page: Content) -> None:
        """Shows statistics of each parameter, and of whole steps."""
        steps = self.steps()
        for stat, series in self.named(self._shown_steps(steps)).items():
            page.run[stat] = series
        page.params = {
            name: Recorded(name.rpartition(".")[0], stats=self._shown_param(name, steps))
            for name in self.names
        }

    def _shown_steps(self, steps: list[int]) -> dict[str, Series]:
        """Statistics of whole steps, but the rate, without those of what was never done."""
        found = {stat: Series(steps, self.step_series(stat)) for stat in STEP_STATS if stat != "lr"}
        for stat, nothing in NOTHING_DONE.items():
            if all(x == nothing for x in found[stat].values if x == x):
                del found[stat]
        if "clip_coef" not in found:
            del found["clipped_total_norm"]
        return found

    def _shown_param(self, name: str, steps: list[int]) -> dict[str, Series]:
        """Statistics of a parameter, but its rms, which follows from the norm, and a norm that is a copy."""
        found = self.shown_series(name, steps, [stat for stat in self.columns if stat != "abs_max"])
        found.pop("rms", None)
        if str(found.get("clipped_norm")) == str(found.get("norm")):
            found.pop("clipped_norm", None)
        rows, largest = self.detailed(name), self.layer_series(name, "abs_max")
        rows = rows[:: -(-len(rows) // MAX_RECORDS) or 1]
        known = {"abs_max": Series([steps[i] for i in rows], [largest[i] for i in rows])}
        return self.named(found | with_numbers(known))

    def logged(self, name: str, stats: Stats) -> Stats:
        """Statistics of a parameter in one record that a log gets: those that were read."""
        if self.about[name][1] < 2:
            del stats["zero_rows"]  # a parameter with fewer than 2 dimensions has no rows
        if is_unread(stats["abs_max"], stats["nonfinite"]):
            del stats["abs_max"]
        return self.named(stats)

    def newest(self, seen: Mapping[str, int], part: str = "") -> Iterator[Reading]:
        """Last records of the steps and of layers' outputs, unless they are in `seen`; waits for a GPU."""
        for reading in super().newest(seen, part):
            steps = self.named({stat: self.step_series(stat)[-1] for stat in STEP_STATS})
            reading.values.update({f"step/{stat}": x for stat, x in steps.items()})
            yield reading
        if self.output_stats is not None:
            yield from self.output_stats.newest(seen, "_of_outputs")

    def figures(self, name: str) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Flow of gradients."""
        if len(self.stats):
            yield f"{name}/flow", self.plot_flow

    def maps(self, name: str) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Heat map of the norms of all parameters' gradients over the steps."""
        if len(self.stats):
            rows = {param: self.layer_series(param, "norm") for param in self.names}
            yield f"{name}/norm", lambda: layer_chart(rows, self.steps(), "gradient norm", is_share=False)

    # ---- saving

    def state(self) -> dict[str, Any]:
        """All records, as plain values and tensors."""
        self.reduce()
        state: dict[str, Any] = {name: getattr(self, name) for name in (*STATE, "keep", "skipped")}
        state["stores"] = {name: store.state() for name, store in self._stores.items()}
        state["outputs"] = None if self.output_stats is None else self.output_stats.state()
        return state

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_skipped": self.skipped}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """New records from the value of `state`."""
        records = cls(state["keep"], activations=state["outputs"] is not None)
        for name in STATE:
            setattr(records, name, state[name])
        own = records._stores
        own |= {name: StatStore.from_state(x, own[name].columns) for name, x in state["stores"].items()}
        records._skipped = state["skipped"]
        if records.output_stats is not None:
            records.output_stats = OutputGradients.from_state(state["outputs"])
        return records
