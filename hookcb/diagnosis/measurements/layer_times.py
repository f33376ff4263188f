"""LayerTimes: the time of each layer's forward beside its work, in multiply-adds and elements."""

import math
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookcb.core.torch_private import CALL_NAME, forward_hooks
from hookcb.core.whose import OURS, is_of_program
from hookcb.diagnosis.fault import EVERY, Measurement
from hookcb.diagnosis.measurements.clock import Clock
from hookcb.diagnosis.measurements.lines import code_of, function_place
from hookcb.diagnosis.measurements.operations import Operations
from hookcb.diagnosis.run import Run
from hookcb.hooks.hook import Hook
from hookcb.hooks.modules import contains_compiled, named_modules
from hookcb.hooks.own import OwnHook, register
from hookcb.hooks.taps import Tap

FIRST, MAX_TIMED = 6, 6  # batch from which layers are timed, and number of batches in which they are
MIN_TIMED = 3
NUMBERS = {bool, int, float, type(None)}
READS = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal")  # for which a GPU is waited for
ELEMENT = 16  # multiply-adds that take as long as an element of a result, which is read and written
# operations that take far more per element, by their size or by what is in them
UNKNOWN = re.compile(
    r"_?(linalg_(?!vector_norm)|fft|cdist|sort|topk|kthvalue|median|mode|unique|cholesky|lu_|geqrf|ormqr|"
    r"triangular_solve|histogram|searchsorted)"
)


class LayerTimes(Measurement):
    """Times the forwards of all modules in a few batches, each without what it calls and without other hooks.

    The batches are those after an inspected one, so that nothing else is measured between the layers. Hooks
    are on the modules only in them. Nothing is timed in a process that has compiled anything, as new hooks
    would compile it again.
    """

    cadence = EVERY
    uses = (Clock, Operations)

    def __init__(self) -> None:
        # least seconds of a forward by layer, without the modules that it calls, as a busy machine adds to
        # them, and of the user's forward hooks on all layers, by function; empty if too few were timed
        self.seconds, self.hook_seconds = dict[str, float](), dict[str, float]()
        self.work: dict[str, float] = defaultdict(float)  # in a forward by layer, see `work_of`
        self.n_ops: Counter[str] = Counter()  # operations in a forward by layer
        self.n_reads: Counter[str] = Counter()  # those that read a number of a tensor, as `.item()` does
        self._names: dict[int, str] = {}
        # seconds of each batch, and in the current one, by layer and by the user's function
        self._all_seconds, self._of_hooks = (defaultdict[str, list[float]](list) for _ in range(2))
        self._now, self._now_in_hooks = (defaultdict[str, float](float) for _ in range(2))
        self._running: list[str] = []
        self._since = 0.0
        self._handles: list[RemovableHandle] = []
        self._n_timed, self._is_after_look = 0, False

    def on_model(self, run: Run) -> None:
        self._names = {id(m): name for name, m in named_modules(run.loop.model).items()}
        run.measured(Operations).listeners.append(self)

    def on_batch(self, run: Run) -> None:
        """Puts hooks on the modules if the batch before this one was inspected, and this one is not."""
        self.on_backward(run)
        is_due = self._is_after_look and not run.looking and run.n_batches >= FIRST
        self._is_after_look = run.looking
        if not is_due or contains_compiled(model := run.loop.model):
            return
        if (split := run.measured(Clock).split) is not None:
            split.leaves_out = True
        loop, acts = run.loop, ("_enter", "_pause", "_begin", "_end", "_resume")
        enter, pause, begin, end, resume = (_Timing(self, act, loop) for act in acts)
        for m in named_modules(model).values():
            if id(m) in self._names and not isinstance(m, torch.jit.ScriptModule):
                after, before = map(len, forward_hooks(m))  # others, which act between two of these
                on, on_pre = m.register_forward_hook, m.register_forward_pre_hook
                self._handles += [
                    register(on_pre, pause if before else enter, prepend=True),
                    register(on, end, prepend=True),
                    *([register(on_pre, begin)] if before else []),
                    *([register(on, resume)] if after else []),
                ]
        if loop.is_calling and id(model) in self._names:  # its hooks come too late for the call in progress
            self._running.append(self._names[id(model)])
            self._since = time.perf_counter()

    def _enter(self, m: nn.Module, args: Any) -> None:
        self._pause(m, args)
        self._running.append(self._names[id(m)])

    def _pause(self, m: nn.Module, args: Any) -> None:
        now = time.perf_counter()
        if self._running:
            self._now[self._running[-1]] += now - self._since
        self._since = now

    def _begin(self, m: nn.Module, args: Any) -> None:
        self._add_hooks(forward_hooks(m)[1])
        self._running.append(self._names[id(m)])
        self._since = time.perf_counter()

    def _end(self, m: nn.Module, args: Any, output: Any) -> None:
        now, name = time.perf_counter(), self._names[id(m)]
        if name in self._running:
            self._now[name] += now - self._since
            while self._running.pop() != name:  # those whose forward has raised
                pass
        self._since = time.perf_counter()

    def _resume(self, m: nn.Module, args: Any, output: Any) -> None:
        self._add_hooks(forward_hooks(m)[0])
        self._since = time.perf_counter()

    def _add_hooks(self, hooks: Mapping[int, Any]) -> None:
        """Adds the time since the last event to that of the user's hooks, which have acted since."""
        now = time.perf_counter()
        others = [hook.hook if isinstance(hook, Tap) else hook for hook in hooks.values()]
        others = [hook for hook in others if hook is not None and not isinstance(hook, _Timing)]
        with suppress(Exception):  # of an odd object; the user's forward goes on
            if (title := _title_of(others)) is not None:
                self._now_in_hooks[title] += now - self._since

    def on_backward(self, run: Run, level: str = "") -> None:
        """Removes the hooks, at the latest before the backward, which may run forwards again."""
        if not self._handles:
            return
        while self._handles:
            self._handles.pop().remove()
        self._n_timed += 1
        self.done = self._n_timed == MAX_TIMED
        for kept, found in ((self._all_seconds, self._now), (self._of_hooks, self._now_in_hooks)):
            for name, seconds in found.items():
                kept[name].append(seconds)
            found.clear()
        self._running.clear()

    on_cancel = close = on_backward

    def add_work(self, layer: str, func: Any, args: tuple[Any, ...], output: Any) -> None:
        """Adds the work of an operation in the first inspected forward."""
        op = func.overloadpacket.__name__
        if not _is_of_hook():
            self.n_ops[layer] += 1
            self.n_reads[layer] += op in READS
        self.work[layer] += work_of(op, args, output)

    def tell(self, run: Run) -> None:
        n = self._n_timed
        self.seconds, self.hook_seconds = (
            {name: min(x) for name, x in found.items() if n >= MIN_TIMED and 2 * len(x) > n}
            for found in (self._all_seconds, self._of_hooks)
        )


