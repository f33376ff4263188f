"""SWA: a model with the average of the weights at the end of each of the last epochs."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR, get_swa_avg_fn, update_bn

from hookcb.core import orders
from hookcb.core.arguments import check_count, check_number
from hookcb.core.batch import split_batch
from hookcb.core.console import warn
from hookcb.core.randomness import random_state, set_random_state
from hookcb.core.torch_private import BatchNorm
from hookcb.hooks.modules import device_of
from hookcb.processes.groups import is_sharded
from hookcb.training.averages import AverageCallback
from hookcb.training.schedules.base import RateCallback


class SWA(AverageCallback, RateCallback):
    """Averages the weights at the end of each of the last epochs: stochastic weight averaging.

    From epoch `start` on, the rate goes to `lr` and stays there, and the average is updated after each epoch.
    When the fit ends, stopped or not, the statistics of batch norm are computed anew with the average, by one
    pass over the training batches, for which data and random numbers are as they were. The trained model
    keeps its own weights; `learn.model.load_state_dict(learn.swa.model.state_dict())` takes the average's.

    Needs the memory of one more model. Each rank averages its own replica.

    Args:
        start: first epoch that counts: its number, from 0, or the share of the fit before it, as a float.
        lr: the rate that is reached; None leaves rates alone, as for a schedule of your own.
        anneal_epochs: number of epochs in which the rate goes there, along a cosine.
        name: name of the callback in the learner.

    Attributes:
        model: the averaged model, in eval mode; each fit creates a new one.
        n_averaged: number of epochs in the average.
        scheduler: torch's `SWALR` during a fit, from epoch `start` on.

    Raises:
        AttributeError: If there is no averaged model, before the first fit that reaches `start`.
        ValueError: When a fit begins, if `start` is after its last epoch, the model is sharded, or `lr` meets
            another schedule.

    Source: Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization", 2018;
        `torch.optim.swa_utils`.

    >>> from hookcb import SWA, synth_learner
    >>> learn = synth_learner()
    >>> with learn.no_logging():
    ...     learn.fit(4, cbs=SWA(start=0.5, lr=0.01, anneal_epochs=1))
    >>> learn.swa.n_averaged
    2
    """

    order = orders.SCHEDULE
    run_lr_find = False

    def __init__(
        self,
        start: int | float = 0.75,
        lr: float | None = None,
        anneal_epochs: int = 5,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        if isinstance(start, float):
            check_number("start", start, 0, 1, closed=True, hint=", a share of the fit, or an epoch")
        else:
            check_count("start", start, "epochs", least=0)
        if lr is not None:
            check_number("lr", lr)
        check_count("anneal_epochs", anneal_epochs, "epochs", least=0)
        self.start, self.lr, self.anneal_epochs = start, lr, anneal_epochs

    @property
    def first(self) -> int:
        return int(self.start * self.n_epoch) if isinstance(self.start, float) else self.start

    def _average(self, averages: list[Tensor], now: list[Tensor]) -> None:
        update: Any = get_swa_avg_fn()  # type: ignore[no-untyped-call]
        for average, x in zip(averages, now, strict=True):
            average.copy_(update(average, x, self.n_averaged))

    def make(self, opt: Optimizer) -> LRScheduler:
        assert self.lr is not None
        return SWALR(opt, self.lr, self.anneal_epochs)

    def before_fit(self) -> None:
        if is_sharded(self.learn.model):
            raise ValueError("SWA cannot average a sharded model; EMA can")
        if self.first >= self.n_epoch:
            raise ValueError(f"SWA begins with epoch {self.first}, but the last one is {self.n_epoch - 1}")
        others = [cb for cb in self.learn.cbs if isinstance(cb, RateCallback) and cb is not self]
        if self.lr is not None and others:
            raise ValueError(f"{others[0]!r} sets the rate too; give SWA(lr=None), or leave it out")
        self._begin()
        if self.lr is not None:
            super().before_fit()

    def after_train(self) -> None:
        if self.epoch >= self.first and self._has_begun:
            self._add()

    def after_epoch(self) -> None:
        if self.epoch + 1 >= self.first and self.scheduler is not None:
            self.scheduler.step()
        if self.epoch + 1 == self.n_epoch:
            self._renew_batch_norm()

    def after_cancel_fit(self) -> None:
        self._renew_batch_norm()

    def _renew_batch_norm(self) -> None:
        if not self.n_averaged:
            return
        loader, model = self.learn.dls.train, self.model
        norms = [m for m in model.modules() if isinstance(m, BatchNorm)]
        if not norms:
            return
        before = [copy.deepcopy(m.state_dict()) for m in norms]
        random, device = random_state(loader), device_of(self.learn.model)
        seen = []

        def inputs() -> Iterator[list[Any]]:
            for batch in loader:
                xb, _ = split_batch(batch, device, self.learn.n_inp)
                seen.append(True)
                yield [xb]

        try:
            update_bn(inputs(), _TakesInputs(model))
        finally:
            set_random_state(random, loader)
            model.eval()
        if not seen:  # the loader can be read once only
            warn("SWA could not compute the statistics of batch norm anew: the training loader gave no batch")
            for norm, state in zip(norms, before, strict=True):
                norm.load_state_dict(state)

    def after_fit(self) -> None:
        if self.lr is not None:
            super().after_fit()

    def state_dict(self) -> dict[str, Any]:
        return RateCallback.state_dict(self) | AverageCallback.state_dict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.lr is not None:
            RateCallback.load_state_dict(self, state)
        AverageCallback.load_state_dict(self, state)


class _TakesInputs(nn.Module):
    """A model that takes its inputs as one value, as `update_bn` gives them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, xb: Any) -> Any:
        return self.model(**xb) if isinstance(xb, Mapping) else self.model(*xb)
