"""OutputGradients: statistics of the gradients with respect to layers' outputs."""

from typing import Any

from torch import Tensor, nn

from hookcb.activations.records import ActivationRecords
from hookcb.activations.report import FIRST_COLUMNS, LAST_COLUMNS, ActivationReport
from hookcb.activations.stats import has_stats
from hookcb.core.batch import parts
from hookcb.core.threads import in_loop_thread, this_thread
from hookcb.core.torch_private import plain_class
from hookcb.gradients.stats import Number
from hookcb.hooks.hook import Hooks
from hookcb.hooks.modules import find_modules, make_ready_for_hooks
from hookcb.records.tables import Column, VerdictLike, Worst


class OutputGradients(ActivationRecords):
    """Statistics of the gradients with respect to layers' outputs, the same as `ActivationStats` records.

    `near_zero` is the share of exact zeros.

    Args:
        keep: maximum number of records.
        **options: see `ActivationRecords`.
    """

    def __init__(self, keep: int, **options: Any) -> None:
        super().__init__(**options | {"eps": 0.0}, keep=keep)

    def report(
        self, *, worst: Worst = "auto", depth: int | None = None, verdict: VerdictLike | None = None
    ) -> "OutputReport":
        """Table of the layers with the statistics of the last record; `print` shows it.

        The worst rows are layers with findings of `verdict`, then those with NaN or infinite gradients, then
        those with the largest share of zeros. See `ActivationStats.report` for the arguments.
        """
        title = f"gradients of outputs in the last of {len(self.stats)} recorded batches"
        return OutputReport(list(self.rows(verdict, "zeros")), title, worst=worst, depth=depth)


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
    """Hooks on leaf modules with parameters that record the gradients of their outputs, batch by batch.

    Args:
        model: the model to hook.
        stats: the records to add to.

    Attributes:
        scale: factor by which a GradScaler has multiplied the loss of this batch.
    """

    def __init__(self, model: nn.Module, stats: OutputGradients) -> None:
        layers = find_modules(model)
        make_ready_for_hooks(model)
        self.stats, self._is_open, self._thread = stats, False, this_thread()
        self.scale: Number = 1.0
        self._names = {id(m): name or plain_class(m).__name__ for name, m in layers.items()}
        self._hooks = Hooks(layers, self._take, is_forward=False, pre=True, gate=self._acts)

    def begin_batch(self, is_open: bool) -> None:
        """Begins a batch, which is recorded if `is_open`."""
        self.stats.drop_batch()
        self._is_open = is_open

    def _acts(self) -> bool:
        return self._is_open and in_loop_thread(self._thread)

    def _take(self, m: nn.Module, grads: Any) -> None:
        name = self._names[id(m)]
        for path, x in list(parts(grads[0] if len(grads) == 1 else grads, name)):
            if isinstance(x, Tensor):
                is_scaled = has_stats(x) and not (isinstance(self.scale, float) and self.scale == 1)
                self.stats.take(path, x.float() / self.scale if is_scaled else x, plain_class(m).__name__)

    def end_batch(self, epoch: int, step: int) -> None:
        """Adds the record of the batch."""
        buffer, self._is_open = self.stats.buffer, False
        order = {name: i for i, name in enumerate(self._names.values())}
        in_order = sorted(buffer.batch, key=lambda path: order.get(path.partition("[")[0], 0))
        # the gradient of the last call comes first
        buffer.batch = {path: buffer.batch[path][::-1] for path in in_order}
        self.stats.end_batch("train", epoch, step)

    def remove(self) -> None:
        """Removes the hooks."""
        self._hooks.remove()
        self.stats.drop_batch()
        self._is_open = False
