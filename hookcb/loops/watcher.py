"""Watch: the events of a training loop, from hooks on its model and optimizers."""

from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from hookcb.core import graph
from hookcb.core.batch import inputs_of, parts
from hookcb.core.callback import Callback
from hookcb.core.torch_private import (
    CALL_NAME,
    as_it_is,
    compiled_call,
    in_backward,
    in_transform,
    is_jit_tracing,
)
from hookcb.diagnosis.failures import describe_failure
from hookcb.gradients.hand_steps import GradientMark, StepByHand, WeightMark
from hookcb.hooks.compiled import CompiledTap
from hookcb.hooks.hook import Hook, detached
from hookcb.hooks.optimizer_steps import StepHook
from hookcb.hooks.own import register
from hookcb.loops.calls import Call, Habits, Now, classify
from hookcb.loops.checks import check_loss
from hookcb.loops.coverage import WatchCoverage
from hookcb.loops.loss_finder import Backward, LossFinder, first_parameter_behind
from hookcb.loops.optimizers import WatchedOptimizers, unwrapped
from hookcb.loops.reporter import LoopReporter
from hookcb.loops.stages import AFTER_BACKWARD, BEFORE_BACKWARD, IN_BACKWARD, IN_STEP, Stage
from hookcb.loops.taps import n_running, stepping_optimizer


class _Step(NamedTuple):
    opt: Optimizer
    has_closure: bool = False


