"""MixedPrecision: predictions and losses in half precision, weights in full."""

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
    """Computes predictions and losses under autocast: less memory, and faster on hardware made for it.

    Autocast lasts from `before_batch` to `after_loss`, in training and validation, also outside a fit. With
    float16 a fit scales its losses, so that small gradients do not vanish: `learn.scaler` is a
    `torch.amp.GradScaler`, which unscales gradients in `before_step` and skips the step where they have
    overflowed. Each step then waits for the device, unless the optimizer is fused. A step without any
    gradient is cancelled; gradients that stay after a cancelled step are scaled again for the next backward.

    Args:
        dtype: torch.bfloat16 or torch.float16, or "bf16" or "fp16".
        name: what the learner calls it.
        **scaler_options: with float16, for `torch.amp.GradScaler`: `init_scale`, `growth_interval` ….

    Raises:
        ValueError, TypeError: for another dtype, and options that a GradScaler does not take.
        RuntimeError: when a fit begins, where the device has no autocast, or there is a scaler already.

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
            raise ValueError(f"dtype is {dtype!r}; give torch.bfloat16, torch.float16, 'bf16' or 'fp16'")
        _check_options(self.dtype, scaler_options)
        self._options, self._skipped = scaler_options, torch.zeros((), dtype=torch.int64)
        self._owns = self._unscaled = False  # learn.scaler is of this; gradients that stay are unscaled

    @property
    def skipped(self) -> int:
        """Number of steps skipped in this fit; to look waits for the device."""
        return int(self._skipped)

    @property
    def _scaler(self) -> torch.amp.GradScaler | None:
        return self.learn.scaler if self._owns else None

    def before_fit(self) -> None:
        device = device_of(self.model, None)
        self._skipped, self._unscaled = torch.zeros((), dtype=torch.int64, device=device), False
        torch.autocast(device.type, self.dtype)  # what it refuses, it refuses before training
        if self.dtype is torch.float16:
            if self.learn.scaler is not None:
                raise RuntimeError("learn.scaler is set already; use one MixedPrecision, or one GradScaler")
            self.learn.scaler, self._owns = torch.amp.GradScaler(device.type, **self._options), True
            self.learn.scaler.scale(torch.ones((), device=device))  # else it has no scale before a backward

    def before_batch(self) -> None:
        # of the phase: it ends with it, by an error too, and a validation inside has one of its own
        self.phase_state["autocast"] = context = _autocast(device_of(self.model, None).type, self.dtype)
        next(context)

    def after_loss(self) -> None:
        if context := self.phase_state.pop("autocast", None):
            context.close()

    after_cancel_batch = after_cancel_train = after_cancel_validate = after_loss
    after_cancel_epoch = after_cancel_fit = after_loss

    def before_backward(self) -> None:
        if self._unscaled and (scaler := self._scaler):  # what this backward adds is scaled
            self._unscaled, scale = False, scaler.get_scale()
            scaler.update(scale)  # forgets that it has unscaled
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
    """Autocast from `next` to `close`, or until nobody holds it any more."""
    # inside another autocast its cache would give casts of weights that have changed since, or keep ours
    torch.clear_autocast_cache()
    try:
        with torch.autocast(device_type, dtype):
            yield
    finally:
        torch.clear_autocast_cache()


def _check_options(dtype: torch.dtype, options: dict[str, Any]) -> None:
    if options and dtype is not torch.float16:
        raise TypeError(f"{[*options]} are for a GradScaler, which bfloat16 does without; leave them out")
    try:
        torch.amp.GradScaler("cpu", **options)
    except TypeError as refused:
        raise TypeError(f"{refused}; see torch.amp.GradScaler for what is possible") from None
    except AssertionError as refused:
        raise ValueError(f"a GradScaler refuses {options}: {refused}") from refused
