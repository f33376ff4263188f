"""LayerRecords: recorded numbers of layers, read by layer, by record, or as a table."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar, overload

import torch
from fastcore.foundation import L

from hookcb.core.arguments import did_you_mean
from hookcb.core.files import check_saved, read_saved, save_whole
from hookcb.core.text import join_names
from hookcb.records.content import MAX_RECORDS
from hookcb.records.frames import frame_of
from hookcb.records.recording import Reading, Recording, picked, with_numbers
from hookcb.records.series import Series
from hookcb.records.store import RecordInfo, StatStore

Layer = int | str | slice
Stats = dict[str, float]
T = TypeVar("T")
PHASES = ("train", "valid")
SCHEMA = 1  # version of saved records


def module_of(name: str) -> str:
    """Name of the module that a recorded output belongs to: `lstm` for `lstm[0]` and `lstm#1`."""
    return name.partition("#")[0].partition("[")[0]


class TableRow(NamedTuple):
    """One number of one layer in one batch."""

    record: int
    epoch: int
    step: int
    phase: str
    layer: str
    stat: str
    value: float


class Record:
    """Statistics of all layers in one batch: `record[layer]`, by index or name, is a dict of numbers.

    Attributes:
        epoch: index of the epoch.
        step: number of training batches before this one.
        phase: "train" or "valid".
    """

    def __init__(self, records: "LayerRecords", phase: str, info: RecordInfo) -> None:
        self._records, self._info = records, info
        self.phase, self.epoch, self.step = phase, info.epoch, info.step

    def __len__(self) -> int:
        return len(self._records.names)

    @overload
    def __getitem__(self, layer: int) -> Stats: ...
    @overload
    def __getitem__(self, layer: slice) -> Sequence[Stats]: ...
    @overload
    def __getitem__(self, layer: str) -> Any: ...  # a glob gives several; `record["fc"]["mean"]` must pass
    def __getitem__(self, layer: Layer) -> Any:
        records = self._records
        store = records.store_of(self.phase)

        def numbers(name: str) -> Stats:
            return dict(zip(records.columns, store.row(self._info.record, name).tolist(), strict=False))

        return records.of_layers(layer, numbers)

    def __iter__(self) -> Iterator[Stats]:
        return iter(self[:])

    def __contains__(self, layer: object) -> bool:
        return layer in self._records.names

    def __repr__(self) -> str:
        return f"Record(epoch={self.epoch}, step={self.step}, {len(self)} layers)"


class LayerRecords(Recording, ABC):
    """Recorded numbers of layers, in one store for each phase.

    A layer is given by index, name, slice of indices, or glob on names. A slice or glob selects several
    layers, and the result is an `L` with one item for each, in the order of `names`.

    Attributes:
        columns: names of the statistics.
    """

    columns: tuple[str, ...]

    @abstractmethod
    def store_of(self, phase: str) -> StatStore:
        """Store of the records of training, "train", or validation, "valid"."""

    @property
    def names(self) -> list[str]:
        """Names of the recorded layers, in the order of their first record."""
        names = dict.fromkeys(self.store_of("train").names)
        return list(names | dict.fromkeys(self.store_of("valid").names))

    @property
    def stats(self) -> Sequence[Record]:
        """The recorded training batches: `stats[record][layer]` is a dict of numbers."""
        return self._records("train")

    @property
    def valid_stats(self) -> Sequence[Record]:
        """The recorded validation batches, like `stats`."""
        return self._records("valid")

    @overload
    def series(self, layer: int, stat: str, phase: str = "train") -> list[float]: ...
    @overload
    def series(self, layer: slice, stat: str, phase: str = "train") -> Sequence[list[float]]: ...
    @overload
    def series(self, layer: str, stat: str, phase: str = "train") -> list[float] | Sequence[list[float]]: ...
    def series(self, layer: Layer, stat: str, phase: str = "train") -> Any:
        """One statistic of a layer, a float for each record; NaN if the layer was not called.

        Raises:
            LookupError: If there is no such layer or statistic.
        """
        return self.of_layers(layer, lambda name: self.layer_series(name, stat, phase))

    def layer_series(self, name: str, stat: str, phase: str = "train") -> list[float]:
        """One statistic of the layer with exactly this name, like `series`."""
        values: list[float] = self.store_of(phase).series(name)[:, self.place_of(stat)].tolist()
        return values

    def place_of(self, stat: str) -> int:
        """Place of a statistic in `columns`.

        Raises:
            LookupError: If there is no such statistic.
        """
        if stat not in self.columns:
            raise LookupError(f"there is no statistic {stat!r}; there are {', '.join(self.columns)}")
        return self.columns.index(stat)

    def shown_series(
        self, name: str, steps: Sequence[int], stats: Sequence[str] | None = None
    ) -> dict[str, Series]:
        """Statistics of a layer in training for a page, without the records in which it was not called.

        Args:
            name: name of the layer.
            steps: step of each record.
            stats: the statistics, by default all.
        """
        stats = self.columns if stats is None else stats
        values = self.store_of("train").series(name)[:, [self.columns.index(stat) for stat in stats]]
        rows = picked(values, MAX_RECORDS)
        kept = [steps[i] for i in rows.tolist()]
        columns = zip(stats, values[rows].T.tolist(), strict=True)
        return with_numbers({stat: Series(kept, column) for stat, column in columns})

    def newest(self, seen: Mapping[str, int], part: str = "") -> Iterator[Reading]:
        """Last record of training, unless its number is `seen[part]`; waits for a GPU."""
        store = self.store_of("train")
        if not store.infos or seen.get(part) == store.infos[-1].record:
            return
        record, _, step = store.infos[-1]
        reading = Reading(part, record, step, {}, {})
        for name in store.names:
            numbers = store.row(record, name).tolist()
            if any(x == x for x in numbers):  # else it was not called
                stats = self.logged(name, dict(zip(self.columns, numbers, strict=False)))
                reading.values.update({f"{name}/{stat}": x for stat, x in stats.items()})
        yield reading

    def logged(self, name: str, stats: Stats) -> Stats:
        """Statistics of a layer in one record that a log gets."""
        return stats

    def table(self) -> list[TableRow]:
        """Every number as a row of its own, for `pandas.DataFrame(rows)` or `polars.DataFrame(rows)`.

        `record` counts the records of both phases in the order of their batches.
        """
        stores = [(phase, self.store_of(phase)) for phase in PHASES]
        values = [{name: store.series(name).tolist() for name in store.names} for _, store in stores]
        batches = sorted(
            (info.epoch, at, i) for at, (_, store) in enumerate(stores) for i, info in enumerate(store.infos)
        )
        rows = []
        for record, (epoch, at, i) in enumerate(batches):
            phase, store = stores[at]
            for name, numbers in values[at].items():
                if any(x == x for x in numbers[i]):  # else the layer was not called
                    stats = zip(self.columns, numbers[i], strict=False)
                    rows += [
                        TableRow(record, epoch, store.infos[i].step, phase, name, *stat) for stat in stats
                    ]
        return rows

    def to_frame(self) -> Any:
        """A DataFrame of pandas or polars with a row for each record, and a column for each "layer.stat".

        Its first columns are `record`, `epoch`, `step` and `phase`. A layer that was not called is missing.

        Raises:
            ModuleNotFoundError: If neither is installed.
        """
        wide: dict[int, dict[str, Any]] = {}
        for row in self.table():
            about = {"record": row.record, "epoch": row.epoch, "step": row.step, "phase": row.phase}
            name = f"{row.layer}.{row.stat}" if row.layer else row.stat
            wide.setdefault(row.record, about)[name] = row.value
        return frame_of(list(wide.values()))

    def steps(self, phase: str = "train") -> list[int]:
        """Step of each record."""
        return [info.step for info in self.store_of(phase).infos]

    @overload
    def of_layers(self, layer: int, read: Callable[[str], T]) -> T: ...
    @overload
    def of_layers(self, layer: slice, read: Callable[[str], T]) -> Sequence[T]: ...
    @overload
    def of_layers(self, layer: Layer, read: Callable[[str], T]) -> T | Sequence[T]: ...
    def of_layers(self, layer: Layer, read: Callable[[str], Any]) -> Any:
        """The result of `read(name)` for one layer, or an `L` of the results for several.

        Raises:
            LookupError: If there is no such layer.
        """
        names = self.names
        if isinstance(layer, slice):
            return L(map(read, names[layer]))
        if isinstance(layer, int):
            if not -len(names) <= layer < len(names):
                raise IndexError(f"there is no layer {layer}; there are {len(names)}: {join_names(names)}")
            return read(names[layer])
        if layer in names:
            return read(layer)
        if matching := [name for name in names if isinstance(layer, str) and fnmatchcase(name, layer)]:
            return L(map(read, matching))
        hint = did_you_mean(str(layer), names)
        raise LookupError(f"no layer {layer!r} was recorded; {hint}there are: {join_names(names) or 'none'}")

    def names_of(self, layer: Layer | None) -> list[str]:
        """Names of the selected layers; of all layers if `layer` is None."""
        names = self.of_layers(slice(None) if layer is None else layer, str)
        return [names] if isinstance(names, str) else list(names)

    def _records(self, phase: str) -> Sequence[Record]:
        records: Sequence[Record] = L(Record(self, phase, info) for info in self.store_of(phase).infos)
        return records


class SavedRecords(LayerRecords):
    """Records that can be saved to a file and loaded from it, without a callback.

    Attributes:
        keys: keys of `state()`, by which a file is recognized.
    """

    keys: frozenset[str]

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """All that was recorded, of types that `torch.load(weights_only=True)` reads."""

    @classmethod
    @abstractmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """New records from what `state` has returned."""

    def save(self, path: str | Path) -> Path:
        """Writes the records to one file, which `load` and `torch.load(weights_only=True)` read."""
        return save_whole({"schema": SCHEMA, **self.state()}, path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """New records from a file written by `save`.

        Raises:
            FileNotFoundError: If there is no file.
            ValueError: If it was not written by `save`, is of another version, is not whole, or has changed
                since.
        """
        state = without_schema(read_saved(path, torch.device("cpu")), path)
        check_saved(state, path, set(cls.keys))
        return cls.from_state(state)


def without_schema(state: Any, file: str | Path) -> Any:
    """`state` of a file without the version of saved records.

    Raises:
        ValueError: If it is another version than that of this package.
    """
    found = state.get("schema", SCHEMA) if isinstance(state, dict) else SCHEMA
    if found != SCHEMA:
        raise ValueError(f"{file} has records of version {found!r}, and this hookcb reads version {SCHEMA}")
    return {key: x for key, x in state.items() if key != "schema"} if isinstance(state, dict) else state
