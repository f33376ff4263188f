"""GradientRecorder: takes what `GradientHealth` records, at the events of a fit."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from hookcb.core.optim import detached_scalar
from hookcb.gradients.capture import GradientReader, StepTaken, first_nonfinite
from hookcb.gradients.hand_steps import StepByHand
from hookcb.gradients.outputs import OutputHooks
from hookcb.gradients.readings import GradientReadings
from hookcb.gradients.steps import StepWatch, is_unscaled, running_stats, scale_of
from hookcb.hooks.modules import ModelGoneError
from hookcb.hooks.params import Which, find_params


class GradientRecorder:
    """Reads gradients and weights around the steps of a fit; made when it begins, closed when it ends.

    Args:
        readings: where records go.
        model: whose.
        which: parameters, see `find_params`.

    Raises:
        LookupError: where it selects nothing.
    """

    def __init__(
        self, readings: GradientReadings, model: nn.Module, which: Which | Iterable[Which] | None
    ) -> None:
        self._readings, self._which = readings, which
        self._model_ref = ref(model)  # as a loop that is watched ends with its model
        self._reader = GradientReader(find_params(model, which))
        self._n_steps = 0
        self._step: StepTaken | None = None  # in progress, where it is looked at
        stats = readings.output_stats
        self._outputs = None if stats is None else OutputHooks(model, stats)
        self._watch = StepWatch(model, self._at_step)

    @property
    def _model(self) -> nn.Module:
        if (model := self._model_ref()) is None:
            raise ModelGoneError("the model whose gradients were read is gone")
        return model

    def refresh(self, opt: Optimizer | None) -> None:
        """Takes in what the model and the optimizer, where one is known, have now."""
        with suppress(LookupError):  # what was selected has gone
            self._reader.refresh(find_params(self._model, self._which), running_stats(self._model))
        if opt is not None:
            self._watch.note(opt)

    # ---- gradients of outputs

    def begin_batch(self) -> None:
        """A training batch begins; what comes until the next step is looked at as that step is."""
        if self._outputs is not None:
            self._outputs.begin(is_open=self._is_looking)

    def note_scale(self, scaler: GradScaler | None) -> None:
        """The loss is about to be scaled."""
        if self._outputs is not None:
            self._outputs.scale = scale_of(scaler, self._model)

    def drop_batch(self) -> None:
        """The batch was cancelled."""
        if self._outputs is not None:
            self._outputs.begin(is_open=False)

    def end_batch(self, epoch: int, step: int) -> None:
        """The batch has ended."""
        if self._outputs is not None:
            self._outputs.end(epoch, step)

    # ---- steps

    @property
    def _is_looking(self) -> bool:
        """Whether the next step is looked at."""
        return self._readings.wants(self._n_steps)

    @torch.no_grad()
    def begin_step(self, opt: Optimizer, scaler: GradScaler | None) -> None:
        """Gradients are whole, and not clipped yet."""
        if self._watch.begin(opt):
            self.refresh(opt)
        self._step, looking = None, self._is_looking
        self._n_steps += 1
        if looking:
            lr, scale = detached_scalar(opt.param_groups[-1]["lr"]), scale_of(scaler, self._model)
            own = 1.0 if is_unscaled(scaler, opt) else scale
            if scaler is None and isinstance(set_by_one := getattr(opt, "grad_scale", None), Tensor):
                own = scale = detached_scalar(
                    set_by_one
                )  # a GradScaler that is not known, for a fused optimizer
            self._step = StepTaken(self._reader.before_step(own), lr, scale)
        if isinstance(opt, StepByHand):  # when it ends, its gradients may be cleared
            self._watch.make()

    @torch.no_grad()
    def _at_step(self) -> None:
        """The optimizer begins its step."""
        if self._step is not None:
            self._reader.at_step(self._step.takens)

    @torch.no_grad()
    def end_step(self, epoch: int, step: int, is_cancelled: bool, has_scaler: bool = False) -> None:
        """The step was made, or not: adds the record."""
        skipped = self._watch.end(is_cancelled, has_scaler)
        self._readings.skips.add(skipped)
        taken, self._step = self._step, None
        if taken is not None:
            self._readings.not_optimized = self._watch.missing(self._reader.with_grad)
            self._reader.after_step(taken, skipped)
            self._readings.add_step(taken, self._reader, epoch, step)

    @torch.no_grad()
    def nonfinite(self, scaler: GradScaler | None) -> str | None:
        """Which gradient is not finite, in words; None also where a GradScaler is finding its scale.

        An overflow halves the scale, so at 1 it has another reason.
        """
        found = first_nonfinite(find_params(self._model))
        if found is None or (scaler is not None and scaler.get_scale() > 1):
            return None
        name, n = found
        return f"the gradient of {name!r} has {n:,} NaN or infinite element{'s' * (n != 1)}"

    def drop_gradients(self, opt: Optimizer) -> None:
        """So that the next backward does not add to them."""
        opt.zero_grad()
        self._model.zero_grad()

    def close(self) -> None:
        """The fit has ended."""
        self._watch.close()
        if self._outputs is not None:
            self._outputs.remove()

    # ---- resuming

    def state(self) -> dict[str, Any]:
        """What a resumed fit needs."""
        return {"n_steps": self._n_steps, "starts": dict(self._reader.starts)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes in what `state` gave, after the readings have taken in theirs."""
        self._n_steps = state["n_steps"]
        self._reader.starts = dict(state["starts"])
        if self._outputs is not None and self._readings.output_stats is not None:
            self._outputs.stats = self._readings.output_stats
