"""Statistics of layers' outputs that ActivationStats does not record."""

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from hookcb.activations.stats import has_stats
from hookcb.core.batch import parts
from hookcb.core.torch_private import in_transform
from hookcb.diagnosis.fault import Measurement
from hookcb.diagnosis.frame import about
from hookcb.diagnosis.run import Layer, Partial, Run, Series
from hookcb.hooks.hook import detached
from hookcb.hooks.modules import named_modules
from hookcb.records.memory import Memory
from hookcb.records.store import StatStore

COLUMNS = ("spread", "saturated")
MAX_ELEMENTS = 16_384  # read for the spread
MAX_RECORDS = 1_000
TANH, SIGMOID = 0.97, 0.03  # saturated above this magnitude, and within this distance of 0 or 1


class LayerRows(Measurement):
    """Records spread and saturation of layers' outputs."""

    def __init__(self) -> None:
        self._about: dict[str, str] = {}
        self._store: StatStore | None = StatStore(COLUMNS, MAX_RECORDS)
        # in the current batch: name and dtype of an output, a sample of it, and its saturated share
        self._taken: list[tuple[str, torch.dtype, Tensor, Tensor | None]] = []
        self._memory = Memory()  # as what is allocated in the midst of a forward splits the heap
        self._largest: dict[str, float] = {}
        self._n_copies = 0  # calls of copies, as nn.DataParallel makes them
        self._is_hidden = False  # whether outputs were in CUDA graphs, where nothing may be copied

    def on_model(self, run: Run) -> None:
        self._about = {name: about(m) for name, m in named_modules(run.loop.model).items()}

    def on_batch(self, run: Run) -> None:
        self._taken = []
        self._memory.take_back()

    def on_output(self, run: Run, name: str, m: nn.Module, output: Any) -> None:
        if not name:
            self._n_copies += 1
        if (x := float_output(name, output)) is None:
            return
        is_simple = x.is_cpu and not (torch.compiler.is_compiling() or in_transform())
        sample, saturated = sample_of(x, self._memory if is_simple else None), saturated_share(m, x)
        # a list, because other attributes that change with each batch would make compiled code recompile
        self._taken.append((name, x.dtype, sample, saturated))

    def on_compiled_output(self, run: Run, name: str, m: nn.Module, output: Tensor | None) -> None:
        if output is None:
            self._is_hidden = True
        else:
            self.on_output(run, name, m, output)

    @property
    def last(self) -> str:
        """Name of the last layer with an output in this batch, "" if there is none yet."""
        return self._taken[-1][0] if self._taken else ""

    def on_batch_end(self, run: Run) -> None:
        if self._store is None:
            return
        record = self._store.begin(0, run.step)
        alike = defaultdict[Any, list[tuple[str, Tensor, Tensor | None]]](list)
        for name, dtype, sample, saturated in self._taken:
            self._store.add(name)  # in the order of execution
            self._largest[name] = torch.finfo(dtype).max
            alike[sample.shape, sample.device].append((name, sample, saturated))
        for same in alike.values():  # a few operations for all layers whose samples have the same shape
            names, samples, saturated_shares = zip(*same, strict=True)
            spreads = spread(torch.stack(samples))
            unknown = spreads.new_full((), math.nan)
            shares = torch.stack([unknown if x is None else x.float() for x in saturated_shares])
            rows = torch.split(torch.stack([spreads, shares], 1), 1)
            for name, row in zip(names, rows, strict=True):
                self._store.put(name, [record], row)
        self.on_batch(run)

    def tell(self, run: Run) -> None:
        if self._n_copies:
            copies = "layers ran as copies, as nn.DataParallel makes them, which were not inspected"
            run.notes.append(copies)
            run.lack(Partial(copies), "activations")
        if self._is_hidden:
            hidden = "outputs in CUDA graphs, as of reduce-overhead, were not compared across samples"
            run.notes.append(hidden)
            run.lack(Partial(hidden), "activations")
        if (store := self._store) is None:
            return
        steps = [info.step for info in store.infos]
        for name in store.names:
            kind = self._about.get(name, "")
            layer = run.layers.setdefault(name, Layer(name, kind.partition(" ")[0], kind, len(run.layers)))
            layer.largest = self._largest.get(name, math.inf)
            for stat, values in zip(COLUMNS, store.series(name).T.tolist(), strict=True):
                layer.stats[stat] = Series.of(steps, values)

    def freeze(self) -> None:
        self._store, self._taken, self._memory = None, [], Memory()


def float_output(name: str, output: Any) -> Tensor | None:
    """First float tensor in the output of a layer, detached; None for a copy of a layer, without a name."""
    inside = [output] if type(output) is Tensor else [x for _, x in parts(output)]
    x = next((x for x in inside if isinstance(x, Tensor) and has_stats(x)), None)
    if not name or x is None or not x.dtype.is_floating_point or not x.numel():
        return None
    plain: Tensor = detached(x)  # also unwraps tensors of torch.func transforms
    return plain


def sample_of(x: Tensor, memory: Memory | None = None) -> Tensor:
    """Copy of an output `(N, …)` as float32 `(N, k)`; of a part of each sample beyond 16,384 elements.

    Zeros for a single sample, which has no spread. `memory` lends what is needed.
    """
    if x.ndim == 0 or x.shape[0] < 2:  # as `len` of a tensor takes longer
        return x.new_zeros((2, 1), dtype=torch.float32)
    flat = x.reshape(x.shape[0], -1)
    if (n := flat.numel()) > MAX_ELEMENTS:
        flat = flat[: min(x.shape[0], MAX_ELEMENTS), :: n // MAX_ELEMENTS]
    return flat.to(torch.float32, copy=True) if memory is None else memory.lend(flat.shape).copy_(flat)


def spread(samples: Tensor) -> Tensor:
    """Variance across the batch relative to the second moment, of samples `(layers, N, k)`: `(layers,)`.

    0 if all samples of a layer are the same, NaN if all its elements are zero. It writes to `samples`.
    """
    whole = torch.linalg.vector_norm(samples, dim=(1, 2))  # norms take a fraction of the time of `var`
    samples -= samples[:, :1].clone()  # exactly 0 if all samples are the same
    samples -= samples.mean(1, keepdim=True)
    share: Tensor = (torch.linalg.vector_norm(samples, dim=(1, 2)) / whole).square()
    return share


def saturated_share(m: nn.Module, x: Tensor) -> Tensor | None:
    """Share of the outputs of a Tanh or Sigmoid near its limits, NaN if all are; None for other modules."""
    if not isinstance(m, nn.Tanh | nn.Sigmoid):
        return None
    is_near = x.abs() > TANH if isinstance(m, nn.Tanh) else (x < SIGMOID) | (x > 1 - SIGMOID)
    return is_near.float().mean().masked_fill(x.isnan().all(), math.nan)
