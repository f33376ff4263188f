"""TerminateOnNaN: ends a fit before a bad loss reaches the weights."""

from hookcb.core import orders
from hookcb.core.callback import Callback
from hookcb.core.console import warn
from hookcb.core.events import CancelBatchException, CancelFitException


class TerminateOnNaN(Callback):
    """Ends the fit at a training loss that is NaN or infinite, before its backward pass.

    The weights stay as they were after the last good step; running statistics, as of batch norm, include the
    bad batch. It gives one UserWarning. `DetectAnomaly` then finds the operation that made the NaN. In
    `learn.one_batch` the batch's step is skipped.

    Reading each loss waits for the device once a batch.

    Args:
        name: see `Callback`.

    Attributes:
        reason: "loss is nan at epoch 0, batch 3", counted from 0; None if the fit was not ended.

    >>> import torch, warnings
    >>> from hookcb import TerminateOnNaN, synth_learner
    >>> learn = synth_learner(loss_func=lambda pred, y: torch.nn.functional.mse_loss(pred, y).log().sqrt())
    >>> with learn.no_logging(), warnings.catch_warnings(action="ignore"):
    ...     learn.fit(20, cbs=TerminateOnNaN())
    >>> learn.terminate_on_nan.reason.startswith("loss is nan at epoch ")
    True
    """

    default_name = "terminate_on_nan"  # else …_on_na_n
    order = orders.NONFINITE
    may_cancel = frozenset({"fit", "batch"})
    run_valid = False
    run_lr_find = False  # lr_find raises the rate until it is too high, on purpose

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self.reason: str | None = None

    def before_fit(self) -> None:
        self.reason = None

    def after_loss(self) -> None:
        if self.loss.isfinite().all():  # waits for the device
            return
        where = ", ".join(self.learn.position("after_loss"))
        self.reason = f"loss is {self.loss.item()} at {where}"
        ends = "the fit ends with the weights as they were before"
        warn(f"{self.reason}; {ends}", stacklevel=2, is_of_rank=True)
        raise (CancelFitException if self.learn.fitting else CancelBatchException)(self.reason)
