"""InputPhases: statistics of the inputs of training and of validation, column by column."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookcb.activations.stats import has_stats
from hookcb.core.batch import parts
from hookcb.diagnosis.fault import Measurement
from hookcb.diagnosis.run import Run

MAX_INPUTS, MAX_BATCHES = 4, 32  # of a batch, and batches of each phase, that are measured
MAX_SAMPLES, MAX_SIDE, MAX_ROWS = 64, 32, 8_192  # of an input that are read, evenly spread
MAX_COLUMNS, MAX_CHANNELS = 256, 4
LEVEL = "level "  # begins the key of an input that is one number for each sample


class Columns(NamedTuple):
    """Statistics of the columns of a table, or of the channels of images, over several batches.

    Attributes:
        n: number of values in each column.
        mean, std, low, high: of each column.
        n_images: number of images with three channels.
        ends, ends_error: mean of the first channel less that of the last one, and its standard error.
    """

    n: int
    mean: list[float]
    std: list[float]
    low: list[float]
    high: list[float]
    n_images: int = 0
    ends: float = math.nan
    ends_error: float = math.nan


class InputPhases(Measurement):
    """Measures the inputs of inspected training batches, and of the first batches of each validation.

    Attributes:
        train: by place in the batch and shape of the columns, statistics of the training.
        valid: likewise, of validations.
        levels: numbers of the training and of validations, of inputs that are one number for each sample
            beside others, as a noise level or a time is.
    """

    def __init__(self) -> None:
        self._sums: dict[bool, dict[str, list[Tensor]]] = {True: {}, False: {}}  # by whether it is training
        self._n = {True: 0, False: 0}
        self.train: dict[str, Columns] = {}
        self.valid: dict[str, Columns] = {}
        self.levels: list[tuple[Columns, Columns]] = []

    def on_batch(self, run: Run) -> None:
        self.add(True, run.loop.xb)

    def on_eval_batch(self, run: Run) -> None:
        self.add(False, run.loop.xb)

    def add(self, training: bool, xb: Any) -> None:
        self._n[training] += 1
        if self._n[training] > MAX_BATCHES:
            return
        tensors = [(path, x.detach()) for path, x in parts(xb) if isinstance(x, Tensor) and has_stats(x)]
        for path, x in tensors[:MAX_INPUTS]:
            is_number = x.is_floating_point() or x.dtype is torch.uint8  # others are indices or flags
            is_level = len(tensors) > 1 and x.numel() in (1, *x.shape[:1])
            if x.numel() and (is_level or (is_number and x.ndim > 1)):
                new = _sums(x.reshape(-1, 1).double() if is_level else x)
                key = LEVEL + path if is_level else f"{path} {x.ndim}-d, {len(new[1])}"
                before = self._sums[training].get(key)
                self._sums[training][key] = new if before is None else _joined(before, new)

    def tell(self, run: Run) -> None:
        train, valid = ({key: _read(x) for key, x in self._sums[phase].items()} for phase in (True, False))
        self.levels = [(train[key], valid[key]) for key in train if key in valid and key.startswith(LEVEL)]
        self.train, self.valid = train, valid

    def freeze(self) -> None:
        self._sums = {True: {}, False: {}}


def columns_of(x: Tensor) -> Tensor:
    """Some rows of a batch as a table: channels of images, last dimensions of others, or one column."""
    x = x[:: math.ceil(len(x) / MAX_SAMPLES)]
    for dim in range(2, x.ndim) if x.ndim > 3 else ():
        x = x.transpose(0, dim)[:: math.ceil(x.shape[dim] / MAX_SIDE)].transpose(0, dim)
    if x.ndim > 3:
        x = x.movedim(1, -1) if x.shape[1] <= MAX_CHANNELS else x
        n_columns = x.shape[-1] if x.shape[-1] <= MAX_CHANNELS else 1
    else:
        n_columns = x.shape[-1] if x.shape[-1] <= MAX_COLUMNS else 1
    table = x.reshape(-1, n_columns)
    table = table[:: math.ceil(len(table) / MAX_ROWS)]
    return table.float() if x.device.type == "mps" else table.double()


def _sums(x: Tensor) -> list[Tensor]:
    table = columns_of(x)
    n = table.new_full((), float(len(table)))
    sums = [n, table.sum(0), table.square().sum(0)]
    if x.ndim == 4 and table.shape[1] == 3:
        means = (x.movedim(1, -1) if x.shape[1] == 3 else x).to(table.dtype).mean((1, 2))
        ends = means[:, 0] - means[:, -1]
        sums += [table.new_full((), float(len(ends))), ends.sum(), ends.square().sum()]
    return [*sums, table.amin(0), table.amax(0)]


def _joined(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
    added = [x + y for x, y in zip(a[:-2], b[:-2], strict=True)]
    return [*added, a[-2].minimum(b[-2]), a[-1].maximum(b[-1])]


def _read(sums: list[Tensor]) -> Columns:
    n, total, squares, *of_images, low, high = (x.cpu() for x in sums)
    mean = total / n
    std = (squares / n - mean.square()).clamp_min(0).sqrt()
    columns = Columns(int(n), mean.tolist(), std.tolist(), low.tolist(), high.tolist())
    if not of_images:
        return columns
    n_images, ends, ends_squared = map(float, of_images)
    variance = max(0.0, ends_squared / n_images - (ends / n_images) ** 2)
    error = math.sqrt(variance / n_images)
    return columns._replace(n_images=int(n_images), ends=ends / n_images, ends_error=error)
