"""DetectAnomaly: autograd's anomaly mode on chosen batches."""

from typing import Any

import torch
from torch.autograd import set_detect_anomaly

from hookcb.core import orders
from hookcb.core.arguments import check_count
from hookcb.core.callback import Callback
from hookcb.core.threads import locked


class DetectAnomaly(Callback):
    """Makes autograd raise at a backward that returns NaN, and name the forward operation.

    Turns on `torch.autograd.set_detect_anomaly` for training batches `start` to `stop` of a fit, counted over
    all epochs. Training is several times slower there, so choose a window around the batch that
    `TerminateOnNaN` has named. Outside the window, in validation and after the fit the mode is restored.
    `learn.one_batch` is not affected.

    The mode belongs to the process: while a window is open, it is also on for trainings in other threads, and
    it is restored when the last window closes. It cannot be used with a GradScaler, whose scaled gradients
    overflow until it has found its scale, which is not an error of the model.

    Args:
        start: index of the first training batch.
        stop: index of the first batch after the window; by default the window has no end.
        name: see `Callback`.

    Raises:
        TypeError, ValueError: If the window is empty or not whole numbers.
        RuntimeError: If a GradScaler scales the losses when a fit begins, as with `MixedPrecision("fp16")`;
            in the fit, by autograd, if a backward returns NaN, after a warning with the traceback of the
            forward operation.

    >>> import warnings
    >>> from hookcb import DetectAnomaly, synth_learner
    >>> learn = synth_learner(loss_func=lambda pred, y: (pred - pred.detach()).sqrt().mean() * 0)
    >>> with learn.no_logging(), warnings.catch_warnings(action="ignore"):
    ...     try:
    ...         learn.fit(1, cbs=DetectAnomaly())
    ...     except RuntimeError as error:
    ...         print(error)
    Function 'SqrtBackward0' returned nan values in its 0th output.
    """

    order = orders.NONFINITE
    run_valid = False
    run_lr_find = False  # lr_find ends by itself if the loss is not finite

    def __init__(self, start: int = 0, stop: int | None = None, *, name: str | None = None) -> None:
        super().__init__(name=name)
        check_count("start", start, "training batches", least=0)
        if stop is not None:
            check_count("stop", stop, "training batches", least=start + 1, hint=f", as start is {start}")
        self.start, self.stop = start, stop
        self._is_on = False

    def before_fit(self) -> None:
        if self.learn.scaler is not None and self.learn.scaler.is_enabled():
            raise RuntimeError(
                "DetectAnomaly stops at the first NaN of a backward, but under a GradScaler overflows are "
                "normal; use NanTrace in a Learner, which replays the batch without the scale, or "
                "bfloat16, which needs no scaler"
            )

    def before_batch(self) -> None:
        within = self.start <= self.train_iter and (self.stop is None or self.train_iter < self.stop)
        if self.learn.fitting and within:  # outside a fit nothing would turn it off after an error
            self._switch(True)

    def after_batch(self) -> None:
        self._switch(False)

    def _switch(self, on: bool) -> None:
        if on and not self._is_on:
            _enter()
        elif self._is_on and not on:
            _leave()
        self._is_on = on

    # a cancel of more than the batch, and an error, skip after_batch
    after_train = after_epoch = after_fit = after_batch

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_is_on": False}  # a copy has not turned the mode on


_open: list[tuple[bool, bool]] = []  # per open window: autograd's mode before the first


def _enter() -> None:
    """Turns anomaly mode on."""
    with locked():
        mode = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
        _open.append(_open[0] if _open else mode)
        set_detect_anomaly(True)


def _leave() -> None:
    """Restores the mode from before the first window when the last one closes."""
    with locked():
        mode = _open.pop()
        if not _open:
            set_detect_anomaly(*mode)
