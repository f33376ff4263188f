"""Slab: a tensor on a device to which a kernel writes the sums of each layer's outputs, record by record."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hookcb.activations.bins import Bins
from hookcb.activations.kernel import COLUMNS, Kernel, Launch, works_on
from hookcb.activations.stats import Known
from hookcb.core.torch_private import raw_stream
from hookcb.records.store import StatStore, Transfer

RECORDS = 65  # those that wait, and the running batch
ROWS = 64  # for layers and their calls, at first
SPARE = 2  # kernels, for the streams on which a graph is tried and captured
NOT_CALLED = -1.0  # in place of the number of elements


class Place(NamedTuple):
    """Place of the sums of an output, in each record."""

    slab: "Slab"
    row: int

    @property
    def sums(self) -> Tensor:
        """The sums in the running batch, on their device, `(columns,)`."""
        return self.slab.sums[self.slab.record, self.row]


class Output(NamedTuple):
    """The part of one output that a hook keeps.

    Attributes:
        type: class of the layer; for an output without statistics, what the output is instead.
        shape: shape of the output.
        n: number of elements that this process has of the output.
        copies: number of ranks that have the same ones, as under tensor parallelism; 0 if that is unknown.
        elements: a copy of the output or a sample of it, see `take`; None if it is in a slab, or has no
            statistics.
        exact: moments of all elements if `elements` is a sample, else None.
        place: where its sums are in a slab; None if they are not in one.
        n_counted: about how many elements a histogram in a slab has.
    """

    type: str
    shape: tuple[int, ...] = ()
    n: int = 0
    copies: int = 1
    elements: Tensor | None = None
    exact: Known | None = None
    place: Place | None = None
    n_counted: float = 0.0

    @property
    def is_known(self) -> bool:
        """Whether it has statistics."""
        return self.elements is not None or self.place is not None


class Waiting(NamedTuple):
    """A layer's output in a batch that has a record, and in which record of a slab it is."""

    phase: str
    name: str
    record: int
    output: Output
    at: int = 0


class Ready(NamedTuple):
    """All that the next output of a call needs, if it is like the last one."""

    output: Output
    dtype: torch.dtype
    sums: Tensor
    stream: int
    kernel: Kernel
    launch: Launch


