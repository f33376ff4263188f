"""MixedPrecision: predictions and losses in half precision, weights in full precision."""

from collections.abc import Generator
from typing import Any

import torch

from hookcb.core import orders
from hookcb.core.callback import Callback
from hookcb.core.events import CancelStepException
from hookcb.core.optim import gradients, scale_gradients
from hookcb.hooks.modules import device_of

DTYPES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16}


class MixedPrecision(Callback):
    """Computes predictions and losses under autocast: less memory, and faster on hardware that supports it.

    Autocast is on from `before_batch` to `after_loss`, in training and validation, also outside a fit. With
    float16, a fit scales its losses so that small gradients do not underflow: `learn.scaler` is a
    `torch.amp.GradScaler`, which unscales gradients in `before_step` and skips the step if they have
    overflowed. Each step then waits for the device, unless the optimizer is fused. A step without any
    gradient is cancelled; gradients left by a cancelled step are scaled again for the next backward.

    Args:
        dtype: torch.bfloat16 or torch.float16, or "bf16" or "fp16".
        name: name of the callback in the learner.
        **scaler_options: options of `torch.amp.GradScaler`, with float16 only: `init_scale` …

    Raises:
        RuntimeError: When a fit begins, if the device has no autocast, or `learn.scaler` is set already.

    Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018.

    >>> from hookcb import MixedPrecision, synth_learner
    >>> learn = synth_learner()
    >>> with learn.no_logging():
    ...     learn.fit(1, cbs=MixedPrecision())
    >>> learn.mixed_precision.skipped
    0
    """

    order = orders.PRECISION

    def __init__(
        self, dtype: torch.dtype | str = torch.bfloat16, *, name: str | None = None, **scaler_options: Any
    ) -> None:
        super().__init__(name=name)
        self.dtype: Any = DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
        if self.dtype not in DTYPES.values():
            raise ValueError(f"dtype must be torch.bfloat16, torch.float16, 'bf16' or 'fp16', got {dtype!r}")
        _check_options(self.dtype, scaler_options)
        self._options, self._skipped = scaler_options, torch.zeros((), dtype=torch.int64, device="cpu")
        self._owns = False  # whether learn.scaler was set here
        self._unscaled = False  # whether the gradients left by a cancelled step are unscaled

    @property
    def skipped(self) -> int:
        """Number of steps skipped in this fit; reading it waits for the device."""
        return int(self._skipped)

    @property
    def _scaler(self) -> torch.amp.GradScaler | None:
        return self.learn.scaler if self._owns else None

    def before_fit(self) -> None:
        device = device_of(self.model)
        self._skipped, self._unscaled = torch.zeros((), dtype=torch.int64, device=device), False
        torch.autocast(device.type, self.dtype)  # raises before training, not in it
        if self.dtype is torch.float16:
            if self.learn.scaler is not None:
                raise RuntimeError("learn.scaler is set already; use one MixedPrecision, or one GradScaler")
            self.learn.scaler, self._owns = torch.amp.GradScaler(device.type, **self._options), True
            # else it has no scale before a backward ends
            self.learn.scaler.scale(torch.ones((), device=device))

    def before_batch(self) -> None:
        # in the phase's state: it ends with the phase, even by an error, and a nested validation has its own
        self.phase_state["autocast"] = context = _autocast(device_of(self.model).type, self.dtype)
        next(context)

    def after_loss(self) -> None:
        if context := self.phase_state.pop("autocast", None):
            context.close()

    after_cancel_batch = after_cancel_train = after_cancel_validate = after_loss
    after_cancel_epoch = after_cancel_fit = after_loss

    def before_backward(self) -> None:
        if self._unscaled and (scaler := self._scaler):  # the gradients that this backward adds are scaled
            self._unscaled, scale = False, scaler.get_scale()
            scaler.update(scale)  # resets its stage to READY
            scale_gradients(self.opt, scale)

    def before_step(self) -> None:
        if (scaler := self._scaler) and not self._unscaled:
            if not gradients(self.opt):
                raise CancelStepException
            scaler.unscale_(self.opt)
            self._unscaled = True

    def after_cancel_step(self) -> None:
        self.phase_state["cancelled"] = True

    def after_step(self) -> None:
        if not self.phase_state.pop("cancelled", False) and (scaler := self._scaler):
            before = scaler.scale(one := torch.ones_like(self._skipped, dtype=torch.float32))
            scaler.update()
            self._skipped += scaler.scale(one) < before
            self._unscaled = False

    def after_fit(self) -> None:
        self.after_loss()
        if self._owns:
            self.learn.scaler, self._owns = None, False

    def state_dict(self) -> dict[str, Any]:
        scaler = self._scaler
        state = {"skipped": self.skipped, "unscaled": self._unscaled}
        return state | {"scaler": scaler.state_dict()} if scaler else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if scaler := self._scaler:
            scaler.load_state_dict(state["scaler"])
            self._skipped.fill_(state["skipped"])
            self._unscaled = state["unscaled"]

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_skipped": self._skipped.cpu(), "_owns": False}


def _autocast(device_type: str, dtype: torch.dtype) -> Generator[None, None, None]:
    """Autocast from `next` to `close`, or until the generator is garbage-collected."""
    # within another autocast, the cache could return outdated casts of weights, or keep those made here
    torch.clear_autocast_cache()
    try:
        with torch.autocast(device_type, dtype):
            yield
    finally:
        torch.clear_autocast_cache()


def _check_options(dtype: torch.dtype, options: dict[str, Any]) -> None:
    if options and dtype is not torch.float16:
        raise TypeError(f"{[*options]} are for a GradScaler, which bfloat16 does not need; leave them out")
    try:
        torch.amp.GradScaler("cpu", **options)
    except TypeError as refused:
        raise TypeError(f"{refused}; see torch.amp.GradScaler for what is possible") from None
    except AssertionError as refused:
        raise ValueError(f"GradScaler does not accept {options}: {refused}") from refused
