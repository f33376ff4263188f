"""OutputBuffer: layers' outputs on their way from the hook to the records."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from hookcb.activations.bins import Bins
from hookcb.activations.slab import NOT_CALLED, Output, Slab, can_take, works_on
from hookcb.activations.stats import ROW, Sample, stats_of, summarize, take
from hookcb.core.torch_private import is_dynamo_imported, mark_static_address
from hookcb.records.memory import Memory
from hookcb.records.store import StatStore, Transfer

K = TypeVar("K")
MAX_BATCHES = 64  # batches that wait to be reduced
MAX_ELEMENTS = 4 * ROW  # that wait: 1 MB, which a CPU's cache holds


class Waiting(NamedTuple):
    """A layer's output in a batch that has a record, and in which record of a slab it is."""

    phase: str
    name: str
    record: int
    output: Output
    at: int = 0


class OutputBuffer:
    """The one buffer between hooks and records.

    Hooks add outputs to `batch`. A batch that ends gets a record and waits; a cancelled one is dropped.
    Reducing a few elements takes about as long as reducing thousands, so batches wait for one another.

    Args:
        stores: receive `STORED`, then `bins.n + 2` counts if there are bins, by phase.
        eps: see `layer_stats`.
        bins: bins of the histograms, None for no histograms.
        sample: see `ActivationStats`.

    Attributes:
        batch: outputs of all calls in the running batch, by path.
        slabs: those of devices on which a kernel works.
    """

    def __init__(
        self, stores: Mapping[str, StatStore], eps: float, bins: Bins | None, sample: Sample
    ) -> None:
        self.stores, self.eps, self.bins, self.sample = stores, eps, bins, sample
        # new for each batch: compiled code would be compiled anew each time a list has grown
        self.batch: dict[str, list[Output]] = {}
        self.slabs: dict[torch.device, Slab] = {}
        self.memory = Memory()
        self._waiting: list[Waiting] = []
        self._sent: list[tuple[Sequence[Waiting], Transfer]] = []
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
        is_plain: bool,
        is_merged: bool = False,
        written: Tensor | None = None,
    ) -> None:
        """Takes what statistics need of a tensor with statistics; waits for no device.

        Args:
            path: name of the layer, or of a tensor in its output.
            x: the tensor.
            kind: class of the layer.
            is_plain: whether nothing traces or transforms what is done, so that a kernel may be launched, and
                memory used again.
            is_merged: whether its moments join those of other ranks.
            written: what a kernel in compiled code writes to.
        """
        calls, output = self.batch.setdefault(path, []), None
        if is_plain and (slab := self._slab_on(x.device)) is not None:
            output = slab.take(path, len(calls), x, kind, written)
            if output is not None and x.is_cuda and torch.cuda.is_current_stream_capturing():
                slab.captured.setdefault(path, []).append(output)
        if output is None:
            elements, known = take(x.detach(), self.sample, self.memory.lend if is_plain else None, is_merged)
            output = Output(kind, x.shape, x.dtype, elements, known, n=x.numel())
        calls.append(output)

    def launches(self, x: Tensor) -> bool:
        """Whether a kernel takes a tensor, and nothing is allocated."""
        return self._slab_on(x.device) is not None and can_take(x)

    def _slab_on(self, device: torch.device) -> Slab | None:
        """The slab of a device; None if no kernel works there, or if a number of elements was asked for."""
        if device not in self.slabs and works_on(device) and not isinstance(self.sample, int):
            self.slabs[device] = Slab(device, self.eps, self.bins, self.sample is None)
        return self.slabs.get(device)

    def written_on(self, device: torch.device, n_layers: int) -> Tensor:
        """The tensor to which compiled code on a device writes, as its compiler knows."""
        if (slab := self._slab_on(device)) is not None:
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

    def keep(self, outputs: Mapping[str, Output], phase: str, epoch: int, step: int) -> None:
        """Gives outputs of a batch that has ended a record, if any has statistics; they wait."""
        found, store = [item for item in outputs.items() if item[1].has_stats], self.stores[phase]
        if not found:
            return
        record = store.begin(epoch, step)
        for name, output in found:
            store.add(name)  # in the order of the forward, as those of one shape are reduced together
            at = output.slab.record if output.slab is not None else 0
            self._waiting.append(Waiting(phase, name, record, output, at))
            if output.elements is not None:
                self._n_elements += output.elements.numel()
        for slab in self.slabs.values():
            slab.end_batch()
        self._n_batches += 1
        self._n_lent = self.memory.n_lent
        if self._n_batches == MAX_BATCHES or self._n_elements > MAX_ELEMENTS:
            self.reduce()

    def reduce(self) -> None:
        """Puts the statistics of waiting outputs into the stores; sums of slabs are only sent."""
        waiting = sorted(self._waiting, key=lambda item: item[:2])
        self._waiting, self._n_batches, self._n_elements = [], 0, 0
        of_devices: dict[torch.device, list[tuple[list[Waiting], Tensor]]] = {}
        for some, sums in self.summed((item, item.output) for item in waiting):
            of_devices.setdefault(sums.device, []).append((some, sums))
        for found in of_devices.values():
            self._put([item for some, _ in found for item in some], torch.cat([sums for _, sums in found]))
        for slab in self.slabs.values():
            if own := [item for item in waiting if item.output.slab is slab]:
                self._sent.append((own, slab.send()))
        self.memory.take_back(slice(self._n_lent))
        self._n_lent = 0

    def read(self) -> None:
        """Puts all statistics into the stores, also those that must be waited for."""
        self.reduce()
        sent, self._sent = self._sent, []
        for waiting, transfer in sent:
            at = [item.at for item in waiting], [item.output.row for item in waiting]
            sums = transfer.arrived()[at]
            called = [i for i, n in enumerate(sums[:, 0].tolist()) if n != NOT_CALLED]
            self._put([waiting[i] for i in called], sums[called])

    def summed(self, outputs: Iterable[tuple[K, Output]]) -> Iterator[tuple[list[K], Tensor]]:
        """Sums of outputs with elements, `(R, columns)`; those of one shape are reduced together.

        At most twice `ROW` elements at a time, which a CPU's cache holds.
        """
        alike: dict[tuple[Any, ...], list[tuple[K, Output]]] = {}
        for key, output in outputs:
            if (x := output.elements) is not None:
                n = output.n if output.known is None else 0  # else it is known too
                alike.setdefault((x.shape, x.dtype, x.device, n), []).append((key, output))
        for (shape, *_, n), items in alike.items():
            at_once = max(1, 2 * ROW // max(1, prod(shape)))
            for i in range(0, len(items), at_once):
                some = items[i : i + at_once]
                elements = [x for _, output in some if (x := output.elements) is not None]
                rows = elements[0] if len(some) == 1 else torch.stack(elements)  # a single one needs no copy
                rows = rows.reshape(len(some), -1)
                known = [known for _, output in some if (known := output.known) is not None]
                sums = summarize(rows, known, self.eps, n)
                if self.bins is not None:
                    sums = torch.cat([sums, self.bins.counts_of(rows).to(sums.dtype)], 1)
                yield [key for key, _ in some], sums

    def _put(self, waiting: Sequence[Waiting], sums: Tensor) -> None:
        """Puts statistics of outputs, those of a layer one after another, into the stores."""
        runs = [list(run) for _, run in groupby(waiting, lambda item: item[:2])]
        for run, x in zip(runs, torch.split(stats_of(sums), [len(run) for run in runs]), strict=True):
            is_wide = any(item.output.dtype is torch.float64 for item in run)
            self.stores[run[0].phase].put(
                run[0].name, [item.record for item in run], x if is_wide else x.float()
            )
