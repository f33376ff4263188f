"""StepWatch: whether and when optimizers make a step, and on which parameters."""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.nn.parameter import UninitializedBuffer
from torch.optim import Optimizer

from hookcb.core.optim import detached_scalar
from hookcb.core.threads import in_loop_thread, this_thread
from hookcb.core.torch_private import buffers_of, scaler_stage
from hookcb.gradients.stats import Number
from hookcb.hooks.modules import device_of, named_modules
from hookcb.hooks.optimizer_steps import StepHook, params_of
from hookcb.hooks.params import Param

RUNNING = ("running_mean", "running_var")


class StepWatch:
    """Calls a function when an optimizer begins the step in progress, with gradients as it gets them.

    It hooks all optimizers, as several may make a step. A step counts as made when the first optimizer with
    parameters of the model begins it, in the thread that created this. A GradScaler that skips a step calls
    no optimizer.

    Args:
        model: the model.
        on_step: called once for each step, after all clipping; a second time if an optimizer makes the step
            that was taken for one without.

    Attributes:
        take_error: called with an error that then does not reach the optimizer's step, if any.
    """

    take_error: Callable[[Exception], object] | None = None

    def __init__(self, model: nn.Module, on_step: Callable[[], object]) -> None:
        self._model, self._on_step, self._thread = ref(model), on_step, this_thread()
        self._ids: set[int] = set()  # of the parameters of all noted optimizers
        self._noted: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # with its number of parameters
        self._others: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # that train another model
        self._is_open = self._is_made = self._is_by_hand = False
        self._has_closure = False  # whether the last call of an optimizer was given one
        self._found_inf: Tensor | None = None
        self._hook = StepHook(self._at_step)  # last, as a step in another thread may call it at once

    def note(self, opt: Optimizer) -> bool:
        """Notes the parameters of an optimizer; True if they have changed."""
        n = _n_params(opt)
        if self._noted.get(opt) == n:
            return False
        self._noted[opt] = n
        self._ids |= params_of(opt)
        return True

    def begin(self, opt: Optimizer) -> bool:
        """Begins a step; True if the optimizer's parameters have changed."""
        self._is_open, self._found_inf = True, None
        # in a closure that the optimizer has called, it gets these gradients, and others when it calls again
        self._is_made, self._is_by_hand = self._has_closure, False
        return self.note(opt)

    def _at_step(self, opt: Optimizer, args: Any, kwargs: Any) -> None:
        self._has_closure = not self._is_open and any(map(callable, (*args, *kwargs.values())))
        try:
            self._make(opt)
        except Exception as error:
            if self.take_error is None:
                raise
            self.take_error(error)

    def _make(self, opt: Optimizer) -> None:
        """Notes that an optimizer makes the step, if it is due."""
        is_due = self._is_open and (self._is_by_hand or not self._is_made)
        if is_due and in_loop_thread(self._thread) and self._is_ours(opt):
            # a fused optimizer reads from what the scaler has set whether to make the step
            found_inf = getattr(opt, "found_inf", None)
            self._found_inf = found_inf.clone() if isinstance(found_inf, Tensor) else None
            self._is_made, self._is_by_hand = True, False
            self._on_step()

    def make_by_hand(self) -> None:
        """Notes that the step is made with the current gradients, unless an optimizer begins it later."""
        self._is_made = self._is_by_hand = True
        self._on_step()

    def _is_ours(self, opt: Optimizer) -> bool:
        """Whether it has parameters of the model; notes it if it is new."""
        if opt in self._noted:
            return True
        if self._others.get(opt) == _n_params(opt):
            return False
        model = self._model()
        ours = self._ids.union(map(id, model.parameters() if model is not None else ()))
        if ours.isdisjoint(params_of(opt)):
            self._others[opt] = _n_params(opt)
            return False
        return self.note(opt)

    def end(self, is_cancelled: bool, has_scaler: bool) -> Number:
        """Ends the step; 1.0 if it was not made, as a tensor if only the device knows."""
        self._is_open = self._has_closure = False
        if not (self._is_made or has_scaler or is_cancelled):
            self._on_step()  # made by hand, or by an optimizer without hooks
            return 0.0
        if is_cancelled:  # under watch, the optimizer is called all the same
            return 1.0
        if self._found_inf is not None:
            return detached_scalar((self._found_inf.reshape(()) > 0).float())
        return 0.0 if self._is_made else 1.0

    def missing(self, params: Sequence[Param]) -> list[str]:
        """Names of the parameters that are in no optimizer seen so far."""
        return [param.name for param in params if id(param.p) not in self._ids]

    def close(self) -> None:
        """Removes the hook on optimizers."""
        self._hook.remove()


def _n_params(opt: Optimizer) -> int:
    return sum(len(group["params"]) for group in opt.param_groups)


def scale_of(scaler: torch.amp.GradScaler | None, model: nn.Module) -> Number:
    """Factor by which a GradScaler multiplies losses; 1.0 without one. Its `get_scale` would need a sync."""
    return 1.0 if scaler is None else detached_scalar(scaler.scale(torch.ones((), device=device_of(model))))


def is_unscaled(scaler: torch.amp.GradScaler | None, opt: Optimizer) -> bool:
    """Whether the gradients are already divided by the scale; else a scaler does it in its step."""
    if scaler is None or not scaler.is_enabled():
        return True
    stage = scaler_stage(scaler, opt)
    return bool(stage is not OptState.READY)


def running_stats(model: nn.Module) -> dict[str, Tensor]:
    """Non-empty buffers called running_mean or running_var, by qualified name."""
    return {
        f"{prefix}.{name}" if prefix else name: b
        for prefix, m in named_modules(model).items()
        for name, b in buffers_of(m).items()
        if b is not None and name in RUNNING and not isinstance(b, UninitializedBuffer) and b.numel()
    }
