"""MemoryStats: memory of every layer, its growth, and what to checkpoint."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from hookcb.core.sampling import SamplingCallback
from hookcb.core.torch_private import plain_class
from hookcb.hooks.coverage import Coverage, why_not_called
from hookcb.hooks.modules import Where, find_modules, named_modules
from hookcb.profiling.memory.allocator import AllocatorHistory, check_snapshot
from hookcb.profiling.memory.readings import MemoryRecords, RankPeak
from hookcb.profiling.memory.sums import Params, param_layers
from hookcb.profiling.memory.watch import MemoryWatch
from hookcb.records.forward import forwarded, forwarded_attribute, forwarded_property


class MemoryStats(SamplingCallback):
    """Memory by layer (kept for the backward, parameters, gradients, optimizer state), and its growth.

    Watches training batches 0, every, 2·every …; the layers have hooks on those batches only. Bytes kept for
    the backward are counted exactly, by the storages that autograd saves. Allocated bytes come from the
    allocator on CUDA, whose peak statistics are not reset; elsewhere they are the outputs and saved tensors
    of layers. Validation and forwards repeated by activation checkpointing do not count. A compiled module
    counts as one layer, and is not compiled again.

    Args:
        modules: the layers, see `find_modules`; by default all modules, including containers.
        every: number of training batches from one watched batch to the next.
        snapshot: file for the history of CUDA's allocator, for pytorch.org/memory_viz; written if the fit
            runs out of memory. Ignored without CUDA.
        name: attribute of the learner.

    Attributes:
        totals: memory of the watched batch that keeps most, which `layers()` and `report()` are about.
        advice: layers to checkpoint first.
        notes: sentences about what could not be counted.
        rank_peak: of several ranks, which has the highest peak, known at the end of each training. All else
            is of this rank.
        coverage: which layers were seen.

    Raises:
        LookupError: If the model has none of `modules`, when a fit begins.

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

    layers = forwarded(MemoryRecords.layers)
    table = forwarded(MemoryRecords.table)
    to_frame = forwarded(MemoryRecords.to_frame)
    totals = forwarded_property(MemoryRecords.totals)
    advice = forwarded_property(MemoryRecords.advice)
    growth = forwarded(MemoryRecords.growth)
    notes = forwarded_property(MemoryRecords.notes)
    rank_peak: RankPeak | None = forwarded_attribute("rank_peak")
    report = forwarded(MemoryRecords.report)
    _repr_html_ = forwarded(MemoryRecords._repr_html_)

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
        self._params: Params = []  # parameters in the batch in progress
        self._silent: dict[str, str] = {}  # why each layer may not be called
        self.records = MemoryRecords({}, every)

    def before_fit(self) -> None:
        super().before_fit()
        named = named_modules(self.model)
        layers = named if self.modules is None else find_modules(self.model, self.modules, True)
        types = {name: plain_class(m).__name__ for name, m in layers.items()}
        self.records = MemoryRecords(types, self.every or 1)
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
        # a forward after this is a repetition by activation checkpointing
        if self.is_looking and self._watch:
            self._watch.end(self.loss)

    def after_backward(self) -> None:
        if self.is_looking and self._watch and self._watch.seen:
            self._params = param_layers(self.model, self.records.types)
            self.records.note_params(self._params)

    def after_cancel_batch(self) -> None:
        super().after_cancel_batch()
        if self._watch:
            self._watch.drop()

    # after one of these there is no `after_batch`
    after_cancel_train = after_cancel_epoch = after_cancel_fit = after_cancel_batch

    def after_batch(self) -> None:
        if self._watch:
            super().after_batch()
            if self.is_looking and (seen := self._watch.take()):
                self.records.add_batch(self.train_iter, seen)
                self.records.note_optimizer(self._params, self.opt)
                self._silent |= self._watch.inside

    def after_train(self) -> None:
        ranks = self.learn.ranks
        if ranks.world > 1 and self._watch and not self.learn.is_nested:
            own = float(self.records.peak)
            peaks = ranks.max([own if rank == ranks.rank else 0.0 for rank in range(ranks.world)])
            self.records.rank_peak = RankPeak.of(peaks)

    def after_fit(self) -> None:
        watch, self._watch, self._params = self._watch, None, []
        history, self._history = self._history, None
        if watch:
            watch.close()
        if history:
            history.stop(self.learn.fit_error)

    @property
    def coverage(self) -> Coverage:
        """Layers that were seen in this fit or the last one, and layers that hide their memory."""
        called = self.records.called
        labels = {name: name or kind for name, kind in self.records.types.items()}
        fired = tuple(label for name, label in labels.items() if name in called)
        silent = {label: self._silent[name] for name, label in labels.items() if name not in called}
        hidden = dict(self.records.hidden)
        return Coverage(tuple(labels.values()), fired, silent, hidden, {}, self.n_batches, self.n_skipped)

    def _is_training(self) -> bool:
        # not in a validation in the middle of the batch
        return self.learn.training and self.learn.in_loop_thread

    def state_dict(self) -> dict[str, Any]:
        return {}  # the memory of this process is of no use to another one

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_watch": None, "_history": None, "_params": []}
