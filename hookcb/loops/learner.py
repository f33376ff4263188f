"""Learner: the training loop, on one screen."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from fastcore.foundation import L
from torch import Tensor, nn
from torch.optim import Optimizer

from hookcb.core.arguments import check_count, check_number, hinted
from hookcb.core.batch import describe, n_batches, split_batch
from hookcb.core.callback import Callback
from hookcb.core.callback_list import Callbacks
from hookcb.core.fetches import FetchListener
from hookcb.core.files import check_saved, save_whole
from hookcb.core.loop import check_model, stray_cancels_as_errors
from hookcb.core.optim import Rates, check_rates, set_rates
from hookcb.core.text import name_of
from hookcb.diagnosis.callback import diagnose_loop
from hookcb.diagnosis.verdict import Verdict
from hookcb.hooks.modules import device_of, resolve_device
from hookcb.hooks.summary import Summary, module_summary
from hookcb.loops import ported
from hookcb.loops.alike import facts_of
from hookcb.loops.checks import (
    check_fit,
    check_functions,
    check_loss,
    check_opt,
    make_opt,
    names_batch,
    same_objects,
    trainable,
)
from hookcb.loops.data import as_loaders, check_loader, describe_loaders, set_epoch
from hookcb.loops.hypers import with_hypers
from hookcb.loops.lr_curve import LRFind
from hookcb.loops.lr_find import find_lr
from hookcb.loops.names import NamedLoop
from hookcb.processes.batches import UNEVEN, agree_on_length, check_uneven, fetched, own_order
from hookcb.processes.groups import group_of, is_sharded
from hookcb.processes.ranks import ranks_of
from hookcb.processes.shards import drop_gathered, gathered, resharded
from hookcb.report.collect import make_page
from hookcb.report.page import Page
from hookcb.training.checkpoint.names import with_plain_names
from hookcb.training.checkpoint.resume import Resume, read_any, validated_weights
from hookcb.training.checkpoint.state import check_whole, is_checkpoint, read_opt
from hookcb.training.metrics import Metrics
from hookcb.training.predictions import GatherPreds
from hookcb.training.progress import Progress
from hookcb.training.recorder import Recorder
from hookcb.training.schedules.one_cycle import OneCycle

T = TypeVar("T")
Remaining = Callable[[str, Iterable[Any]], Iterable[Any]]  # selects the items of a level still to do
PHASES = (("train", "train"), ("validate", "valid"))  # levels of an epoch, and their loaders in `dls`


class Learner(NamedLoop):
    """Trains a model, and emits the events at which callbacks act.

    Args:
        dls: an object with `.train` and `.valid`, a `(train, valid)` tuple (`valid` may be None), or one
            iterable of batches. A batch is a tensor, a tuple `(*xb, *yb)`, or a mapping of keyword arguments.
        model: called as `model(*xb)`, or `model(**xb)` if a batch is a mapping.
        loss_func: called as `loss_func(pred, *yb)`, returns a scalar. Without it, the model's output
            must have a `.loss`.
        opt_func: called as `opt_func(model.parameters(), lr=lr)` when a fit begins; or an optimizer.
        lr: learning rate; an optimizer that is given keeps its own.
        metrics: functions `(pred, *yb) -> scalar`, or objects with `update`, `compute` and `reset`; one,
            several, or a mapping from name to metric.
        cbs: one callback or several. `Recorder`, `Metrics` and `Progress` are added unless one of the same
            class is given here.
        n_inp: number of items of a batch that are inputs; by default all but the last, or all of a mapping.
        device: device to train on, or "auto" for the accelerator of this machine, or else the CPU; by default
            the model's.
        wd: weight decay of the optimizer that is created, as that understands it: AdamW decouples it, as
            fastai does, Adam adds it to the gradient. By default the optimizer's own.

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

    between_batches = "data"  # between batches it only fetches the next one

    @hinted
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
        wd: float | None = None,
    ) -> None:
        check_model(model, "Learner(dls, model, loss_func)")
        super().__init__(model)
        check_functions(loss_func, opt_func)
        if n_inp is not None:
            check_count("n_inp", n_inp, "inputs", hint=", or None")
        self.dls = as_loaders(dls)
        self.loss_func, self.opt_func, self.n_inp = loss_func, opt_func, n_inp
        self.lr, self.wd = check_number("lr", lr, closed=True, hint=", such as 1e-3"), wd
        self.opt = opt_func if isinstance(opt_func, Optimizer) else None
        self._opt_params: list[nn.Parameter] | None = None  # those that opt_func made the optimizer for
        self._fetch_listeners: list[FetchListener] = []
        self._remaining: Remaining = everything
        self._uneven = UNEVEN[0]
        self.device = None if device is None else resolve_device(device)
        self.add_cbs(cbs)
        defaults = (Recorder(), Metrics(metrics), Progress())
        self.add_cbs([d for d in defaults if not any(_replaces(cb, d) for cb in self.cbs)])

    def _held(self) -> dict[str, str]:
        opt = name_of(self.opt_func) if self.opt is None else type(self.opt).__name__
        loss = "None" if self.loss_func is None else name_of(self.loss_func)
        return {"dls": describe_loaders(self.dls)} | super()._held() | {"loss_func": loss, "opt": opt}

    @hinted
    def fit_one_cycle(
        self,
        n_epoch: int,
        lr_max: Rates | None = None,
        div: float = 25.0,
        div_final: float = 1e5,
        pct_start: float = 0.25,
        moms: tuple[float, float] | None = (0.95, 0.85),
        cbs: Callbacks = (),
        *,
        wd: float | None = None,
        resume: str | Path | None = None,
        uneven: str = "error",
    ) -> None:
        """Trains with a learning rate that rises to `lr_max` and falls to almost 0; see `OneCycle`."""
        self._check_idle()
        with self.added_cbs(OneCycle(lr_max, div, div_final, pct_start, moms)):
            self.fit(n_epoch, cbs=cbs, wd=wd, resume=resume, uneven=uneven)

    @hinted
    def lr_find(
        self,
        start_lr: float = 1e-7,
        end_lr: float = 10,
        num_it: int = 100,
        stop_div: bool = True,
        show_plot: bool = False,
    ) -> LRFind:
        """Trains with a learning rate that grows from batch to batch, then restores everything.

        Args:
            start_lr: the first learning rate.
            end_lr: the last learning rate.
            num_it: number of batches.
            stop_div: whether to stop when the loss is 4 times its best, or not finite.
            show_plot: whether to draw the curve, too, with matplotlib.

        Returns:
            Rates and losses, with a `suggestion` and a `plot`.

        Raises:
            TypeError, ValueError: If an argument is invalid.
            RuntimeError: If a fit is running.
        """
        with self.wrapped_model("learn.lr_find"):
            found = find_lr(self, start_lr, end_lr, num_it, stop_div)
        if show_plot:
            found.plot()
        return found

    # ---- the loop

    @hinted
    def fit(
        self,
        n_epoch: int,
        lr: Rates | None = None,
        cbs: Callbacks = (),
        *,
        wd: float | None = None,
        resume: str | Path | None = None,
        uneven: str = "error",
    ) -> None:
        """Trains for `n_epoch` epochs, and validates after each if there is a `dls.valid`.

        Args:
            n_epoch: number of passes over `dls.train`; a resumed fit counts those made before.
            lr: learning rate from now on, or one for each parameter group, or `slice(lowest, highest)`, which
                is spread over them; by default the optimizer's, which is created with `self.lr`. A resumed
                fit keeps its own.
            cbs: callbacks for this fit; their results stay readable as `learn.<name>`.
            wd: weight decay from now on, likewise.
            resume: what a `Checkpoint` has written to resume from, or its folder, whose newest intact one is
                used; "latest" is the folder of this fit's `Checkpoint`, and starts a new fit if it has none.
                `Progress` shows what is resumed; it is a warning if nothing is left to train.
            uneven: what to do if ranks have different numbers of training batches: "error", or "stop" to
                end each epoch with the shortest, as loaders without a length always do.

        Raises:
            TypeError, ValueError, RuntimeError, OSError: If it cannot train; before training starts.
        """
        self._check_idle()
        with self.added_cbs(cbs), self.on_all_ranks("learn.fit"), self._plan(n_epoch, lr, wd, resume, uneven):
            self.run_fit(self._epochs)

    def _epochs(self) -> None:
        for self.epoch in self._remaining("epoch", range(self.n_epoch)):
            self.row = {}
            set_epoch(self.dls.train, self.epoch)
            self.within("epoch", self._epoch)

    def _epoch(self) -> None:
        for level, loader in self._remaining("phase", PHASES):
            if (dl := getattr(self.dls, loader, None)) is not None:
                self._phase(level, dl)

    def _phase(self, level: str, dl: Any) -> None:
        self.set_phase(training=level == "train", dl=dl, n_iter=n_batches(dl))
        agree_on_length(self, self._uneven)
        self.model.train(self.training)
        with resharded(self.model), torch.set_grad_enabled(self.training):
            self.within(level, self._batches)

    def _batches(self) -> None:
        for self.iter, batch in self._fetched():
            self.xb, self.yb = split_batch(batch, self._device, self.n_inp)
            self.within("batch", self._batch)
            if self.training:
                self.ranks.end_batch()
                self.train_iter += 1
        if self.training:
            self.ranks.end_batch(is_last=True)

    @names_batch
    def _batch(self) -> None:
        self.pred = self.predict()
        self.emit("after_pred")
        self.loss = self.get_loss()
        if self.iter == 0:  # only once, as it takes time, and other batches are no different
            check_loss(self.loss)
        self.emit("after_loss")
        if self.training:
            self.within("backward", self._backward)
            if not self.accumulating and self.within("step", self.step):
                self.opt.zero_grad()

    def _backward(self) -> None:
        scaler, loss = self.scaler, self.loss  # read here, as before_backward may have changed them
        self.run_backward(loss if scaler is None else scaler.scale(loss))

    # ---- what it calls; to be overridden for other models and losses

    def predict(self) -> Any:
        """Calls the model on `xb`; override it for a model that is called differently."""
        return self.model(*self.xb) if isinstance(self.xb, tuple) else self.model(**self.xb)

    def get_loss(self) -> Tensor:
        """Computes the loss, a tensor of one element; override it for a loss with other arguments."""
        if self.loss_func is not None:
            loss: Any = self.loss_func(self.pred, *self.yb)
            return loss  # type: ignore[no-any-return]  # checked by use
        loss = getattr(self.pred, "loss", None)
        if loss is None:
            raise ValueError(
                f"no loss_func was given, and the model's output {describe(self.pred)} has no .loss; "
                f"pass loss_func=…{'' if self.yb else ', and a batch (x, y), as this one has no target'}"
            )
        return loss  # type: ignore[no-any-return]  # checked by use

    # ---- the loop's other uses

    @hinted
    def validate(self, dl: Any = None, cbs: Callbacks = ()) -> L:
        """Runs the validation phase on `dl`, by default `dls.valid`; can be called inside a fit.

        Records of the last fit stay as they are, as no `before_fit` is emitted.

        Returns:
            Loss and metrics, averaged over samples, in the order of an epoch's columns.

        Raises:
            TypeError, ValueError: If `dl` yields no batches.
        """
        dl = getattr(self.dls, "valid", None) if dl is None else dl
        if dl is None:
            raise ValueError("no validation loader was given; pass dl=, or (train, valid) to the learner")
        check_loader(dl, "dl")
        with self.restored(), self.on_all_ranks("learn.validate"), self.added_cbs(cbs), self._apart():
            self._place()
            self.row = {}
            self._phase("validate", self.own_part(dl))
            return L(self.row.values())

    def _apart(self) -> AbstractContextManager[None]:
        """Makes stray cancels errors, unless a fit does that."""
        return nullcontext() if self.fitting else stray_cancels_as_errors()

    @hinted
    def get_preds(
        self, dl: Any = None, with_input: bool = False, with_loss: bool = False, *, ds_idx: int = 1
    ) -> tuple[Any, ...]:
        """Predictions for `dl`, by default `dls.valid`, in its order, on the CPU.

        Args:
            dl: batches, with or without targets.
            with_input: whether to return the inputs too, as first item.
            with_loss: whether to return each sample's loss too, as last item; `loss_func` must have a
                `reduction`.
            ds_idx: without `dl`, 0 for `dls.train`, 1 for `dls.valid`.

        Returns:
            `(preds, targets)`, nested like the model's output and the batches, with samples along the first
            dimension; targets are None if there are none.

        Raises:
            ValueError: If `loss_func` has no `reduction`, or batches differ in shape.
        """
        if ds_idx not in (0, 1):
            raise ValueError(f"ds_idx must be 0 for dls.train or 1 for dls.valid, got {ds_idx!r:.80}")
        dl = self.dls.train if dl is None and ds_idx == 0 else dl
        gather = GatherPreds(self.loss_func, with_input=with_input, with_loss=with_loss)
        with self.on_all_ranks("learn.get_preds"):
            positions = own_order(self.own_part(self.dls.valid if dl is None else dl))
            if self.ranks.world > 1 and positions is None:
                gather.digest = hashlib.blake2b()
            try:
                self.validate(dl, cbs=gather)
            finally:
                self.__dict__.pop(gather.name, None)  # the attribute would keep all predictions alive
            return gather.results(self.ranks, positions)

    @hinted
    def one_batch(self, b: Any = None) -> Tensor:
        """Trains on one batch outside a fit, with all its events, for tests and experiments.

        Args:
            b: the batch, by default the first of `dls.train`.

        Returns:
            Its loss; `xb`, `yb`, `pred` and `loss` stay readable.
        """
        if self.fitting:
            raise RuntimeError("a fit is running; call one_batch outside of it")
        on_ranks = self.on_all_ranks("learn.one_batch")
        with self.restored(batch=False), torch.enable_grad(), on_ranks, stray_cancels_as_errors():
            self._prepare()
            self.set_phase(training=True, dl=[next(iter(self.dls.train)) if b is None else b], n_iter=1)
            self.model.train()
            self._batches()
        loss: Tensor = self.loss
        return loss

    def diagnose(self) -> Verdict:
        """Diagnoses the training: what is wrong, in which layer, why, and what to do; or that it is healthy.

        Reads the records of `Diagnose`, or else of `ActivationStats` and `GradientHealth`.

        Raises:
            RuntimeError: If nothing is recorded.
        """
        return diagnose_loop(self)

    def report(self, path: str | Path | None = None) -> Page:
        """A page of what was recorded, and of the verdict: one HTML file, written to `path` if that is given.

        A notebook shows the page; `hookcb.load_report` reads the data of a file back.

        Raises:
            ValueError: If the name of the file does not end in .html.
            OSError: If the file cannot be written.
        """
        return make_page(self, path)

    def summary(self, *xb: Any, depth: int | None = None) -> Summary:
        """Summary of the model's modules, optimizer, loss and callbacks; see `module_summary`.

        If the model is sharded, all ranks must call it; shapes of outputs are those on this rank.

        Args:
            *xb: inputs for the model, by default those of the first training batch.
            depth: number of levels of modules to show, by default all.
        """
        on_ranks = self.on_all_ranks("learn.summary") if is_sharded(self.model) else nullcontext()
        with on_ranks:
            return module_summary(self, *xb, depth=depth)

    @contextmanager
    def no_logging(self) -> Iterator[None]:
        """Prints nothing in a `with` block; recording goes on."""
        with self.removed_cbs([cb for cb in self.cbs if isinstance(cb, Progress)]):
            yield

    @contextmanager
    def no_bar(self) -> Iterator[None]:
        """Prints a row per epoch but no bar in a `with` block."""
        with_bar = [cb for cb in self.cbs if isinstance(cb, Progress) and cb.bar]
        for cb in with_bar:
            cb.bar = False
        try:
            yield
        finally:
            for cb in with_bar:
                cb.bar = True

    # ---- weights on disk

    @hinted
    def save(self, file: str | Path, with_opt: bool = True) -> Path:
        """Writes the weights and the optimizer's state to `file`; never leaves a half-written file.

        On several ranks, rank 0 writes. Of a sharded model it gathers all, and all ranks must call it.

        Returns:
            The path written.
        """
        check_whole(self)
        if is_sharded(self.model):
            with self.on_all_ranks("learn.save"):
                state, is_main = self._saved(with_opt), self.ranks.is_main
        else:
            state, is_main = self._saved(with_opt), ranks_of(self.model).is_main and self.ranks.is_main
        return save_whole(state, file) if is_main else Path(file)

    def _saved(self, with_opt: bool) -> dict[str, Any]:
        """State that `save` writes: by plain names on several ranks, and gathered from them."""
        model = self.model.state_dict()
        opt = self.opt.state_dict() if with_opt and self.opt is not None else None
        if group_of(self.model) is not None or is_sharded(self.model):
            model, opt = gathered(with_plain_names(self.model, model)), gathered(opt)
        return {"model": model, "opt": opt}

    @hinted
    def load(self, file: str | Path, with_opt: bool = True, strict: bool = True) -> None:
        """Reads a file of `save`, to the model's device.

        From a file or folder of `Checkpoint`, it reads the weights that were validated: those of `EMA` if
        attached. Any form of the model, on any number of ranks, reads what another has written.

        Raises:
            ValueError: If `file` is truncated or damaged, or was written by neither.
            RuntimeError: If its weights do not fit the model; with `strict` also if some are missing.
        """
        with self.wrapped_model("learn.load"):
            self._load(Path(file), with_opt, strict)

    def _load(self, file: Path, with_opt: bool, strict: bool) -> None:
        self._place()
        state = read_any(file, self._device, ranks_of(self.model))
        if not (of_fit := is_checkpoint(state)):
            check_saved(state, file, {"model", "opt"})
        weights = validated_weights(self.model, state, file, self.model.state_dict())
        self.model.load_state_dict(weights, strict=strict)
        if with_opt and not of_fit and state["opt"] is not None:
            self._prepare()
            self.opt.load_state_dict(read_opt(self.opt, state["opt"], file))

    # ---- fastai's names

    fit_flat_cos, fit_sgdr, fine_tune = ported.fit_flat_cos, ported.fit_sgdr, ported.fine_tune
    freeze, freeze_to, unfreeze = ported.freeze_body, ported.freeze_to, ported.unfreeze_all
    to_fp16, to_native_fp16, to_bf16, to_fp32 = ported.to_fp16, ported.to_fp16, ported.to_bf16, ported.to_fp32
    no_mbar = no_bar

    @property
    def loss_grad(self) -> Any:
        """Fastai's name of `loss`, of which the backward is called."""
        return self.loss

    @loss_grad.setter
    def loss_grad(self, loss: Any) -> None:
        self.loss = loss

    @property
    def final_record(self) -> L:
        """Losses and metrics of the last epoch."""
        return L(self.recorder.values[-1])

    def create_opt(self) -> None:
        """Creates the optimizer by `opt_func`, as each fit does if there is none."""
        self._prepare()

    if not TYPE_CHECKING:  # else a type checker would assume that every attribute exists

        def __getattr__(self, name: str) -> Any:
            try:
                return object.__getattribute__(self, name)
            except AttributeError as error:
                if name in ported.OF_LEARNER:
                    raise AttributeError(f"{error}; hookcb has {ported.OF_LEARNER[name]}") from None
                raise

    # ---- around a training

    @contextmanager
    def _plan(
        self, n_epoch: int, lr: Rates | None, wd: float | None, resume: str | Path | None, uneven: str
    ) -> Iterator[None]:
        """Checks and sets what a fit needs, the same on all ranks, and what a resumed one has left to do."""
        check_fit(n_epoch, self.dls)
        check_uneven(uneven)
        with self.restored():
            self._prepare(lr, wd)
            self.opt.zero_grad()  # an interrupted fit may have left gradients behind
            self.n_epoch, self.epoch, self.train_iter, self.accumulating = n_epoch, 0, 0, False
            self._uneven = uneven
            asked = {"number of epochs": n_epoch, "resumed checkpoint": str(resume), "uneven": uneven}
            self.ranks.check_alike(asked | facts_of(self, self.loss_func))
            found = Resume.find(resume, self)
            self._remaining = everything if found is None else partial(found.remaining, self)
            file = None if found is None else found.file.name
            self.ranks.check_alike({"resumed checkpoint": file})
            try:
                yield
            finally:
                self._remaining, self._uneven = everything, UNEVEN[0]

    def _fetched(self) -> Iterator[tuple[int, Any]]:
        """Yields the numbered batches of this phase that are still to do."""
        self.iter = -1
        batches = self._remaining("batch", enumerate(self.dl))
        return fetched(self, batches, self._fetch_listeners, self._uneven)

    def follow_fetches(self, listener: FetchListener) -> None:
        """Notifies `listener` of each fetch of a training batch, from the next epoch on."""
        self._fetch_listeners.append(listener)

    def leave_fetches(self, listener: FetchListener) -> None:
        """Undoes `follow_fetches`; a second call does nothing."""
        self._fetch_listeners = [x for x in self._fetch_listeners if x is not listener]

    @contextmanager
    def on_all_ranks(self, name: str) -> Iterator[None]:
        """Finds the ranks that train the model, which decide and fail together in the block.

        Args:
            name: what all ranks must call, "learn.fit".

        Raises:
            RankError: If some ranks did not call it, or another one fails.
        """
        if self.ranks.is_together:  # a validation inside a fit
            self.ranks.meet(name, f" {self.where()}")
            yield
            return
        with self.wrapped_model(name):
            self.ranks = ranks_of(self.model)
            with self.ranks.together(name, self.where):
                yield

    def _check_idle(self) -> None:
        if self.fitting:
            raise RuntimeError("a fit is running; it must end before another one begins")

    def _place(self) -> None:
        drop_gathered(self.model)
        self._device = device_of(self.model, self.device)
        if isinstance(self.loss_func, nn.Module):
            self.loss_func.to(self._device)  # it may have weights of classes

    def _prepare(self, lr: Rates | None = None, wd: float | None = None) -> None:
        self._place()
        params = trainable(self.model)
        swapped = self._opt_params is not None and not same_objects(self._opt_params, params)
        if self.opt is None or swapped:
            self.opt, self._opt_params = with_hypers(make_opt(self.opt_func, params, self.lr)), params
            wd = self.wd if wd is None else wd
        check_opt(self.opt, self.model, passes_closure=type(self).step is not Learner.step)
        if lr is not None:
            check_rates("lr", lr, closed=True)
            set_rates(self.opt, lr)
        if wd is not None:
            ported.set_weight_decay(self.opt, wd)


def everything(level: str, items: Iterable[T]) -> Iterable[T]:
    """Selects all items of a level, as in a fit that is not resumed."""
    return items


def _replaces(cb: Callback, default: Callback) -> bool:
    """Whether a callback that was given takes the place of one that is there by default."""
    return isinstance(cb, type(default)) and not (isinstance(cb, Metrics) and cb.on_train)
