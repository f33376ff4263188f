"""LoopReporter: the events of a loop hookcb does not run, according to what is reported of it."""

import os
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Self
from weakref import ref

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hookcb.core.batch import parts
from hookcb.core.callback import Callback
from hookcb.core.callback_list import Callbacks
from hookcb.core.console import show, warn
from hookcb.core.events import CancelException, CancelFitException, CancelStepException, Event
from hookcb.core.loop import stray_cancels_as_errors
from hookcb.core.optim import detached_scalar
from hookcb.core.switch import is_off
from hookcb.core.torch_private import after_backward, as_it_is, in_backward, in_transform, transforms_left
from hookcb.diagnosis.callback import diagnose_loop
from hookcb.diagnosis.reader import Way
from hookcb.diagnosis.verdict import Verdict
from hookcb.hooks.hook import detached
from hookcb.hooks.modules import ModelGoneError
from hookcb.hooks.own import register
from hookcb.loops.checks import check_loss
from hookcb.loops.coverage import Facts, check_follows
from hookcb.loops.names import NamedLoop
from hookcb.loops.stages import BEFORE_BACKWARD, FIRST, IN_STEP, TRANSITIONS, Move, Stage
from hookcb.processes.agreed_stop import AgreedStop
from hookcb.processes.board import Board
from hookcb.processes.groups import describe_alone, group_of
from hookcb.processes.process_group import n_processes
from hookcb.report.collect import make_page
from hookcb.report.page import Page

# Numbers of the loops of this process. All ranks open in the same order what they train together; a loop that
# one of them opens alone has no group, and is counted by itself.
_numbers = {"together": count(), "alone": count()}


