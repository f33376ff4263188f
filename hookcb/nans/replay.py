"""The state at the beginning of a batch, and a context manager that replays the batch from it."""

import ctypes
import dis
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hookcb.core.batch import parts
from hookcb.core.randomness import set_random_state
from hookcb.core.restore import (
    BufferCopies,
    preserve_attribute,
    preserve_contents,
    preserve_own_attributes,
    preserve_random,
)
from hookcb.core.torch_private import forward_hooks, is_dynamo_imported, tensor_hooks, version_of
from hookcb.core.whose import is_of_program
from hookcb.hooks.modules import unwrapped
from hookcb.hooks.taps import Tap, taps_on

MT19937_BYTES = 625 * 4  # its state: 624 words and the position in them

Autocast = tuple[str, bool, torch.dtype]  # type of device, whether autocast is on, dtype


@dataclass(slots=True)
class BatchStart:
    """State at the beginning of a batch.

    Attributes:
        random: state of the random generators, in the form that is fastest to read; see `random_state`.
        autocasts: whether autocast was on and its dtype, for each type of device.
        buffers: copies of the buffers.
        versions: number of in-place changes of each tensor of the batch.
    """

    random: dict[str, Any]
    autocasts: list[Autocast]
    buffers: BufferCopies
    versions: list[int]

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Restores autocast for a `with` block; its cache of cast weights is empty before and after."""
        torch.clear_autocast_cache()
        with ExitStack() as stack:
            stack.callback(torch.clear_autocast_cache)
            for kind, enabled, dtype in self.autocasts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            yield

    def random_state(self) -> dict[str, Any]:
        """The argument of `hookcb.core.randomness.set_random_state`; NumPy's state is in arrays."""
        return self.random | {"loaders": []}


class BatchStarts:
    """Records how batches begin, reusing copies that have not changed since the last."""

    def __init__(self) -> None:
        self.buffers = BufferCopies()
        # the state as bytes, and as returned by NumPy
        self._numpy: tuple[bytes, dict[str, Any]] | None = None

    def note(self, learn: Any) -> BatchStart:
        """State at the beginning of the batch of `learn`; valid until the next call."""
        self.buffers.take(learn.model)
        return BatchStart(self._random(), autocasts(learn.model), self.buffers, versions_of(learn))

    def _random(self) -> dict[str, Any]:
        """Like `core.randomness.random_state`, without its lists, which take ten times as long."""
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if numpy := sys.modules.get("numpy"):
            state["numpy"] = self._of_numpy(numpy)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = torch.cuda.get_rng_state_all()
        return state

    def _of_numpy(self, numpy: Any) -> dict[str, Any]:
        """NumPy's state; reading it takes 30 µs, checking that it is unchanged takes 1."""
        generator = numpy.random.mtrand._rand._bit_generator
        if type(generator).__name__ != "MT19937":  # another generator was set
            return dict(numpy.random.get_state(legacy=False))
        raw = ctypes.string_at(generator.ctypes.state_address, MT19937_BYTES)
        # the second of a pair of normal numbers, kept for the next call, is not among the bytes
        if self._numpy is None or self._numpy[0] != raw or self._numpy[1]["has_gauss"]:
            self._numpy = raw, numpy.random.get_state(legacy=False)
        return self._numpy[1]


def autocasts(model: nn.Module) -> list[Autocast]:
    """Whether autocast is on and its dtype, for each type of device that the model may run on."""
    param = next(model.parameters(), None)
    devices = {"cpu"} if param is None else {"cpu", param.device.type}
    return [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in devices
        if torch.amp.is_autocast_available(kind)
    ]


def versions_of(learn: Any) -> list[int]:
    """Number of in-place changes of each tensor of the batch."""
    tensors = (x for _, x in parts((learn.xb, learn.yb)) if isinstance(x, Tensor))
    return [-1 if x.is_inference() else version_of(x) for x in tensors]


@contextmanager
def as_at_start(learn: Any, start: BatchStart, with_observers: bool = True) -> Iterator[None]:
    """Runs a `with` block in the state in which the batch of `learn` began, with the model uncompiled.

    Afterwards the previous state is restored: buffers, random numbers, modes, attributes of modules, and
    `xb`, `yb`, `pred` and `loss`. Callbacks do not see the replay; the user's hooks do.

    Args:
        learn: the learner, in the middle of a training batch.
        start: state at the beginning of the batch.
        with_observers: whether the user's forward hooks that return nothing see it too.
    """
    plain = unwrapped(learn.model)  # without DistributedDataParallel, which would wait for the other ranks
    with (
        preserve_random(),
        learn.restored(),
        preserve_attribute([learn], "model", plain),
        start.buffers.swapped_in(plain),
        preserve_own_attributes(plain),
        nullcontext() if with_observers else _without_observers(plain),
        preserve_attribute(observing_taps(plain), "hook", None),
        _uncompiled(),
        torch.enable_grad(),
    ):
        set_random_state(start.random_state())
        yield


def has_observers(learn: Any) -> bool:
    """Whether the model has forward hooks of the user that return nothing."""
    return any(_observers(register) for register in _hooks_of(unwrapped(learn.model)))


@contextmanager
def _without_observers(model: nn.Module) -> Iterator[None]:
    registers = list(_hooks_of(model))
    with preserve_contents(*registers):
        for register in registers:
            for key in _observers(register):
                del register[key]
        yield


def _hooks_of(model: nn.Module) -> Iterator[dict[int, Any]]:
    return (hooks for m in model.modules() for hooks in forward_hooks(m) if hooks)


def _observers(register: dict[int, Any]) -> list[int]:
    return [key for key, hook in register.items() if _is_observer(hook)]


def _is_observer(hook: Any) -> bool:
    """Whether a hook is a function of the user that returns nothing, so that it cannot replace an output."""
    while isinstance(hook, partial):
        hook = hook.func
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    if code is None or not is_of_program(code.co_filename):
        return False
    returned, before = [], None
    for step in dis.get_instructions(code):
        if step.opname == "RETURN_CONST":
            returned.append(step.argval)
        elif step.opname == "RETURN_VALUE":
            is_constant = before is not None and before.opname == "LOAD_CONST"
            returned.append(before.argval if is_constant and before is not None else hook)
        before = step
    return all(x is None for x in returned)


def observing_taps(model: nn.Module) -> list[Tap]:
    """Hooks of hookcb that only observe, including those of callbacks."""
    on_params: Iterator[Any] = (tap for p in model.parameters() for tap in tensor_hooks(p).values())
    taps: list[Tap] = [*taps_on(model), *(tap for tap in on_params if isinstance(tap, Tap))]
    return [tap for tap in taps if tap.hook is not None and not tap.hook.modify]


def _uncompiled() -> Any:
    # if it was never imported nothing is compiled, and importing it takes a second
    return torch.compiler.set_stance("force_eager") if is_dynamo_imported() else nullcontext()