class Slab:
    """Sums of outputs of the batches that wait, on one device; nothing is allocated in a hook.

    A launch reads on the device which record is the running one, or that none is. So a captured graph
    records at each replay, though no hook is called then.

    Args:
        device: the device.
        eps: see `layer_stats`.
        bins: bins of histograms, or None.
        counts_all: whether these count all elements, see `Kernel.prepared`.

    Attributes:
        sums: `(records, rows, columns)`, see `COLUMNS`.
        record: the running one.
        captured: outputs of graphs that may be replayed in any batch, by path.
    """

    def __init__(self, device: torch.device, eps: float, bins: Bins | None, counts_all: bool) -> None:
        self.device, self._eps, self._bins, self._counts_all = device, eps, bins, counts_all
        self._n_columns = len(COLUMNS) + (bins.n + 2 if bins else 0)
        self.sums = self._empty(ROWS)
        self.captured: dict[str, list[Output]] = {}
        self._cursor = torch.zeros(1, dtype=torch.int32, device=device)
        self._kernels: dict[int, Kernel] = {}  # by stream, as launches that overlap need memory of their own
        self._spare: list[Kernel] = []  # for streams of CUDA graphs, in whose pool nothing may stay
        self._add_spare()
        self._rows: dict[tuple[str, int], int] = {}  # by path and call
        self._ready: dict[tuple[str, int], Ready] = {}
        self._wide: set[int] = set()  # rows of float64 outputs
        self.record, self._is_used, self._rests = 0, False, False  # whether the running batch has written
        self._sent: list[tuple[Sequence[Waiting], Transfer]] = []

    @torch.inference_mode(False)  # else it could be written in inference mode only
    def _empty(self, n: int) -> Tensor:
        shape = RECORDS, n, self._n_columns
        return torch.full(shape, NOT_CALLED, dtype=torch.float64, device=self.device)

    def take_alike(self, path: str, call: int, x: Tensor, kind: str, written: Tensor | None) -> Output | None:
        """Does what `take` does if the tensor is like the last one of this call; else returns None."""
        ready = self._ready.get((path, call))
        if (
            ready is None
            or x.dtype is not ready.dtype
            or x.shape != ready.output.shape
            or not x.is_contiguous()
            or (self.sums if written is None else self._sums_of(written)) is not ready.sums
            or self._stream(x) != ready.stream
            or kind != ready.output.type
        ):
            return None
        ready.kernel.launch(x, ready.launch, ready.stream)
        self._is_used = True
        return ready.output

    def take(self, path: str, call: int, x: Tensor, kind: str, written: Tensor | None = None) -> Output:
        """Writes the sums of a tensor that `can_take` accepts, in compiled code to `written`; one launch."""
        ready = self._prepare(path, call, x, kind, self._sums_of(written), self._stream(x))
        ready.kernel.launch(x, ready.launch, ready.stream)
        self._is_used = True
        return ready.output

    def _sums_of(self, written: Tensor | None) -> Tensor:
        """Tensor to write to: a compiler may give a copy, which it copies back; an old one was replaced."""
        return self.sums if written is None or written.shape != self.sums.shape else written

    def _stream(self, x: Tensor) -> int:
        return raw_stream(self.device) if x.is_cuda else 0

    def _prepare(self, path: str, call: int, x: Tensor, kind: str, sums: Tensor, stream: int) -> Ready:
        row = self._rows.setdefault((path, call), len(self._rows))
        if row == self.sums.shape[1]:
            self.reserve(2 * row)
            sums = self.sums
        if x.dtype is torch.float64:
            self._wide.add(row)
        if stream not in self._kernels:
            self._kernels[stream] = self._spare.pop() if self._spare else self._new_kernel()
        kernel = self._kernels[stream]
        launch = kernel.prepared(x, sums, self._cursor, row, self._counts_all)
        output = Output(kind, x.shape, x.numel(), place=Place(self, row), n_counted=launch.n_counted)
        ready = self._ready[path, call] = Ready(output, x.dtype, sums, stream, kernel, launch)
        return ready

    def _new_kernel(self) -> Kernel:
        return Kernel(self.device, self._eps, self._bins)

    def _add_spare(self) -> None:
        while len(self._spare) < SPARE:
            self._spare.append(self._new_kernel())

    def reserve(self, n: int) -> None:
        """Has room for a number of layers and calls from the start, as a CUDA graph must allocate none."""
        if n > (n_rows := self.sums.shape[1]):
            with torch.inference_mode(False):
                self.sums = torch.cat([self.sums, self._empty(n - n_rows)], 1)

    def drop_batch(self) -> None:
        """Forgets the sums of the running batch."""
        if self._is_used:
            self.sums[self.record].fill_(NOT_CALLED)
            self._is_used = False

    def end_batch(self) -> None:
        """Begins the next record."""
        if self._is_used or self.captured:
            self.record, self._is_used = self.record + 1, False
            self._point()
        self._add_spare()

    def _point(self) -> None:
        self._cursor.fill_(-1 if self._rests else self.record)

    def rest(self, rests: bool) -> None:
        """Lets graphs that were captured write nothing when they are replayed, or write again."""
        self._rests = rests and bool(self.captured)
        if self.captured:
            self._point()

    def send(self, waiting: Sequence[Waiting]) -> None:
        """Starts the transfer of the sums of batches that have ended; the running one stays."""
        if not self.record:
            return
        self._sent.append((waiting, Transfer(self.sums[: self.record, : len(self._rows)].clone())))
        running = self.sums[self.record].clone()
        self.sums[: self.record + 1].fill_(NOT_CALLED)
        self.sums[0] = running
        self.record = 0
        self._point()

    def receive(self, stores: Mapping[str, StatStore]) -> None:
        """Puts statistics of all that was sent into the stores; waits for it."""
        sent, self._sent = self._sent, []
        for waiting, transfer in sent:
            sums = transfer.arrived()
            values, was_called = stats_of(sums), sums[..., 0] != NOT_CALLED
            of_layers: dict[tuple[str, str], list[tuple[int, int, int]]] = {}
            for phase, name, record, output, at in waiting:
                if output.place is not None and was_called[at, output.place.row]:
                    of_layers.setdefault((phase, name), []).append((record, at, output.place.row))
            for (phase, name), items in of_layers.items():
                records, at_, rows = map(list, zip(*items, strict=True))
                x = values[at_, rows]
                stores[phase].put(name, records, x if rows[0] in self._wide else x.float())


def can_take(x: Tensor) -> bool:
    """Whether the kernel takes a tensor: dense, not repeated in memory, and with elements."""
    return works_on(x.device, x.dtype) and x.numel() > 0 and 0 not in x.stride()


def stats_of(sums: Tensor) -> Tensor:
    """`LAYER_STATS`, then the counts of a histogram, `(..., columns)`, from sums of the kernel."""
    n, pivot, scale, sum1, sum2, _, _, low, high, near_zero, zeros, nonfinite = sums[
        ..., : len(COLUMNS)
    ].unbind(-1)
    mean = pivot + sum1 / n / scale
    std = ((sum2 - sum1.square() / n).clamp(min=0) / (n - 1)).sqrt() / scale  # NaN for one element
    unknown = low > high  # no element is finite
    low, high = (x.masked_fill(unknown, torch.nan) for x in (low, high))
    shares = [(x / n).masked_fill(unknown, torch.nan) for x in (near_zero, zeros)]
    found = [mean, std, low, high, torch.maximum(high, -low), *shares, nonfinite]
    return torch.cat([torch.stack(found, -1), sums[..., len(COLUMNS) :]], -1)
