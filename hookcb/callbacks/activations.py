"""ActivationStats: mean, spread and share near zero of every layer's output, batch by batch."""

from collections.abc import Iterable
from typing import Any

import torch
from fastcore.foundation import L
from rich.table import Table
from torch import Tensor, nn

from hookcb.batch import parts
from hookcb.callbacks.hook import HookCallback
from hookcb.modules import Where
from hookcb.stats import LAYER_STATS, has_stats, layer_stats

MISSING = dict.fromkeys(LAYER_STATS, float("nan"))


class ActivationStats(HookCallback):
    """Records statistics of each layer's output in training: shows the dead, saturated and exploding ones.

    They are computed on the layer's device inside the hook; no activation is kept and no batch waits for a
    GPU. A cancelled batch leaves nothing.

    Args:
        modules, every, include_paramless, name: see `HookCallback`.
        eps: magnitude up to which an element counts as near zero, in the output's unit.

    Attributes:
        stats: `stats[record][layer]` is a dict of `mean`, `std` (in the output's unit; unbiased) and
            `near_zero` (share with |x| ≤ eps, 0..1); NaN where a layer put out nothing.
        names: of the layers, in the order of their first record. Tensors inside an output are named by their
            path, `lstm[0]`; calls of a layer called several times in a batch by number, `fc#0`, `fc#1`.
        left_out: by layer, the kind of what has no statistics.

    >>> from hookcb import ActivationStats, synth_learner
    >>> learn = synth_learner()
    >>> with learn.no_logging():
    ...     learn.fit(1, cbs=ActivationStats(include_paramless=True))
    >>> learn.activation_stats.names
    ['0', '1', '2']
    >>> len(learn.activation_stats.stats), sorted(learn.activation_stats.stats[0][0])
    (10, ['mean', 'near_zero', 'std'])
    """

    def __init__(
        self,
        *,
        modules: Where | Iterable[Where] | None = None,
        every: int | None = None,
        include_paramless: bool = False,
        eps: float = 0.05,
        name: str | None = None,
    ) -> None:
        super().__init__(modules, every, include_paramless=include_paramless, name=name)
        if not eps >= 0:
            raise ValueError(f"eps is {eps!r}; give a magnitude of 0 or more")
        self.eps = eps
        self._forget()

    def _forget(self) -> None:
        self.names: list[str] = []
        self._kinds: dict[str, tuple[str, tuple[int, ...]]] = {}  # by name, the layer's type and output shape
        self._batch: dict[str, list[Tensor]] = {}
        self._waiting: list[tuple[list[str], Tensor]] = []
        self._records: list[dict[str, dict[str, float]]] = []

    def before_fit(self) -> None:
        self._forget()
        super().before_fit()

    def before_batch(self) -> None:
        self._batch = {}
        super().before_batch()

    def hook(self, m: nn.Module, i: Any, o: Any) -> None:
        name = self.layer_name(m)
        found = list(parts(o, name))
        if not found:
            self.left_out[name] = type(o).__name__
        for path, x in found:
            if has_stats(x):
                self._batch.setdefault(path, []).append(layer_stats(x, self.eps))
                self._kinds[path] = type(m).__name__, tuple(x.shape)
            else:
                self.left_out[path] = type(x).__name__

    def after_cancel_batch(self) -> None:
        super().after_cancel_batch()
        self._batch = {}

    def after_batch(self) -> None:
        super().after_batch()
        if self._batch:
            rows = {
                path if len(calls) == 1 else f"{path}#{k}": row
                for path, calls in self._batch.items()
                for k, row in enumerate(calls)
            }
            names, device = list(rows), next(iter(rows.values())).device
            self._waiting.append((names, torch.stack([row.to(device) for row in rows.values()])))
            self.names += [name for name in names if name not in self.names]
        self._batch = {}

    def after_epoch(self) -> None:
        self._read()

    def after_fit(self) -> None:
        super().after_fit()
        self._batch = {}
        self._read()

    @property
    def stats(self) -> L:
        """`stats[record][layer]`, layers in the order of `names`."""
        self._read()
        return L(L(record.get(name, MISSING) for name in self.names) for record in self._records)

    def _read(self) -> None:
        """Brings what waits on the device to the host, in one transfer."""
        if self._waiting:
            values = iter(torch.cat([rows for _, rows in self._waiting]).tolist())
            for names, _ in self._waiting:
                self._records.append(
                    {name: dict(zip(LAYER_STATS, next(values), strict=True)) for name in names}
                )
            self._waiting = []

    def report(self) -> Table:
        """A table of the layers with the statistics of the last record, to print with rich."""
        self._read()
        table = Table(title=f"activations in the last of {len(self._records)} recorded batches")
        table.add_column("layer", overflow="fold")
        table.add_column("type")
        for column in ("output", "mean", "std", "near zero"):
            table.add_column(column, justify="right")
        for name in self.names:
            stat = self._records[-1].get(name, MISSING)
            kind, shape = self._kinds[name.partition("#")[0]]
            numbers = f"{stat['mean']:.3f}", f"{stat['std']:.3f}", f"{stat['near_zero']:.0%}"
            table.add_row(name, kind, "×".join(map(str, shape)), *numbers)
        for name, kind in self.left_out.items():
            table.add_row(name, f"no statistics: {kind}")
        return table
