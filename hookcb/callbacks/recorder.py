"""Recorder: the losses and learning rates of a fit, and a row of numbers per epoch."""

import time

import torch
from fastcore.foundation import L
from torch import Tensor

from hookcb.batch import batch_size
from hookcb.callback import Callback


class Recorder(Callback):
    """Keeps what every training comes down to; attached to each `Learner` by itself.

    Losses wait on their device until they are read or the epoch ends, so that no batch waits for a GPU.
    A cancelled batch leaves nothing. Validating or predicting outside a fit changes nothing here.

    Attributes:
        losses: the loss of each training batch, in the loss function's unit.
        lrs: the learning rate each of these batches was trained with, of the optimizer's last group.
        rows: a dict per epoch: `epoch`, `train_loss`, `valid_loss`, what other callbacks put into
            `learn.row`, and `time` in seconds. Losses are averages over samples: batches weigh by their size.

    >>> from hookcb import synth_learner
    >>> learn = synth_learner()
    >>> with learn.no_logging():
    ...     learn.fit(2)
    >>> len(learn.recorder.losses), len(learn.recorder.rows)
    (20, 2)
    """

    order = 40

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self.before_fit()

    def before_fit(self) -> None:
        self.rows = L()
        self._train, self._lrs = _Series(), _Series()

    @property
    def losses(self) -> list[float]:
        """The loss of each training batch."""
        return self._train.values()

    @property
    def lrs(self) -> list[float]:
        """The learning rate of each training batch."""
        return self._lrs.values()

    def before_epoch(self) -> None:
        self._began = time.perf_counter()

    def before_train(self) -> None:
        self._first = len(self._train.sizes)

    def after_loss(self) -> None:
        learn = self.learn
        lr = learn.opt.param_groups[-1]["lr"] if learn.training else 0.0
        learn.phase_state["recorded"] = _kept(learn.loss), _kept(lr), batch_size((*learn.yb, learn.xb))

    def after_cancel_batch(self) -> None:
        self.learn.phase_state.pop("recorded", None)

    def after_batch(self) -> None:
        learn = self.learn
        loss, lr, size = learn.phase_state.pop("recorded", (None, 0.0, 0))
        if loss is None:
            return
        if not learn.training:
            learn.phase_state.setdefault("losses", _Series()).add(loss, size)
        elif learn.fitting:
            self._train.add(loss, size)
            self._lrs.add(lr, 1)

    def after_train(self) -> None:
        self.learn.row["train_loss"] = self._train.mean(self._first)

    def after_validate(self) -> None:
        if losses := self.learn.phase_state.get("losses"):
            self.learn.row["valid_loss"] = losses.mean()

    def after_epoch(self) -> None:
        self.learn.row["time"] = time.perf_counter() - self._began
        self.rows.append({"epoch": self.epoch, **self.learn.row})


class _Series:
    """Numbers, one a batch, some of them still on a device; each with the number of samples it stands for."""

    def __init__(self) -> None:
        self.read: list[float] = []
        self.waiting: list[float | Tensor] = []
        self.sizes: list[int] = []

    def add(self, value: float | Tensor, size: int) -> None:
        self.waiting.append(value)
        self.sizes.append(size)

    def values(self) -> list[float]:
        if any(isinstance(value, Tensor) for value in self.waiting):
            # one transfer for all of them, not one each
            self.read += torch.stack(
                [torch.as_tensor(value).flatten()[0].float() for value in self.waiting]
            ).tolist()
        else:
            self.read += self.waiting  # type: ignore[arg-type]  # no tensor is among them
        self.waiting = []
        return self.read

    def mean(self, first: int = 0) -> float:
        """Average over samples from batch `first` on, NaN where there are none."""
        values, sizes = self.values()[first:], self.sizes[first:]
        total = sum(sizes)
        return sum(v * n for v, n in zip(values, sizes, strict=True)) / total if total else float("nan")


def _kept(value: float | Tensor) -> float | Tensor:
    """A number that later writes to `value` cannot change; what is on a GPU stays there, unwaited for."""
    if not isinstance(value, Tensor):
        return value
    return value.item() if value.is_cpu else value.detach().clone()
