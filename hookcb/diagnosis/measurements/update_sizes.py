"""UpdateSizes: how far each step moves some elements of the largest parameters, on a CPU."""

import math
from collections import deque
from typing import NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from hookcb.diagnosis.fault import EVERY, Measurement
from hookcb.diagnosis.run import Run
from hookcb.gradients.samples import is_native
from hookcb.hooks.params import named_params

N_PARAMS, N_ELEMENTS, N_STEPS = 3, 64, 32  # parameters, elements of each, and steps of a block
N_NEAR, N_BEFORE = 8, 24  # steps before a batch, and those before these


class _Place(NamedTuple):
    """A parameter, how its sample is spread over its memory, and rows for one block of steps."""

    param: ReferenceType[Tensor]
    memory: int  # address of its first element
    size: tuple[int]
    stride: tuple[int]
    row: list[Tensor]
    rows: Tensor  # the same as one tensor


class UpdateSizes(Measurement):
    """Follows root mean squares of the updates of up to 64 elements of the three largest parameters.

    After each step these elements are copied; differences are computed for 32 steps at a time.
    """

    cadence = EVERY

    def __init__(self) -> None:
        self._places: list[_Place] = []
        self._steps: list[int] = []  # of the rows that are filled; the first row is the last one of before
        self._sizes = deque[tuple[int, list[float]]](maxlen=2 * N_STEPS)

    def on_model(self, run: Run) -> None:
        self.freeze()
        fit = [p for p in named_params(run.loop.model).values() if _can_be_read(p)]
        for p in sorted(fit, key=Tensor.numel, reverse=True)[:N_PARAMS]:
            n = min(N_ELEMENTS, p.numel())
            rows = torch.empty(N_STEPS + 1, n, dtype=torch.float32, device="cpu")
            self._places.append(_Place(ref(p), p.data_ptr(), (n,), (p.numel() // n,), [*rows], rows))

    def on_between(self, run: Run) -> None:
        if not self._places:
            return
        if len(self._steps) == N_STEPS + 1:
            self._measure()
        i = len(self._steps)
        for param, memory, size, stride, row, _ in self._places:
            if (p := param()) is None or p.data_ptr() != memory:
                self.freeze()  # it is another one, or elsewhere
                return
            row[i].copy_(p.detach().as_strided(size, stride))
        self._steps.append(run.step)

    def _measure(self) -> None:
        """Takes the sizes of the updates between the rows that are filled; the last one stays."""
        n = len(self._steps)
        of_each = [(rows[1:n] - rows[: n - 1]).square().mean(1).sqrt().tolist() for *_, rows in self._places]
        self._sizes += zip(self._steps[1:], map(list, zip(*of_each, strict=True)), strict=True)
        for *_, rows in self._places:
            rows[0] = rows[n - 1]
        self._steps = self._steps[-1:]

    def before(self, step: int) -> float:
        """Ratio of the largest update of the eight steps before a batch to that of the 24 before.

        Of several parameters the largest one; NaN if unknown.
        """
        if len(self._steps) > 1:
            self._measure()
        sizes = [size for at, size in self._sizes if at < step][-N_NEAR - N_BEFORE :]
        if len(sizes) < N_NEAR + N_BEFORE:
            return math.nan
        ratios = (
            max(of_one[N_BEFORE:]) / largest
            for of_one in zip(*sizes, strict=True)
            if 0 < (largest := max(of_one[:N_BEFORE])) < math.inf
        )
        return max(ratios, default=math.nan)

    def freeze(self) -> None:
        self._places, self._steps = [], []
        self._sizes.clear()


def _can_be_read(p: Tensor) -> bool:
    return p.requires_grad and p.is_cpu and p.is_floating_point() and is_native(p) and p.is_contiguous()
