"""OutputBuffer: layers' outputs on their way from the hook to the records."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from math import prod
from typing import Any

import torch
from torch import Tensor

from hookcb.activations.bins import Bins
from hookcb.activations.kernel import works_on
from hookcb.activations.slab import Output, Slab, Waiting, can_take
from hookcb.activations.stats import ROW, Known, Sample, summarize, take
from hookcb.core.torch_private import is_dynamo_imported, mark_static_address
from hookcb.records.memory import Memory
from hookcb.records.store import StatStore

MAX_BATCHES = 64  # batches that wait to be reduced
MAX_ELEMENTS = 4 * ROW  # that wait, and are reduced together: 1 MB, which a CPU's cache holds

# outputs of one shape, reduced together: those of each layer, elements `(R, n)`, moments if these are known
Portion = tuple[list[list[Waiting]], Tensor, Sequence[Known]]


class OutputBuffer:
    """The one buffer between hooks and records.

    Hooks add outputs to `batch`. A batch that ends gets a record and waits; a cancelled one is dropped.
    Reducing a few elements takes about as long as reducing thousands, so batches wait for one another.

    Args:
        stores: receive `LAYER_STATS`, then `bins.n + 2` counts if there are bins, by phase.
        eps: see `layer_stats`.
        bins: bins of the histograms, None for no histograms.
        sample: see `ActivationStats`.

    Attributes:
        batch: outputs of all calls in the running batch, by path.
    """

    def __init__(
        self, stores: Mapping[str, StatStore], eps: float, bins: Bins | None, sample: Sample
    ) -> None:
        self.stores, self.eps, self.bins, self.sample = stores, eps, bins, sample
        # new for each batch: compiled code would be compiled anew each time a list has grown
        self.batch: dict[str, list[Output]] = {}
        self.slabs: dict[torch.device, Slab] = {}
        self.memory = Memory()
        self._known: dict[str, set[str]] = {phase: set() for phase in stores}  # names seen in each
        self._waiting: list[Waiting] = []
        self._n_batches = self._n_elements = 0
        self._n_lent = 0  # number of tensors that the memory has lent to waiting outputs

    def __getstate__(self) -> dict[str, Any]:
        self.read()  # each waiting row would be copied as the whole block
        return self.__dict__ | {"slabs": {}}

    def take(
        self,
        path: str,
        x: Tensor,
        kind: str,
        wide: bool,
        lends: bool,
        may_launch: bool = True,
        written: Tensor | None = None,
    ) -> None:
        """Takes what statistics need of a tensor with statistics; waits for no device.

        Args:
            path: name of the layer, or of a tensor in its output.
            x: the tensor.
            kind: class of the layer.
            wide: see `moments`.
            lends: whether elements may be kept in memory that is used again.
            may_launch: whether a kernel may be launched, which Dynamo must not see.
            written: what a kernel in compiled code writes to.
        """
        calls = self.batch.get(path)
        if calls is None:
            calls = self.batch[path] = []
        output, slab = None, self.slabs.get(x.device)
        if may_launch and slab is not None:
            output = slab.take_alike(path, len(calls), x, kind, written)
        if output is None and may_launch and self.launches(x):
            slab = self.slab_on(x.device)
            output = slab.take(path, len(calls), x, kind, written)
        if output is None:
            elements, exact = take(x.detach(), self.sample, wide, self.memory.lend if lends else None)
            output = Output(kind, x.shape, x.numel(), 1, elements, exact)
        elif slab is not None and x.is_cuda and torch.cuda.is_current_stream_capturing():
            slab.captured.setdefault(path, []).append(output)
        calls.append(output)

    def launches(self, x: Tensor) -> bool:
        """Whether a kernel takes a tensor, and nothing is allocated."""
        return not isinstance(self.sample, int) and can_take(x)

    def slab_on(self, device: torch.device) -> Slab:
        """The slab of a device."""
        if device not in self.slabs:
            self.slabs[device] = Slab(device, self.eps, self.bins, self.sample is None)
        return self.slabs[device]

    def written_on(self, device: torch.device, n_layers: int) -> Tensor:
        """The tensor to which compiled code on a device writes, as its compiler knows."""
        if works_on(device):
            slab = self.slab_on(device)
            slab.reserve(2 * n_layers)
            if is_dynamo_imported():
                mark_static_address(slab.sums)  # else Inductor captures no CUDA graph
            return slab.sums
        with torch.inference_mode(False):
            return torch.zeros(1, device="cpu")

    def drop_batch(self) -> None:
        """Forgets the outputs of the running batch."""
        self.batch = {}
        for slab in self.slabs.values():
            slab.drop_batch()
        self.memory.take_back(slice(self._n_lent, None))

    def take_batch(self) -> dict[str, Output]:
        """Ends the running batch; returns its outputs by name."""
        batch, self.batch = self.batch, {}
        for slab in self.slabs.values():
            batch = slab.captured | batch
        named: dict[str, Output] = {}
        for path, calls in batch.items():
            if len(calls) == 1:
                (named[path],) = calls
            else:
                named |= {f"{path}#{k}": output for k, output in enumerate(calls)}
        return named

    def end_batch(self, phase: str, epoch: int, step: int) -> dict[str, Output]:
        """Gives the batch a record, if it has statistics; returns its outputs by name."""
        named, store = self.take_batch(), self.stores[phase]
        if not named.keys() <= self._known[phase]:
            self._introduce(phase, named)
        found = [(name, output) for name, output in named.items() if output.is_known]
        if not found:
            return named
        record = store.begin(epoch, step)
        for name, output in found:
            at = output.place.slab.record if output.place else 0
            self._waiting.append(Waiting(phase, name, record, output, at))
            if output.elements is not None:
                self._n_elements += output.elements.numel()
        for slab in self.slabs.values():
            slab.end_batch()
        self._n_batches += 1
        self._n_lent = self.memory.n_lent
        if self._n_batches == MAX_BATCHES or self._n_elements > MAX_ELEMENTS:
            self.reduce()
        return named

    def _introduce(self, phase: str, named: Mapping[str, Output]) -> None:
        """Adds layers to a store in the order of the forward, as those of one shape are reduced together."""
        new = {name: None for name, output in named.items() if output.is_known}
        in_order = [name for store in self.stores.values() for name in store.names if name in new]
        for name in dict.fromkeys(in_order) | new:
            self.stores[phase].add(name)
        self._known[phase].update(named)

    def reduce(self) -> None:
        """Puts the statistics of waiting outputs into the stores; those of one shape are reduced together."""
        waiting, self._waiting, self._n_batches, self._n_elements = self._waiting, [], 0, 0
        for portion in portions(waiting):
            self._put(portion)
        for slab in self.slabs.values():
            slab.send([item for item in waiting if item.output.place and item.output.place.slab is slab])
        self.memory.take_back(slice(self._n_lent))
        self._n_lent = 0

    def read(self) -> None:
        """Puts all statistics into the stores, also those that must be waited for."""
        self.reduce()
        for slab in self.slabs.values():
            slab.receive(self.stores)

    def _put(self, portion: Portion) -> None:
        runs, rows, known = portion
        at_once = max(1, ROW // max(1, rows.shape[1]))  # more would make the heap grow each time
        pieces = [slice(i, i + at_once) for i in range(0, len(rows), at_once)]
        values = torch.cat([summarize(rows[i], known[i], self.eps) for i in pieces])
        if self.bins is not None:
            counts = torch.cat([self.bins.counts_of(rows[i]) for i in pieces])
            values = torch.cat([values, counts.to(values.dtype)], 1)
        for run, x in zip(runs, torch.split(values, [len(run) for run in runs]), strict=True):
            self.stores[run[0].phase].put(run[0].name, [item.record for item in run], x)


def portions(waiting: Iterable[Waiting]) -> Iterator[Portion]:
    """Joins outputs of one shape, layer by layer, to matrices of at most `MAX_ELEMENTS`; long rows are alone.

    Outputs of a portion all have known moments, or none has.
    """
    alike: dict[tuple[Any, ...], dict[tuple[str, str], list[Waiting]]] = {}
    for item in waiting:
        if (x := item.output.elements) is not None:
            kind = x.shape, x.dtype, x.device, item.output.exact is None
            alike.setdefault(kind, {}).setdefault(item[:2], []).append(item)
    for (shape, *_), layers in alike.items():
        items, n = [item for same in layers.values() for item in same], prod(shape)
        at_once = max(1, MAX_ELEMENTS // max(1, n))
        for i in range(0, len(items), at_once):
            some = items[i : i + at_once]
            elements = [x for item in some if (x := item.output.elements) is not None]
            rows = elements[0] if len(some) == 1 else torch.stack(elements)  # a single one needs no copy
            known = [exact for item in some if (exact := item.output.exact) is not None]
            runs = [list(same) for _, same in groupby(some, lambda item: item[:2])]
            yield runs, rows.reshape(len(some), -1), known
