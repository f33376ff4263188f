"""ActivationStats: records statistics of every layer's output, batch by batch."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.compiler import is_compiling

from hookcb.activations.merge import Merger
from hookcb.activations.operator import NUMBERS, OWNERS, Traced, leave_out, marks_on
from hookcb.activations.records import OPTIONS, ActivationRecords
from hookcb.activations.stats import Sample
from hookcb.core.alone import ALONE
from hookcb.core.batch import parts
from hookcb.core.sampling import SamplingCallback
from hookcb.core.threads import this_thread
from hookcb.core.torch_private import plain_class, raw_stream, version_of
from hookcb.hooks.callback import HookCallback
from hookcb.hooks.coverage import Coverage
from hookcb.hooks.hook import Hook
from hookcb.hooks.modules import device_of, outermost_compiled
from hookcb.processes.groups import group_of, has_whole_layers, is_sharded
from hookcb.processes.shards import Part, is_awaited, mesh_of, output_part, part_of
from hookcb.records.forward import forwarded, forwarded_attribute, forwarded_property

NOT_TAKEN = ("hook", "cpu", "gather", "modify")  # options of `HookCallback` that have no use here

MAX_COMPILED = 8  # times that torch compiles a function, as for each block in which parts of outputs are read
DIVIDED = "layers in tensor parallelism are not seen in more than 8 blocks that are compiled one by one"


class Awaited(NamedTuple):
    """An output that is the result of a collective, for which a hook must not wait."""

    path: str
    x: Tensor
    part: Part
    kind: str
    version: int


class ActivationStats(HookCallback):
    """Records statistics of each layer's output: shows dead, saturated, collapsing and exploding layers.

    Inside the hook a small output is copied and a large one reduced, on its device; the rest is done after
    the batch, for several batches together. No activation is kept and no batch waits for a GPU. A cancelled
    batch leaves nothing.

    In a fit on several ranks the records are those of all their samples, and the same on each: two reductions
    of a few numbers for each layer merge them at the end of a recorded batch, or of a validation. Slices of
    outputs, as under tensor parallelism, are merged too. Under `watch`, which never communicates, and if a
    subclass decides by itself which batches it `wants`, the records are those of this rank.

    Args:
        with_hist: record histograms too.
        eps: magnitude up to which an element counts as near zero, in the output's unit.
        bins: number of histogram bins.
        hist_range: range of bins of equal width. By default bins are logarithmic, from 2⁻¹⁰ to 2¹⁰ on both
            sides of 0: the same for all layers, so that counts of records, layers and ranks can be added.
        sample: `"auto"` uses every element for mean, std, min, max, abs_max and nonfinite, and for shares
            and histogram every one up to 8,192, above that 4,096 (standard error of a share ≤ 0.8 %); on a
            GPU with Triton every one for shares too, and 4,096 or more for a histogram. rms uses all,
            kurtosis those of shares (standard error 0.08 of 4,096 from a normal distribution, more if there
            are outliers).
            An int uses that many elements at most, for all; None uses every one for all, for which large
            outputs are copied until the batch ends.
        keep: maximum number of records; of more every second, fourth … is kept, and the newest.
        append: a new fit continues the records of the last.
        on_valid: record validation batches too, in `valid_stats`.
        name: see `Callback`.
        **options: arguments of `HookCallback`, such as `modules`, `every` and `include_paramless`, but not
            `hook`, `cpu`, `gather` and `modify`.

    Attributes:
        records: the recorded statistics, an `ActivationRecords`; this callback has its methods too.
        stats: `stats[record][layer]` is a dict of `mean`, `std` (unbiased), `min`, `max`, `abs_max` (of
            finite elements), `near_zero`, `zeros` (shares, 0..1; NaN if no element is finite), `nonfinite`
            (number), `rms` (root of the mean square, in the output's unit) and `kurtosis` (fourth central
            moment by the square of the variance: 3 for a normal distribution, 1 at least; NaN if all elements
            are equal or one is not finite); NaN if a layer was not called.
        names: layer names, in the order of their first record. Tensors inside an output are named by their
            path, `lstm[0]`; calls of a layer called several times in a batch by number, `fc#0`, `fc#1`.

    >>> from hookcb import ActivationStats, synth_learner
    >>> learn = synth_learner()
    >>> with learn.no_logging():
    ...     learn.fit(1, cbs=ActivationStats(include_paramless=True))
    >>> learn.activation_stats.names
    ['0', '1', '2']
    >>> len(learn.activation_stats.stats), learn.activation_stats.stats[0]["1"]["min"]
    (10, 0.0)
    """

    columns = ActivationRecords.columns
    load = staticmethod(ActivationRecords.load)
    names = forwarded_property(ActivationRecords.names)
    stats = forwarded_property(ActivationRecords.stats)
    valid_stats = forwarded_property(ActivationRecords.valid_stats)
    series = forwarded(ActivationRecords.series)
    merged = forwarded(ActivationRecords.merged)
    store_of = forwarded(ActivationRecords.store_of)
    table = forwarded(ActivationRecords.table)
    to_frame = forwarded(ActivationRecords.to_frame)
    steps = forwarded(ActivationRecords.steps)
    layer_stats = forwarded(ActivationRecords.layer_stats)
    hist = forwarded(ActivationRecords.hist)
    hist_edges = forwarded(ActivationRecords.hist_edges)
    color_dim = forwarded(ActivationRecords.color_dim)
    plot_layer_stats = forwarded(ActivationRecords.plot_layer_stats)
    plot_depth = forwarded(ActivationRecords.plot_depth)
    dead_chart = forwarded(ActivationRecords.dead_chart)
    plot_layers = forwarded(ActivationRecords.plot_layers)
    report = forwarded(ActivationRecords.report)
    _repr_html_ = forwarded(ActivationRecords._repr_html_)
    save = forwarded(ActivationRecords.save)
    clear = forwarded(ActivationRecords.clear)
    with_hist: bool = forwarded_attribute("with_hist")
    eps: float = forwarded_attribute("eps")
    bins: int = forwarded_attribute("bins")
    hist_range: tuple[float, float] | None = forwarded_attribute("hist_range")
    sample: Sample = forwarded_attribute("sample")
    keep: int = forwarded_attribute("keep")
    outputs: dict[str, tuple[str, tuple[int, ...]]] = forwarded_attribute("outputs")
    left_out: dict[str, str] = forwarded_attribute("left_out")

    def __init__(
        self,
        with_hist: bool = False,
        *,
        eps: float = 0.05,
        bins: int = 60,
        hist_range: tuple[float, float] | None = None,
        sample: Sample = "auto",
        keep: int = 5_000,
        append: bool = False,
        on_valid: bool = False,
        name: str | None = None,
        **options: Any,
    ) -> None:
        for option in options:
            if option in NOT_TAKEN:
                raise TypeError(
                    f"ActivationStats takes no {option}=, as its hook keeps only numbers; "
                    f"pass {option}= to HookCallback"
                )
        self.records = ActivationRecords(with_hist, eps, bins, hist_range, sample, keep)
        super().__init__(**{"detach": False} | options, name=name)
        self.append, self.run_valid = append, on_valid
        self._before = self._now = (0, 0)  # epochs and steps before this fit, and up to now
        self._is_sharded = False  # whether outputs may be parts
        self._is_slice = False  # whether the last output of a layer in tensor parallelism was one
        self._awaited: list[Awaited] = []  # in the running forward
        self._thread: int | None = None  # of the loop, during a fit
        self._owner = -1  # by which compiled code finds it
        self._written: Tensor | None = None  # what compiled code writes to
        self._hook_of: dict[int, Hook] = {}  # by the address of its mark
        self._streams: dict[torch.device, int] = {}  # those of the running batch, by card

    def before_fit(self) -> None:
        if not self.append:
            self.clear()
            self._now = 0, 0
        self._before = self._now
        self.records.drop_batch()
        super().before_fit()
        self._find_ranks()
        self._thread = this_thread() if self.learn.in_loop_thread else None
        device, n_hooks = device_of(self.learn.model), len(self.hooks or ())
        self._written = self.records.buffer.written_on(device, n_hooks)
        if OWNERS.get(self._owner) is not self:
            self._owner = next(NUMBERS)
        if self.is_forward and not self._options.get("pre") and self._may_shorten:
            self._hook_of = {}
            is_whole = not self._is_sharded or has_whole_layers(self.learn.model)
            for hook, mark in zip(self.hooks or (), marks_on(device, n_hooks), strict=True):
                hook.quick = self._take_usual
                if is_whole:
                    hook.traced = Traced(self, mark)
                elif len(outermost_compiled(self.learn.model)) > MAX_COMPILED:
                    hook.traced, hook.why_silent = leave_out, DIVIDED
                self._hook_of[mark.data_ptr()] = hook
            OWNERS[self._owner] = self

    @property
    def _may_shorten(self) -> bool:
        """Whether what `hook` does may be done in shorter ways, as no subclass has changed it."""
        return type(self).hook is ActivationStats.hook

    def _let_act(self, training: bool | None) -> None:
        super()._let_act(training)
        for slab in self.records.buffer.slabs.values():
            slab.rest(training is None)

    def looks_alike(self) -> bool:
        """Whether all ranks look at the same batches, so that their records can be merged."""
        return type(self).wants is SamplingCallback.wants

    def _find_ranks(self) -> None:
        """Finds whose samples are recorded."""
        model, ranks = self.learn.model, self.learn.ranks
        self._awaited, self._is_slice = [], False
        self._is_sharded = group_of(model) is not None and is_sharded(model)
        looks_alike = ranks.world > 1 and self.looks_alike()
        self.has_rank_state = ranks.world > 1 and not looks_alike
        self.records.merger = None
        if looks_alike:
            records = self.records
            given = {"every": self.every or 1, "on_valid": self.run_valid} | {
                option: getattr(records, option) for option in OPTIONS
            }
            ranks.check_alike({f"arguments of {self.name}": given})
            records.merger = Merger(ranks, device_of(model))
        group = group_of(model) if ranks is ALONE else ranks.group
        if group is None:
            self.records.of_ranks = ""
        elif looks_alike:
            self.records.of_ranks = f"all samples on {ranks.world} ranks"
        else:
            rank, world = distributed.get_rank(group), distributed.get_world_size(group)
            self.records.of_ranks = f"rank {rank} of {world}"

    def before_batch(self) -> None:
        super().before_batch()
        if (learn := self.learn).training:
            epochs, steps = self._before
            self._now = epochs + learn.epoch + 1, steps + learn.train_iter + 1
        if self.is_looking and not self.outside_main_phase:
            self.records.drop_batch()
            self._awaited = []
            self._streams = {
                device: raw_stream(device) for device in self.records.buffer.slabs if device.index is not None
            }

    def _take_usual(self, m: nn.Module, output: Any) -> bool:
        """Does what `hooks_act` and `hook` do in the usual case: an ordinary tensor in the loop's thread."""
        if is_compiling():  # this function, which Dynamo may compile by itself if it cannot compile the layer
            return False
        if self._acts_in is not self.learn.training:
            return True
        if this_thread() != self._thread or type(output) is not Tensor or self._is_sharded:
            return False
        name = self._names.get(id(m))
        if name is None:
            return False
        self.records.take(name, output, type(m).__name__)
        return True

    def _is_in_graph(self, x: Tensor) -> bool:
        """Whether a tensor in compiled code is on another stream than the batch, as in a CUDA graph."""
        return x.is_cuda and self._streams.get(x.device) != raw_stream(x.device)

    def layer_of(self, mark: Tensor) -> str:
        """Name of the layer with a mark; "" if there is none."""
        hook = self._hook_of.get(mark.data_ptr())
        return "" if hook is None else hook.name

    def take_compiled(self, x: Tensor | None, mark: Tensor, written: Tensor, part: str, kind: str) -> bool:
        """Does what `hook` does, when compiled code is run; a kernel writes to `written`.

        `part` is the path of the tensor in the layer's output. Returns whether this is a batch that is
        recorded, and `x` may be copied: not what a CUDA graph has, which `mode="reduce-overhead"` tries and
        captures on a stream of its own: nothing may stay there.
        """
        is_in_graph = x is not None and self._is_in_graph(x)
        acts = self._acts_in is self.learn.training or (
            is_in_graph and torch.cuda.is_current_stream_capturing()
        )
        if not acts or this_thread() != self._thread or (hook := self._hook_of.get(mark.data_ptr())) is None:
            return False
        hook.fired, path = True, hook.name + part
        if x is None:
            self.records.leave_out(path, kind)
        elif is_in_graph and not self.records.buffer.launches(x):
            self.records.leave_out(path, "a tensor in a CUDA graph")
        else:
            self.records.take(path, x, kind, written=written)
        return not is_in_graph

    def hook(self, m: nn.Module, *seen: Any) -> None:
        name, output = self._names.get(id(m)), seen[-1]
        kind = plain_class(m).__name__
        if name is None:
            self.left_out[f"a copy of {kind}"] = "as nn.DataParallel makes them of the layers"
            return
        if (self._options.get("pre") or not self.is_forward) and len(output) == 1:
            output = output[0]
        for path, x in list(parts(output, name)) or [(name, output)]:
            if self._is_sharded and isinstance(x, Tensor):
                self._take_part(path, x, m, seen[0])
            else:
                self.records.take(path, x, kind)

    def _take_part(self, path: str, x: Tensor, m: nn.Module, inputs: Iterable[Any]) -> None:
        """Takes this rank's part of an output of a model that is divided between ranks."""
        kind, is_output = plain_class(m).__name__, not self._options.get("pre")
        mesh, merger = mesh_of(m, inputs) if is_output else None, self.records.merger
        part = part_of(x) if mesh is None else output_part(x, m, inputs, mesh)
        if part is None:
            self.records.left_out[path] = "summands of the ranks"
            return
        if mesh is not None:
            self._is_slice = part.is_slice
            if merger is not None:
                merger.note_peers(mesh)
        if part.is_slice and (merger is None or self.learn.ranks.world < distributed.get_world_size()):
            self.records.slices[path] = f"of rank {distributed.get_rank()}"
        elif self._is_slice and mesh is None and merger is None:
            self.records.slices[path] = (
                f"probably of rank {distributed.get_rank()}, as that of the layer before"
            )
        if not is_awaited(part.x):
            self.records.take(path, part.x, kind, part.shape, part.copies)
        elif x.is_inference():  # which does not tell if it was changed since
            self.records.left_out[path] = "a result that is awaited, in inference mode"
        else:
            self.records.buffer.batch.setdefault(path, [])  # in the order of the forward
            self._awaited.append(Awaited(path, x, part, kind, version_of(x)))

    def _take_awaited(self) -> None:
        """Takes the results of collectives once the forward has used them."""
        if not self._awaited:
            return
        awaited, self._awaited = self._awaited, []
        with torch.no_grad():
            for path, x, part, kind, version in awaited:
                if version_of(x) != version:
                    self.records.left_out[path] = "changed in place before it had arrived"
                else:
                    self.records.take(path, part.x.wait(), kind, part.shape, part.copies)  # type: ignore[attr-defined]

    def after_pred(self) -> None:
        super().after_pred()
        self._take_awaited()

    def before_backward(self) -> None:
        super().before_backward()
        self._take_awaited()

    def after_cancel_batch(self) -> None:
        super().after_cancel_batch()
        if not self.outside_main_phase:
            self.records.drop_batch()
            self._awaited = []

    def after_batch(self) -> None:
        super().after_batch()
        if self.is_looking and not self.outside_main_phase:
            self._take_awaited()
            epochs, steps = self._before
            phase = "train" if self.training else "valid"
            self.records.end_batch(phase, epochs + self.epoch, steps + self.train_iter)

    def after_validate(self) -> None:
        if self.run_valid and not self.outside_main_phase:
            epochs, steps = self._before
            self.records.end_validation(epochs + self.epoch, steps + self.train_iter)

    def after_cancel_epoch(self) -> None:
        ActivationStats.after_validate(self)  # which a cancel in a validation leaves out

    def after_cancel_fit(self) -> None:
        ActivationStats.after_validate(self)

    def after_epoch(self) -> None:
        self.records.flush()

    def after_fit(self) -> None:
        super().after_fit()
        self.records.drop_batch()
        self.records.flush()
        self.records.merger, self._awaited = None, []

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_written": None, "_hook_of": {}}

    @property
    def coverage(self) -> Coverage:
        """Layers and batches that the hooks have seen; a layer whose output has no statistics is not seen."""
        return super().coverage.recorded(self.outputs, self.records.slices)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "now": self._now,
            "before": self._before,
            "recorded": self.records.state(),
            **({"merged": self.records.merger.state()} if self.records.merger else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        merger, slabs = self.records.merger, self.records.buffer.slabs
        self.records = ActivationRecords.from_state(state["recorded"])
        self.records.buffer.slabs = slabs  # to which compiled code writes
        if merger is not None and "merged" in state:
            merger.load_state(state["merged"])
        self.records.merger = merger
        self._now, self._before = state["now"], state["before"]
