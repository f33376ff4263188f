"""watch: callbacks on any training loop, which stays as it is."""

import warnings
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, finalize, ref

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from hookcb.core.callback import Callback
from hookcb.core.callback_list import Callbacks
from hookcb.core.torch_private import CALL_NAME, compiled_call, in_backward, in_transform, is_jit_tracing
from hookcb.gradients.hand_steps import StepByHand, WeightMark
from hookcb.hooks.compiled import CompiledTap
from hookcb.hooks.hook import Hook, detached
from hookcb.hooks.optimizer_steps import StepHook, params_of
from hookcb.loops.coverage import WatchCoverage
from hookcb.loops.external import ExternalLoop
from hookcb.loops.loss_found import find_loss, first_parameter_behind, scaler_at_work
from hookcb.loops.stages import AFTER_BACKWARD, BEFORE_BACKWARD, IN_BACKWARD, IN_STEP
from hookcb.loops.taps import n_running, optimizer_at_work

Optimizers = Optimizer | Iterable[Optimizer] | None


def watch(
    model: nn.Module,
    optimizer: "Optimizers | Callbacks" = None,
    *more: Callbacks,
    cbs: Callbacks = (),
    scaler: torch.amp.GradScaler | None = None,
) -> "Watch":
    """Has callbacks follow a training loop that stays as it is, until `close()` or the end of a `with` block.

    Events come from hooks on the model and on the steps of its optimizers:

    - a batch begins where the model is called in train mode with gradients on, after the last one's backward
      or step: several calls before a backward are of one batch, backwards without a step accumulate; until
      the model is called itself, calls of its parts count, as of `net.actor(x)`;
    - a call in eval mode is a batch of validation; one in train mode without gradients is left out;
    - the backward is seen as gradients come to what the model returned, or to `w.report_loss(loss)`;
    - the loss is what backward is called on, the sum of several, before a GradScaler has scaled it; it is
      found when the backward begins, and need not be told;
    - a batch ends when all optimizers have made a step, else when the next one begins; if weights move
      without an optimizer, the step begins as the backward ends, and ends with the batch.

    It follows the thread that it was made in. Several watches may follow one model, each with callbacks of
    its own. `w.coverage` has what could not be seen or was left out, and why.

    Args:
        model: the model as the loop calls it: what torch.compile or DistributedDataParallel gave.
        optimizer: one or several; None follows all that have parameters of the model.
        *more: callbacks, one by one or in lists; they become attributes, `w.activation_stats`. A cancel of
            theirs is ignored, an error of theirs reaches the loop and ends the watch. Those that take part
            in the training, such as `MixedPrecision`, are refused.
        cbs: callbacks too, as a `Learner` takes them.
        scaler: the loop's GradScaler; callbacks then know of its scale, which gradients of outputs and the
            loss need. By default it is found when it makes its first step.

    Raises:
        TypeError, ValueError, LookupError: for what cannot be watched, before anything is hooked.

    >>> import torch
    >>> from hookcb import ActivationStats, watch
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    >>> opt = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with watch(model, opt, ActivationStats()) as w:
    ...     for x in torch.randn(3, 8, 2):
    ...         model(x).square().mean().backward()
    ...         opt.step()
    ...         opt.zero_grad()
    >>> len(w.activation_stats.stats), w.activation_stats.names
    (3, ['0', '2'])
    """
    found, callbacks = _as_list(optimizer), flat(*more, cbs)
    if found and all(map(_is_callback, found)):
        found, callbacks = [], [*found, *callbacks]
    optimizers = _checked_optimizers(optimizer, found)
    is_others = isinstance(model, nn.Module) and _is_of_others(optimizers, model)
    if is_others:
        warnings.warn(
            f"no parameter of {type(model).__name__} is in the optimizer that was given, so none of its "
            "steps will be seen; give the one that trains it, or None to find it",
            stacklevel=2,
        )
    w = Watch(model, optimizers, callbacks, scaler)
    w.facts.has_other_optimizer = is_others
    return w


