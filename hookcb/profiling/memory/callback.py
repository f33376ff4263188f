"""MemoryStats: the memory of every layer, whether it grows, and what would free some."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from hookcb.core.sampling import SamplingCallback
from hookcb.hooks.coverage import Coverage, why_not_called
from hookcb.hooks.modules import Where, find_modules, named_modules
from hookcb.profiling.memory.allocator import AllocatorHistory, check_snapshot
from hookcb.profiling.memory.readings import MemoryReadings
from hookcb.profiling.memory.sums import Params, param_layers
from hookcb.profiling.memory.watch import MemoryWatch


class MemoryStats(SamplingCallback, MemoryReadings):
    """Tells which layers take the memory: kept for the backward, parameters, gradients, optimizer; and leaks.

    Looks at training batches 0, every, 2·every …; on those the layers have hooks, on others nothing. What is
    kept for the backward is counted exactly, by the storages that autograd saves; on CUDA what is allocated
    is asked of the allocator, whose peak statistics stay as they are, else it is what layers put out or save.
    Forwards that activation checkpointing repeats and validations do not count. A compiled module counts as
    one layer, and is not compiled anew.

    Args:
        modules: the layers, see `find_modules`; by default all modules, those that contain others too.
        every: look at each so many-th training batch.
        snapshot: a file for the history of CUDA's allocator, for pytorch.org/memory_viz; it is written where
            the fit ends as memory has run out. Without CUDA it does nothing.
        name: what the learner calls it.

    Attributes:
        totals: what the watched batch that keeps most takes in all; `layers()` and `report()` tell of that.
        advice: what to checkpoint first.
        notes: what could not be counted, in words.
        coverage: which layers were seen.

    Raises:
        TypeError, ValueError: for arguments that cannot be.
        LookupError: when a fit begins, where `modules` are not there.

    >>> from hookcb import MemoryStats, synth_learner
    >>> learn = synth_learner(bs=16)
    >>> with learn.no_logging():
    ...     learn.fit(1, cbs=MemoryStats(every=3))
    >>> [(row.name, row.type, row.kept) for row in learn.memory_stats.layers()]
    [('', 'Sequential', 512), ('0', 'Linear', 0), ('1', 'ReLU', 512), ('2', 'Linear', 0)]
    >>> print(learn.memory_stats.growth())
    memory growth: 0 bytes per step (standard error 0 bytes)
    """

    run_lr_find = False

    def __init__(
        self,
        modules: Where | Iterable[Where] | None = None,
        every: int = 50,
        *,
        snapshot: str | Path | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(every, name=name)
        self.modules, self.snapshot = modules, check_snapshot(snapshot)
        self._watch: MemoryWatch | None = None  # while a fit runs
        self._history: AllocatorHistory | None = None
        self._params: Params = []  # of the batch in progress
        self._silent: dict[str, str] = {}  # why each layer may not be called
        self.clear({})

    def before_fit(self) -> None:
        super().before_fit()
        named = named_modules(self.model)
        layers = named if self.modules is None else find_modules(self.model, self.modules, True)
        self.clear({name: type(m).__name__ for name, m in layers.items()})
        self._silent = {name: why_not_called(named, name) for name in layers}
        self._watch = MemoryWatch(layers, self._is_training)
        if self.snapshot is not None and torch.cuda.is_available():
            self._history = AllocatorHistory(self.snapshot)
            self._history.start()

    def before_batch(self) -> None:
        if self._watch:  # else no fit runs
            super().before_batch()
            if self.is_looking:
                self._watch.begin(self.model, (self.xb, self.yb), self.learn.is_calling)

    def after_pred(self) -> None:
        if self.is_looking and self._watch:
            self._watch.begin_loss(self.yb)

    def before_backward(self) -> None:
        # a forward from here on is one that activation checkpointing repeats
        if self.is_looking and self._watch:
            self._watch.end(self.loss)

    def after_backward(self) -> None:
        if self.is_looking and self._watch and self._watch.seen:
            self._params = param_layers(self.model, self.types)
            self.note_params(self._params)

    def after_cancel_batch(self) -> None:
        super().after_cancel_batch()
        if self._watch:
            self._watch.drop()

    # where one of these has ended a batch, no `after_batch` comes
    after_cancel_train = after_cancel_epoch = after_cancel_fit = after_cancel_batch

    def after_batch(self) -> None:
        if self._watch:
            super().after_batch()
            if self.is_looking and (seen := self._watch.take()):
                self.add(self.train_iter, seen)
                self.note_optimizer(self._params, self.opt)
                self._silent |= self._watch.inside

    def after_fit(self) -> None:
        watch, self._watch, self._params = self._watch, None, []
        history, self._history = self._history, None
        if watch:
            watch.close()
        if history:
            history.stop()

    @property
    def coverage(self) -> Coverage:
        """Which layers were seen in this fit, or in the last, and which hide their memory."""
        labels = {name: name or kind for name, kind in self.types.items()}
        fired = tuple(label for name, label in labels.items() if name in self.called)
        silent = {label: self._silent[name] for name, label in labels.items() if name not in self.called}
        return Coverage(
            tuple(labels.values()), fired, silent, dict(self.hidden), {}, self.n_batches, self.n_skipped
        )

    def _is_training(self) -> bool:
        return (
            self.learn.training and self.learn.in_loop_thread
        )  # not in a validation in the middle of the batch

    def state_dict(self) -> dict[str, Any]:
        return {}  # another process has memory of its own

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_watch": None, "_history": None, "_params": []}
