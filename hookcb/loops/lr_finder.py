"""LRFinder: the learning rate up from tiny to huge, and what the loss does meanwhile."""

import math

from hookcb.core.callback import Callback
from hookcb.core.events import CancelEpochException, CancelFitException
from hookcb.loops.lr_curve import Smoothed
from hookcb.training.schedules.base import set_rate

N_NOISY = 10  # first batches, whose average is too uncertain to compare with


class LRFinder(Callback):
    """Trains each batch with a higher learning rate than the last, and ends the fit; for `learn.lr_find`.

    Waits for the device in each batch, as whether to go on depends on the loss. Nothing is validated.

    Args:
        start_lr, end_lr: the rates of the first and the last batch, of all parameter groups.
        num_it: number of batches.
        stop_div: whether to end at a loss that is not finite, or, from the 11th batch on, once the smoothed
            loss is over 4 times its best.
        name: what the learner calls it.

    Attributes:
        lrs: the learning rate of each batch that was not cancelled.
        losses: the loss of each of them, in the loss function's unit.

    Source: L. Smith, "Cyclical Learning Rates", arxiv.org/abs/1506.01186, section 3.3; fastai's `lr_find`.
    """

    order = -100  # the rate is there before anyone reads it
    run_valid = False
    run_lr_find = False

    def __init__(
        self, start_lr: float, end_lr: float, num_it: int, stop_div: bool, *, name: str | None = None
    ) -> None:
        super().__init__(name=name)
        self.start_lr, self.end_lr, self.num_it, self.stop_div = start_lr, end_lr, num_it, stop_div
        self.lrs: list[float] = []
        self.losses: list[float] = []

    def before_fit(self) -> None:
        self.lrs, self.losses = [], []
        self._batch: tuple[float, float] | None = None
        self._smoothed = Smoothed()
        self._best = math.inf

    def before_batch(self) -> None:
        share = min(1.0, self.train_iter / (self.num_it - 1))
        self._lr = self.start_lr ** (1 - share) * self.end_lr**share
        set_rate(self.learn.opt, self._lr)

    def after_loss(self) -> None:
        self._batch = self._lr, self.loss.item()  # now, as others may scale it for backward

    def after_cancel_batch(self) -> None:
        self._batch = None

    def after_batch(self) -> None:
        batch, self._batch = self._batch, None
        diverged = batch is not None and self._add(*batch)
        if (diverged and self.stop_div) or self.train_iter + 1 >= self.num_it:
            raise CancelFitException

    def after_train(self) -> None:
        raise CancelEpochException  # before its validation

    def _add(self, lr: float, loss: float) -> bool:
        """Keeps a batch; whether its smoothed loss has left all bounds."""
        self.lrs.append(lr)
        self.losses.append(loss)
        smoothed = self._smoothed.add(loss)
        if len(self.losses) <= N_NOISY or not math.isfinite(loss):
            return not math.isfinite(loss)
        self._best = min(self._best, smoothed)
        # of a loss that can be negative, 4 times the best says nothing; how far it has come does
        room = 3 * self._best if self._best > 0 else 3 * max(1.0, abs(self._best), abs(self.losses[0]))
        return smoothed > self._best + room
