"""StatStore: numbers of layers, record by record, on their way from the device to the host."""

from collections import deque
from collections.abc import Iterator, Sequence
from math import nan
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from hookcb.records.thinned import Thinned

T = TypeVar("T")
MAX_QUEUED = 1024
N_SENT = 16  # numbers that leave a GPU at once
MIN_WRITTEN = 64  # records of a layer that are written together, as a write takes as long as for one


class RecordInfo(NamedTuple):
    """The batch of a record."""

    record: int  # index from 0, dropped records included
    epoch: int
    step: int


class _Queued(NamedTuple):
    name: str
    records: list[int]
    values: Tensor  # (len(records), n_columns)


class StatStore:
    """Columns of numbers of named layers over the batches of a run, in bounded memory.

    Values may arrive after later records have begun, for several records at once, and from any device. Values
    on a GPU wait there; a flush sends them in one transfer that nothing waits for, and reading waits.

    At most `keep` records are kept, spread evenly over the run, and the newest; see `Thinned`.

    >>> import torch
    >>> from hookcb.records.store import StatStore
    >>> store = StatStore(("mean",), keep=4)
    >>> for step in range(10):
    ...     store.put("fc", [store.begin(epoch=0, step=step)], torch.tensor([[float(step)]]))
    >>> store.series("fc").tolist()
    [[0.0], [4.0], [8.0], [9.0]]
    """

    def __init__(self, columns: Sequence[str], keep: int) -> None:
        self.columns, self.keep = tuple(columns), keep
        self._kept = Thinned[RecordInfo](keep)
        self._values: dict[str, Tensor] = {}  # (capacity, n_columns) by name, rows as in infos
        self._queue: list[_Queued] = []
        self._unwritten: dict[str, list[_Queued]] = {}  # values on the host, by name
        self._sent: list[tuple[list[tuple[str, list[int]]], Transfer]] = []  # names and records of values
        self._newest: set[str] = set()  # names with values in the newest record

    @property
    def names(self) -> list[str]:
        """Layer names, in the order of their first values."""
        return list(self._values)

    @property
    def infos(self) -> list[RecordInfo]:
        """The batches of the kept records."""
        return self._kept.items

    def begin(self, epoch: int, step: int) -> int:
        """Begins a record and returns its number."""
        record, n = self._kept.n, len(self._kept.items)
        is_thinned = self._kept.add(RecordInfo(record, epoch, step))
        if is_thinned:
            for values in self._values.values():
                stay = values[::2].clone()
                values[: len(stay)], values[len(stay) :] = stay, float("nan")
        elif len(self._kept.items) == n:  # in the place of the one before
            for name in self._newest:
                self._values[name][n - 1] = float("nan")
        self._newest = set()
        return record

    def add(self, name: str) -> None:
        """Adds a layer to `names` before its first values arrive."""
        if name not in self._values:
            self._values[name] = self._empty(0)

    def put(self, name: str, records: list[int], values: Tensor) -> None:
        """Adds values of a layer, `(len(records), n_columns)`, float32 or float64 on any device."""
        self.add(name)
        if values.device.type == "cpu":
            self._keep(_Queued(name, records, values))
        else:
            self._queue.append(_Queued(name, records, values))
            if len(self._queue) == MAX_QUEUED:
                self.flush()

    def flush(self) -> None:
        """Starts the transfer of values that wait on devices, and stores those sent before."""
        self._receive()
        alike: dict[tuple[torch.device, torch.dtype], list[_Queued]] = {}
        for queued in self._queue:
            alike.setdefault((queued.values.device, queued.values.dtype), []).append(queued)
        for some in alike.values():
            sent = [(queued.name, queued.records) for queued in some]
            self._sent.append((sent, Transfer(torch.cat([queued.values for queued in some]))))
        self._queue = []

    def series(self, name: str) -> Tensor:
        """The values of a layer, `(n_records, n_columns)`; NaN for records without the layer.

        Float32, or float64 if the layer has had float64 values.
        """
        self._read()
        values, n = self._values.get(name, self._empty(0)), len(self.infos)
        return torch.cat([values[:n], self._empty(max(0, n - len(values)))])

    def row(self, record: int, name: str) -> Tensor:
        """The values of a layer in a record, `(n_columns,)`; NaN if the record is without the layer.

        Raises:
            LookupError: If the record is not kept.
        """
        self._read()
        i = self._kept.place(record)
        if i is None:
            raise LookupError(f"record {record} is no longer kept; only {len(self.infos)} are, see keep=")
        values = self._values.get(name)
        return self._empty(1)[0] if values is None or i >= len(values) else values[i]

    def state(self) -> dict[str, Any]:
        """All records, of types that `torch.load(weights_only=True)` reads."""
        return {
            "columns": list(self.columns),
            "keep": self.keep,
            "stride": self._kept.stride,
            "infos": [tuple(info) for info in self.infos],
            "values": {name: self.series(name) for name in self.names},
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], columns: Sequence[str] = ()) -> "StatStore":
        """A store made from what `state` has returned; NaN in those of `columns` that it lacks."""
        found = list(state["columns"])
        store = cls(columns or found, state["keep"])
        store._values, kept = state["values"], store._kept
        if list(store.columns) != found:  # of another version
            places = [found.index(name) if name in found else -1 for name in store.columns]
            store._values = {name: pad(x, (0, 1), value=nan)[:, places] for name, x in store._values.items()}
        store._newest, kept.stride = set(store._values), state["stride"]
        for info in state["infos"]:
            kept.n = info[0]
            kept.add(RecordInfo(*info))
        return store

    def __getstate__(self) -> dict[str, Any]:
        self._read()
        return self.__dict__

    def _read(self) -> None:
        self.flush()
        self._receive()
        for name in list(self._unwritten):
            self._write(name)

    def _receive(self) -> None:
        arriving, self._sent = self._sent, []
        for sent, transfer in arriving:
            parts = torch.split(transfer.arrived(), [len(records) for _, records in sent])
            for (name, records), values in zip(sent, parts, strict=True):
                self._keep(_Queued(name, records, values))

    def _keep(self, queued: _Queued) -> None:
        waiting = self._unwritten.setdefault(queued.name, [])
        waiting.append(queued)
        if sum([len(x.records) for x in waiting]) >= MIN_WRITTEN:
            self._write(queued.name)

    def _write(self, name: str) -> None:
        waiting = self._unwritten.pop(name)
        kept = [record for queued in waiting for record in queued.records]
        new = torch.cat([queued.values for queued in waiting]) if len(waiting) > 1 else waiting[0].values
        if self._kept.stride > 1:  # not all records are kept
            rows = {i: row for i, record in enumerate(kept) if (row := self._kept.place(record)) is not None}
            new, kept = new[list(rows)], list(rows.values())
        if not kept:
            return
        values, first, last = self._values[name], kept[0], max(kept)
        if last >= len(values):  # doubling copies each row about once in total
            values = self._enlarge(name, min(self.keep, max(64, 2 * last)))
        is_run = kept == list(range(first, last + 1))  # a slice takes half the time
        if new.dtype is torch.float64 and values.dtype is torch.float32:
            with torch.inference_mode(False):
                values = self._values[name] = values.double()
        values[slice(first, last + 1) if is_run else kept] = new.to(values.dtype)
        if last == len(self.infos) - 1:
            self._newest.add(name)

    def _enlarge(self, name: str, capacity: int) -> Tensor:
        with torch.inference_mode(False):
            values = self._values[name]
            values = self._values[name] = torch.cat([values, self._empty(capacity - len(values))])
        return values

    @torch.inference_mode(False)  # else it could be written in inference mode only
    def _empty(self, n: int) -> Tensor:
        return torch.full((n, len(self.columns)), float("nan"), dtype=torch.float32, device="cpu")