def flat(*given: Callbacks) -> list[Any]:
    """Callbacks that are given one by one, in lists, or both, as one list."""
    return [cb for cbs in given for cb in _as_list(cbs)]


def _as_list(given: Any) -> list[Any]:
    if given is None:
        return []
    is_one = isinstance(given, Optimizer | Callback | type | str) or not isinstance(given, Iterable)
    return [given] if is_one else list(given)


def _is_callback(x: Any) -> bool:
    return isinstance(x, Callback) or (isinstance(x, type) and issubclass(x, Callback))


def _is_of_others(optimizers: list[Optimizer], model: nn.Module) -> bool:
    """Whether optimizers are given and the model has parameters, and they share none."""
    trained = {id(p) for opt in optimizers for group in opt.param_groups for p in group["params"]}
    params = {id(p) for p in model.parameters()}
    return bool(optimizers and params) and trained.isdisjoint(params)


def _checked_optimizers(optimizer: Any, found: list[Any]) -> list[Optimizer]:
    if not all(isinstance(opt, Optimizer) for opt in found):
        raise TypeError(
            f"optimizer is {optimizer!r:.80}; give a torch optimizer, several, or None to find them"
        )
    return [_unwrapped(opt) for opt in found]


def _unwrapped(opt: Optimizer) -> Optimizer:
    """The optimizer whose step is called in the end; Accelerate wraps it."""
    while isinstance(inner := getattr(opt, "optimizer", None), Optimizer):
        opt = inner
    return opt


