"""How a batch began: a replay goes back to it, and leaves everything as it was found."""

import ctypes
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hookcb.core.batch import parts
from hookcb.core.randomness import random_state, set_random_state
from hookcb.core.restore import BufferCopies, counts_kept
from hookcb.core.torch_private import is_dynamo_imported, tensor_hooks, version_of
from hookcb.hooks.modules import unwrapped
from hookcb.hooks.taps import Tap, taps_on

MT19937_BYTES = 625 * 4  # of its state: 624 words, and where in them it is

Autocast = tuple[str, bool, torch.dtype]  # the kind of device, whether it is on, and to what it casts


@dataclass(slots=True)
class BatchStart:
    """How a batch began.

    Attributes:
        random: the random numbers, as they are read quickest; see `random_state`.
        autocasts: of each kind of device whether it was on, and to which dtype.
        buffers: what they held.
        versions: how often each tensor of the batch had been changed in place.
    """

    random: dict[str, Any]
    autocasts: list[Autocast]
    buffers: BufferCopies
    versions: list[int]

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Autocast as it was, with no cast of weights left from before, and leaving none."""
        torch.clear_autocast_cache()
        with ExitStack() as stack:
            stack.callback(torch.clear_autocast_cache)
            for kind, enabled, dtype in self.autocasts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            yield

    def random_state(self) -> dict[str, Any]:
        """For `hookcb.core.randomness.set_random_state`; what is of NumPy is in its arrays."""
        return self.random | {"loaders": []}


class BatchStarts:
    """Notes how batches begin, and keeps from one to the next what has not changed."""

    def __init__(self) -> None:
        self.buffers = BufferCopies()
        self._numpy: tuple[bytes, dict[str, Any]] | None = None  # the state as bytes, and as numpy gives it

    def note(self, learn: Any) -> BatchStart:
        """How the batch begins that `learn` is about to put through the model, until the next is noted."""
        self.buffers.take(learn.model)
        return BatchStart(self._random(), autocasts(learn.model), self.buffers, versions_of(learn))

    def _random(self) -> dict[str, Any]:
        """`random_state` without its lists, which take ten times as long as the rest."""
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if numpy := sys.modules.get("numpy"):
            state["numpy"] = self._of_numpy(numpy)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = torch.cuda.get_rng_state_all()
        return state

    def _of_numpy(self, numpy: Any) -> dict[str, Any]:
        """Its state, which takes 30 µs to read, and 1 to see that it is the last one still."""
        generator = numpy.random.mtrand._rand._bit_generator
        if type(generator).__name__ != "MT19937":  # somebody has set another
            return dict(numpy.random.get_state(legacy=False))
        raw = ctypes.string_at(generator.ctypes.state_address, MT19937_BYTES)
        # the half of a pair of normal numbers that waits for the next call is not among the bytes
        if self._numpy is None or self._numpy[0] != raw or self._numpy[1]["has_gauss"]:
            self._numpy = raw, numpy.random.get_state(legacy=False)
        return self._numpy[1]


def autocasts(model: nn.Module) -> list[Autocast]:
    """Of each kind of device that a model may run on, whether autocast is on, and to which dtype."""
    param = next(model.parameters(), None)
    devices = {"cpu"} if param is None else {"cpu", param.device.type}
    return [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in devices
        if torch.amp.is_autocast_available(kind)
    ]


def versions_of(learn: Any) -> list[int]:
    """How often each tensor of the batch has been changed in place."""
    tensors = (x for _, x in parts((learn.xb, learn.yb)) if isinstance(x, Tensor))
    return [-1 if x.is_inference() else version_of(x) for x in tensors]


@contextmanager
def as_at_start(learn: Any, start: BatchStart) -> Iterator[None]:
    """In the block all is as when the batch of `learn` began, and the model runs plainly, not compiled.

    Afterwards it is as it was found: buffers, random numbers, modes, what modules count in attributes, and
    `xb`, `yb`, `pred` and `loss`. Callbacks do not see the replay, hooks of the user's own do.
    """
    model, now = learn.model, random_state()
    plain = unwrapped(model)  # without DistributedDataParallel, which would wait for the other ranks
    with (
        learn.restored(),
        start.buffers.swapped_in(plain),
        counts_kept(plain),
        _taps_closed(plain),
        _uncompiled(),
        torch.enable_grad(),
    ):
        learn.model = plain
        set_random_state(start.random_state())
        try:
            yield
        finally:
            learn.model = model
            set_random_state(now)


@contextmanager
def _taps_closed(model: nn.Module) -> Iterator[None]:
    """Hooks of hookcb's that only look, those of callbacks among them, see nothing."""
    on_params: Iterator[Any] = (tap for p in model.parameters() for tap in tensor_hooks(p).values())
    taps: list[Tap] = [*taps_on(model), *(tap for tap in on_params if isinstance(tap, Tap))]
    closed = [(tap, tap.hook) for tap in taps if tap.hook is not None and not tap.hook.modify]
    try:
        for tap, _ in closed:
            tap.hook = None
        yield
    finally:
        for tap, hook in closed:
            tap.hook = hook


def _uncompiled() -> Any:
    # where it was never imported nothing is compiled, and importing it takes a second
    return torch.compiler.set_stance("force_eager") if is_dynamo_imported() else nullcontext()