class _Timing(OwnHook):
    """Calls a method of `LayerTimes` in the thread of the loop; an error in it costs these times only."""

    def __init__(self, times: LayerTimes | None = None, act: str = "", loop: Any = None) -> None:
        self._times, self._act, self._loop = times, act, loop  # a copy has none

    def __call__(self, *seen: Any) -> None:
        """Called by torch."""
        if self._times is not None and self._loop.in_loop_thread:
            try:
                getattr(self._times, self._act)(*seen)
            except Exception as error:  # must not be raised in the user's forward
                self._times.failed(error)


def _is_of_hook() -> bool:
    """Whether the operation that is dispatched is one of hookcb's hooks, which act in the calls of layers."""
    frame, is_outside = sys._getframe(1).f_back, False
    while frame is not None and frame.f_code.co_name != CALL_NAME:
        if is_outside and frame.f_code.co_filename.startswith(OURS):
            return True
        is_outside |= frame.f_code.co_name == "__torch_dispatch__"
        frame = frame.f_back
    return False


def _title_of(hooks: list[Any]) -> str | None:
    """Functions of hooks of the user or a package; None without any, or with hooks of torch or hookcb too."""
    acting = [hook for hook in hooks if not isinstance(hook, Hook) or hook.gate()]
    functions = [hook.hook_func if isinstance(hook, Hook) else hook for hook in acting]
    codes = [code for function in functions if (code := code_of(function)) is not None]
    if not functions or not all(is_of_program(code.co_filename) for code in codes):
        return None
    return f"the forward hook {' and '.join(dict.fromkeys(map(function_place, functions)))}"


def work_of(op: str, args: tuple[Any, ...], output: Any) -> float:
    """Work of an operation in multiply-adds, of which each element of a result counts as `ELEMENT`."""
    given = {None, *map(address, _inside(args))}
    results = [x for x in _inside((output,)) if address(x) not in given]  # a view is no work
    return multiply_adds(op, args, results) + float(ELEMENT * sum(x.numel() for x in results))


def _inside(values: tuple[Any, ...]) -> list[Any]:
    """Arguments or results of an operation, and what is in their lists and tuples; other than numbers."""
    items = [x for value in values for x in (value if type(value) in (list, tuple) else (value,))]
    return [x for x in items if type(x) not in NUMBERS]


def address(x: Any) -> int | None:
    """Address of a tensor's memory; None for what has none, such as a sparse tensor or a wrapper."""
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        return None
    try:
        return x.untyped_storage().data_ptr()
    except RuntimeError:  # a subclass made by _make_wrapper_subclass
        return None


def multiply_adds(op: str, args: tuple[Any, ...], results: list[Tensor]) -> float:
    """Multiply-adds of an operation; 0 for one that is not a product, infinity for one whose work is unknown.

    torch.utils.flop_counter knows more of them, but its import takes half a second.
    """
    if UNKNOWN.match(op):
        return math.inf
    if op in ("mm", "bmm"):
        return float(args[0].numel() * args[1].shape[-1])
    if op in ("addmm", "baddbmm"):
        return float(args[1].numel() * args[2].shape[-1])
    if op == "convolution":
        whole = args[0] if args[6] else results[0]  # args[6]: whether it is transposed
        return float(whole.numel() * prod(args[1].shape[1:]))
    if op.startswith("_scaled_dot_product"):
        return float(2 * args[0].numel() * args[1].shape[-2])
    if op == "mkldnn_rnn_layer":
        return float(prod(args[0].shape[:-1]) * (args[1].numel() + args[2].numel()))
    if op.removeprefix("_") in ("cudnn_rnn", "thnn_fused_lstm_cell"):
        weights = args[1] if isinstance(args[1], list | tuple) else ()
        return float(prod(args[0].shape[:-1]) * sum(x.numel() for x in weights))
    return 0.0