class Watch(LoopReporter):
    """Follows a training loop by hooks on the model and its optimizers; see `watch`, which creates it."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        cbs: Iterable[Callback | type[Callback]],
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise TypeError(f"scaler must be the loop's torch.amp.GradScaler or None, got {scaler!r:.80}")
        self._optimizers = WatchedOptimizers(optimizers)
        self._stepped: set[int] = set()  # ids of the optimizers that made a step in this batch
        self._has_stepped = False  # whether any optimizer has made a step, ever
        self._step: _Step | None = None  # in progress
        self._n_calls = 0  # nested calls of the model in progress
        self._outermost: Call | None = None  # what the outermost of them is
        self._is_paused = False  # whether it is aside in a training, which is off for its length
        self._habits = Habits()
        self._left_preds: list[Hook] = []  # on the output of a batch that was left before calls aside
        self._is_left = False  # whether the last training batch ended without a step
        self._is_eval_with_grad = False  # whether the last call in eval mode had gradients on
        self._is_scaler_given = scaler is not None
        self._is_from_others = False  # whether this batch was computed from parameters of other optimizers
        self._mark: WeightMark | None = None  # the weights after the backward, until they are stepped
        self._by_hand: StepByHand | None = None  # set once weights have moved without an optimizer
        self._left_gradient = GradientMark()
        self._hooks: list[Any] = []
        self._part_hooks: list[Hook] = []  # until the model itself is called
        self._root_hooks: list[Any] = []  # on what a backward is called on, where no call is seen
        self._compiled: CompiledTap | None = None
        self._finder: LossFinder | None = None
        super().__init__(model, list(cbs), optimizers[0] if optimizers else None, scaler)
        self._closing = finalize(model, _close, ref(self))

    def _held(self) -> dict[str, str]:
        names = sorted(type(opt).__name__ for opt in self._optimizers)
        return super()._held() | ({"opt": f"[{', '.join(names)}]"} if len(names) > 1 else {})

    def _listen(self) -> None:
        # before hooks of callbacks: those that read gradients at a step must know that it has begun
        model, hooks = self.model, self._hooks
        self._finder = self._make_finder()
        hooks.append(StepHook(self._step_begins))
        hooks.append(StepHook(self._step_ends, after=True))
        hooks.append(_hook(model, self._call_begins, pre=True, with_kwargs=True))
        hooks.append(_hook(model, self._call_returns))
        hooks.append(_hook(model, self._call_ends, always_call=True))
        self._tap_compiled(model)
        # a model that is compiled in place is called as a whole, and its graph would be checked for them
        for part in _parts(model) if self._compiled is None else ():
            self._part_hooks.append(_hook(part, self._part_begins, pre=True, with_kwargs=True))
            self._part_hooks.append(_hook(part, self._part_returns))

    def _make_finder(self) -> LossFinder | None:
        """Finds losses that the loop does not report; None if it reports all."""
        return LossFinder(self._note_failure, self._backward_begins)

    def _note_failure(self, error: Exception) -> None:
        self.facts.failure = describe_failure("the search for losses", error)

    def _tap_compiled(self, model: nn.Module) -> None:
        if self._compiled is None and compiled_call(model) is not None:
            self._compiled = CompiledTap(
                model,
                lambda args, kwargs: self._call_begins(self.model, args, kwargs),
                lambda output: self._call_ends(self.model, (), output),
                lambda output: self._call_returns(self.model, (), output),
            )

    def _unhook(self) -> None:
        for hooks in (self._hooks, self._part_hooks, self._left_preds, self._root_hooks):
            _remove(hooks)
        for seen in (self._compiled, self._finder):
            if seen is not None:
                seen.remove()

    # ---- the model

    def _call_begins(self, m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_elsewhere() or self.close_failed():
            return
        # counted anew, as a call that Ctrl-C has ended was not counted down
        self._n_calls = n_running(CALL_NAME, m) if self._n_calls else 1
        if self._n_calls > 1:
            return
        _remove(self._part_hooks)
        self._end_aside()
        self._outermost = self._classify(m)
        if self._outermost is Call.ASIDE:
            self.facts.n_without_grad += m.training
            self.facts.n_eval_inside += not m.training
            self._habits.looks_aside |= not m.training
            if not self.training:
                self.end_batch()
            # not in training for its length, so that callbacks ignore it
            self._is_paused, self.training = self.training, False
        elif self._outermost is not Call.RECOMPUTE:
            self.facts.n_calls += 1
            self._begin_or_continue(m, inputs_of(args, kwargs), self._outermost)

    def _classify(self, m: nn.Module) -> Call:
        if not self._has_stepped and (opt := stepping_optimizer()) is not None:
            self._has_stepped = self._optimizers.has_params(opt, self.model)  # its step began earlier
            if self._has_stepped and self._optimizers.include(opt, self.model):
                self._optimizers.add(opt, self.model)
                self._begin_closure(opt)
        return classify(self._now(m), self._habits)

    def _now(self, m: nn.Module) -> Now:
        step: Literal["closure", "lbfgs"] | None = None
        if self._step is not None and self._step.has_closure and self._is_stepping():
            step = "lbfgs" if isinstance(self._step.opt, LBFGS) else "closure"
        return Now(
            trains=torch.is_grad_enabled() and (m.training or self.facts.eval_trains),
            in_train_mode=m.training,
            in_backward=in_backward(),
            is_open=self.has_batch and self.training,
            stage=self.stage,
            is_stepped=bool(self._stepped),
            has_optimizer=len(self._optimizers) > 0,
            step=step,
        )

    def _end_aside(self) -> None:
        if self._is_paused:
            self.training, self._is_paused = True, False

    def _begin_or_continue(self, m: nn.Module, xb: Any, call: Call) -> None:
        """Begins a batch for a call, unless it belongs to the one that is open."""
        trains = call is not Call.VALIDATE
        leaf = first_parameter_behind(xb) if trains else None
        self._is_eval_with_grad = torch.is_grad_enabled() and not m.training
        if call is not Call.CONTINUE:
            self.facts.n_cut += not trains and self.is_waiting
            left = self.pred if trains and self.is_waiting else None
            self.begin_batch(trains, detached(xb) if in_transform() else xb)
            outputs = [
                x for _, x in parts(left) if isinstance(x, Tensor) and x.requires_grad and not x.is_leaf
            ]
            self._left_preds = [Hook(x, self._left_goes_on, pre=True) for x in outputs]
        if leaf is not None and not self._optimizers.train(leaf):
            self._is_from_others |= all(leaf is not p for p in self.model.parameters())

    def _left_goes_on(self, x: Tensor | None, grad: Tensor) -> None:
        """Learns from a gradient that a batch was not over when it was left."""
        self._habits.spans_asides = True
        self._habits.left_in.discard(Stage.FORWARD)

    @property
    def is_waiting(self) -> bool:
        """Whether a training batch is open and its backward has not begun."""
        return self.training and self.stage in BEFORE_BACKWARD and not self._stepped

    def _call_returns(self, m: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self.in_loop_thread:
            return
        is_followed = self._outermost not in (Call.ASIDE, Call.RECOMPUTE)
        if self._n_calls == 1 and is_followed and self.has_batch:
            self.report_pred(detached(output) if in_transform() else output)

    def _call_ends(self, m: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self.in_loop_thread:
            return
        self._n_calls = max(0, self._n_calls - 1)
        if not self._n_calls:
            self._end_aside()

    # ---- a model that is never called as a whole, only its parts, as in `net.actor(x)`

    def _part_begins(self, m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._n_calls or not self.in_loop_thread or self.close_failed():
            return
        if m.training and (call := self._classify(m)) in (Call.TRAIN, Call.CONTINUE):
            self.facts.n_part_calls += 1
            self._begin_or_continue(m, inputs_of(args, kwargs), call)

    def _part_returns(self, m: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._n_calls or not self.in_loop_thread:
            return
        if torch.is_grad_enabled() and self.is_waiting:
            self.report_pred(detached(output) if in_transform() else output)

    # ---- reports

    def begin_batch(self, training: bool = True, xb: Any = ()) -> None:
        """See `LoopReporter`; no optimizer has stepped in a new batch."""
        if not self.fitting:
            return
        self.end_batch()
        self._stepped.clear()
        self._habits.looks_aside = False
        self._is_left &= not training
        _remove(self._left_preds)
        super().begin_batch(training, xb)
        self._is_from_others = False

    def begin_backward(self) -> None:
        """See `LoopReporter`; looks for a loss that was not reported."""
        if self.stage in BEFORE_BACKWARD:
            self._look_for_loss()
        super().begin_backward()

    def _backward_begins(self, backward: Backward) -> None:
        """Follows a backward where no call of the model is seen, as where its caller is compiled."""
        _remove(self._root_hooks)
        if self.facts.n_calls or self.facts.n_part_calls or self.close_failed():
            return
        params = {id(p) for p in self.model.parameters()}
        roots = [x for x in backward.roots if isinstance(x, Tensor) and not x.is_leaf]
        if any(id(leaf) in params for leaf in graph.leaves(graph.roots(roots))):
            self._root_hooks = [register(x.register_hook, self._gradient_arrives_uncalled) for x in roots]

    @as_it_is
    def _gradient_arrives_uncalled(self, grad: Tensor) -> None:
        if not torch.is_grad_enabled() and self.stage not in IN_BACKWARD:
            self.begin_batch()
        self._gradient_arrives(grad)

    def _look_for_loss(self) -> None:
        """Takes the loss of the backward that begins, if it trains the model and is not reported."""
        backward = None if self._finder is None else self._finder.running
        if backward is not None and not self._is_scaler_given:
            self.scaler = backward.scaler
        if self.loss is not None:
            return
        found = backward.loss() if backward and backward.trains(self.model.parameters()) else None
        if found is None or self._is_from_others:
            self.facts.n_losses_unfound += 1
            self.facts.n_losses_of_others += self._is_from_others
            self.facts.n_given += self._is_from_others
        else:
            self.facts.n_losses_found += 1
            self._set_loss(found.value, found.node)

    def end_backward(self) -> None:
        """See `LoopReporter`; a loop without an optimizer may make its own step from now on."""
        if not self.fitting:
            return
        is_first = self.stage in IN_BACKWARD
        super().end_backward()
        if (model := self._model()) is not None:
            self._left_gradient.note(model)
        if is_first and not self._has_stepped and not self.facts.has_other_optimizer:
            self._mark = WeightMark(self.model)
            if self._by_hand is not None:
                super().begin_step(self._by_hand)

    def end_batch(self) -> None:
        """See `LoopReporter`; if weights have moved since the backward, the loop has made its own step."""
        mark, self._mark = self._mark, None
        if mark is not None and not self._has_stepped and self._model() is not None:
            self._end_step_by_hand(mark.has_moved())
        if self.training and not self._stepped and self.stage in (Stage.FORWARD, Stage.GRADIENTS):
            self._habits.left_in.add(self.stage)
            self._is_left = True
        super().end_batch()

    def _end_step_by_hand(self, has_moved: bool) -> None:
        self.facts.n_moved_by_hand += has_moved
        if self.stage not in IN_STEP and has_moved:
            self._by_hand = StepByHand(p for p in self.model.parameters() if p.requires_grad)
        elif self.stage in IN_STEP and not has_moved:
            self.emit("after_cancel_step")  # the next batch adds to its gradients

    def report_loss(self, loss: Tensor) -> Tensor:
        """See `LoopReporter`; if no call was seen, a batch begins with its loss."""
        check_loss(loss)
        if not self.fitting:
            return loss
        if not self.facts.n_calls and not (loss.requires_grad and self.is_waiting):
            self.begin_batch(loss.requires_grad, ())  # only parts of the model are called
        elif self.training and not loss.requires_grad:  # of a call without gradients
            self.facts.n_losses_outside += 1
            return loss
        return super().report_loss(loss)

    def begin_step(self, opt: Optimizer) -> None:
        """See `LoopReporter`; a loop may call it before it clips gradients, to have them read unclipped."""
        if not self.fitting:
            return super().begin_step(opt)  # which checks it
        self.facts.reports_steps |= self._step is None
        self._has_stepped = True
        if self.stage in IN_STEP and self.opt is self._by_hand:
            self.opt = unwrapped(opt)  # the step that has begun is an optimizer's after all
        super().begin_step(unwrapped(opt))

    # ---- the optimizers

    def _step_begins(self, opt: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._is_watched_step(opt) or (not self._is_step_of(opt) and self._is_stepping()):
            return None
        self._has_stepped = True
        self._step = _Step(opt)
        has_closure = any(map(callable, (*args, *kwargs.values())))
        has_gradients = self._stepped or self.stage in AFTER_BACKWARD
        if id(opt) in self._stepped or (has_closure and has_gradients):
            self.end_batch()
        if has_closure:  # it calls the model inside the step
            self._begin_closure(opt)
            return tuple(self._reporting_step(x, opt) for x in args), {
                name: self._reporting_step(x, opt) for name, x in kwargs.items()
            }
        may_train = not self.training and self._is_eval_with_grad and not self._is_left
        self.facts.eval_trains |= self.has_batch and may_train
        if not (self.has_batch and (self.training or may_train)):
            self.facts.n_steps_alone += 1
            self._habits.left_in.discard(Stage.GRADIENTS)  # the batch that was left is stepped now
        is_scaled = self.scaler is not None and self.scaler.is_enabled()  # it writes to gradients, too
        self.facts.n_clipped += not is_scaled and self._left_gradient.has_changed()
        self.begin_step(opt)
        return None

    def _begin_closure(self, opt: Optimizer) -> None:
        """Notes that a step is in progress that calls the model."""
        self._step = _Step(opt, has_closure=True)
        if isinstance(opt, LBFGS):
            self.facts.n_closures += 1
            self.opt = opt  # its step is not reported

    def _reporting_step(self, x: Any, opt: Optimizer) -> Any:
        """Wraps the closure of a step so that it reports when gradients are ready; not for LBFGS."""
        if not callable(x) or isinstance(opt, LBFGS):
            return x

        def closure(*args: Any, **kwargs: Any) -> Any:
            loss = x(*args, **kwargs)
            if self._is_step_of(opt):
                self.begin_step(opt)
            return loss

        return closure

    def _step_ends(self, opt: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.in_loop_thread or not self._is_step_of(opt):
            return
        self._step = None
        self.end_step()
        self._stepped.add(id(opt))
        if self._optimizers.are_complete and len(self._stepped) >= len(self._optimizers):
            self.end_batch()
        self._tap_compiled(self.model)  # it may have been compiled since its last step

    def _is_stepping(self) -> bool:
        """Whether an optimizer's step is in progress, and has not raised."""
        return self._step is not None and n_running("wrapper", self._step.opt) > 0

    def _is_step_of(self, opt: Optimizer) -> bool:
        return self._step is not None and self._step.opt is opt

    def _is_watched_step(self, opt: Optimizer) -> bool:
        if (model := self._model()) is None or not self._optimizers.include(opt, model):
            return False
        if self._is_elsewhere() or self.close_failed():
            return False
        self._optimizers.add(opt, model)
        return True

    @property
    def is_calling(self) -> bool:
        """Whether the model is being called now; a batch usually begins in its call."""
        return self._n_calls > 0

    def _is_elsewhere(self) -> bool:
        self.facts.n_elsewhere += not (self.in_loop_thread or is_jit_tracing())
        return not self.in_loop_thread

    # ---- the end

    def close(self, error: BaseException | None = None) -> None:
        """Removes all hooks; see `LoopReporter`."""
        self._unhook()
        super().close(error)
        self._by_hand = self._step = self._mark = None  # they hold the weights

    @property
    def coverage(self) -> WatchCoverage:
        """Events seen so far, and those that were not, with the reason."""
        return WatchCoverage.of(self.seen, self.facts, self.epoch, len(self._optimizers))


def _remove(hooks: list[Any]) -> None:
    while hooks:
        hooks.pop().remove()


def _nothing(m: nn.Module, output: Any) -> None:
    """Done by a hook that does nothing."""


def _hook(m: nn.Module, function: Any, **options: Any) -> Hook:
    """A hook of which nothing is compiled into the graph of its module, as it does nothing there."""
    hook = Hook(m, function, detach=False, **options)
    hook.traced = _nothing
    return hook


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules in a model that can be called: its children, or those inside its containers."""
    for child in model.children():
        if isinstance(child, torch.jit.ScriptModule):  # it calls no hooks
            continue
        if type(child).forward is nn.Module.forward:  # a ModuleList or ModuleDict has no forward
            yield from _parts(child)
        else:
            yield child


def _close(watch: "ref[Watch]") -> None:
    if (open_watch := watch()) is not None:
        open_watch.close()
