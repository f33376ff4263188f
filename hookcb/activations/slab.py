"""Slab: a tensor on a device to which a kernel writes the sums of each layer's outputs, record by record."""

from collections.abc import Hashable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookcb.activations.bins import Bins
from hookcb.activations.kernel import BLOCK, KERNEL, PARTS
from hookcb.activations.stats import COLUMNS, SAMPLED, WHOLE, Known, flat
from hookcb.core.triton_kernel import addressed, can_run
from hookcb.records.store import Transfer

RECORDS = 65  # those that wait, and the running batch
ROWS = 64  # for layers and their calls, at first
NOT_CALLED = -1.0  # in place of the number of elements
SHARE = 8 * BLOCK  # elements of a program, at least
PER_SM = 4  # programs, as many as run at once by their registers
DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool} | {
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
}


class Output(NamedTuple):
    """The part of one output that a hook keeps.

    Attributes:
        type: class of the layer; for an output without statistics, what the output is instead.
        shape: shape of the output.
        dtype: that of the output.
        elements: a copy of the output or a sample of it, see `take`; None if it is in a slab, or has no
            statistics.
        known: `moments` of all elements if `elements` is a sample, else None.
        slab: where its sums are; None if they are not in one.
        row: its row in each record of the slab.
        n: number of elements that this process has of the output.
        n_counted: about how many of them a histogram in a slab counts.
        copies: number of ranks that have the same elements, as in tensor parallelism; 0 if that is unknown.
    """

    type: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    elements: Tensor | None = None
    known: Known | None = None
    slab: "Slab | None" = None
    row: int = 0
    n: int = 0
    n_counted: float = 0.0
    copies: int = 1

    @property
    def has_stats(self) -> bool:
        """Whether it has statistics."""
        return self.elements is not None or self.slab is not None

    @property
    def sums(self) -> Tensor:
        """Its sums in the running record of its slab, on their device, `(columns,)`."""
        if self.slab is None:
            raise ValueError(f"an output of {self.type} is in no slab")
        return self.slab.sums[self.slab.record, self.row]


class Ready(NamedTuple):
    """All that the next output of a call needs, if it is like the last one.

    Attributes:
        output: the last one.
        sums: the tensor to write to.
        key: see `TritonKernel.launch`.
        programs: number of programs.
        args: all arguments after the tensor.
        numbers: the same with addresses in place of tensors.
    """

    output: Output
    sums: Tensor
    key: tuple[Hashable, ...]
    programs: int
    args: tuple[Any, ...]
    numbers: tuple[Any, ...]


