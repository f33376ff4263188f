"""Spike looks: statistics of layers' outputs in two batches after a loss has jumped."""

from functools import partial
from typing import Any

from torch import Tensor, nn

from hookcb.activations.stats import LAYER_STATS, has_stats, layer_stats
from hookcb.core.batch import parts
from hookcb.core.torch_private import in_transform
from hookcb.diagnosis.fault import EVERY, Measurement
from hookcb.diagnosis.led import LedStats
from hookcb.diagnosis.measurements.spikes import Spikes
from hookcb.diagnosis.run import Run
from hookcb.hooks.hook import Hook
from hookcb.hooks.modules import has_compiled
from hookcb.processes.groups import is_sharded

AFTER = (1, 4)  # known losses after the first one of a spike, from which on it is looked, if the last is high
N_SPIKES = 8  # of a run that are looked at


class SpikeLooks(Measurement):
    """Looks at the outputs of all layers while a spike of the loss lasts, apart from inspected batches.

    Inspected batches are chosen by their number alone, and the next one may come when all layers have
    changed with the loss. What is seen here is kept for the spike only. Nothing is looked at once any code
    was compiled, as that would compile it again, nor in a model that is divided between ranks.

    Attributes:
        found: the statistics of `LAYER_STATS` of the first output of each layer, by the first step of a spike,
            the step of a look, and the layer's name.
    """

    cadence = EVERY
    uses = (Spikes,)

    def __init__(self) -> None:
        self.found: dict[int, dict[int, dict[str, dict[str, float]]]] = {}
        self._seen: dict[int, dict[int, dict[str, Tensor]]] = {}
        self._hooks: list[Hook] = []

    def on_batch(self, run: Run) -> None:
        self._take_off()
        spike = run.measured(Spikes).under_way
        if spike is None or (spike.step not in self._seen and len(self._seen) == N_SPIKES):
            return
        n = len(self._seen.get(spike.step, ()))
        is_due = n < len(AFTER) and len(spike.after) >= AFTER[n] and spike.after[-1] > spike.limit
        if is_due and not (has_compiled() or is_sharded(run.loop.model)):
            self._put_on(run, self._seen.setdefault(spike.step, {}).setdefault(run.step, {}))

    def _put_on(self, run: Run, seen: dict[str, Tensor]) -> None:
        loop = run.loop
        layers = next((cb.layers for cb in loop.cbs if isinstance(cb, LedStats)), {})
        for name, m in layers.items():
            hook = Hook(m, partial(_take, seen, name), gate=lambda: loop.training and loop.in_loop_thread)
            hook.take_error = self.failed
            self._hooks.append(hook)

    def _take_off(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def on_backward(self, run: Run) -> None:
        self._take_off()  # a later forward is a recomputation by activation checkpointing

    def on_batch_end(self, run: Run) -> None:
        self._take_off()

    def close(self, run: Run) -> None:
        self._take_off()

    def tell(self, run: Run) -> None:
        self.found = {
            first: {
                step: {name: dict(zip(LAYER_STATS, x.tolist(), strict=True)) for name, x in layers.items()}
                for step, layers in looks.items()
            }
            for first, looks in self._seen.items()
        }

    def freeze(self) -> None:
        self._seen = {}


def _take(seen: dict[str, Tensor], name: str, m: nn.Module, inputs: Any, output: Any) -> None:
    """Takes the first output of the first call of a layer."""
    if name not in seen and not in_transform():
        tensors = [output] if isinstance(output, Tensor) else [x for _, x in parts(output)]
        if (x := next(filter(has_stats, tensors), None)) is not None:
            seen[name] = layer_stats(x)
