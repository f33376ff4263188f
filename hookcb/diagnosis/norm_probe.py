"""NormProbe: batch norms whose mode or batch does not fit."""

import traceback
from collections.abc import Iterator

from torch import nn

from hookcb.diagnosis.evidence import Sighting
from hookcb.modules import named_modules

BatchNorm = nn.modules.batchnorm._BatchNorm
MOSTLY = 0.9  # of the batches have a single sample, where that is how the model is trained
REFUSED = "Expected more than 1 value per channel"  # how torch begins to say so


class NormProbe:
    """Looks at the batch norms of a model when a training batch begins; no hook is needed for that."""

    def __init__(self, model: nn.Module) -> None:
        self._norms = {name: m for name, m in named_modules(model).items() if isinstance(m, BatchNorm)}
        self._in_eval: dict[str, int] = {}  # those that are trained, and were in eval mode, with the step
        self._n_single = 0  # batches of one sample that they saw
        self._refused: tuple[str, int] | None = None  # the one that has raised, and the step

    def begin_batch(self, step: int, n_samples: int) -> None:
        """A training batch begins."""
        for name, m in self._norms.items():
            if not m.training and m.track_running_stats and name not in self._in_eval and _is_trained(m):
                self._in_eval[name] = step
        self._n_single += n_samples == 1

    def look_at_error(self, error: BaseException, step: int) -> None:
        """What has ended the training may be a batch norm that had a single value for each channel."""
        if isinstance(error, ValueError) and str(error).startswith(REFUSED):
            names = {id(m): name for name, m in self._norms.items()}
            for frame, _ in traceback.walk_tb(error.__traceback__):
                if (name := names.get(id(frame.f_locals.get("self")))) is not None:
                    self._refused = name, step

    def sightings(self, n_batches: int) -> Iterator[Sighting]:
        """Modes that do not fit."""
        for name, step in self._in_eval.items():
            yield Sighting(
                "mode.mismatch",
                name,
                step=step,
                text=f"{name} is in eval mode while it is trained: it normalises by old running statistics, "
                "and these are not updated.",
                causes=(".eval() was called on the model or on this layer, and no .train() since",),
                next_steps=("call model.train() before training; to freeze it, freeze its parameters too",),
            )
        if self._refused is not None:
            name, step = self._refused
            yield _single(name, step, "one value per channel, which leaves nothing of it", "error")
        elif self._norms and n_batches and self._n_single >= MOSTLY * n_batches:
            yield _single(
                next(iter(self._norms)), 0, "a single sample, as each batch has only one", "warning"
            )


def _is_trained(m: nn.Module) -> bool:
    return any(p.requires_grad for p in m.parameters(recurse=False))


def _single(name: str, step: int, by: str, severity: str) -> Sighting:
    return Sighting(
        "mode.mismatch",
        name,
        step=step,
        value=1.0,
        text=f"{name} normalises by {by}.",
        causes=("a batch of one sample", "a last batch that is left over"),
        next_steps=("use larger batches, drop_last=True, or GroupNorm in place of batch norm",),
        severity=severity,
    )
