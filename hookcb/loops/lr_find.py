"""Search for a learning rate: a training with ever higher rates that leaves no trace."""

import copy
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hookcb.core import orders
from hookcb.core.arguments import check_count, check_number
from hookcb.core.batch import batch_size, n_batches
from hookcb.core.callback import Callback
from hookcb.core.events import CancelEpochException, CancelFitException
from hookcb.core.loop import Loop
from hookcb.core.optim import set_rates
from hookcb.core.randomness import saves_itself
from hookcb.core.restore import (
    preserve_attribute,
    preserve_contents,
    preserve_optimizer,
    preserve_random,
    preserve_values,
)
from hookcb.core.torch_private import buffers_of, parameters_of, unsaved_buffer_names
from hookcb.hooks.modules import device_of
from hookcb.loops.data import Loaders
from hookcb.loops.lr_curve import LRFind
from hookcb.processes.ranks import ranks_of
from hookcb.records.series import Smoothed
from hookcb.training.progress import Progress

N_NOISY = 10  # first batches, whose average is too uncertain for a comparison


def find_lr(
    learn: Loop, start_lr: float = 1e-7, end_lr: float = 10, num_it: int = 100, stop_div: bool = True
) -> LRFind:
    """Implements `Learner.lr_find`."""
    _check(learn, start_lr, end_lr, num_it)
    finder = LRFinder(start_lr, end_lr, num_it, stop_div)
    cbs = [*_stand_ins(learn), finder]
    n, is_alone = n_batches(learn.dls.train), ranks_of(learn.model).world == 1
    with _unchanged(learn):
        if isinstance(learn.dls, Loaders):
            # else a validation loader that is an iterator would be refused
            learn.dls = learn.dls._replace(valid=None)
        learn.fit(math.ceil(num_it / n) if n and is_alone else num_it, cbs=cbs, uneven="stop")
    return LRFind(finder.lrs, finder.losses)


def _check(learn: Loop, start_lr: float, end_lr: float, num_it: int) -> None:
    if learn.fitting:
        raise RuntimeError("a fit is running; call lr_find before or after it")
    check_number("start_lr", start_lr)
    check_number("end_lr", end_lr)
    if start_lr >= end_lr:
        raise ValueError(f"start_lr is {start_lr} and end_lr {end_lr}; give a lower and a higher rate")
    check_count("num_it", num_it, "batches", least=2, hint=" (100 is usual)")
    if isinstance(learn.dls.train, Iterator):
        raise ValueError(
            f"the training loader is a {type(learn.dls.train).__name__}, which can be read only once, and "
            "lr_find would use it up; give a list, or an object whose __iter__ starts over"
        )


def _stand_ins(learn: Loop) -> list[Callback]:
    """Copies of the attached callbacks that take part; they refer to the same parts of the learner."""
    parts = [learn, learn.dls, learn.dls.train, getattr(learn.dls, "valid", None), learn.opt, learn.loss_func]
    shared = chain(parts, learn.model.modules(), learn.model.parameters(), learn.model.buffers())
    memo: dict[int, Any] = {id(x): x for x in shared if x is not None}
    copies = []
    for cb in learn.cbs:
        if not cb.run_lr_find or isinstance(cb, Progress):
            continue
        try:
            copies.append(copy.deepcopy(cb, memo))
        except Exception as error:
            error.add_note(
                f"lr_find uses a copy of {cb!r}; if it cannot be copied, exclude it: "
                f"learn.{cb.name}.run_lr_find = False"
            )
            raise
    return copies


@contextmanager
def _unchanged(learn: Loop) -> Iterator[None]:
    """Detaches the callbacks in a `with` block, and restores everything afterwards."""
    device_of(learn.model, learn.device)  # initializes the GPU, whose random state would be missed otherwise
    loader = learn.dls.train
    roots = [x for x in (learn.model, learn.loss_func) if isinstance(x, nn.Module)]
    inside = vars(learn.opt).values() if learn.opt is not None else ()  # some optimizers wrap another one
    opts = [x for x in (learn.opt, *inside) if isinstance(x, Optimizer)]
    with ExitStack() as stack:
        stack.enter_context(preserve_contents(vars(learn)))
        stack.enter_context(preserve_random(loader))
        if saves_itself(loader):
            stack.callback(loader.load_state_dict, copy.deepcopy(loader.state_dict()))
        for opt in opts:
            stack.enter_context(preserve_optimizer(opt))
        stack.enter_context(_preserve_tensors(roots, opts))
        stack.enter_context(learn.removed_cbs(list(learn.cbs)))
        yield


@contextmanager
def _preserve_tensors(roots: list[nn.Module], opts: list[Optimizer]) -> Iterator[None]:
    """Restores parameters and buffers: their names, values, gradients, and whether they require gradients."""
    plain = [m for root in roots for m in root.modules() if not isinstance(m, torch.jit.ScriptModule)]
    registers = [x for m in plain for x in (parameters_of(m), buffers_of(m), unsaved_buffer_names(m))]
    of_opts = (p for opt in opts for group in opt.param_groups for p in group["params"])
    found = chain.from_iterable((*root.parameters(), *root.buffers()) for root in roots)
    tensors = [x for x in {id(x): x for x in chain(found, of_opts)}.values() if not is_lazy(x)]
    leaves = [x for x in tensors if x.is_leaf]
    with (
        preserve_values(tensors),
        preserve_attribute(leaves, "grad", None),  # else gradients that are already there would be added to
        preserve_attribute(leaves, "requires_grad"),
        preserve_contents(*registers),
    ):
        yield


class LRFinder(Callback):
    """Trains each batch with a higher learning rate than the one before; for `learn.lr_find`.

    Waits for the device in each batch, as the loss decides whether to go on. Nothing is validated.

    Args:
        start_lr, end_lr: the rates of the first and the last batch, of all parameter groups.
        num_it: number of batches.
        stop_div: whether to stop at a loss that is not finite or, from the 11th batch on, when the smoothed
            loss exceeds 4 times its best.
        name: see `Callback`.

    Attributes:
        lrs: the learning rate of each batch that was not cancelled.
        losses: the loss of each of them, in the loss function's unit.

    Source: L. Smith, "Cyclical Learning Rates", arxiv.org/abs/1506.01186, section 3.3; fastai's `lr_find`.
    """

    order = orders.LR_FINDER
    may_cancel = frozenset({"fit"})
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
        set_rates(self.learn.opt, self._lr)

    def after_loss(self) -> None:
        learn = self.learn
        size = batch_size((*learn.yb, learn.xb))
        # now, as other callbacks may scale the loss for backward
        self._batch = self._lr, learn.ranks.mean(self.loss.item(), size)

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
        """Adds a batch; returns whether its smoothed loss has diverged."""
        self.lrs.append(lr)
        self.losses.append(loss)
        smoothed = self._smoothed.add(loss)
        if len(self.losses) <= N_NOISY or not math.isfinite(loss):
            return not math.isfinite(loss)
        self._best = min(self._best, smoothed)
        # 4 times the best means nothing if losses may be negative; then the limit depends on their scale
        room = 3 * self._best if self._best > 0 else 3 * max(1.0, abs(self._best), abs(self.losses[0]))
        return smoothed > self._best + room
