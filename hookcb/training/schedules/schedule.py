"""Schedule: the learning rate by any scheduler of torch."""

import inspect
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau as TorchReduceLROnPlateau

from hookcb.training.schedules.base import SteppedRate

EXAMPLE = "give a function of the optimizer, as Schedule(partial(StepLR, step_size=3))"


class Schedule(SteppedRate):
    """Sets the learning rate by a scheduler of torch, stepped after each training batch or each epoch.

    Batches that are cancelled or only accumulate gradients count too, so that the schedule ends when the fit
    does. After the fit each group of the optimizer has again what it had before: lr, momentum, betas.

    Args:
        factory: `factory(opt)` gives a `torch.optim.lr_scheduler.LRScheduler`; called when a fit begins.
        per: "batch" or "epoch", after what to step.
        name: what the learner calls it.

    Attributes:
        scheduler: torch's, while a fit runs; else None.

    Raises:
        TypeError: where `factory` is no such function; when the fit begins, where it gives no scheduler.
        ValueError: for another `per`; when the fit begins, where the scheduler is of another optimizer.

    >>> from functools import partial
    >>> from torch.optim.lr_scheduler import ExponentialLR
    >>> from hookcb import Schedule, synth_learner
    >>> learn = synth_learner(n_train=3, lr=0.1)
    >>> with learn.no_logging():
    ...     learn.fit(1, cbs=Schedule(partial(ExponentialLR, gamma=0.5)))
    >>> learn.recorder.lrs, learn.opt.param_groups[0]["lr"]
    ([0.1, 0.05, 0.025], 0.1)
    """

    def __init__(
        self, factory: Callable[[Optimizer], LRScheduler], per: str = "batch", *, name: str | None = None
    ) -> None:
        super().__init__(name=name)
        _check_factory(factory)
        if per not in ("batch", "epoch"):
            raise ValueError(f"per is {per!r}; give 'batch' or 'epoch', after what to step")
        self.factory, self.per = factory, per

    def make(self, opt: Optimizer) -> LRScheduler:
        """Gives a new scheduler of `opt`."""
        made: Any = self.factory(opt)
        if isinstance(made, TorchReduceLROnPlateau):
            raise TypeError("torch's ReduceLROnPlateau steps by a value; use hookcb.ReduceLROnPlateau")
        if not isinstance(made, LRScheduler):
            raise TypeError(f"factory {self.factory!r:.80} gave {made!r:.80}, no LRScheduler; {EXAMPLE}")
        if made.optimizer is not opt:
            raise ValueError(
                f"factory gave a {type(made).__name__} of another optimizer than the learner's; "
                "make it of the one that factory is called with"
            )
        return made


def _check_factory(factory: Any) -> None:
    if not callable(factory):
        raise TypeError(f"factory is {factory!r:.80}, no function; {EXAMPLE}")
    try:
        signature = inspect.signature(factory)
    except ValueError:  # of some things made in C there is none
        return
    try:
        signature.bind(object())
    except TypeError as wrong:
        kind = getattr(factory, "__name__", repr(factory))
        raise TypeError(
            f"factory {kind:.80} cannot be called with an optimizer alone ({wrong}); {EXAMPLE}"
        ) from None
