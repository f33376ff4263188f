"""LightningFit: a fit of Lightning's Trainer, followed by what its callback is told."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from hookcb.core.callback import Callback
from hookcb.hooks.hook import Hook
from hookcb.hooks.own import register
from hookcb.loops.coverage import WatchCoverage
from hookcb.loops.external import Followed


class LightningFit(Followed):
    """A fit of Lightning's Trainer; see `hookcb.adapters.lightning`, which tells what happens in it."""

    heeds_stop = True

    def __init__(self, trainer: Any, module: nn.Module, cbs: list[Callback]) -> None:
        self._n_calls = 0  # of the module, inside one another
        self._has_pred = False  # of the batch
        # DistributedDataParallel and the like call training_step through the module's forward
        self._is_redirected = trainer.strategy.model is not module
        optimizers, scaler = trainer.optimizers, getattr(trainer.precision_plugin, "scaler", None)
        super().__init__(module, cbs, optimizers[0] if optimizers else None, scaler)
        self._hooks: list[Any] = [
            Hook(module, self._call_begins, pre=True, gate=self._is_called_here),
            Hook(module, self._call_ends, detach=False, always_call=True, gate=self._is_called_here),
            *(register(opt.register_step_post_hook, self._step_ends) for opt in optimizers),
        ]

    def begin_batch(self, training: bool, xb: Any) -> None:
        """A batch begins."""
        self._n_calls, self._has_pred = 0, False
        super().begin_batch(training, xb)

    def told_loss(self, outputs: Any) -> None:
        """The loss of a validation batch, where `validation_step` has returned one."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor) and loss.ndim == 0:
            self.loss(loss)

    def _is_called_here(self) -> bool:
        return self.is_here

    def _call_begins(self, *seen: Any) -> None:
        self._n_calls += 1

    def _call_ends(self, m: nn.Module, inputs: Any, output: Any) -> None:
        self._n_calls -= 1
        is_its_own = self._n_calls == int(self._is_redirected)
        if is_its_own and self.has_batch and not self._has_pred and output is not None:
            self._has_pred = True
            self.has_pred(output)

    def _step_ends(self, *seen: Any) -> None:
        self.end_step()

    def close(self, error: BaseException | None = None) -> None:
        """Takes all hooks off; readings stay."""
        hooks, self._hooks = self.__dict__.get("_hooks", []), []
        for hook in hooks:
            hook.remove()
        super().close(error)

    @property
    def coverage(self) -> WatchCoverage:
        """What could be seen so far, and what not, with the reason."""
        found = WatchCoverage.of(self.seen, self.facts, n_epochs=1, n_optimizers=1)
        why = {"after_pred": "training_step does not call the module itself, self(x)"}
        missing = {event: why.get(event, reason) for event, reason in found.missing.items()}
        return replace(found, missing=missing, notes=())