class Slab:
    """Sums of outputs of the batches that wait, on one device; nothing is allocated in a hook.

    A launch reads on the device which record is the running one, or that none is. So a captured graph
    records at each replay, though no hook is called then. Each row has memory of its own in which programs
    hand on their sums, as launches on several streams overlap.

    Args:
        device: the device.
        eps: see `layer_stats`.
        bins: bins of histograms, or None.
        counts_all: whether these count all elements, also if they are over 8,192; else 4,096 or more that are
            spread evenly, the same ones of each output of this size.

    Attributes:
        sums: `(records, rows, columns)`, see `COLUMNS`, then the counts of a histogram; float64.
        record: the running one.
        captured: outputs of graphs that may be replayed in any batch, by path.
    """

    @torch.inference_mode(False)
    def __init__(self, device: torch.device, eps: float, bins: Bins | None, counts_all: bool) -> None:
        sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
        self.device, self.most, self._counts_all = device, PER_SM * sms, counts_all
        self._n_slots = 1 << (bins.n + 2).bit_length() if bins else 0  # a power of 2, as Triton needs
        self._n_columns = len(COLUMNS) + (bins.n + 2 if bins else 0)
        bins = bins or Bins(1)
        limits = eps, *bins.scale, bins.ends[1] if bins.ends else 0.0, bins.n, bins.ends is not None
        # without a transfer, which no graph may capture
        self._limits = torch.stack([torch.full((), x, dtype=torch.float64, device=device) for x in limits])
        self._cursor = torch.zeros(1, dtype=torch.int32, device=device)
        self.sums = torch.empty(RECORDS, 0, self._n_columns, dtype=torch.float64, device=device)
        self._scratch: list[tuple[Tensor, Tensor]] = []  # by row
        self.reserve(ROWS)
        self.captured: dict[str, list[Output]] = {}
        self._ready: dict[tuple[str, int], Ready] = {}  # by path and call
        self.record, self._is_used, self._rests = 0, False, False  # whether the running batch has written

    def take(self, path: str, call: int, x: Tensor, kind: str, written: Tensor | None) -> Output | None:
        """Writes the sums of a tensor to a row, in one launch; None if the kernel does not take it.

        Args:
            path: name of the layer, or of a tensor in its output.
            call: index of the call in this batch.
            x: the tensor.
            kind: class of the layer.
            written: what compiled code gives to write to: `sums`, or a copy, which it copies back.
        """
        # a tensor of another shape was replaced since
        sums = self.sums if written is None or written.shape != self.sums.shape else written
        ready = self._ready.get((path, call))
        if (
            ready is None
            or x.dtype is not ready.output.dtype
            or x.shape != ready.output.shape
            or sums is not ready.sums
            or kind != ready.output.type
        ):
            if not can_take(x):
                return None
            ready = self._prepared(path, call, x, kind, sums)
        self._launch(x, ready)
        self._is_used = True
        return ready.output

    def _prepared(self, path: str, call: int, x: Tensor, kind: str, sums: Tensor) -> Ready:
        known = self._ready.get((path, call))
        row = len(self._ready) if known is None else known.output.row
        if row == self.sums.shape[1]:
            self.reserve(2 * row)
            sums = self.sums
        n = x.numel()
        blocks = max(SHARE // BLOCK, -(-n // (self.most * BLOCK)))  # of each program
        passes = blocks if self._counts_all or n <= WHOLE else -(-SAMPLED * blocks // n)  # of the histogram
        own = sums, sums.stride(0), row * sums.stride(1), self._cursor, *self._scratch[row]
        args = *own, n, blocks, passes, self._limits, self.most, self._n_slots, BLOCK
        output = Output(kind, x.shape, x.dtype, slab=self, row=row, n=n, n_counted=n * passes / blocks)
        key, programs = (x.dtype, n < 2**31, self._n_slots), -(-n // (blocks * BLOCK))
        self._ready[path, call] = ready = Ready(output, sums, key, programs, args, addressed(args))
        return ready

    def _launch(self, x: Tensor, ready: Ready) -> None:
        """Writes the sums of a tensor, which is copied if its memory has gaps."""
        if not x.is_contiguous() or x.is_neg():
            x = flat(x.detach().resolve_neg()).contiguous()
        if x.dtype is torch.bool:
            x = x.view(torch.uint8)  # a Triton bool is one bit
        address = x.data_ptr()
        key, args, numbers = (ready.key, address % 16 == 0), (x, *ready.args), (address, *ready.numbers)
        KERNEL.launch(key, self.device, ready.programs, args, numbers)

    @torch.inference_mode(False)  # else it could be written in inference mode only
    def reserve(self, n: int) -> None:
        """Has room for a number of layers and calls from the start, as a CUDA graph must allocate none."""
        more = n - self.sums.shape[1]
        if more <= 0:
            return
        shape = RECORDS, more, self._n_columns
        new = torch.full(shape, NOT_CALLED, dtype=torch.float64, device=self.device)
        self.sums = torch.cat([self.sums, new], 1)
        parts = torch.empty(more, PARTS, self.most, dtype=torch.float64, device=self.device)
        # programs that have finished, counts of the histogram; an even number, as rows begin at 16 bytes
        totals = torch.zeros(more, 2 + self._n_slots, dtype=torch.int64, device=self.device)
        self._scratch += zip(parts, totals, strict=True)

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

    def _point(self) -> None:
        self._cursor.fill_(-1 if self._rests else self.record)

    def rest(self, rests: bool) -> None:
        """Lets graphs that were captured write nothing when they are replayed, or write again."""
        self._rests = rests and bool(self.captured)
        if self.captured:
            self._point()

    def send(self) -> Transfer:
        """Starts the transfer of the sums of batches that have ended; the running one stays."""
        sent = Transfer(self.sums[: self.record, : len(self._ready)].clone())
        running = self.sums[self.record].clone()
        self.sums[: self.record + 1].fill_(NOT_CALLED)
        self.sums[0] = running
        self.record = 0
        self._point()
        return sent


@cache
def works_on(device: torch.device, dtype: torch.dtype = torch.float32) -> bool:
    """Whether the kernel works with a type on a device; warns if Triton is installed and it does not."""
    return dtype in DTYPES and can_run(device, lambda: _try(device, dtype))


def _try(device: torch.device, dtype: torch.dtype) -> None:
    slab, x = Slab(device, 0.0, None, counts_all=False), torch.zeros(2, dtype=dtype, device=device)
    slab._launch(x, slab._prepared("", 0, x, "", slab.sums))


def can_take(x: Tensor) -> bool:
    """Whether the kernel takes a tensor: dense, not repeated in memory, and with elements."""
    return works_on(x.device, x.dtype) and x.numel() > 0 and 0 not in x.stride()
