"""ExternalLoop: a loop that somebody else runs, told what happens in it."""

from collections import Counter
from typing import Any, Self
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookcb.core.batch import parts
from hookcb.core.callback import Callback
from hookcb.core.callback_list import Callbacks
from hookcb.core.console import warn
from hookcb.core.events import LEVELS, CancelException, CancelFitException, CancelStepException
from hookcb.core.loop import Loop, stray_cancels_as_errors
from hookcb.core.torch_private import after_backward, in_backward
from hookcb.diagnosis.callback import diagnose_loop
from hookcb.diagnosis.verdict import Verdict
from hookcb.hooks.hook import Hook, detached
from hookcb.hooks.modules import ModelGoneError
from hookcb.loops.coverage import Facts, check_follows
from hookcb.loops.taps import outside_transforms


class ExternalLoop(Loop):
    """Emits the events of a loop that is not ours, from what it is told, in the order of the contract.

    Whoever follows a loop says what begins and ends. What is still open is closed first, so that each event
    has its place whatever the loop leaves out. It does not keep the model alive.

    Args:
        model: the model being trained.
        cbs: callbacks; a cancel of theirs changes nothing, as the loop is not ours, and an error ends it.
        opt: the optimizer, where it is known.
        scaler: of the losses, where gradients come scaled.

    Attributes:
        stop_requested: whether a callback has asked to end the training, for the loop to look at.
        seen: how often each event was emitted.
        facts: what else was seen.

    Raises:
        TypeError, ValueError, LookupError: for callbacks that cannot follow a loop, or from a before_fit.
    """

    honors_stop = False  # whether who follows the loop looks at `stop_requested`

    def __init__(
        self,
        model: nn.Module,
        cbs: Callbacks = (),
        opt: Any = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        super().__init__(model)
        del self.__dict__["loss"], self.__dict__["epoch"]  # methods here
        self._loss: Tensor | None = None
        self._loss_node: Any = None  # its autograd node, while it is told
        self._epoch = 0
        self.opt, self.scaler = opt, scaler
        self.seen: Counter[str] = Counter()
        self.facts = Facts()
        self._levels: list[str] = []  # that are open, outermost first
        self._n_batches: Counter[str] = Counter()  # of this epoch, by phase
        self._backward: str | None = None  # "running" or "over", in a batch
        self._step_of: Optimizer | None = None  # whose step is in progress
        self._on_tensors: list[Hook] = []
        self._ignored: set[type[CancelException]] = set()
        self._error: BaseException | None = None  # of a callback, that ends it
        self.add_cbs(cbs)
        self._entered = []
        try:
            self._listen()
            with stray_cancels_as_errors():
                try:
                    self._enter(self.cbs)
                except CancelFitException as cancel:
                    self._note(cancel, "before_fit")
        except BaseException as error:
            self.close(error)
            raise

    def _listen(self) -> None:
        """Begins to hear of the loop: all is set by now, as other threads may be heard of at once."""

    # ---- the loop's state

    @property
    def model(self) -> nn.Module:
        """The model being trained."""
        if (model := self._model()) is None:
            raise ModelGoneError("the model that was watched is gone; keep a reference to it")
        return model

    @model.setter
    def model(self, model: nn.Module) -> None:
        self._model = ref(model)

    @property
    def batch_loss(self) -> Tensor | None:
        """The loss of the batch, where it was told."""
        return self._loss

    @property
    def loss_node(self) -> Any:
        """The loss's autograd node, at `after_loss`; of a loss that was found its saved tensors are freed."""
        return self._loss_node

    @property
    def epoch_index(self) -> int:
        """Index of the epoch, from 0, as far as it was told."""
        return self._epoch

    @property
    def has_batch(self) -> bool:
        """Whether a batch is open."""
        return self._levels[-1:] == ["batch"]

    def _checked(self, cbs: Callbacks) -> list[Callback]:
        new = super()._checked(cbs)
        for cb in new:
            check_follows(cb, self.opt is not None)
        return new

    # ---- what happens

    def begin_batch(self, training: bool, xb: Any) -> None:
        """A batch begins; what `xb` was, is forgotten when its gradients are there."""
        self.end_batch()
        phase = "train" if training else "validate"
        self._begin_phase(phase)
        self.iter = self._n_batches[phase]
        self._n_batches[phase] += 1
        self.xb, self._backward = xb, None
        self._open("batch")

    def has_pred(self, pred: Any) -> None:
        """The model has given its output for the batch."""
        self.pred = pred
        self.emit("after_pred")
        if self.training:
            self._follow_backward(*(x for _, x in parts(pred) if isinstance(x, Tensor)))

    def loss(self, loss: Tensor) -> Tensor:  # state of other loops, see batch_loss
        """Tells the loss of the batch, which cannot be seen from outside; call it before the backward.

        Returns:
            The loss, as it is.

        Raises:
            TypeError: where it is no tensor.
        """
        if not isinstance(loss, Tensor):
            raise TypeError(f"the loss is {loss!r:.80}; give the tensor that backward is called on")
        if not self.has_batch:
            self.facts.n_losses_outside += 1
            return loss
        self.facts.n_losses_told += 1
        self._take_loss(detached(loss), loss.grad_fn)
        if self.training:
            self._follow_backward(loss)
        return loss

    def _take_loss(self, loss: Tensor, node: Any) -> None:
        self._loss, self._loss_node = loss, node
        try:
            self.emit("after_loss")
        finally:
            self._loss_node = None  # the graph is theirs, and not to be kept

    def begin_backward(self) -> None:
        """The backward of the batch begins."""
        if self.has_batch and self._backward is None:
            self._backward = "running"
            self.emit("before_backward")

    def end_backward(self) -> None:
        """The gradients of the batch are there."""
        if self.has_batch and self._backward == "running":
            self._backward = "over"
            self.emit("after_backward")
            self.xb, self.pred = (), None  # theirs, and not to be kept for longer

    def begin_step(self, opt: Optimizer) -> None:
        """An optimizer is about to make its step; told again before `end_step`, it does nothing.

        Told before clipping, callbacks read gradients as they are then.
        """
        if self._step_of is opt:
            return
        self.end_step()
        self.opt = opt
        if not self.has_batch or not self.training:
            self.begin_batch(True, ())  # whose forward was not seen
        self.end_backward()
        self._step_of = opt
        self.emit("before_step")

    def end_step(self) -> None:
        """The optimizer has made the step it had begun, or a GradScaler has left it out."""
        if self._step_of is not None:
            self._step_of = None
            self.emit("after_step")

    def end_batch(self) -> None:
        """The batch that is open, if one is, has ended."""
        if self.has_batch:
            self.end_step()
            self._close_level()
            self.train_iter += self.training
            self._forget_batch()

    def epoch(self) -> None:  # type: ignore[override]  # state of other loops, see epoch_index
        """Tells that an epoch has ended, which cannot be seen from outside."""
        self._close_levels()
        self._epoch += 1
        self._n_batches.clear()

    def close_failed(self) -> bool:
        """Whether a callback has failed; then it ends, but not in a backward, which puts its hooks back."""
        if self._error is not None and not in_backward():
            self.close(self._error)
        return self._error is not None

    def close(self, error: BaseException | None = None) -> None:
        """Ends it: hooks come off, results stay readable; a second time does nothing.

        Args:
            error: what has ended the loop; then what is open is cut short.
        """
        if self._entered is None:
            return
        error = error or self._error
        try:
            if error is None:
                self._close_levels()
        finally:
            self._forget_batch()
            self.facts.has_ended = True
            try:
                self._leave(error=error)
            finally:
                self._entered = self._error = None
                self.remove_cbs(list(self.cbs))  # they may follow another loop

    def diagnose(self) -> Verdict:
        """What is wrong with the training that is followed; see `Learner.diagnose`.

        Raises:
            RuntimeError: where nothing is recorded.
        """
        return diagnose_loop(self)

    def __enter__(self) -> Self:
        _ = self.model  # raises where nobody has kept it
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(error)

    # ---- how events follow from that

    def emit(self, event: str) -> None:
        """Calls the callbacks that act at `event`; what they cancel goes on all the same."""
        if self._entered is None or self._error is not None:  # it has ended
            return
        self.seen[event] += 1
        try:
            with outside_transforms():
                super().emit(event)
        except CancelException as cancel:
            self._note(cancel, event)
        except BaseException as error:
            self._error = error  # what they would see from now on is no whole training
            self.close_failed()
            raise

    def _note(self, cancel: CancelException, event: str) -> None:
        is_stop = isinstance(cancel, CancelFitException)
        self.stop_requested |= is_stop
        is_of_step = isinstance(cancel, CancelStepException) and event == "before_step"
        if is_of_step and self._has_no_gradients():
            self.emit("after_cancel_step")  # the optimizer finds nothing to do
        elif type(cancel) not in self._ignored and not (is_stop and self.honors_stop):
            self._ignored.add(type(cancel))
            hint = "; look at .stop_requested in your loop" if is_stop else ""
            warn(
                f"{cancel.raised_in} asks to end the {cancel.level}, and goes unheard, as this loop is not "
                f"ours{hint}",
                stacklevel=3,
            )

    def _has_no_gradients(self) -> bool:
        return all(p.grad is None for group in self.opt.param_groups for p in group["params"])

    def _begin_phase(self, phase: str) -> None:
        if self._levels[-1:] == [phase]:
            return
        while self._levels and self._levels[-1] != "epoch":
            self._close_level()
        if not self._levels:
            self.row = {}
            self._open("epoch")
        self.set_phase(training=phase == "train", dl=None, n_iter=None)
        self._open(phase)

    def _open(self, level: str) -> None:
        self._levels.append(level)
        self.emit(LEVELS[level].before)

    def _close_level(self) -> None:
        self.emit(LEVELS[self._levels.pop()].after)

    def _forget_batch(self) -> None:
        self.xb, self.pred, self._loss, self._backward, self._step_of = (), None, None, None, None
        for hook in self._on_tensors:
            hook.remove()
        self._on_tensors = []

    def _close_levels(self) -> None:
        self.end_batch()
        while self._levels:
            self._close_level()

    def _follow_backward(self, *tensors: Tensor) -> None:
        """Has the first gradient that comes to one of these say that the backward has begun."""
        told = [x for x in tensors if x.requires_grad and not x.is_leaf]
        self._on_tensors += [Hook(x, self._gradient_comes, pre=True) for x in told]

    def _gradient_comes(self, x: Tensor | None, grad: Tensor) -> None:
        if torch.is_grad_enabled():  # create_graph: of a penalty, that is part of the loss
            self.facts.n_penalties += 1
        elif self._backward is None:
            self.begin_backward()
            # when all gradients of this backward are there; DDP's own callback comes between these two
            after_backward(lambda: after_backward(self.end_backward))

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"{type(self).__name__} follows a loop in this process; pickle its callbacks instead")
