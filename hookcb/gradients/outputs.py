"""OutputGradients: statistics of the gradients with respect to layers' outputs."""

import math
import threading
from typing import Any

from torch import Tensor, nn

from hookcb.activations.readings import (
    FIRST_COLUMNS,
    LAST_COLUMNS,
    ActivationReadings,
    ActivationReport,
    ActivationRow,
)
from hookcb.activations.stats import has_stats, kind_of, take
from hookcb.core.batch import parts
from hookcb.core.threads import in_loop_thread
from hookcb.gradients.stats import Number
from hookcb.hooks.hook import Hooks
from hookcb.hooks.modules import find_modules, make_ready_for_hooks
from hookcb.records.tables import Column, Worst


class OutputGradients(ActivationReadings):
    """Statistics of the gradients with respect to layers' outputs, as `ActivationStats` has them of outputs.

    `near_zero` is the share of exact zeros.

    Args:
        keep: number of records that stay.
    """

    def __init__(self, keep: int) -> None:
        self._set_up(False, 0.0, 40, None, "auto", keep)

    def report(self, *, worst: Worst = "auto", depth: int | None = None) -> "OutputReport":
        """The layers with the statistics of the last record, as a table; `print` shows it.

        The worst rows are those with NaN or infinite gradients, then those with the larger share of zeros.
        See `ActivationStats.report` for the arguments.
        """
        records = self.stats
        last = dict(zip(self.names, records[-1], strict=True)) if records else {}
        rows = [self._output_row(name, stats) for name, stats in last.items()]
        title = f"gradients of outputs in the last of {len(records)} recorded batches"
        return OutputReport(rows, title, worst=worst, depth=depth)

    def _output_row(self, name: str, last: dict[str, float]) -> ActivationRow:
        kind, shape = self.outputs[name]
        weight = tuple(0.0 if math.isnan(last[stat]) else last[stat] for stat in ("nonfinite", "zeros"))
        mark = "NaN or inf" if last["nonfinite"] > 0 else ""
        return ActivationRow(
            name=name,
            module=name,
            weight=weight,
            type=kind,
            shape=shape,
            last=last,
            spread=self.series(name, "std"),
            mark=mark,
        )

    def state(self) -> dict[str, Any]:
        """All there is, of plain values."""
        return self._saved()

    def restore(self, state: dict[str, Any]) -> None:
        """Takes in what `state` gave."""
        self._restore(state)


class OutputReport(ActivationReport):
    """Statistics of the gradients of layers' outputs in the last recorded batch."""

    columns = (
        *FIRST_COLUMNS,
        Column("std", lambda row: row.text("std"), 1),
        Column("largest", lambda row: row.text("abs_max"), 3),
        Column("zeros", lambda row: row.text("zeros", ".0%"), 2),
        *LAST_COLUMNS,
    )


class OutputHooks:
    """Hooks on the leaves with parameters, that take the gradients of their outputs batch by batch.

    Args:
        model: whose layers.
        stats: where records go.

    Attributes:
        scale: what a GradScaler has multiplied the loss of this batch by.
    """

    def __init__(self, model: nn.Module, stats: OutputGradients) -> None:
        layers = find_modules(model)
        make_ready_for_hooks(model)
        self.stats, self._is_open, self._thread = stats, False, threading.get_ident()
        self.scale: Number = 1.0
        self._names = {id(m): name or type(m).__name__ for name, m in layers.items()}
        self._batch: dict[str, list[Any]] = {}
        self._hooks = Hooks(layers, self._take, is_forward=False, pre=True, gate=self._acts)

    def begin(self, is_open: bool) -> None:
        """A batch begins that is looked at, or is not."""
        self._batch, self._is_open = {}, is_open

    def _acts(self) -> bool:
        return self._is_open and in_loop_thread(self._thread)

    def _take(self, m: nn.Module, grads: Any) -> None:
        name = self._names[id(m)]
        for path, x in list(parts(grads[0] if len(grads) == 1 else grads, name)):
            if not isinstance(x, Tensor):
                continue
            taken: Any = kind_of(x)
            if has_stats(x):
                unscaled = x if isinstance(self.scale, float) and self.scale == 1 else x.float() / self.scale
                taken = (*take(unscaled, self.stats.sample), type(m).__name__, x.shape)
            self._batch.setdefault(path, []).append(taken)

    def end(self, epoch: int, step: int) -> None:
        """The batch has ended: it becomes a record."""
        batch, self._is_open = self._batch, False
        order = {name: i for i, name in enumerate(self._names.values())}
        in_order = sorted(batch, key=lambda path: order.get(path.partition("[")[0], 0))
        # gradients come to the last call first
        self.stats.add_record("train", epoch, step, {path: batch[path][::-1] for path in in_order})
        self._batch = {}

    def remove(self) -> None:
        """Takes the hooks off."""
        self._hooks.remove()
        self._batch, self._is_open = {}, False
