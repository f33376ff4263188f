"""EMA: a model with the moving average of the weights during training."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from hookcb.core import orders
from hookcb.core.arguments import check_number
from hookcb.core.state import TrainingState
from hookcb.hooks.own import register
from hookcb.processes.groups import without_replicas
from hookcb.processes.shards import drop_gathered
from hookcb.training.averages import AverageCallback, parts_of


class EMA(AverageCallback):
    """Keeps a copy of the model with an exponential moving average of its weights, often the better model.

    After each step, `average = decay · average + (1 - decay) · weights`; the first step copies the weights.
    Floating-point buffers, such as the statistics of batch norm, are averaged too, others are copied (torch's
    `AveragedModel(use_buffers=True)` would round an average of counters). Steps that were cancelled, or that
    a GradScaler skipped, do not count; with a fused optimizer, checking that waits for the device.

    Training is bit-identical with and without it. Validations of a fit use the average, which the model holds
    from `before_validate` to `after_validate`; a `learn.validate()` during training, or outside a fit, uses
    the plain weights. Needs the memory of one more model, and of two during validation.

    Of a sharded model each rank averages its part, which takes no communication. There is no averaged model
    then; `with learn.ema.applied(learn.model):` the trained model holds the averages, as to save them.

    Args:
        decay: share of the average that is kept at each step, 0..1; it averages about 1 / (1 - decay) steps.
        validate: whether the fit validates the average; else the plain weights.
        name: name of the callback in the learner.

    Attributes:
        model: the averaged model, in eval mode; each fit creates a new one. It has the same names as the
            trained model, so `learn.model.load_state_dict(learn.ema.model.state_dict())` works. Of a
            DistributedDataParallel, it is a copy of the model inside.
        n_averaged: number of steps in the average.

    Raises:
        AttributeError: If there is no averaged model, before the first fit, and for a sharded model.
        ValueError, TypeError: If `decay` is not a number from 0 to 1; when a fit begins, if two of them are
            to validate their average.

    Source: Polyak & Juditsky, "Acceleration of stochastic approximation by averaging", 1992;
        `torch.optim.swa_utils`.

    >>> import torch
    >>> from hookcb import EMA, synth_learner
    >>> learn = synth_learner()
    >>> with learn.no_logging():
    ...     learn.fit(1, cbs=EMA(decay=0.9))
    >>> torch.equal(learn.ema.model[0].weight, learn.model[0].weight)
    False
    """

    order = orders.AVERAGE
    run_lr_find = False
    use_buffers = True

    def __init__(self, decay: float = 0.999, *, validate: bool = True, name: str | None = None) -> None:
        super().__init__(name=name)
        check_number("decay", decay, 0, 1, closed=True, hint=", such as 0.999")
        self.decay, self.validate, self._stepped = decay, validate, False
        self._step_hook: Any = None
        self._plain: list[tuple[Tensor, Tensor]] = []  # tensors that hold averages, and their plain values

    def _average(self, averages: list[Tensor], now: list[Tensor]) -> None:
        get_ema_multi_avg_fn(self.decay)(averages, now, self.n_averaged)  # type: ignore[no-untyped-call]

    def before_fit(self) -> None:
        others = [cb for cb in self.learn.cbs if isinstance(cb, EMA) and cb is not self]
        if self.validate and any(cb.validate for cb in others):
            raise ValueError("a fit can validate only one average; give the other EMA validate=False")
        self._begin()
        self._stepped = False
        self._step_hook = register(self.opt.register_step_post_hook, self._note_step)

    def _note_step(self, opt: Optimizer, args: Any, kwargs: Any) -> None:
        # a GradScaler does not call a step that it skips, except of a fused optimizer, which checks found_inf
        found_inf = getattr(opt, "found_inf", None)
        self._stepped = found_inf is None or not bool(found_inf)

    def after_step(self) -> None:
        if self._stepped:
            self._stepped = False
            self._add()

    def before_validate(self) -> None:
        if self.validate and self._has_begun and self.learn.fitting and not self.learn.is_nested:
            self._apply(self._trained)

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Has the trained model hold the averages in a `with` block; of a sharded model, on all ranks.

        Raises:
            AttributeError: Before the first fit.
        """
        if self._plain:  # it does, in a validation
            yield
            return
        model = without_replicas(model)
        self._apply(model)
        try:
            yield
        finally:
            self._restore(model)

    def _apply(self, model: nn.Module) -> None:
        parts, averages = parts_of(model), self._averages()
        self._plain = [(x, x.clone()) for x in parts.values()]  # all, before the first is overwritten
        for name, x in parts.items():
            x.copy_(averages[name])
        drop_gathered(model)

    def after_validate(self) -> None:
        if not self.learn.is_nested:
            self._end_validation()

    def _end_validation(self) -> None:
        if self._plain:  # else a watched model may be gone
            self._restore(self._trained)

    after_cancel_epoch = after_cancel_fit = _end_validation  # after_validate is not called then

    def _restore(self, model: nn.Module) -> None:
        for x, plain in self._plain:
            x.copy_(plain)
        self._plain = []
        drop_gathered(model)

    def after_fit(self) -> None:
        self._end_validation()
        if self._step_hook is not None:
            self._step_hook.remove()
            self._step_hook = None

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, "validated": self.validate} if state else {}

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_plain": [], "_step_hook": None}


def check_validates_weights(learn: TrainingState, would: str) -> None:
    """Checks that values of the validation are those of the trained weights, not of an average.

    Args:
        learn: the loop.
        would: who would do what with the trained weights, for the message.

    Raises:
        ValueError: If an `EMA` is validated.
    """
    if any(cb.validate for cb in learn.cbs if isinstance(cb, EMA)):
        raise ValueError(
            f"{would} the trained weights, but their average is validated; give EMA(validate=False), or use "
            "Checkpoint(monitor=…), which keeps what was validated"
        )
