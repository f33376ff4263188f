"""Spike looks: layers' outputs in two batches after a loss has jumped, and in those looked at before."""

from collections import deque
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hookcb.activations.stats import has_stats
from hookcb.core.batch import parts
from hookcb.core.torch_private import in_transform
from hookcb.diagnosis.fault import EVERY, Measurement
from hookcb.diagnosis.led import LedStats
from hookcb.diagnosis.measurements.spikes import Spikes
from hookcb.diagnosis.run import Run
from hookcb.hooks.hook import Hook
from hookcb.hooks.modules import has_compiled
from hookcb.processes.groups import is_sharded

N_LOOKS, MAX_LATE = 2, 4  # batches after the first one of a spike, and how much later they may come
N_SPIKES, N_BEFORE = 8, 4  # of a run that are looked at, and inspected batches before each
FROM_STEP = 8  # before which batches are inspected close together
MAX_CHANNELS, MAX_ROWS = 32, 2_048  # of an output in a profile

Seen = dict[int, dict[str, Tensor]]  # profiles by step and layer
Told = dict[int, dict[str, list[float]]]


class SpikeLooks(Measurement):
    """Looks at the outputs of all layers while a spike of the loss lasts, apart from inspected batches.

    Inspected batches are chosen by their number alone, and the next one may come when all layers have
    changed with the loss. What is seen here is kept for the spike only. Nothing is looked at more than four
    batches after the first one, as on a GPU, whose losses arrive later: all layers have learned from it then.
    Once any code was compiled, only layers in compiled code are looked at, as hooks would compile it again;
    in a model that is divided between ranks none is.

    Attributes:
        after: profiles of the first output of each layer, see `profile`, by the first step of a spike, the
            step of a look, and the layer's name.
        before: likewise, of the last four inspected batches before the spike, from step 8 on.
    """

    cadence = EVERY
    uses = (Spikes,)

    def __init__(self) -> None:
        self.after: dict[int, Told] = {}
        self.before: dict[int, Told] = {}
        self._after: dict[int, Seen] = {}
        self._before: dict[int, Seen] = {}
        self._recent = deque[tuple[int, dict[str, Tensor]]](maxlen=N_BEFORE + 1)  # the last may be in a spike
        self._last_step = -1  # of the optimizer, in which it was inspected
        self._hooks: list[Hook] = []
        self._led: LedStats | None = None  # during a look

    def on_batch(self, run: Run) -> None:
        self._take_off()
        if (
            run.looking and run.step >= FROM_STEP and run.n_steps != self._last_step
        ):  # else it is of the same step, by accumulation
            self._last_step = run.n_steps
            self._recent.append((run.step, {}))
        spike = run.measured(Spikes).under_way
        if spike is None or (spike.step not in self._after and len(self._after) == N_SPIKES):
            return
        n = len(self._after.get(spike.step, ()))
        is_high = all(x > spike.limit for x in spike.after[-1:])
        is_due = n < N_LOOKS and run.step <= spike.step + MAX_LATE and is_high
        if is_due and not is_sharded(run.loop.model):
            before = [x for x in self._recent if x[0] < spike.step][-N_BEFORE:]
            self._before.setdefault(spike.step, dict(before))
            self._put_on(run, self._after.setdefault(spike.step, {}).setdefault(run.step, {}))

    def on_output(self, run: Run, name: str, m: nn.Module, output: Any) -> None:
        if name and run.step >= FROM_STEP and self._recent and not torch.compiler.is_compiling():
            _take(self._recent[-1][1], name, m, (), output)

    def on_compiled_output(self, run: Run, name: str, m: nn.Module, output: Tensor | None) -> None:
        if output is not None:
            self.on_output(run, name, m, output)

    def _put_on(self, run: Run, seen: dict[str, Tensor]) -> None:
        loop, self._led = run.loop, next((cb for cb in run.loop.cbs if isinstance(cb, LedStats)), None)
        if self._led is None:
            return
        if has_compiled():  # where no hook may be added
            self._led.peek = lambda name, x: _take(seen, name, None, (), x)
            return
        for name, m in self._led.layers.items():
            hook = Hook(m, partial(_take, seen, name), gate=lambda: loop.training and loop.in_loop_thread)
            hook.take_error = self.failed
            self._hooks.append(hook)

    def _take_off(self) -> None:
        if self._led is not None:
            self._led.peek = None
            self._led = None
        while self._hooks:
            self._hooks.pop().remove()

    def on_backward(self, run: Run) -> None:
        self._take_off()  # a later forward is a recomputation by activation checkpointing

    def on_batch_end(self, run: Run) -> None:
        self._take_off()

    def close(self, run: Run) -> None:
        self._take_off()

    def tell(self, run: Run) -> None:
        self.after = {first: _told(seen) for first, seen in self._after.items()}
        self.before = {first: _told(seen) for first, seen in self._before.items()}

    def freeze(self) -> None:
        self._after, self._before, self._recent = {}, {}, deque()


def _told(seen: Seen) -> Told:
    return {step: {name: x.tolist() for name, x in layers.items()} for step, layers in seen.items()}


def profile(x: Tensor) -> Tensor:
    """Means of up to 32 channels of an output, then their standard deviations, over up to 2,048 rows.

    Args:
        x: an output `(…, C)`, or `(N, C, H, W)` if it has four dimensions.

    Returns:
        A float32 tensor `(2 c,)` on the device of `x`, in the unit of `x`.
    """
    x = x.detach().movedim(1, -1) if x.ndim == 4 else x.detach()
    rows = x.reshape(-1, x.shape[-1] if x.ndim else 1)
    rows = rows[:: max(1, len(rows) // MAX_ROWS), :: max(1, rows.shape[1] // MAX_CHANNELS)]
    std, mean = torch.std_mean(rows[:, :MAX_CHANNELS].float(), 0, correction=0)
    return torch.cat([mean, std])


def _take(seen: dict[str, Tensor], name: str, m: nn.Module | None, inputs: Any, output: Any) -> None:
    """Takes the profile of the first output of the first call of a layer."""
    if name in seen or in_transform():
        return
    tensors = [output] if isinstance(output, Tensor) else [x for _, x in parts(output)]
    if (x := next((x for x in tensors if has_stats(x) and x.numel()), None)) is not None:
        seen[name] = profile(x)