class Watch(ExternalLoop):
    """Follows a training loop by hooks on the model and its optimizers; see `watch`, which makes it."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        cbs: Iterable[Callback | type[Callback]],
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise TypeError(f"scaler is {scaler!r:.80}; give the loop's torch.amp.GradScaler, or None")
        self._is_given = bool(optimizers)
        self._optimizers: WeakSet[Optimizer] = WeakSet(optimizers)  # that have made, or will make, steps
        # of those that were not given the number of groups, and whether they have parameters of the model
        self._asked: WeakKeyDictionary[Optimizer, tuple[int, bool]] = WeakKeyDictionary()
        self._covers_all = self._is_given  # whether no other optimizer is to be expected
        self._stepped: set[int] = set()  # ids of those that made a step in this batch
        self._has_stepped = False  # whether any has, ever
        self._stepping: Optimizer | None = None
        self._n_calls = 0  # of the model, inside one another
        self._is_followed = self._is_aside = self._has_closure = False
        self._is_of_others = False  # whether this batch came from parameters of other optimizers
        self._mark: WeightMark | None = None  # where weights were after the backward, until they are stepped
        self._by_hand: StepByHand | None = None  # once weights have moved without an optimizer
        self._hooks: list[Any] = []
        self._part_hooks: list[Hook] = []  # until the model is called itself
        self._compiled: CompiledTap | None = None
        super().__init__(model, list(cbs), optimizers[0] if optimizers else None, scaler)
        self._closing = finalize(model, _close, ref(self))

    def _listen(self) -> None:
        # ahead of hooks of callbacks: who reads gradients at a step has to hear of the step before
        model, hooks = self.model, self._hooks
        hooks.append(StepHook(self._step_begins))
        hooks.append(StepHook(self._step_ends, after=True))
        hooks.append(Hook(model, self._call_begins, detach=False, pre=True, with_kwargs=True))
        hooks.append(Hook(model, self._call_gives, detach=False))
        hooks.append(Hook(model, self._call_ends, detach=False, always_call=True))
        for part in _parts(model):
            self._part_hooks.append(Hook(part, self._part_begins, detach=False, pre=True, with_kwargs=True))
            self._part_hooks.append(Hook(part, self._part_gives, detach=False))
        self._tap_compiled(model)

    def _tap_compiled(self, model: nn.Module) -> None:
        if self._compiled is None and compiled_call(model) is not None:
            self._compiled = CompiledTap(
                model,
                lambda args, kwargs: self._call_begins(self.model, args, kwargs),
                lambda output: self._call_ends(self.model, (), output),
                lambda output: self._call_gives(self.model, (), output),
            )

    def _unhook(self) -> None:
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()
        self._leave_parts()
        if self._compiled is not None:
            self._compiled.remove()

    def _leave_parts(self) -> None:
        hooks, self._part_hooks = self._part_hooks, []
        for hook in hooks:
            hook.remove()

    # ---- the model

    def _call_begins(self, m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or self._is_elsewhere() or self.close_failed():
            return
        # one that Ctrl-C has ended was not counted down
        self._n_calls = n_running(CALL_NAME, m) if self._n_calls else 1
        if self._n_calls > 1:
            return
        if self._compiled is None:  # in a graph they do nothing, and without them it would be compiled anew
            self._leave_parts()
        self._leave_aside()
        self._is_followed = not self._is_recomputing() and (torch.is_grad_enabled() or not m.training)
        if self._is_followed:
            self._follow(m, args or kwargs)
        elif not torch.is_grad_enabled():
            self.facts.n_without_grad += 1
            if not self.training:
                self.end_batch()
            self._is_aside, self.training = self.training, False  # callbacks look at their own phase only

    def _leave_aside(self) -> None:
        if self._is_aside:
            self.training, self._is_aside = True, False

    def _follow(self, m: nn.Module, xb: Any) -> None:
        """A call begins that is a batch, or belongs to the one that is open."""
        self.facts.n_calls += 1
        self._begin_or_go_on(m, xb)

    def _begin_or_go_on(self, m: nn.Module, xb: Any) -> None:
        if not self._has_stepped and (opt := optimizer_at_work()) is not None:
            self._has_stepped = self._has_our_params(opt)  # its step began before we did
        training = torch.is_grad_enabled() and (m.training or self.facts.eval_trains)
        leaf = first_parameter_behind(xb) if training else None
        if not (training and self._goes_on()):
            self.facts.n_cut += not training and self._is_waiting()
            self.begin_batch(training, detached(xb) if in_transform() else xb)
        self._is_of_others |= leaf is not None and not self._is_own(leaf)

    def _is_own(self, leaf: Tensor) -> bool:
        """Whether a parameter is the model's, or trained with it."""
        trained = (p for opt in self._optimizers for group in opt.param_groups for p in group["params"])
        return any(p is leaf for p in chain(self.model.parameters(), trained))

    def _is_recomputing(self) -> bool:
        """Whether a backward is at work, and activation checkpointing runs the forward again."""
        return in_backward() and self._is_open() and self.stage not in AFTER_BACKWARD

    def _is_open(self) -> bool:
        return self.has_batch and self.training

    def _is_waiting(self) -> bool:
        """Whether a training batch is open whose backward has yet to come."""
        return self.training and self.stage in BEFORE_BACKWARD and not self._stepped

    def _goes_on(self) -> bool:
        """Whether this call belongs to the batch that is open."""
        return self._is_waiting() or (self._is_open() and self._in_closure())

    def _call_gives(self, m: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling() or not self.in_loop_thread:
            return
        if self._n_calls == 1 and self._is_followed and self.has_batch:
            self.report_pred(detached(output) if in_transform() else output)

    def _call_ends(self, m: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling() or not self.in_loop_thread:
            return
        self._n_calls = max(0, self._n_calls - 1)
        if not self._n_calls:
            self._leave_aside()

    # ---- a model that is never called itself, but in parts, as `net.actor(x)`

    def _part_begins(self, m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or self._n_calls or not self.in_loop_thread or self.close_failed():
            return
        if torch.is_grad_enabled() and m.training and not self._is_recomputing():
            self.facts.n_part_calls += 1
            self._begin_or_go_on(m, args or kwargs)

    def _part_gives(self, m: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        is_ours = not torch.compiler.is_compiling() and not self._n_calls and self.in_loop_thread
        if is_ours and torch.is_grad_enabled() and self._is_waiting():
            self.report_pred(detached(output) if in_transform() else output)

    # ---- what the loop may tell

    def begin_batch(self, training: bool = True, xb: Any = ()) -> None:
        """See `ExternalLoop`; a new batch has had no step."""
        self._stepped.clear()
        super().begin_batch(training, xb)
        self._is_of_others = False

    def begin_backward(self) -> None:
        """See `ExternalLoop`; a loss that was not told is looked for."""
        if self.stage in BEFORE_BACKWARD and self.loss is None:
            self.look_for_loss()
        super().begin_backward()

    def look_for_loss(self) -> None:
        """A backward begins whose loss was not told: takes it, if it is the model's own and can be found."""
        found = find_loss(self._thread, self.model.parameters())
        if found is not None and found.may_be_scaled:
            if self.scaler is not None and self.scaler.is_enabled():
                found = found.unscaled(self.scaler)
            elif not self._has_stepped and self._by_hand is None:
                found = None  # the first step tells whether a GradScaler is at work
        if found is None or self._is_of_others:
            self.facts.n_losses_unfound += 1
            self.facts.n_losses_of_others += self._is_of_others
        else:
            self.facts.n_losses_found += 1
            self._set_loss(found.value, found.node)

    def end_backward(self) -> None:
        """See `ExternalLoop`; in a loop that has made no step of an optimizer, its own may come now."""
        is_first = self.stage in IN_BACKWARD
        super().end_backward()
        if is_first and not self._has_stepped and not self.facts.has_other_optimizer:
            self._mark = WeightMark(self.model)
            if self._by_hand is not None:
                super().begin_step(self._by_hand)

    def end_batch(self) -> None:
        """See `ExternalLoop`; if weights have moved since the backward, the loop has made its step."""
        mark, self._mark = self._mark, None
        if mark is not None and not self._has_stepped and self._model() is not None:
            self._end_step_by_hand(mark.has_moved())
        super().end_batch()

    def _end_step_by_hand(self, has_moved: bool) -> None:
        self.facts.n_moved_by_hand += has_moved
        if self.stage not in IN_STEP and has_moved:
            self._by_hand = StepByHand(p for p in self.model.parameters() if p.requires_grad)
        elif self.stage in IN_STEP and not has_moved:
            self.emit("after_cancel_step")  # its gradients go into the next one

    def report_loss(self, loss: Tensor) -> Tensor:
        """Tells the loss of the batch, see `ExternalLoop`; where no call was seen, a batch begins with it."""
        if isinstance(loss, Tensor):
            if not self.facts.n_calls and not (loss.requires_grad and self._is_waiting()):
                self.begin_batch(loss.requires_grad, ())  # only parts of the model are called
            elif self.training and not loss.requires_grad:  # of a call aside
                self.facts.n_losses_outside += 1
                return loss
        return super().report_loss(loss)

    def begin_step(self, opt: Optimizer) -> None:
        """See `ExternalLoop`; a loop that clips gradients may call it before, for what they are then."""
        self.facts.tells_steps |= self._stepping is None
        self._has_stepped = True
        if self.stage in IN_STEP and self.opt is self._by_hand:
            self.opt = _unwrapped(opt)  # an optimizer makes the step that has begun
        super().begin_step(_unwrapped(opt))

    # ---- the optimizers

    def _step_begins(self, opt: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._is_ours(opt) or (self._stepping is not opt and self._is_stepping()):
            return None
        if not self._has_stepped:
            self._has_stepped, self.scaler = True, self.scaler or scaler_at_work()
        self._stepping = opt
        self._has_closure = any(map(callable, (*args, *kwargs.values())))
        has_gradients = self._stepped or self.stage in AFTER_BACKWARD
        if id(opt) in self._stepped or (self._has_closure and has_gradients):
            self.end_batch()
        if self._has_closure:  # it calls the model inside the step
            self.facts.n_closures += isinstance(opt, LBFGS)
            return tuple(self._telling(x, opt) for x in args), {
                name: self._telling(x, opt) for name, x in kwargs.items()
            }
        self.facts.eval_trains |= self.has_batch and not self.training and torch.is_grad_enabled()
        self.facts.n_steps_alone += not self.has_batch
        self.begin_step(opt)
        return None

    def _telling(self, x: Any, opt: Optimizer) -> Any:
        """The closure of a step, which then tells that gradients are there; of LBFGS as it is."""
        if not callable(x) or isinstance(opt, LBFGS):
            return x

        def closure(*args: Any, **kwargs: Any) -> Any:
            loss = x(*args, **kwargs)
            if self._stepping is opt:
                self.begin_step(opt)
            return loss

        return closure

    def _step_ends(self, opt: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.in_loop_thread or self._stepping is not opt:
            return
        self._stepping = None
        self.end_step()
        self._stepped.add(id(opt))
        if self._covers_all and len(self._stepped) >= len(self._optimizers):
            self.end_batch()
        self._tap_compiled(self.model)  # it may have been compiled since

    def _is_stepping(self) -> bool:
        """Whether an optimizer is in the middle of its step, which has not raised."""
        return self._stepping is not None and n_running("wrapper", self._stepping) > 0

    def _in_closure(self) -> bool:
        return self._has_closure and self._is_stepping()

    def _is_ours(self, opt: Optimizer) -> bool:
        if not (opt in self._optimizers or (not self._is_given and self._has_our_params(opt))):
            return False
        if self._is_elsewhere() or self.close_failed():
            return False
        if opt not in self._optimizers:
            self._take_in(opt)
        return True

    def _has_our_params(self, opt: Optimizer) -> bool:
        """Whether it has parameters of the model; asked in any thread, so it changes nothing else."""
        n_groups, has_ours = self._asked.get(opt, (-1, False))
        if n_groups != len(opt.param_groups):
            has_ours = not self._trained.isdisjoint(params_of(opt))
            self._asked[opt] = len(opt.param_groups), has_ours
        return has_ours

    def _take_in(self, opt: Optimizer) -> None:
        self._optimizers.add(opt)
        self._covers_all = self._trained <= set().union(*map(params_of, self._optimizers))

    @property
    def _trained(self) -> set[int]:
        return {id(p) for p in self.model.parameters() if p.requires_grad}

    @property
    def is_calling(self) -> bool:
        """Whether the model is being called now, as it is when a batch begins."""
        return self._n_calls > 0

    def _is_elsewhere(self) -> bool:
        self.facts.n_elsewhere += not (self.in_loop_thread or is_jit_tracing())
        return not self.in_loop_thread

    # ---- the end

    def close(self, error: BaseException | None = None) -> None:
        """Takes all hooks off; results stay readable. A second time does nothing.

        Args:
            error: what has ended the loop; then what is open is cut short.
        """
        self._unhook()
        super().close(error)

    @property
    def coverage(self) -> WatchCoverage:
        """What could be seen so far, and what not, with the reason."""
        return WatchCoverage.of(self.seen, self.facts, self.epoch, len(self._optimizers))


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules in a model that can be called: its children, of containers those inside."""
    for child in model.children():
        if type(child).forward is nn.Module.forward:  # ModuleList and ModuleDict have none of their own
            yield from _parts(child)
        elif not isinstance(child, torch.jit.ScriptModule):  # which calls no hooks
            yield child


def _close(watch: "ref[Watch]") -> None:
    if (found := watch()) is not None:
        found.close()
