"""LayerReadings: what was recorded of layers, read by layer, by record, or as a table."""

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from fastcore.foundation import L

from hookcb.core.files import load_saved, save_whole
from hookcb.core.text import join_names
from hookcb.records.store import RecordInfo, StatStore

Layer = int | str | slice
PHASES = ("train", "valid")


class TableRow(NamedTuple):
    """One number, of one layer in one batch."""

    record: int
    epoch: int
    step: int
    phase: str
    layer: str
    stat: str
    value: float


class Record:
    """The statistics of all layers in one batch: `record[layer]`, by index or name, is a dict of numbers.

    Attributes:
        epoch, step: when it was; steps count the training batches.
        phase: "train" or "valid".
    """

    def __init__(self, readings: "LayerReadings", phase: str, info: RecordInfo) -> None:
        self._readings, self._info = readings, info
        self.phase, self.epoch, self.step = phase, info.epoch, info.step

    def __len__(self) -> int:
        return len(self._readings.names)

    def __getitem__(self, layer: Layer) -> Any:
        readings = self._readings
        store = readings.store_of(self.phase)

        def numbers(name: str) -> dict[str, float]:
            return dict(zip(readings.columns, store.row(self._info.record, name).tolist(), strict=False))

        return readings.of_layers(layer, numbers)

    def __iter__(self) -> Iterator[dict[str, float]]:
        return iter(self[:])

    def __repr__(self) -> str:
        return f"Record(epoch={self.epoch}, step={self.step}, {len(self)} layers)"


class LayerReadings(ABC):
    """Reads what a callback has recorded; it has stores by phase.

    A layer is given by index, by name, by a slice of indices or a glob on names; the last two give an `L` of
    results, in the order of `names`.
    """

    columns: tuple[str, ...]

    @abstractmethod
    def store_of(self, phase: str) -> StatStore:
        """The records of training, "train", or of validation, "valid"."""

    @property
    def names(self) -> list[str]:
        """Of the recorded layers, in the order of their first record."""
        names = dict.fromkeys(self.store_of("train").names)
        return list(names | dict.fromkeys(self.store_of("valid").names))

    @property
    def stats(self) -> L:
        """The recorded training batches: `stats[record][layer]` is a dict of numbers."""
        return self._records("train")

    @property
    def valid_stats(self) -> L:
        """The recorded validation batches, as in `stats`."""
        return self._records("valid")

    def series(self, layer: Layer, stat: str, phase: str = "train") -> Any:
        """One statistic of a layer, a float for each record; NaN where it was not called.

        Raises:
            LookupError: for a layer or statistic that is not there.
        """
        if stat not in self.columns:
            raise LookupError(f"there is no statistic {stat!r}; there are {', '.join(self.columns)}")
        store, column = self.store_of(phase), self.columns.index(stat)

        return self.of_layers(layer, lambda name: store.series(name)[:, column].tolist())

    def table(self) -> list[TableRow]:
        """Every number as a row of its own: `pandas.DataFrame(rows)` and `polars.DataFrame(rows)` take them.

        `record` counts the records of both phases in their order.
        """
        stores = [(phase, self.store_of(phase)) for phase in PHASES]
        values = [{name: store.series(name).tolist() for name in store.names} for _, store in stores]
        batches = sorted(
            (x.epoch, of, i) for of, (_, store) in enumerate(stores) for i, x in enumerate(store.infos)
        )
        rows = []
        for record, (epoch, of, i) in enumerate(batches):
            phase, store = stores[of]
            for name, numbers in values[of].items():
                if any(x == x for x in numbers[i]):  # else it was not called
                    stats = zip(self.columns, numbers[i], strict=False)
                    rows += [
                        TableRow(record, epoch, store.infos[i].step, phase, name, *stat) for stat in stats
                    ]
        return rows

    def steps(self, phase: str = "train") -> list[int]:
        """The step of each record."""
        return [info.step for info in self.store_of(phase).infos]

    def of_layers(self, layer: Layer, read: Callable[[str], Any]) -> Any:
        """What `read` gives for the name of the layer, or an `L` of that for each of several."""
        names = self.names
        if isinstance(layer, slice):
            return L(map(read, names[layer]))
        if isinstance(layer, int):
            if not -len(names) <= layer < len(names):
                raise IndexError(f"there is no layer {layer}; there are {len(names)}: {join_names(names)}")
            return read(names[layer])
        if layer in names:
            return read(layer)
        if found := [name for name in names if isinstance(layer, str) and fnmatchcase(name, layer)]:
            return L(map(read, found))
        close = difflib.get_close_matches(str(layer), names, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise LookupError(f"no layer {layer!r} was recorded; {hint}there are: {join_names(names) or 'none'}")

    def names_of(self, layer: Layer | None) -> list[str]:
        """The names of what is given as a layer, of all by None."""
        found = self.of_layers(slice(None) if layer is None else layer, str)
        return [found] if isinstance(found, str) else list(found)

    def _records(self, phase: str) -> L:
        return L(Record(self, phase, info) for info in self.store_of(phase).infos)


class SavedReadings(LayerReadings):
    """Readings that can be written to a file, by a callback that is made of `options`."""

    options: tuple[str, ...]  # arguments that are saved too
    saved: frozenset[str]  # keys of what `save` writes

    def save(self, path: str | Path) -> Path:
        """Writes what was recorded to one file, which `load` reads, and `torch.load(weights_only=True)`."""
        return save_whole(self._saved(), path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """What `save` has written, to be read.

        Raises:
            FileNotFoundError: where there is none.
            ValueError: If it was not written by `save`, is not whole, or has changed since.
        """
        state = load_saved(path, torch.device("cpu"), set(cls.saved))
        readings = cls(**{option: state[option] for option in cls.options})
        readings._restore(state)
        return readings

    @abstractmethod
    def _saved(self) -> dict[str, Any]:
        """All there is, of types that `torch.load(weights_only=True)` reads."""

    @abstractmethod
    def _restore(self, state: dict[str, Any]) -> None:
        """Takes in what `_saved` gave."""