class Transfer:
    """Transfer of a tensor from its device to the host, which nothing waits for until `arrived`.

    Args:
        values: the tensor, which must not be written to before that.
    """

    def __init__(self, values: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if not values.is_cuda:
            self._host = values.cpu()
            return
        # a stream of its own: on the current one the copy would delay the training that follows
        stream = torch.cuda.Stream(values.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(values.device))
        with torch.cuda.stream(stream):
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True, device="cpu")
            self._host.copy_(values, non_blocking=True)
            self._event = stream.record_event()
        values.record_stream(stream)

    @property
    def is_there(self) -> bool:
        """Whether it has arrived, so that nothing waits."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def arrived(self) -> Tensor:
        """The tensor on the host; waits for the transfer."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


class Arriving(Generic[T]):
    """Numbers on a device, each with a key, that come to the host sixteen at a time; nothing waits for them.

    A key may also have several numbers, as many as the others; it gets nested lists of them.

    They leave a GPU only; those on another device, up to `most`, wait there until `rest`.
    """

    def __init__(self, most: int) -> None:
        self._waiting = deque[tuple[T, Tensor]](maxlen=most)
        self._sent = deque[tuple[list[T], Transfer]]()

    def add(self, key: T, value: Tensor) -> None:
        """Adds a number, a tensor of no dimension, or of one shape for all, which must not be written to."""
        self._waiting.append((key, value))
        if len(self._waiting) >= N_SENT and value.is_cuda and not torch.cuda.is_current_stream_capturing():
            self.send()

    def send(self) -> None:
        """Starts the transfer of those that wait."""
        if self._waiting:
            values = torch.stack([value for _, value in self._waiting])
            self._sent.append(([key for key, _ in self._waiting], Transfer(values)))
            self._waiting.clear()

    def there(self) -> Iterator[tuple[T, Any]]:
        """Takes those that have arrived, in their order."""
        while self._sent and self._sent[0][1].is_there:
            yield from self._next()

    def rest(self) -> Iterator[tuple[T, Any]]:
        """Takes all, in their order; waits for the device."""
        self.send()
        while self._sent:
            yield from self._next()

    def _next(self) -> Iterator[tuple[T, Any]]:
        keys, transfer = self._sent.popleft()
        yield from zip(keys, transfer.arrived().tolist(), strict=True)


def read_numbers(values: list[float | Tensor], first: int = 0) -> list[float]:
    """Converts values from `first` on to numbers, in place; those of a device and dtype in one transfer."""
    waiting: dict[Any, list[int]] = {}
    for i, value in enumerate(values[first:], first):
        if isinstance(value, Tensor):
            waiting.setdefault((value.device, value.dtype), []).append(i)
    for places in waiting.values():
        numbers = torch.stack([values[i].flatten()[0] for i in places]).tolist()  # type: ignore[union-attr]
        for i, number in zip(places, numbers, strict=True):
            values[i] = float(number)
    return values  # type: ignore[return-value]  # no tensor is left from `first` on
