"""What outputs of layers tell, beyond what ActivationStats records."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hookcb.batch import parts
from hookcb.diagnosis.evidence import Layer, Series, Sighting
from hookcb.diagnosis.op_probe import saturated_share
from hookcb.stats import has_stats
from hookcb.store import StatStore

COLUMNS = ("spread", "saturated")
MOST = 16_384  # elements that the spread is taken from
KEEP = 1_000  # records
BatchNorm = nn.modules.batchnorm._BatchNorm


class LayerProbe:
    """Takes the spread and saturation of layers' outputs, and sees modes that do not fit."""

    def __init__(self, name_of: Callable[[nn.Module], str]) -> None:
        self._name_of = name_of
        self._store = StatStore(COLUMNS, KEEP)
        self._record = 0
        self._step = 0
        self._in_eval: dict[
            str, int
        ] = {}  # batch norms that are trained, and were in eval mode, with the step
        self._single: dict[str, tuple[int, int]] = {}  # … that had one value a channel: step, batch size
        self.largest: dict[str, float] = {}

    def begin(self, step: int) -> None:
        """A batch begins that is looked at."""
        self._record, self._step = self._store.begin(0, step), step

    def look(self, m: nn.Module, output: Any) -> None:
        """A layer has put something out, in training."""
        if isinstance(m, BatchNorm) and not m.training and _is_trained(m):
            self._in_eval.setdefault(self._name_of(m), self._step)
        x = next((x for _, x in parts(output) if isinstance(x, Tensor) and has_stats(x)), None)
        if x is None or not x.is_floating_point() or not x.numel():
            return
        x, name = x.detach(), self._name_of(m)
        self.largest[name] = torch.finfo(x.dtype).max
        saturated = saturated_share(m, x)
        values = [spread(x), x.new_full((), math.nan) if saturated is None else saturated]
        self._store.put(name, [self._record], torch.stack([value.float() for value in values])[None])

    def look_at_input(self, m: nn.Module, args: tuple[Any, ...], step: int) -> None:
        """A batch norm is about to be called."""
        x = args[0] if args and isinstance(args[0], Tensor) else None
        if (
            x is not None
            and m.training
            and x.ndim > 1
            and x.numel()
            and (len(x) == 1 or x.shape[1] == x.numel())
        ):
            self._single.setdefault(self._name_of(m), (step, x.numel() // x.shape[1]))

    def add_to(self, layers: dict[str, Layer], about: dict[str, str]) -> None:
        """Puts what was taken into the evidence."""
        steps = [info.step for info in self._store.infos]
        for name in self._store.names:
            kind = about.get(name, "")
            layer = layers.setdefault(name, Layer(name, kind.partition(" ")[0], kind, len(layers)))
            layer.largest = self.largest.get(name, math.inf)
            for stat, values in zip(COLUMNS, self._store.series(name).T.tolist(), strict=True):
                layer.stats[stat] = Series.of(steps, values)

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
        for name, (step, per_channel) in self._single.items():
            alone = per_channel == 1
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


def _is_trained(m: nn.Module) -> bool:
    return bool(m.track_running_stats) and any(p.requires_grad for p in m.parameters(recurse=False))


def spread(x: Tensor) -> Tensor:
    """Variance across the batch relative to the second moment: 0 where all samples come out the same.

    Args:
        x: `(N, …)`; of more than 16,384 elements some of each sample are looked at.

    Returns:
        A 0-d float32 tensor; NaN of a single sample, and where all is zero.
    """
    if x.ndim == 0 or len(x) < 2:
        return x.new_full((), math.nan, dtype=torch.float32)
    flat = x.reshape(len(x), -1)
    if flat.numel() > MOST:
        flat = flat[:, :: max(1, flat.numel() // MOST)]
    flat = flat[:MOST].float()
    return flat.var(0, correction=0).mean() / flat.square().mean()
