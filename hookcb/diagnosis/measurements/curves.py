"""Numbers that Diagnose records of each batch, as curves in bounded memory."""

import math
import mmap
import os
import time
from collections import defaultdict
from io import FileIO
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from hookcb.core.optim import detached_scalar, largest_lr
from hookcb.diagnosis.fault import EVERY, NOTES, Measurement
from hookcb.diagnosis.measurements.clock import Clock
from hookcb.diagnosis.measurements.loss_terms import factor_of_mean
from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.run import Run, Series, Skipped
from hookcb.records.store import read_numbers
from hookcb.records.thinned import Thinned

STATM = Path("/proc/self/statm")  # in pages
MAX_POINTS, MAX_MEMORY = 8_192, 128  # points of a curve, and of memory in use, which is read in fewer batches
N_FACTORS = 32  # losses in a row with one factor, which is the unit of the curve from then on


class Curve(Thinned[tuple[int, float | Tensor]]):
    """A number per batch, with its step; tensors stay on their device until `series()` is read."""

    def __init__(self, most: int = MAX_POINTS) -> None:
        super().__init__(most)

    def series(self) -> Series:
        """All kept points; waits for the device."""
        steps, values = [step for step, _ in self.items], read_numbers([value for _, value in self.items])
        self.items = list(zip(steps, values, strict=True))
        return Series(steps, values)


def bytes_in_use(statm: FileIO | None) -> float | None:
    """Bytes on the GPU if one is in use, else of the process, without mapped files; None if unknown."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # `memory_allocated` sorts 160 names for one of them
        kinds = torch.cuda.memory_stats_as_nested_dict().get("allocated_bytes", {})  # {} of some allocators
        return float(kinds.get("all", {}).get("current", 0))
    if statm is None:
        return None
    _, resident, shared, *_ = os.pread(statm.fileno(), 256, 0).split()
    return float((int(resident) - int(shared)) * mmap.PAGESIZE)


class Curves(Measurement):
    """Numbers of each batch: loss, learning rate, time and memory.

    Once the number that a mean loss is multiplied by has stayed for 32 batches, losses with another one are
    divided by that change, so that the curve shows what the model does.
    """

    cadence = EVERY
    cadences: ClassVar = {"on_batch_end": NOTES}
    uses = (Clock, Steps)

    def __init__(self) -> None:
        self._loss, self._rate, self._wait, self._length = (Curve() for _ in range(4))
        self._losses = defaultdict[int, Curve](Curve)  # by id of the optimizer
        self._memory = Curve(MAX_MEMORY)
        self.last_loss: float | Tensor | None = None  # of the newest batch that has one
        self.last_rate = math.nan  # of the newest step
        self.factor: float | None = None  # of the newest loss, see `factor_of_mean`; None if unknown
        self._unit, self._n_units = math.nan, 0  # factor of the losses before, and their number in a row
        # time at which the first backward of the last batch had ended, NaN where an epoch begins
        self._ended, self._has_ended = math.nan, False
        self._statm: FileIO | None = None  # on Linux only
        self.losses: dict[int, Series] = {}  # before each step of an optimizer, by index of the optimizer
        self.waits = Series()  # seconds spent fetching batches since the previous batch, if a fetch was seen
        self.batches = Series()  # seconds from the end of the previous batch's first backward to this one's
        self.memory = Series()  # bytes in use after batches of `Run.noting`, if known

    def on_model(self, run: Run) -> None:
        self._statm = STATM.open("rb", buffering=0) if STATM.exists() else None

    def on_batch(self, run: Run) -> None:
        self._has_ended = False
        if run.step and not math.isnan(self._ended):  # else the fetch has started the loader
            self._wait.add((run.step, run.measured(Clock).waited))

    def on_loss(self, run: Run) -> None:
        loss = detached_scalar(run.loop.loss)
        self.last_loss = self._in_unit(loss, factor_of_mean(run.loop.loss_node))
        if self.factor != 0:  # else it tells nothing, as in a warm-up of the loss
            self._loss.add((run.step, self.last_loss))

    def _in_unit(self, loss: float | Tensor, factor: float) -> float | Tensor:
        """A loss whose factor has changed, as of a scale that a program sets, divided by that change."""
        self.factor = None if math.isnan(factor) else factor
        if factor == self._unit:
            self._n_units += 1
        elif self._n_units < N_FACTORS:
            self._unit, self._n_units = factor, 1
        elif factor * self._unit > 0:
            return loss / (factor / self._unit)
        return loss

    def on_gradients(self, run: Run) -> None:
        if self._has_ended:
            return
        self._has_ended, now = True, time.perf_counter()
        if not math.isnan(self._ended):
            self._length.add((run.step, now - self._ended))
        self._ended = now

    def on_between(self, run: Run) -> None:
        if (opt := run.loop.opt) is not None:
            if self.last_loss is not None:
                self._losses[id(opt)].add((run.step, self.last_loss))
            self.last_rate = largest_lr(opt)
            self._rate.add((run.step, self.last_rate))

    def on_batch_end(self, run: Run) -> None:
        if self._memory.is_due() and (used := bytes_in_use(self._statm)) is not None:
            self._memory.add((run.step, used))

    def on_epoch(self, run: Run) -> None:
        self._ended = math.nan  # the time until the next batch does not count

    def tell(self, run: Run) -> None:
        run.loss, run.lr = self._loss.series(), self._rate.series()
        self.waits, self.batches = self._wait.series(), self._length.series()
        self.memory = self._memory.series()
        places = run.measured(Steps).places()
        self.losses = {places[key]: curve.series() for key, curve in self._losses.items() if key in places}
        run.sources |= {"memory"} if len(self.memory) else set()
        run.lack(Skipped("memory in use is unknown on this system"), "memory")
        if any(p.maximizes for p in run.params.values()):
            run.lack(Skipped("the optimizer maximizes the loss"), "loss")
        elif len(run.loss):
            run.sources.add("loss")

    def close(self, run: Run) -> None:
        if self._statm is not None:
            self._statm.close()

    def freeze(self) -> None:
        self._statm = self.last_loss = None
