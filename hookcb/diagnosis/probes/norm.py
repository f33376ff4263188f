"""NormProbe: batch norms whose mode or batch does not fit, and a model that was left in eval mode."""

import traceback
from collections.abc import Iterator
from weakref import WeakValueDictionary, ref

from torch import Tensor, nn

from hookcb.core.torch_private import BatchNorm, Dropout
from hookcb.diagnosis.evidence import Observation
from hookcb.hooks.modules import named_modules

MOSTLY = 0.9  # of the batches have a single sample, where that is how the model is trained
REFUSED = "Expected more than 1 value per channel"  # how torch begins to say so


class NormProbe:
    """Looks at the batch norms of a model when a training batch begins; no hook is needed for that.

    One that is in eval mode from the beginning, with statistics that it has learned before, in a model that
    is in train mode, is meant to be: people freeze them so when they fine-tune.
    """

    def __init__(self, model: nn.Module) -> None:
        norms = {name: m for name, m in named_modules(model).items() if isinstance(m, BatchNorm)}
        self._norms = WeakValueDictionary(norms)  # as a loop that is watched ends with its model
        self._model = ref(model)
        self._drops = any(isinstance(m, Dropout) and m.p > 0 for m in model.modules())
        self._meant = {name for name, m in self._norms.items() if not m.training and _has_learned(m)}
        self._in_eval: dict[str, int] = {}  # those that are trained, and were in eval mode, with the step
        self._without_dropout: int | None = None  # the first step at which all of the model was
        self._n_single = 0  # batches of one sample that they saw
        self._refused: tuple[str, int] | None = None  # the one that has raised, and the step

    def begin_batch(self, step: int, n_samples: int) -> None:
        """A training batch begins."""
        model = self._model()
        whole = model is not None and model.training
        for name, m in self._norms.items():
            if m.training:
                self._meant.discard(name)
            elif m.track_running_stats and _is_trained(m) and not (whole and name in self._meant):
                self._in_eval.setdefault(name, step)
        if self._drops and not whole and self._without_dropout is None:
            self._without_dropout = step
        self._n_single += n_samples == 1

    def read_error(self, error: BaseException, step: int) -> None:
        """What has ended the training may be a batch norm that had a single value for each channel."""
        if isinstance(error, ValueError) and str(error).startswith(REFUSED):
            names = {id(m): name for name, m in self._norms.items()}
            for frame, _ in traceback.walk_tb(error.__traceback__):
                if (name := names.get(id(frame.f_locals.get("self")))) is not None:
                    self._refused = name, step

    def observations(self, n_batches: int) -> Iterator[Observation]:
        """Modes that do not fit."""
        for name, step in self._in_eval.items():
            yield Observation(
                "mode.mismatch",
                name,
                step=step,
                text=f"{name} is in eval mode while it is trained: it normalises by old running statistics, "
                "and these are not updated.",
                causes=(".eval() was called on the model or on this layer, and no .train() since",),
                next_steps=("call model.train() before training; to freeze it, freeze its parameters too",),
            )
        if self._without_dropout is not None and not self._in_eval:
            yield Observation(
                "mode.mismatch",
                step=self._without_dropout,
                text="the model is trained in eval mode, so that its dropout does nothing.",
                causes=(".eval() was called on the model, and no .train() since",),
                next_steps=("call model.train() before training",),
                severity="warning",
            )
        if self._refused is not None:
            name, step = self._refused
            yield _single(name, step, "one value per channel, which leaves nothing of it", "error")
        elif self._norms and n_batches and self._n_single >= MOSTLY * n_batches:
            yield _single(
                next(iter(self._norms)), 0, "a single sample, as each batch has only one", "warning"
            )


def _has_learned(m: nn.Module) -> bool:
    """Whether its running statistics are not those that it is made with."""
    return isinstance(m.running_mean, Tensor) and bool(m.running_mean.any())


def _is_trained(m: nn.Module) -> bool:
    return any(p.requires_grad for p in m.parameters(recurse=False))


def _single(name: str, step: int, by: str, severity: str) -> Observation:
    return Observation(
        "mode.mismatch",
        name,
        step=step,
        value=1.0,
        text=f"{name} normalises by {by}.",
        causes=("a batch of one sample", "a last batch that is left over"),
        next_steps=("use larger batches, drop_last=True, or GroupNorm in place of batch norm",),
        severity=severity,
    )
