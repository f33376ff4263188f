"""EMA: a model with the moving average of the weights during training."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hookcb.core import orders
from hookcb.core.arguments import check_number
from hookcb.core.callback import Callback
from hookcb.core.state import TrainingState
from hookcb.hooks.own import register
from hookcb.processes.groups import is_sharded, without_replicas
from hookcb.processes.shards import drop_gathered, is_dtensor, joined_like, local_part


class EMA(Callback):
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

    def __init__(self, decay: float = 0.999, *, validate: bool = True, name: str | None = None) -> None:
        super().__init__(name=name)
        check_number("decay", decay, 0, 1, closed=True, hint=", such as 0.999")
        self.decay, self.validate, self._stepped = decay, validate, False
        self._averaged: AveragedModel | _Shards | None = None
        self._step_hook: Any = None
        self._plain: list[tuple[Tensor, Tensor]] = []  # tensors that hold averages, and their plain values

    @property
    def model(self) -> nn.Module:  # type: ignore[override]  # elsewhere it is the trained model
        """The averaged model."""
        if self._averaged is None:
            raise AttributeError(f"{type(self).__name__} has no averaged model before its first fit")
        if isinstance(self._averaged, _Shards):
            use = f"with {self.name}.applied(model):"
            raise AttributeError(f"a sharded model cannot be copied; use the averages in a block: {use}")
        model: nn.Module = self._averaged.module
        return model

    @property
    def _trained(self) -> nn.Module:
        return without_replicas(self.learn.model)

    def before_fit(self) -> None:
        others = [cb for cb in self.learn.cbs if isinstance(cb, EMA) and cb is not self]
        if self.validate and any(cb.validate for cb in others):
            raise ValueError("a fit can validate only one average; give the other EMA validate=False")
        average = partial(_average, decay=self.decay)
        trained = self._trained
        if is_sharded(trained):
            self._averaged = _Shards(trained, average)
        else:
            self._averaged = _Averaged(trained, multi_avg_fn=average, use_buffers=True).eval()
        self._stepped = False
        self._masks = [
            (average, name)
            for name, x in trained.named_buffers()
            if x.is_floating_point() and not local_part(x).isfinite().all()
            for average in [self._averages()[name]]
        ]
        self._step_hook = register(self.opt.register_step_post_hook, self._note_step)

    def _note_step(self, opt: Optimizer, args: Any, kwargs: Any) -> None:
        # a GradScaler does not call a step that it skips, except of a fused optimizer, which checks found_inf
        found_inf = getattr(opt, "found_inf", None)
        self._stepped = found_inf is None or not bool(found_inf)

    def after_step(self) -> None:
        if self._stepped and self._averaged is not None:
            self._stepped = False
            self._averaged.update_parameters(self._trained)
            for average, name in self._masks:
                average.copy_(local_part(self._trained.get_buffer(name)))

    def before_validate(self) -> None:
        if self.validate and self._averaged is not None and self.learn.fitting and not self.learn.is_nested:
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

    def _averages(self) -> dict[str, Tensor]:
        """Averages by name."""
        averaged = self._averaged
        return averaged.averages if isinstance(averaged, _Shards) else _named(self.model)

    def _apply(self, model: nn.Module) -> None:
        plain, averages = _named(model), self._averages()
        self._plain = [(x, x.clone()) for x in plain.values()]  # all, before the first is overwritten
        for name, x in plain.items():
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
        if self._averaged is None:
            return {}
        n_averaged = int(self._averaged.n_averaged)
        averaged = self._averages()
        if isinstance(self._averaged, _Shards):
            averaged = self._averaged.whole(self._trained)
        return {"averaged": averaged, "n_averaged": n_averaged, "validated": self.validate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._averaged is not None:
            for name, x in self._averages().items():
                x.copy_(local_part(state["averaged"][name]))
            self._averaged.n_averaged.fill_(state["n_averaged"])

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_plain": [], "_step_hook": None}


class _Averaged(AveragedModel):
    """An `AveragedModel` whose update does not wait for the device, as that of torch 2.13 does."""

    def update_parameters(self, model: nn.Module) -> None:
        """Adds the weights and buffers after a step."""
        averages, now = (chain(m.parameters(), m.buffers()) for m in (self.module, model))
        pairs = [(x.detach(), y.detach().to(x.device)) for x, y in zip(averages, now, strict=True)]
        # torch copies n_averaged to the device of the weights, which waits for it
        if self.n_averaged and self.multi_avg_fn is not None:
            _average_all(pairs, self.multi_avg_fn, self.n_averaged)
        else:
            for average, x in pairs:
                average.copy_(x)
        self.n_averaged += 1


class _Shards:
    """Averages of this rank's part of a model, in place of an `AveragedModel`.

    Attributes:
        averages: by name of the parameter or buffer.
        n_averaged: number of steps.
    """

    def __init__(self, model: nn.Module, average: Callable[..., None]) -> None:
        self.averages = {name: x.clone() for name, x in _named(model).items()}
        self.n_averaged = torch.zeros((), dtype=torch.long, device="cpu")
        self._average = average

    def whole(self, model: nn.Module) -> dict[str, Tensor]:
        """The averages as tensors that are divided as those of the model are."""
        whole = {}
        for name, x in _tensors(model):
            average = self.averages[name] if self.n_averaged else local_part(x.data)
            whole[name] = joined_like(average, x) if is_dtensor(x) else average
        return whole

    def update_parameters(self, model: nn.Module) -> None:
        """Adds the weights and buffers after a step."""
        pairs = []
        for name, x in _named(model).items():
            average = self.averages[name]
            if self.n_averaged == 0 or average.shape != x.shape:  # it was gathered when this began
                self.averages[name] = x.clone()
            else:
                pairs.append((average, x))
        _average_all(pairs, self._average, self.n_averaged)
        self.n_averaged += 1


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


def _average_all(pairs: list[tuple[Tensor, Tensor]], average: Callable[..., None], n_averaged: Any) -> None:
    """Updates each average, the first of a pair; all of one device and dtype together."""
    alike: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
    for pair in pairs:
        alike.setdefault((pair[0].device, pair[0].dtype), []).append(pair)
    for group in alike.values():
        average(*(list(tensors) for tensors in zip(*group, strict=True)), n_averaged)


def _average(averages: list[Tensor], now: list[Tensor], n_averaged: Any, decay: float) -> None:
    """Updates averages, all of one dtype."""
    if averages[0].is_floating_point() or averages[0].is_complex():
        get_ema_multi_avg_fn(decay)(averages, now, n_averaged)  # type: ignore[no-untyped-call]
    else:
        for average, x in zip(averages, now, strict=True):
            average.copy_(x)


def _named(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, a shared one under each of its names; writes bypass autograd.

    Of a sharded one, this rank's part.
    """
    return {name: local_part(x.data) for name, x in _tensors(model)}


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
