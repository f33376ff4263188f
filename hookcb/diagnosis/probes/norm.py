"""NormProbe: batch norms with a wrong mode or batch size, and models that were left in eval mode."""

import traceback
from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary, ref

from torch import Tensor, nn

from hookcb.core.text import as_layer
from hookcb.core.torch_private import BatchNorm, Dropout
from hookcb.diagnosis.run import Observation
from hookcb.hooks.modules import named_modules

MIN_CALLS = 3  # without gradients
MIN_SINGLE = 0.9  # share of batches with a single sample
REFUSED = "Expected more than 1 value per channel"  # beginning of torch's error


class NormProbe:
    """Checks the batch norms of a model at the beginning of each training batch; needs no hook.

    A batch norm with learned statistics that is in eval mode from the beginning, in a model in train mode, is
    not a fault: that is how it is frozen for fine-tuning.

    Attributes:
        is_needed: whether there is anything to check.
    """

    def __init__(self, model: nn.Module) -> None:
        norms = {name: m for name, m in named_modules(model).items() if isinstance(m, BatchNorm)}
        self._norms = WeakValueDictionary(norms)  # a watch must not keep its model alive
        self._model = ref(model)
        self._drops = any(isinstance(m, Dropout) and m.p > 0 for m in model.modules())
        self.is_needed = self._drops or bool(norms)
        self._frozen = {name for name, m in self._norms.items() if not m.training and _has_learned(m)}
        self._in_eval: dict[str, int] = {}  # step at which trained batch norms were first in eval mode
        self._without_dropout: int | None = None  # first step with all of the model in eval mode
        self._n_single = 0  # batches of one sample
        self._refused: tuple[str, int] | None = None  # name of the batch norm that has raised, and the step

    def begin_batch(self, step: int, n_samples: int | None) -> None:
        """Checks all modes at the beginning of a training batch of so many samples, if that is known."""
        model = self._model()
        whole = model is not None and model.training
        for name, m in self._norms.items():
            if m.training:
                self._frozen.discard(name)
            elif m.track_running_stats and _is_trained(m) and not (whole and name in self._frozen):
                self._in_eval.setdefault(name, step)
        is_new = self._drops and not whole and self._without_dropout is None
        if is_new and model is not None and any(p.requires_grad for p in model.parameters()):
            self._without_dropout = step
        self._n_single += n_samples == 1

    def read_error(self, error: BaseException, step: int) -> None:
        """Records the batch norm that ended the training because it got a single value per channel."""
        if isinstance(error, ValueError) and str(error).startswith(REFUSED):
            names = {id(m): name for name, m in self._norms.items()}
            for frame, _ in traceback.walk_tb(error.__traceback__):
                if (name := names.get(id(frame.f_locals.get("self")))) is not None:
                    self._refused = name, step

    def observations(self, n_batches: int) -> Iterator[Observation]:
        """Modes and batch sizes that are wrong for training."""
        for name, step in self._in_eval.items():
            yield Observation(
                "mode.mismatch",
                name,
                step=step,
                text=f"Batch norm {as_layer(name)} is in eval mode while it is trained: it normalizes by old "
                "running statistics, which are not updated.",
                causes=(".eval() was called on the model or on this layer, without .train() afterwards",),
                next_steps=("Call model.train() before training; to freeze it, freeze its parameters too",),
            )
        if self._without_dropout is not None and not self._in_eval:
            yield Observation(
                "mode.mismatch",
                step=self._without_dropout,
                text="The model is trained in eval mode, so its dropout does nothing.",
                causes=(".eval() was called on the model, without .train() afterwards",),
                next_steps=("Call model.train() before training",),
                severity="warning",
            )
        if self._refused is not None:
            name, step = self._refused
            yield _single(name, step, "one value per channel, which leaves nothing of the input", "error")
        elif self._norms and n_batches and self._n_single >= MIN_SINGLE * n_batches:
            name = next(iter(self._norms))
            yield _single(name, 0, "a single sample, because each batch has only one", "warning")


def observe_unseen_validation(loop: Any) -> Iterator[Observation]:
    """Calls in train mode without gradients, in a loop that never calls its model in eval mode.

    Args:
        loop: an external loop at its end.
    """
    n, modules = loop.facts.n_without_grad, list(loop.model.modules())
    has_modes = any(isinstance(m, BatchNorm) or (isinstance(m, Dropout) and m.p > 0) for m in modules)
    if n >= MIN_CALLS and has_modes and not loop.seen["before_validate"]:
        yield Observation(
            "mode.mismatch",
            value=float(n),
            text=f"The model was called {n} times in train mode without gradients, and never in eval mode. "
            "If these calls were a validation, its dropout and batch norms acted as in training.",
            causes=("a validation without model.eval()",),
            next_steps=("Call model.eval() before a validation, and model.train() after it",),
            severity="info",
        )


def _has_learned(m: nn.Module) -> bool:
    """Whether its running statistics differ from their initial values."""
    return isinstance(m.running_mean, Tensor) and bool(m.running_mean.any())


def _is_trained(m: nn.Module) -> bool:
    return any(p.requires_grad for p in m.parameters(recurse=False))


def _single(name: str, step: int, by: str, severity: str) -> Observation:
    return Observation(
        "mode.mismatch",
        name,
        step=step,
        value=1.0,
        text=f"Batch norm {as_layer(name)} normalizes by {by}.",
        causes=("a batch of one sample", "a last batch with the remaining sample"),
        next_steps=("Use larger batches, drop_last=True, or GroupNorm instead of batch norm",),
        severity=severity,
    )
