"""Learner: the training loop, on one screen."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from fastcore.foundation import L
from torch import Tensor, nn
from torch.optim import Optimizer

from hookcb.core.batch import describe, n_batches, split_batch
from hookcb.core.callback_list import Callbacks
from hookcb.core.events import CancelException, CancelFitException, CancelValidException
from hookcb.core.fetches import FetchListener, ObservedFetches
from hookcb.core.files import check_saved, read_saved, save_whole
from hookcb.core.loop import stray_cancels_as_errors
from hookcb.diagnosis.callback import diagnose_loop
from hookcb.diagnosis.verdict import Verdict
from hookcb.hooks.modules import device_of
from hookcb.hooks.summary import Summary, module_summary
from hookcb.loops.checks import (
    check_fit,
    check_functions,
    check_loss,
    check_lr,
    check_opt,
    make_opt,
    same_objects,
    trainable,
)
from hookcb.loops.data import as_loaders, check_loader
from hookcb.loops.lr_curve import LRFind
from hookcb.loops.lr_find import find_lr
from hookcb.loops.names import NamedLoop
from hookcb.training.checkpoint.resume import resumed, validated_weights
from hookcb.training.metrics import Metrics
from hookcb.training.predictions import GatherPreds
from hookcb.training.progress import Progress
from hookcb.training.recorder import Recorder
from hookcb.training.schedules.one_cycle import OneCycle

T = TypeVar("T")
Remaining = Callable[[str, Iterable[Any]], Iterable[Any]]  # what is still to do of a level's items
PHASES = (("train", "train"), ("validate", "valid"))  # levels of an epoch, and their loaders in `dls`


class Learner(NamedLoop):
    """Trains a model, and tells its callbacks what happens.

    Args:
        dls: what has `.train` and `.valid`, a `(train, valid)` tuple (`valid` may be None), or one iterable
            of batches. A batch is a tensor, a tuple `(*xb, *yb)`, or a mapping of keyword arguments.
        model: called as `model(*xb)`, of a mapping as `model(**xb)`.
        loss_func: called as `loss_func(pred, *yb)`, gives a scalar. Without it the model's output has a
            `.loss`.
        opt_func: called as `opt_func(model.parameters(), lr=lr)` when a fit begins, or a ready optimizer.
        lr: learning rate; a ready optimizer keeps its own.
        metrics: functions `(pred, *yb) -> scalar`, or objects with `update`, `compute` and `reset`; one,
            several, or a mapping from name to metric.
        cbs: one callback or several. `Recorder`, `Metrics` and `Progress` come by themselves; one of such a
            class given here takes that one's place.
        n_inp: how many items of a batch are inputs; by default all but the last, of a mapping all.
        device: where to train; by default where the model is.

    Raises:
        TypeError: If an argument has the wrong type; the message says what is possible.
        ValueError: If an argument has an invalid value.

    >>> import torch
    >>> from hookcb import Learner
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> batches = list(zip(x.split(16), (3 * x).split(16)))
    >>> learn = Learner(batches, torch.nn.Linear(1, 1), torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
    >>> with learn.no_logging():
    ...     learn.fit(5)
    >>> learn.recorder.losses[-1] < learn.recorder.losses[0]
    True
    """

    between_batches = "data"  # it fetches its batches itself, and does nothing else there

    def __init__(
        self,
        dls: Any,
        model: nn.Module,
        loss_func: Callable[..., Tensor] | None = None,
        opt_func: Callable[..., Optimizer] | Optimizer = torch.optim.Adam,
        lr: float = 1e-3,
        metrics: Any = (),
        cbs: Callbacks = (),
        *,
        n_inp: int | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__(model)
        check_functions(loss_func, opt_func)
        if n_inp is not None and not (isinstance(n_inp, int) and n_inp >= 1):
            raise ValueError(f"n_inp is {n_inp!r}; give the number of inputs of a batch, 1 or more")
        self.dls = as_loaders(dls)
        self.loss_func, self.opt_func, self.lr, self.n_inp = loss_func, opt_func, check_lr(lr), n_inp
        self.opt = opt_func if isinstance(opt_func, Optimizer) else None
        self._opt_params: list[nn.Parameter] | None = None  # for which opt_func made the optimizer
        self._fetch_listeners: list[FetchListener] = []
        self._remaining: Remaining = everything
        self.device = None if device is None else torch.device(device)
        self.add_cbs(cbs)
        defaults = (Recorder(), Metrics(metrics), Progress())
        self.add_cbs([d for d in defaults if not any(isinstance(cb, type(d)) for cb in self.cbs)])

    def fit_one_cycle(
        self,
        n_epoch: int,
        lr_max: float | Sequence[float] | None = None,
        div: float = 25.0,
        div_final: float = 1e5,
        pct_start: float = 0.25,
        moms: tuple[float, float] | None = (0.95, 0.85),
        cbs: Callbacks = (),
        *,
        resume: str | Path | None = None,
    ) -> None:
        """Trains with the learning rate going up to `lr_max` and down to almost nothing; see `OneCycle`."""
        self._check_idle()
        with self.added_cbs(OneCycle(lr_max, div, div_final, pct_start, moms)):
            self.fit(n_epoch, cbs=cbs, resume=resume)

    def lr_find(
        self, start_lr: float = 1e-7, end_lr: float = 10, num_it: int = 100, stop_div: bool = True
    ) -> LRFind:
        """Trains with the learning rate growing from batch to batch, and leaves everything as it was.

        Args:
            start_lr: the first learning rate.
            end_lr: the last.
            num_it: number of batches.
            stop_div: whether to end where the loss is 4 times its best, or not finite.

        Returns:
            Rates and losses, with a `suggestion` and a `plot`.

        Raises:
            TypeError, ValueError: If an argument is invalid.
            RuntimeError: If a fit is running.
        """
        return find_lr(self, start_lr, end_lr, num_it, stop_div)

    # ---- the loop

    def fit(
        self,
        n_epoch: int,
        lr: float | None = None,
        cbs: Callbacks = (),
        *,
        resume: str | Path | None = None,
    ) -> None:
        """Trains for `n_epoch` epochs, validating after each where there is a `dls.valid`.

        Args:
            n_epoch: number of passes over `dls.train`, in a resumed fit with those made before.
            lr: learning rate from here on; by default what the optimizer has, `self.lr` at its making. A
                resumed fit goes on with its own.
            cbs: callbacks for this fit; their results stay readable as `learn.<name>`.
            resume: a file that `Checkpoint` has written, or a folder, of which the newest whole file is
                taken, to go on from; "latest" is the folder of this fit's `Checkpoint`, and begins anew where
                that has none. `Progress` shows what is resumed; that nothing is left to train is a warning.

        Raises:
            TypeError, ValueError, RuntimeError, OSError: before training starts, for what cannot be trained.
        """
        self._check_idle()
        check_fit(n_epoch, self.dls)
        with self.restored(), self.added_cbs(cbs):
            self._prepare(lr)
            self.opt.zero_grad()  # an interrupted fit may have left gradients behind
            self.n_epoch, self.epoch, self.train_iter, self.accumulating = n_epoch, 0, 0, False
            self._remaining = resumed(resume, self) or everything
            try:
                self.run_fit(self._epochs)
            finally:
                self._remaining = everything

    def _epochs(self) -> None:
        for self.epoch in self._remaining("epoch", range(self.n_epoch)):
            self.row = {}
            self.within("epoch", self._epoch)

    def _epoch(self) -> None:
        for level, loader in self._remaining("phase", PHASES):
            if (dl := getattr(self.dls, loader, None)) is not None:
                self._phase(level, dl)

    def _phase(self, level: str, dl: Any) -> None:
        self.set_phase(training=level == "train", dl=dl, n_iter=n_batches(dl))
        self.model.train(self.training)
        with torch.set_grad_enabled(self.training):
            self.within(level, self._batches)

    def _batches(self) -> None:
        self.iter = -1
        for self.iter, batch in self._fetched(self._remaining("batch", enumerate(self.dl))):
            self.xb, self.yb = split_batch(batch, self._device, self.n_inp)
            try:
                self.within("batch", self._batch)
            except BaseException as error:
                self._note_batch(error)
                raise
            self.train_iter += self.training
        if self.iter < 0:
            raise ValueError(f"the {'training' if self.training else 'validation'} loader gave no batch")

    def _fetched(self, batches: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        """Batches with their numbers; where a signal has ended the workers of a loader too, no more come."""
        try:
            yield from self._told(batches)
        except Exception as error:
            if not self.stop_requested:
                raise
            raise (CancelFitException if self.training else CancelValidException) from error

    def _told(self, batches: Iterable[T]) -> Iterable[T]:
        """The batches of a training or validation, as who listens is told of fetches."""
        listeners = tuple(self._fetch_listeners) if self.training else ()
        return ObservedFetches(batches, listeners) if listeners else batches

    def follow_fetches(self, listener: FetchListener) -> None:
        """Tells `listener` of each fetch of a training batch, from the next epoch on."""
        self._fetch_listeners.append(listener)

    def leave_fetches(self, listener: FetchListener) -> None:
        """Ends what `follow_fetches` began; a second time does nothing."""
        self._fetch_listeners = [x for x in self._fetch_listeners if x is not listener]

    def _batch(self) -> None:
        self.pred = self.predict()
        self.emit("after_pred")
        self.loss = self.get_loss()
        if self.iter == 0:  # what one batch gives all give: looked at once, as each look costs
            check_loss(self.loss)
        self.emit("after_loss")
        if self.training:
            self.within("backward", self._backward)
            if not self.accumulating and self.within("step", self.step):
                self.opt.zero_grad()

    def _backward(self) -> None:
        scaler, loss = self.scaler, self.loss  # looked up here, as before_backward may have changed them
        (loss if scaler is None else scaler.scale(loss)).backward()

    def predict(self) -> Any:
        """The model's output for `xb`; override it for a model that is called differently."""
        return self.model(*self.xb) if isinstance(self.xb, tuple) else self.model(**self.xb)

    def get_loss(self) -> Tensor:
        """The loss of `pred` against `yb`, a tensor of one element; override it for one made differently."""
        if self.loss_func is not None:
            loss: Any = self.loss_func(self.pred, *self.yb)
            return loss  # type: ignore[no-any-return]  # checked by use
        loss = getattr(self.pred, "loss", None)
        if loss is None:
            raise ValueError(
                f"there is no loss_func, and the model's output {describe(self.pred)} has no .loss; "
                "pass loss_func=…"
            )
        return loss  # type: ignore[no-any-return]  # checked by use

    # ---- the loop's other uses

    def validate(self, dl: Any = None, cbs: Callbacks = ()) -> L:
        """Runs the validation phase on `dl`, by default `dls.valid`, also from inside a fit.

        What a fit has recorded stays as it is: no `before_fit` is emitted.

        Returns:
            Loss and metrics, averaged over samples, in the order of the columns of an epoch's row.

        Raises:
            TypeError, ValueError: If `dl` gives no batches.
        """
        dl = getattr(self.dls, "valid", None) if dl is None else dl
        if dl is None:
            raise ValueError(
                "there is no validation loader; pass dl=, or make the learner with (train, valid)"
            )
        check_loader(dl, "dl")
        with (
            self.restored(),
            self.added_cbs(cbs),
            nullcontext() if self.fitting else stray_cancels_as_errors(),
        ):
            self._place()
            self.row = {}
            self._phase("validate", dl)
            return L(self.row.values())

    def get_preds(self, dl: Any = None, with_input: bool = False, with_loss: bool = False) -> tuple[Any, ...]:
        """Predictions for `dl`, by default `dls.valid`, in the order of its batches, on the CPU.

        Args:
            dl: batches, with or without targets.
            with_input: also the inputs, as first item.
            with_loss: also each sample's loss, as last item; `loss_func` then needs a `reduction`.

        Returns:
            `(preds, targets)`, targets being None where there are none; each nested as the model and the
            batches have it, with samples along the first dimension.

        Raises:
            ValueError: If `loss_func` has no `reduction`, or batches differ in shape.
        """
        gather = GatherPreds(self.loss_func, with_input=with_input, with_loss=with_loss)
        try:
            self.validate(dl, cbs=gather)
        finally:
            self.__dict__.pop(gather.name, None)  # as an attribute it would keep all predictions alive
        return gather.results()

    def one_batch(self, b: Any = None) -> Tensor:
        """Trains on one batch outside a fit, with all its events, for tests and a first look.

        Args:
            b: the batch, by default the first that `dls.train` gives.

        Returns:
            Its loss; `xb`, `yb`, `pred` and `loss` stay readable.
        """
        if self.fitting:
            raise RuntimeError("a fit is running; one_batch is for outside a fit")
        with self.restored(batch=False), torch.enable_grad(), stray_cancels_as_errors():
            self._prepare()
            self.set_phase(training=True, dl=[next(iter(self.dls.train)) if b is None else b], n_iter=1)
            self.model.train()
            self._batches()
        loss: Tensor = self.loss
        return loss

    def diagnose(self) -> Verdict:
        """What is wrong with the training, in which layer, why, and what next; or that it is healthy.

        It reads what callbacks have recorded: `Diagnose`, else `ActivationStats` and `GradientHealth`.

        Raises:
            RuntimeError: If nothing is recorded.
        """
        return diagnose_loop(self)

    def summary(self, *xb: Any, depth: int | None = None) -> Summary:
        """What the model consists of, with optimizer, loss and callbacks; see `module_summary`.

        Args:
            *xb: inputs of the model, by default those of the first training batch.
            depth: how many levels of modules to show, by default all.
        """
        return module_summary(self, *xb, depth=depth)

    @contextmanager
    def no_logging(self) -> Iterator[None]:
        """Prints nothing for the length of a `with` block; recording goes on."""
        with self.removed_cbs([cb for cb in self.cbs if isinstance(cb, Progress)]):
            yield

    @contextmanager
    def no_bar(self) -> Iterator[None]:
        """Prints a row per epoch and no bar, for the length of a `with` block."""
        with_bar = [cb for cb in self.cbs if isinstance(cb, Progress) and cb.bar]
        for cb in with_bar:
            cb.bar = False
        try:
            yield
        finally:
            for cb in with_bar:
                cb.bar = True

    # ---- weights on disk

    def save(self, file: str | Path, with_opt: bool = True) -> Path:
        """Writes the weights, and the optimizer's state, to `file`; a file that is there is replaced whole.

        Returns:
            The path written.
        """
        opt = self.opt.state_dict() if with_opt and self.opt is not None else None
        return save_whole({"model": self.model.state_dict(), "opt": opt}, file)

    def load(self, file: str | Path, with_opt: bool = True, strict: bool = True) -> None:
        """Reads what `save` has written, to the model's device.

        Of what `Checkpoint` has written it takes the weights that were validated: where `EMA` was attached,
        their average.

        Raises:
            ValueError: If `file` is truncated or damaged, or was written by neither.
            RuntimeError: where its weights do not fit the model, or with `strict` not all of it.
        """
        self._place()
        state = read_saved(file, self._device)
        if (weights := validated_weights(state)) is not None:
            self.model.load_state_dict(weights, strict=strict)
            return
        check_saved(state, file, {"model", "opt"})
        self.model.load_state_dict(state["model"], strict=strict)
        if with_opt and state["opt"] is not None:
            self._prepare()
            self.opt.load_state_dict(state["opt"])

    # ---- before training

    def _check_idle(self) -> None:
        if self.fitting:
            raise RuntimeError("a fit is running; it must end before another begins")

    def _place(self) -> None:
        self._device = device_of(self.model, self.device)
        if isinstance(self.loss_func, nn.Module):
            self.loss_func.to(self._device)  # the weights of its classes

    def _prepare(self, lr: float | None = None) -> None:
        self._place()
        params = trainable(self.model)
        swapped = self._opt_params is not None and not same_objects(self._opt_params, params)
        if self.opt is None or swapped:
            self.opt, self._opt_params = make_opt(self.opt_func, params, self.lr), params
        check_opt(self.opt, self.model)
        if lr is not None:
            for group in self.opt.param_groups:
                group["lr"] = check_lr(lr)

    def _note_batch(self, error: BaseException) -> None:
        if not isinstance(error, CancelException) and not hasattr(error, "__notes__"):
            where = ", ".join(self.position("after_pred"))
            error.add_note(f"in {where}, with xb {describe(self.xb)} and yb {describe(self.yb)}")


def everything(level: str, items: Iterable[T]) -> Iterable[T]:
    """All items of a level are still to do, as in any fit that begins at the beginning."""
    return items
