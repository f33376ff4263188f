"""Statistics of layers' outputs that ActivationStats does not record."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hookcb.activations.stats import has_stats
from hookcb.core.batch import parts
from hookcb.core.torch_private import in_transform
from hookcb.diagnosis.probes.attention import saturated_share
from hookcb.diagnosis.run import Layer, Series
from hookcb.hooks.hook import detached
from hookcb.hooks.modules import named_modules
from hookcb.records.memory import Memory
from hookcb.records.store import StatStore

See = Callable[[str, nn.Module, Tensor], object]
COLUMNS = ("spread", "saturated")
MAX_ELEMENTS = 16_384  # read for the spread
MAX_RECORDS = 1_000


class LayerProbe:
    """Records spread and saturation of layers' outputs.

    Args:
        model: the model.
        see: is shown the name, the layer and the output.
    """

    def __init__(self, model: nn.Module, see: See | None = None) -> None:
        self._see = see
        self._names = {id(m): name or type(m).__name__ for name, m in named_modules(model).items()}
        self._store = StatStore(COLUMNS, MAX_RECORDS)
        self._step = 0
        self._taken: list[tuple[str, torch.dtype, Tensor]] = []  # in the current batch
        self._memory = Memory()  # as what is allocated in the midst of a forward splits the heap
        self.largest: dict[str, float] = {}
        self.n_copies = 0  # calls of copies, as nn.DataParallel makes them

    def begin_record(self, step: int) -> None:
        """Begins the record of an inspected batch."""
        self._step, self._taken = step, []
        self._memory.take_back()

    def measure_layer(self, m: nn.Module, output: Any) -> None:
        """Measures the first float tensor in a layer's output."""
        if id(m) not in self._names:
            self.n_copies += 1
            return
        x = next((x for _, x in parts(output) if isinstance(x, Tensor) and has_stats(x)), None)
        if x is None or not x.is_floating_point() or not x.numel():
            return
        x = detached(x)  # also unwraps tensors of torch.func transforms
        if self._see is not None:
            self._see(self._names[id(m)], m, x)
        is_simple = x.is_cpu and not (torch.compiler.is_compiling() or in_transform())
        share, saturated = spread(x, self._memory if is_simple else None), saturated_share(m, x)
        if saturated is None:
            saturated = x.new_full((), math.nan)
        values = torch.stack([share, saturated.float()])
        if is_simple:
            values = self._memory.keep(values)
        # a list, because other attributes that change with each batch would make compiled code recompile
        self._taken.append((self._names[id(m)], x.dtype, values))

    @property
    def last(self) -> str:
        """Name of the last layer measured in this batch, "" if there is none yet."""
        return self._taken[-1][0] if self._taken else ""

    def end_record(self) -> None:
        """Stores the record of the batch."""
        record = self._store.begin(0, self._step)
        for name, dtype, values in self._taken:
            self.largest[name] = torch.finfo(dtype).max
            self._store.put(name, [record], values[None].clone())
        self._taken = []
        self._memory.take_back()

    def add_to(self, layers: dict[str, Layer], about: dict[str, str]) -> None:
        """Adds the records to the `layers` of a Run."""
        steps = [info.step for info in self._store.infos]
        for name in self._store.names:
            kind = about.get(name, "")
            layer = layers.setdefault(name, Layer(name, kind.partition(" ")[0], kind, len(layers)))
            layer.largest = self.largest.get(name, math.inf)
            for stat, values in zip(COLUMNS, self._store.series(name).T.tolist(), strict=True):
                layer.stats[stat] = Series.of(steps, values)


def spread(x: Tensor, memory: Memory | None = None) -> Tensor:
    """Variance across the batch relative to the second moment: 0 if all samples have the same output.

    Args:
        x: `(N, …)`; if it has more than 16,384 elements a part of each sample is read.
        memory: lends what is needed on the way.

    Returns:
        A 0-d float32 tensor; NaN for a single sample, and if all elements are zero.
    """
    if x.ndim == 0 or len(x) < 2:
        return x.new_full((), math.nan, dtype=torch.float32)
    flat = x.reshape(len(x), -1)
    if flat.numel() > MAX_ELEMENTS:
        flat = flat[:, :: max(1, flat.numel() // MAX_ELEMENTS)]
    flat = flat[:MAX_ELEMENTS]
    rows = flat.float().contiguous() if memory is None else memory.lend(flat.shape).copy_(flat)
    out = None if memory is None else rows
    whole = torch.linalg.vector_norm(rows)  # norms take a fraction of the time of `var`
    rows = torch.sub(rows, rows[0].clone(), out=out)  # exactly 0 if all samples are the same
    rows = torch.sub(rows, rows.mean(0), out=out)
    if memory is not None:
        memory.take_back(slice(-1, None))
    share: Tensor = (torch.linalg.vector_norm(rows) / whole).square()
    return share
