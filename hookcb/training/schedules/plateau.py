"""ReduceLROnPlateau: a lower learning rate when a monitored value stops improving."""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from hookcb.core.arguments import check_count, check_number
from hookcb.training.monitor import Mode, check_monitor, check_patience, monitored, resolve_mode
from hookcb.training.schedules.base import RateCallback


class ReduceLROnPlateau(RateCallback):
    """Multiplies the learning rate by `factor` when a column of the epoch's row stops improving.

    Patience counts as in torch: with 1, one epoch without improvement is tolerated, and after the second in a
    row the rate is lowered. NaN is not an improvement; an epoch cancelled before it had a value does not
    count.
    After the fit, the rates of the optimizer's groups are restored.

    Args:
        monitor: the column, such as "train_loss" or the name of a metric.
        mode: "min" or "max", which is better; by default "min" if the name contains "loss" or "error". Also
            a function such as `np.less` or `np.greater`.
        min_delta: a value must be better than the best by more than this, in the unit of `monitor`.
        patience: number of epochs in a row without improvement that are tolerated, 0 or more.
        factor: the rate is multiplied by this, between 0 and 1.
        min_lr: lower bound of the rates.
        cooldown: number of epochs after a reduction that do not count.
        name: name of the callback in the learner.

    Attributes:
        scheduler: the torch scheduler during a fit; else None.

    Raises:
        ValueError: When the fit begins, if `monitor` needs a validation and there is none.
        LookupError: If no column has that name; when the fit begins, if that is known by then.

    >>> from hookcb import ReduceLROnPlateau, synth_learner
    >>> learn = synth_learner(n_train=1, lr=1e-6)
    >>> with learn.no_logging():
    ...     learn.fit(4, cbs=ReduceLROnPlateau(min_delta=0.1, patience=0, factor=0.5))
    >>> learn.recorder.lrs
    [1e-06, 1e-06, 5e-07, 2.5e-07]
    """

    def __init__(
        self,
        monitor: str = "valid_loss",
        mode: Mode | None = None,
        min_delta: float = 0.0,
        patience: int = 1,
        factor: float = 0.1,
        min_lr: float = 0.0,
        cooldown: int = 0,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.monitor, self.mode = monitor, resolve_mode(monitor, mode)
        check_patience(patience, min_delta, least=0)
        _check_factor(factor)
        check_number("min_lr", min_lr, closed=True)
        check_count("cooldown", cooldown, "epochs", least=0)
        self.min_delta, self.patience, self.factor, self.min_lr = min_delta, patience, factor, min_lr
        self.cooldown = cooldown

    def make(self, opt: Optimizer) -> LRScheduler:
        check_monitor(self.learn, self.monitor)
        return lr_scheduler.ReduceLROnPlateau(
            opt,
            mode=self.mode,  # type: ignore[arg-type]  # resolve_mode returns "min" or "max"
            factor=self.factor,
            patience=self.patience,
            threshold=self.min_delta,
            threshold_mode="abs",
            min_lr=self.min_lr,
            cooldown=self.cooldown,
            eps=0.0,  # else a rate below 1e-8 would never fall
        )

    def after_epoch(self) -> None:
        value = monitored(self.learn, self.monitor)
        if value is not None and self.scheduler is not None:
            scheduler: Any = self.scheduler
            groups = self.learn.opt.param_groups
            rates = [group["lr"] for group in groups]
            scheduler.step(value)
            for group, rate in zip(groups, rates, strict=True):
                if isinstance(rate, Tensor) and group["lr"] is not rate:  # torch 2.6 puts a float there
                    group["lr"] = rate.fill_(group["lr"])


def _check_factor(factor: float) -> None:
    if isinstance(factor, int | float) and factor > 1:
        raise ValueError(
            f"factor is {factor}, but the rate is multiplied by it; to divide, as fastai does with "
            f"factor={factor:g}, give factor={1 / factor:g}"
        )
    check_number("factor", factor, 0, 1)
