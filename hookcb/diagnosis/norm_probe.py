"""NormProbe: batch norms whose mode or batch does not fit, looked at in each batch as it costs little."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from hookcb.diagnosis.evidence import Sighting
from hookcb.hooks import Hook
from hookcb.modules import named_modules

BatchNorm = nn.modules.batchnorm._BatchNorm
MOSTLY = 0.9  # of the batches have a single sample, where that is how the model is trained


class NormProbe:
    """Hooks on the batch norms of a model.

    Args:
        model: whose.
        look: called as `look(function, *args)`; it calls the function, in training only.
    """

    def __init__(self, model: nn.Module, look: Callable[..., object]) -> None:
        self._in_eval: dict[str, int] = {}  # those that are trained, and were in eval mode, with the step
        # those that had a single sample: the first step, the fewest values a channel, how often
        self._single: dict[str, tuple[int, int, int]] = {}
        norms = {name: m for name, m in named_modules(model).items() if isinstance(m, BatchNorm)}
        self._names = {id(m): name for name, m in norms.items()}
        self._hooks = [
            Hook(m, lambda m, args: look(self._see, m, args), pre=True, detach=False) for m in norms.values()
        ]

    def _see(self, step: int, m: BatchNorm, args: tuple[Any, ...]) -> None:
        """A batch norm is about to be called in training."""
        name = self._names[id(m)]
        if not m.training:
            if m.track_running_stats and any(p.requires_grad for p in m.parameters(recurse=False)):
                self._in_eval.setdefault(name, step)
            return
        x = args[0] if args and isinstance(args[0], Tensor) else None
        if x is not None and x.ndim > 1 and len(x) == 1 and x.numel():
            values = x.numel() // x.shape[1]
            first, fewest, n = self._single.get(name, (step, values, 0))
            self._single[name] = first, min(fewest, values), n + 1

    def remove(self) -> None:
        """Takes the hooks off."""
        for hook in self._hooks:
            hook.remove()

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
        for name, (step, per_channel, n) in self._single.items():
            alone = per_channel == 1
            if not alone and n < MOSTLY * n_batches:
                continue
            yield Sighting(
                "mode.mismatch",
                name,
                step=step,
                value=float(per_channel),
                text=f"{name} normalises by {'one value' if alone else 'a single sample'} per channel"
                + (", which leaves nothing of it." if alone else f" ({per_channel} values), no batch."),
                causes=("a batch of one sample", "a last batch that is left over"),
                next_steps=("use larger batches, drop_last=True, or GroupNorm in place of batch norm",),
                severity="error" if alone else "warning",
            )