class LoopReporter(NamedLoop):
    """Emits the events of a loop hookcb does not run, according to its reports.

    Reports may be incomplete: `stages.TRANSITIONS` says which event follows from which report, and
    `stages.FIRST` what is closed or opened first if a report is missing. It does not keep the model alive.

    Args:
        model: the model being trained.
        cbs: callbacks; their cancels change nothing, as hookcb does not control the loop, and their errors
            end it.
        opt: the optimizer, if known.
        scaler: the loop's GradScaler, if gradients are scaled.

    Attributes:
        stage: the stage of the batch that is open, if any.
        stop_requested: whether a callback has requested the end of the training; for the loop to read. On
            several ranks all of them find it True after the same step.
        seen: how often each event was emitted.
        facts: other observations of the loop.

    Raises:
        TypeError, ValueError, LookupError: If a callback cannot follow a loop, or from a `before_fit`.
    """

    honors_stop = False  # whether the code that reports reads `stop_requested`
    way: Way = "watch"  # for advice that fits
    replays = True  # whether a batch may be run again for the origin of a NaN: a test may count the calls

    _ended_opt: Callable[[], Any] | None = None

    def __init__(
        self,
        model: nn.Module,
        cbs: Callbacks = (),
        opt: Any = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        has_no_part = is_off()  # HOOKCB=0: closed at once, and nothing is hooked
        group = None if has_no_part else self._group_of(model)
        how = "alone" if group is None else "together"
        self._name = f"loop-{how}-{next(_numbers[how])}"  # on all ranks
        self._stop = AgreedStop(group, self._name)
        super().__init__(model)
        self._board: Board | None = None
        self._process = os.getpid()  # in one that is forked from it, this does nothing
        self.stage = Stage.IDLE
        self._phase: str | None = None  # "train" or "validate", while an epoch is open
        self._loss_node: Any = None  # autograd node of the loss, during after_loss
        self._pred_grad: Tensor | None = None  # the gradient with which a backward began, while it begins
        self.opt, self.scaler = opt, scaler
        self.seen: Counter[str] = Counter()
        self.facts = Facts(of_rank="", way=self.way, is_off=has_no_part)
        self._n_batches: Counter[str] = Counter()  # of this epoch, by phase
        self._on_tensors: list[RemovableHandle] = []
        self._told: set[type[CancelException]] = set()
        self._error: BaseException | None = None  # raised by a callback; it ends the loop
        self.add_cbs(cbs)
        self._entered = []
        if has_no_part:
            return self.close()
        self.facts.of_rank = describe_alone(model, group)
        try:
            self._listen()
            with stray_cancels_as_errors():
                try:
                    self._enter(self.cbs)
                except CancelFitException as cancel:
                    self._note_cancel(cancel, "before_fit")
        except BaseException as error:
            self.close(error)
            raise

    def _listen(self) -> None:
        """Starts observing the loop; called when all state is set, as other threads may report at once."""

    # ---- state

    def _group_of(self, model: nn.Module) -> Any:
        """Process group of the ranks that train the model together, None if this process is alone."""
        return group_of(model)

    @property
    def board(self) -> Board | None:
        """The place where the processes of this training leave notes for each other; None if there is one.

        Looked for until the first batch, as a script may open its process group late.
        """
        if self._board is None and n_processes() > 1:
            rank = distributed.get_rank() if distributed.is_initialized() else int(os.environ["RANK"])
            self._board = Board(self._name, rank, n_processes())
        return self._board

    @property
    def rank(self) -> int:
        """See `Loop`."""
        return 0 if self.board is None else self.board.rank

    @property
    def world(self) -> int:
        """See `Loop`."""
        return 1 if self.board is None else self.board.world

    @property
    def stop_requested(self) -> bool:
        """Whether to end the training now."""
        return self._stop.is_due

    @stop_requested.setter
    def stop_requested(self, is_wanted: bool) -> None:
        if is_wanted:
            self._stop.request()

    @property
    def model(self) -> nn.Module:
        """The model being trained."""
        if (model := self._model()) is None:
            raise ModelGoneError("the watched model no longer exists; keep a reference to it")
        return model

    @model.setter
    def model(self, model: nn.Module) -> None:
        self._model = ref(model)

    @property
    def loss_node(self) -> Any:
        """Autograd node of the loss, during `after_loss`; it may have freed its saved tensors already."""
        return self._loss_node

    @property
    def pred_grad(self) -> Tensor | None:
        """The gradient of an output of the model with which the backward began, while it begins."""
        return self._pred_grad

    @property
    def has_batch(self) -> bool:
        """Whether a batch is open."""
        return self.stage is not Stage.IDLE

    def _checked(self, cbs: Callbacks) -> list[Callback]:
        new = super()._checked(cbs)
        for cb in new:
            check_follows(cb, self.opt is not None, self.way)
        return new

    # ---- reports

    def begin_batch(self, training: bool = True, xb: Any = ()) -> None:
        """Reports that a batch begins; its inputs `xb` are kept until its gradients are ready."""
        if not self.fitting:
            return
        self.end_batch()
        phase = "train" if training else "validate"
        self._begin_phase(phase)
        self.iter = self._n_batches[phase]
        self._n_batches[phase] += 1
        self.xb = xb
        self._make(Move.BEGIN_BATCH)

    def report_pred(self, pred: Any) -> None:
        """Reports the model's output for the batch."""
        if not self.fitting:
            return
        self.pred = pred
        self.emit("after_pred")
        if self.training:
            self._follow_backward(*(x for _, x in parts(pred) if isinstance(x, Tensor)))

    def report_loss(self, loss: Tensor) -> Tensor:
        """Reports the loss of the batch; call it before the backward.

        Returns:
            The loss, unchanged.

        Raises:
            TypeError: If it is not a tensor.
            ValueError: If it does not have one element.
        """
        check_loss(loss)
        if not self.has_batch:
            self.facts.n_losses_outside += 1
            return loss
        self.facts.n_losses_reported += 1
        self._set_loss(detached(loss), loss.grad_fn)
        if self.training:
            self._follow_backward(loss)
        return loss

    def report_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Reports what the loop has measured in the validation that is under way or has just ended.

        A verdict reads the loss and the accuracy, such as `val_loss` and `val_acc`, where it has not seen
        them itself.

        Args:
            metrics: numbers by name, or tensors of one element; anything else is left out.
        """
        for name, x in metrics.items() if self.fitting else ():
            if isinstance(x, int | float) or (isinstance(x, Tensor) and x.numel() == 1):
                self.reported_metrics[name] = detached_scalar(x)

    def _set_loss(self, loss: Tensor, node: Any) -> None:
        self.loss, self._loss_node = loss, node
        try:
            self.emit("after_loss")
        finally:
            self._loss_node = None  # would keep the loop's graph alive

    def begin_backward(self) -> None:
        """Reports that the backward of the batch begins."""
        self._make(Move.BEGIN_BACKWARD)

    def end_backward(self) -> None:
        """Reports that the gradients of the batch are ready."""
        if self._make(Move.END_BACKWARD):
            self.xb, self.pred = (), None  # would keep the loop's tensors alive

    def begin_step(self, opt: Optimizer) -> None:
        """Reports that an optimizer is about to step; a second call before `end_step` does nothing.

        Callbacks read gradients now, so call it before clipping if they should be unclipped.

        Raises:
            TypeError: If `opt` is not an optimizer.
        """
        if not hasattr(opt, "param_groups"):
            raise TypeError(f"opt must be the optimizer that makes the step, got {opt!r:.80}")
        if not self.fitting:
            return
        if self.stage in IN_STEP:
            if self.opt is opt:
                return
            self.end_step()
        self.opt = opt
        if not self.training:
            self.end_batch()
        self._make(Move.BEGIN_STEP)

    def end_step(self) -> None:
        """Reports that the optimizer has made its step, or that a GradScaler has skipped it."""
        self._make(Move.END_STEP)

    def end_batch(self) -> None:
        """Reports that the batch has ended; does nothing if none is open."""
        if self._make(Move.END_BATCH):
            self.train_iter += self.training
            self._forget_batch()

    def end_epoch(self) -> None:
        """Reports that an epoch has ended, which no hook can notice."""
        self._end_phase()
        self.epoch += 1
        self._n_batches.clear()

    @property
    def opt(self) -> Any:
        """The optimizer of the latest step; once the loop has ended, as long as something else holds it."""
        return self._opt if self._ended_opt is None else self._ended_opt()

    @opt.setter
    def opt(self, opt: Any) -> None:
        self._opt = opt

    def close_failed(self) -> bool:
        """Whether a callback has failed; closes it then, except in a backward, which would restore hooks."""
        if self._error is not None and not in_backward():
            self.close(self._error)
        return self._error is not None

    def close(self, error: BaseException | None = None) -> None:
        """Stops following: removes all hooks; results stay readable. A second call does nothing.

        Args:
            error: the exception that ended the loop, if any; open levels are then cut short.
        """
        if self._entered is None or os.getpid() != self._process:
            return
        error = error or self._error
        try:
            if error is None:
                self._end_phase()
        finally:
            self.stage = Stage.IDLE
            self._forget_batch()
            self.facts.has_ended = True
            try:
                self._leave(error=error)
            finally:
                self._entered = self._error = None
                self.remove_cbs(list(self.cbs))  # so that they may follow another loop
                if self._opt is not None:  # it holds the weights
                    self._ended_opt, self._opt = ref(self._opt), None

    def diagnose(self) -> Verdict:
        """Diagnoses the training; see `Learner.diagnose`.

        Raises:
            RuntimeError: If nothing is recorded.
        """
        return diagnose_loop(self)

    def report(self, path: str | Path | None = None) -> Page:
        """A page of what was recorded, and of the verdict; see `Learner.report`.

        Raises:
            ValueError: If the name of the file does not end in .html.
            OSError: If the file cannot be written.
        """
        return make_page(self, path)

    def __enter__(self) -> Self:
        _ = self.model  # raises if the model is gone
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(error)

    # ---- from reports to events

    def _make(self, move: Move) -> bool:
        """Makes a move, after those that it requires; returns False if this stage, or the end, ignores it."""
        if not self.fitting:
            return False
        while (first := FIRST.get((self.stage, move))) is not None:
            getattr(self, first)()
        if (transition := TRANSITIONS.get((self.stage, move))) is None:
            return False
        self.stage = transition.stage
        self.emit(transition.event)
        return True

    def emit(self, event: str) -> None:
        """Calls the callbacks that act at `event`; cancels have no effect."""
        if self._entered is None or self._error is not None:  # closed, or about to be
            return
        if os.getpid() != self._process:
            return
        self.seen[event] += 1
        try:
            if event == Event.AFTER_STEP:
                self._stop.end_step()
            if in_transform():  # of torch.func, which forbids writes to callbacks' tensors
                with transforms_left():
                    super().emit(event)
            else:
                super().emit(event)
        except CancelException as cancel:
            self._note_cancel(cancel, event)
        except BaseException as error:
            self._error = error  # callbacks would see only parts of the training from now on
            self.close_failed()
            raise

    def _note_cancel(self, cancel: CancelException, event: str) -> None:
        is_stop = isinstance(cancel, CancelFitException)
        if is_stop:
            self.stop_requested, self.ended_by = True, self._describe_end(cancel)
        cancels_step = isinstance(cancel, CancelStepException) and event == "before_step"
        if cancels_step and self._has_no_gradients():
            self.emit("after_cancel_step")  # the optimizer has nothing to do
        elif type(cancel) not in self._told:
            self._told.add(type(cancel))
            self._tell(cancel, is_stop)

    def _tell(self, cancel: CancelException, is_stop: bool) -> None:
        if is_stop and self.honors_stop:
            if self._stop.is_main:
                show(self.ended_by, soft_wrap=True, highlight=False, markup=False)
            return
        why = f": {cancel}" if str(cancel) else ""
        hint = "; look at .stop_requested in your loop" if is_stop else ""
        warn(
            f"{cancel.raised_in} requested the end of the {cancel.level}{why}; ignored, because hookcb does "
            f"not control this loop{hint}"
        )

    def _has_no_gradients(self) -> bool:
        return all(p.grad is None for group in self.opt.param_groups for p in group["params"])

    def _begin_phase(self, phase: str) -> None:
        if self._phase == phase:
            return
        if self._phase is None:
            if not (self.cbs or self.epoch):  # here, as add_cb may have attached one since it was created
                self._warn_of_nothing()
            self.row = {}
            self.emit("before_epoch")
        else:
            self.emit(f"after_{self._phase}")
        self.reported_metrics = {} if phase == "validate" else self.reported_metrics
        self.set_phase(training=phase == "train", dl=None, n_iter=None)
        self._phase = phase
        self.emit(f"before_{phase}")

    def _warn_of_nothing(self) -> None:
        owner, call = "HookcbCallback", "HookcbCallback(Diagnose())"
        if self.way == "watch":
            owner, call = "watch", "watch(model, optimizer, cbs=Diagnose())"
        warn(f"{owner} was given no callbacks and records nothing; {call} gives a verdict")

    def _end_phase(self) -> None:
        """Ends the batch, its phase and the epoch, if they are open."""
        self.end_batch()
        phase, self._phase = self._phase, None
        if phase is not None:
            self.emit(f"after_{phase}")
            self.emit("after_epoch")

    def _forget_batch(self) -> None:
        self.xb, self.pred = (), None
        self.loss = None  # type: ignore[assignment]  # until there is one
        for hook in self._on_tensors:
            hook.remove()
        self._on_tensors = []

    def _follow_backward(self, *tensors: Tensor) -> None:
        """Reports the backward when the first gradient of one of these tensors arrives."""
        for x in tensors:
            if x.requires_grad and not x.is_leaf:
                self._on_tensors.append(register(x.register_hook, self._gradient_arrives))

    @as_it_is
    def _gradient_arrives(self, grad: Tensor) -> None:
        if torch.is_grad_enabled():  # create_graph: a gradient penalty, which is part of the loss
            self.facts.n_penalties += 1
        elif self.stage in BEFORE_BACKWARD:
            self._pred_grad = grad
            try:
                self.begin_backward()
            finally:
                self._pred_grad = None
            # DDP queues its own callback between these two
            after_backward(partial(after_backward, self._gradients_are_ready))

    @as_it_is
    def _gradients_are_ready(self) -> None:
        self.end_backward()

    def _held(self) -> dict[str, str]:
        model, named = self._model(), [name for name, x in vars(self).items() if isinstance(x, Callback)]
        return {
            "model": "None" if model is None else type(model).__name__,
            "opt": "None" if self.opt is None else type(self.opt).__name__,
            "cbs": f"[{', '.join(named)}]",  # those of a closed loop, too, as their results are still there
            "batches": f"{self.train_iter:,}",
            "state": "following" if self.fitting else "closed",
        }

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"{type(self).__name__} follows a loop in this process; pickle its callbacks instead")
