"""Named ranges in a running torch profiler: steps, their phases, and the layers called in them."""

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from hookcb.core.threads import in_loop_thread, this_thread
from hookcb.core.torch_private import plain_class
from hookcb.hooks.hook import Hooks
from hookcb.profiling.memory.sizes import n_bytes, tensors_in

STEP = "ProfilerStep#"  # TensorBoard's plugin and Holistic Trace Analysis find steps by this name
RECOMPUTED = "recomputed "
FORWARD = ("forward", "loss")  # phases in which a call of a layer counts as its forward


class _Open(threading.local):
    """Open ranges of this thread, outermost first, each with the object it was opened for."""

    def __init__(self) -> None:
        self.ranges: list[tuple[object, record_function]] = []


class LayerRanges:
    """Opens and closes the ranges of steps and phases, and by hooks the ranges of layers.

    Args:
        layers: layers by qualified name.

    Attributes:
        range_layers: name of the layer of each range, by the name of the range in the trace.
        output_bytes: size of the outputs of each layer, by step.
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self.range_layers: dict[str, str] = {}
        self.output_bytes: dict[int, Counter[str]] = {}
        self._names = {id(m): name for name, m in layers.items()}
        self._labels = {name: _label(name, m) for name, m in layers.items()}
        self._open = _Open()
        self._step: int | None = None
        self._thread = this_thread()
        self._calls: Counter[str] = Counter()
        self._phase = ""
        # the last pre-hook and the first forward hook, so that nothing but the layer itself is in the range
        self._hooks = [
            Hooks(layers, self._enter, detach=False, pre=True, gate=self._acts),
            Hooks(layers, self._leave, detach=False, prepend=True, always_call=True, gate=self._acts),
        ]

    def begin_step(self, step: int) -> None:
        """Opens the range of a step."""
        self.end_step()
        self._step, self._calls = step, Counter()
        self.output_bytes[step] = Counter()
        self._begin(self, f"{STEP}{step}")

    def begin_phase(self, phase: str) -> None:
        """Closes the open phase and opens the next one, inside the step."""
        if self._step is not None:
            self._close(down_to=1)
            self._phase = phase
            self._begin(phase, phase)

    def end_step(self) -> None:
        """Closes all open ranges."""
        self._step = None
        self._close()

    def remove(self) -> None:
        """Closes all open ranges and removes the hooks."""
        self.end_step()
        for hooks in self._hooks:
            hooks.remove()

    def _acts(self) -> bool:
        is_on = not torch.compiler.is_compiling() and self._step is not None
        return is_on and in_loop_thread(self._thread)

    def _enter(self, m: nn.Module, *seen: Any) -> None:
        layer, prefix = self._names[id(m)], RECOMPUTED if self._phase == "backward" else ""
        call = self._calls[prefix + layer]
        self._calls[prefix + layer] += 1
        name = f"{prefix}{self._labels[layer]}" + (f" #{call}" if call else "")
        self.range_layers[name] = layer
        self._begin(m, name)

    def _leave(self, m: nn.Module, i: Any, output: Any) -> None:
        ranges = self._open.ranges
        depth = next((d for d in reversed(range(len(ranges))) if ranges[d][0] is m), None)
        if depth is None:  # a hook before ours has raised
            return
        self._close(depth)
        if self._step is not None and self._phase in FORWARD:
            n = sum(map(_n_bytes, tensors_in(output)))
            self.output_bytes[self._step][self._names[id(m)]] += n

    def _begin(self, what: object, name: str) -> None:
        opened = record_function(name)
        opened.__enter__()  # type: ignore[no-untyped-call]
        self._open.ranges.append((what, opened))

    def _close(self, down_to: int = 0) -> None:
        while len(self._open.ranges) > down_to:
            _, opened = self._open.ranges.pop()
            opened.__exit__(None, None, None)


def _label(name: str, m: nn.Module) -> str:
    kind = plain_class(m).__name__
    label = f"{name} ({kind})" if name else kind
    return label.replace("\\", "/").replace('"', "'")  # torch does not escape it in JSON


def _n_bytes(x: Tensor) -> int:
    try:
        return n_bytes(x)
    except (NotImplementedError, RuntimeError):  # a tensor subclass that hides its memory
        return 0
