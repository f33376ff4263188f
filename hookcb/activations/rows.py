"""Rows: memory on a CPU for small outputs of several batches, with a row for each layer and batch."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookcb.activations.stats import ROW, WHOLE, Known

MAX_BATCHES = 64  # batches that wait to be reduced
MAX_ELEMENTS = 4 * ROW  # that wait, and are reduced together: 1 MB, which a CPU's cache holds
MIN_SIZE = 32  # elements that a smaller output counts as, which takes memory beside its elements
NONE: frozenset[str] = frozenset()


class Output(NamedTuple):
    """The part of one output that the hook keeps.

    Attributes:
        type: class of the layer; for an output without statistics, what the output is instead.
        shape: shape of the output.
        elements: a copy of the output or a sample of it, see `take`; None without statistics.
        exact: moments of all elements if `elements` is a sample, else None.
        n: number of elements that this process has of the output.
        copies: number of ranks that have the same ones, as under tensor parallelism; 0 if that is unknown.
    """

    type: str
    shape: tuple[int, ...] = ()
    elements: Tensor | None = None
    exact: Known | None = None
    n: int = 0
    copies: int = 1

    @property
    def is_small(self) -> bool:
        """Whether `elements` are all of a small output, on a CPU."""
        x = self.elements
        if x is None or not (x.is_cpu and x.dtype is torch.float32 and self.copies == 1):
            return False
        return 0 < self.n == x.numel() <= WHOLE and x.shape == self.shape


class Run(NamedTuple):
    """Records of a layer."""

    phase: str
    name: str
    records: list[int]


class Portion(NamedTuple):
    """Outputs of one shape that are reduced together.

    Attributes:
        runs: records of the rows, layer by layer.
        rows: their elements, `(R, n)`.
        known: their moments; empty if they are to be computed from `rows`.
    """

    runs: list[Run]
    rows: Tensor
    known: Sequence[Known] = ()


class _Seat(NamedTuple):
    type: str
    shape: torch.Size
    rows: Sequence[Tensor]  # one for each batch that can wait


class _Ended(NamedTuple):
    phase: str
    record: int
    without: frozenset[str]  # layers that were not called


class Rows:
    """Small outputs of the batches that wait: a layer fills its row, which takes half the time of a copy.

    What does not fit, such as a second call in a batch or another shape, must be kept elsewhere.

    Attributes:
        filled: layers with an output of the running batch, in the order of the forward.
    """

    def __init__(self) -> None:
        self.filled: dict[str, None] = {}
        self._seats: dict[str, _Seat] = {}
        self._blocks: list[tuple[list[str], Tensor]] = []  # layers of one shape: (n_batches, n_layers, n)
        self._n_batches = 0  # that can wait; 0 before rows are arranged
        self._asked: set[str] = set()  # layers for whose output there was no row
        self._elsewhere: set[str] = set()  # layers with rows whose last output is kept elsewhere
        self._ended: list[_Ended] = []

    def take(self, name: str, x: Tensor) -> bool:
        """Copies an output with statistics into the layer's row, if it has a free one of this shape."""
        seat = self._seats.get(name)
        if seat is None or x.shape != seat.shape or x.dtype is torch.float64 or not x.is_cpu:
            if x.numel() <= WHOLE:
                self._asked.add(name)
            return False
        if name in self.filled:
            return False
        seat.rows[len(self._ended)].copy_(x.detach())
        self.filled[name] = None
        return True

    def pull(self, name: str) -> Output:
        """Takes a layer's output of the running batch out of its row."""
        del self.filled[name]
        return self._output(name)

    def _output(self, name: str) -> Output:
        seat = self._seats[name]
        elements = seat.rows[len(self._ended)].clone()
        return Output(seat.type, seat.shape, elements, None, elements.numel())

    def end_batch(self, phase: str, record: int, others: Iterable[str]) -> dict[str, Output]:
        """Ends the running batch, whose outputs wait; returns those of layers that come from elsewhere.

        Args:
            phase: "train" or "valid".
            record: number of the batch's record.
            others: layers whose outputs in this batch are kept elsewhere.
        """
        back: dict[str, Output] = {}
        if self._elsewhere or not self._seats.keys().isdisjoint(others):
            back = {name: self._output(name) for name in self._elsewhere if name in self.filled}
            self._elsewhere = (self._elsewhere | self._seats.keys() & others) - back.keys()
        if self.filled:
            is_whole = len(self.filled) == len(self._seats)
            without = NONE if is_whole else frozenset(self._seats.keys() - self.filled)
            self._ended.append(_Ended(phase, record, without))
            self.filled = {}
        return back

    @property
    def is_full(self) -> bool:
        """Whether no further batch can wait, or there are no rows yet and some were asked for."""
        return len(self._ended) == self._n_batches and bool(self._ended or self._asked)

    def arrange(self, outputs: Mapping[str, Output]) -> None:
        """Gives rows to those layers that asked for one and have small `outputs`; no batch may wait."""
        now = {name: (seat.type, seat.shape) for name, seat in self._seats.items()}
        small = {name: x for name, x in outputs.items() if name in self._asked and x.is_small}
        wanted, n = dict[str, tuple[str, torch.Size]](), 0
        for name, about in (now | {name: (x.type, torch.Size(x.shape)) for name, x in small.items()}).items():
            size = max(MIN_SIZE, about[1].numel())
            if n + size <= MAX_ELEMENTS:
                wanted[name], n = about, n + size
        self._n_batches, self._asked = max(1, min(MAX_BATCHES, MAX_ELEMENTS // max(1, n))), set()
        if wanted != now:
            self._seats, self._blocks = {}, []
            with torch.inference_mode(False):
                for shape in dict.fromkeys(shape for _, shape in wanted.values()):
                    self._add_block(
                        shape, {name: kind for name, (kind, own) in wanted.items() if own == shape}
                    )

    def _add_block(self, shape: torch.Size, kinds: Mapping[str, str]) -> None:
        block = torch.empty(self._n_batches, len(kinds), *shape, dtype=torch.float32, device="cpu")
        self._blocks.append((list(kinds), block.view(*block.shape[:2], -1)))
        of_layers = zip(*(of_batch.unbind() for of_batch in block), strict=True)
        for (name, kind), rows in zip(kinds.items(), of_layers, strict=True):
            self._seats[name] = _Seat(kind, shape, rows)

    def empty(self) -> Iterator[Portion]:
        """Takes out the batches that wait; the running one stays."""
        ended, self._ended = self._ended, []
        for names, block in self._blocks if ended else ():
            portion = _portion(names, ended, block[: len(ended)])
            if portion.runs:
                yield portion
            if self.filled:
                block[0] = block[len(ended)]

    def __reduce__(self) -> tuple[Any, ...]:
        return Rows, ()  # a copy is empty


def _portion(names: Sequence[str], ended: Sequence[_Ended], block: Tensor) -> Portion:
    """A portion from `(n_batches, n_layers, n)`."""
    phases = [(phase, list(same)) for phase, same in groupby(ended, lambda x: x.phase)]
    rows = block.transpose(0, 1).flatten(0, 1)
    if not any(x.without for x in ended):
        of_phases = [(phase, [x.record for x in same]) for phase, same in phases]
        return Portion([Run(phase, name, of) for name in names for phase, of in of_phases], rows)
    runs = [
        Run(phase, name, [x.record for x in same if name not in x.without])
        for name in names
        for phase, same in phases
    ]
    is_there = [name not in x.without for name in names for x in ended]
    return Portion([run for run in runs if run.records], rows[is_there])
