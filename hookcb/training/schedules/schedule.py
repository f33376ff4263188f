"""Schedule: any torch scheduler of the learning rate."""

import inspect
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau as TorchReduceLROnPlateau

from hookcb.training.schedules.base import SteppedRate

EXAMPLE = "give a function of the optimizer, such as Schedule(partial(StepLR, step_size=3))"


class Schedule(SteppedRate):
    """Sets the learning rate with a torch scheduler, stepped after each training batch or each epoch.

    Batches that are cancelled, or only accumulate gradients, count too, so that the schedule ends with the
    fit. After the fit, the settings of the optimizer's groups are restored: lr, momentum, betas.

    Args:
        factory: `factory(opt)` returns a `torch.optim.lr_scheduler.LRScheduler`; called when a fit begins.
        per: "batch" or "epoch", after which the scheduler is stepped.
        name: name of the callback in the learner.

    Attributes:
        scheduler: the torch scheduler during a fit; else None.

    Raises:
        TypeError: If `factory` is not such a function; when the fit begins, if it returns no scheduler.
        ValueError: If `per` is anything else; when the fit begins, if the scheduler is of another optimizer.

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
            raise ValueError(f"per must be 'batch' or 'epoch', got {per!r}")
        self.factory, self.per = factory, per

    def make(self, opt: Optimizer) -> LRScheduler:
        made: Any = self.factory(opt)
        if isinstance(made, TorchReduceLROnPlateau):
            raise TypeError("torch's ReduceLROnPlateau steps by a value; use hookcb.ReduceLROnPlateau")
        if not isinstance(made, LRScheduler):
            raise TypeError(
                f"factory {self.factory!r:.80} must return an LRScheduler, got {made!r:.80}; {EXAMPLE}"
            )
        if made.optimizer is not opt:
            raise ValueError(
                f"factory returned a {type(made).__name__} of another optimizer than the learner's; "
                "create it with the optimizer that factory is called with"
            )
        return made


def _check_factory(factory: Any) -> None:
    if not callable(factory):
        raise TypeError(f"factory must be a function, got {factory!r:.80}; {EXAMPLE}")
    try:
        signature = inspect.signature(factory)
    except ValueError:  # some functions written in C have none
        return
    try:
        signature.bind(object())
    except TypeError as wrong:
        kind = getattr(factory, "__name__", repr(factory))
        raise TypeError(
            f"factory {kind:.80} cannot be called with only an optimizer ({wrong}); {EXAMPLE}"
        ) from None
