"""GradientHealth: records gradients and weights around each optimizer step."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.optim import Optimizer

from hookcb.core.alone import Ranks
from hookcb.core.arguments import check_count
from hookcb.core.callback import Callback
from hookcb.core.events import CancelStepException
from hookcb.core.optim import detached_scalar
from hookcb.core.torch_private import flattened_sizes, is_fully_sharded
from hookcb.gradients.capture import GradientReader, StepCapture, first_nonfinite
from hookcb.gradients.hand_steps import StepByHand
from hookcb.gradients.outputs import OutputGradients, OutputHooks
from hookcb.gradients.records import GradientRecords
from hookcb.gradients.steps import StepWatch, is_unscaled, running_stats, scale_of
from hookcb.hooks.params import Which, check_which, find_params
from hookcb.processes.shards import is_divided, is_dtensor, is_shard
from hookcb.records.forward import forwarded, forwarded_attribute, forwarded_property


class GradientHealth(Callback):
    """Records gradients, weights and updates of each parameter at each step.

    Gradients are read whole, unscaled and before clipping, and once more as the optimizer gets them; weights
    are read after the step. Nothing waits for a GPU, except for sparse gradients, which are coalesced.

    Of sharded parameters, as under FSDP and tensor parallelism, each rank reads its part; two reductions of a
    few numbers for each parameter merge them at each record, and nothing is gathered. Under `watch`, which
    never communicates, the numbers are those of this rank's part.

    Args:
        every: record steps 0, every, 2·every … of the optimizer; by default all.
        params: a glob on names ("blocks.*.weight"), a predicate (name, parameter) -> bool, or several of
            these; by default all parameters.
        activations: whether to record gradients of the outputs of all leaf modules with parameters, too; on
            several ranks, those of this one. Not for a model compiled with `fullgraph=True`, whose forward
            would raise torch's `Unsupported`.
        detail_every: read details in records 0, n, 2n … only, as each needs another pass over the gradients:
            `abs_max`, NaN in the other records, and for `flow()` the mean |gradient|. Parameters with up to
            1,024 elements, those of which each rank has a part, and all on a card with Triton, which reads
            them in the same pass, always have them; so does each on a CPU if a gradient is not finite.
        on_nonfinite: action on a NaN or infinite gradient of any parameter: "record" it; "skip" the step and
            drop the gradients; "raise", which ends the fit with weights and optimizer as they were before the
            step. "skip" and "raise" wait for the device at each step. They leave overflows to a GradScaler
            until its scale has fallen to 1.
        keep: maximum number of records; beyond it every second, fourth … is kept, and the newest.
        name: name of the callback in the learner.

    Attributes:
        records: the `GradientRecords`, which can be saved without the callback.
        stats: `stats[record][parameter]` is a dict of `norm` (L2), `clipped_norm` (NaN if the step was
            skipped), `rms`, `abs_max` (of finite elements), `nonfinite` (number; on a GPU without Triton, in
            records without details, 1 stands for any), `zero_rows` (share, 0..1; NaN for one dimension, or if
            no element is finite), `weight_norm`, `weight_mean`, `weight_std`, `update_ratio` (‖Δw‖/‖w‖ of
            this step) and `drift` (the same since the fit began). The last two use 1,024 elements at most.
            Gradient statistics use all elements; weight statistics use all up to 65,536, and 1,024 of larger
            weights, whose norm is then usually within 3 %. So does `weight_std` of more than 1,024 if it is
            below 6 % of the mean, as in a layer norm.

    Raises:
        FloatingPointError: With `on_nonfinite="raise"`; names the first bad parameter, and the batch.
        LookupError: When a fit begins, if `params` selects nothing.
        TypeError, ValueError: If an argument is invalid; when a fit begins, if a sharded model is watched and
            `on_nonfinite` is not "record".

    >>> from hookcb import GradientHealth, synth_learner
    >>> learn = synth_learner()
    >>> with learn.no_logging():
    ...     learn.fit(1, cbs=GradientHealth())
    >>> learn.gradient_health.names, len(learn.gradient_health.stats)
    (['0.weight', '0.bias', '2.weight', '2.bias'], 10)
    """

    run_lr_find = False  # which tries rates that are too high on purpose

    def __init__(
        self,
        every: int | None = None,
        params: Which | Iterable[Which] | None = None,
        activations: bool = False,
        *,
        detail_every: int = 10,
        on_nonfinite: str = "record",
        keep: int = 5_000,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        if on_nonfinite not in ("record", "skip", "raise"):
            raise ValueError(f"on_nonfinite must be 'record', 'skip' or 'raise', got {on_nonfinite!r}")
        self.every = check_count("every", 1 if every is None else every, "steps")
        self.params = None if params is None else check_which(params)
        self.activations, self.on_nonfinite = activations, on_nonfinite
        self.detail_every = check_count("detail_every", detail_every, "records")
        self.keep = check_count("keep", keep, "records", least=2)
        self.records = GradientRecords(keep, activations)
        self._end()

    def _end(self) -> None:
        """Drops the state of a fit."""
        self._n_steps, self._is_gathered = 0, False
        self._reader: GradientReader | None = None
        self._watch: StepWatch | None = None
        self._outputs: OutputHooks | None = None
        self._capture: StepCapture | None = None  # of the step in progress, if it is recorded
        self._is_by_hand = False  # whether it was taken as one without an optimizer
        self._is_outdated = False  # whether to look for the parameters again before the next step

    # ---- events

    def before_fit(self) -> None:
        self._end()
        model = self.learn.model
        self.records = GradientRecords(self.keep, self.activations)
        found = find_params(model, self.params)
        self._reader = GradientReader(found, self.learn.ranks, self.records.memory)
        self._note_shards(self._reader, self.learn.ranks)
        # a watch may begin when some are gathered, and then reads them anew at its first step
        is_whole = not all(is_shard(param.p) for param in self._reader.params)
        self._is_gathered = is_whole and any(map(is_fully_sharded, model.modules()))
        stats = self.records.output_stats
        self._outputs = None if stats is None else OutputHooks(model, stats)
        self._watch = StepWatch(model, self._at_step)
        self._refresh(self.opt)

    def before_train(self) -> None:
        self._is_outdated = self.learn.is_calling  # torch.func.functional_call puts other tensors in
        if not self._is_outdated:
            self._refresh(self.opt)

    def before_batch(self) -> None:
        if self._outputs and self.training:
            self._outputs.begin_batch(is_open=self.wants(self._n_steps))

    def before_backward(self) -> None:
        if self._outputs:
            self._outputs.scale = scale_of(self.learn.scaler, self.learn.model)

    after_pred = before_backward  # under watch, the first gradient may arrive before before_backward

    def after_cancel_batch(self) -> None:
        if self._outputs and self.training:
            self._outputs.begin_batch(is_open=False)

    def after_batch(self) -> None:
        if self._outputs and self.training:
            self._outputs.end_batch(self.epoch, self.train_iter)

    def before_step(self) -> None:
        if self._reader is None or self._watch is None:  # outside a fit
            return
        is_recorded = self.wants(self._n_steps)
        self._n_steps += 1
        self._begin_step(self._reader, self._watch, is_recorded)
        if self.on_nonfinite == "record" or (reason := self._nonfinite()) is None:
            return
        if self.on_nonfinite == "skip":
            self.opt.zero_grad()  # else the next backward would add to them
            self.learn.model.zero_grad()
            raise CancelStepException
        self._end_step(is_cancelled=True)
        raise FloatingPointError(
            f"{reason} at {', '.join(self.learn.position('before_step'))}; "
            "weights and optimizer are as they were before this step"
        )

    def after_cancel_step(self) -> None:
        self.phase_state["cancelled"] = True

    def after_step(self) -> None:
        self._end_step(self.phase_state.pop("cancelled", False), has_scaler=self.learn.scaler is not None)

    def after_epoch(self) -> None:
        self.records.flush()

    def after_fit(self) -> None:
        if self._watch:
            self._watch.close()
        if self._outputs:
            self._outputs.remove()
        self.records.flush()
        self._end()

    # ---- steps

    def wants(self, i: int) -> bool:
        """Whether step `i`, counted from 0, is recorded."""
        return i % self.every == 0

    def _refresh(self, opt: Optimizer | None) -> None:
        """Reads the current parameters and buffers of the model and the optimizer."""
        if self._reader is None or self._watch is None:
            return
        model = self.learn.model
        with suppress(LookupError):  # the selected parameters are gone
            self._reader.refresh(
                find_params(model, self.params), running_stats(model), flattened_sizes(model)
            )
        if opt is not None:
            self._watch.note(opt)

    def look_again(self) -> None:
        """Looks for the parameters of the model again before the next step, as some are new."""
        self._is_outdated = True

    def _note_shards(self, reader: GradientReader, ranks: Ranks) -> None:
        """Checks that ranks have parts of the same parameters; alone, notes whose part is read."""
        divided = [param.p for param in reader.params if is_divided(param.p)]
        self.has_rank_state = bool(divided)
        self._part = (ranks.rank, ranks.world) if divided else ()
        if not divided:
            return
        if ranks.world == 1:
            if self.on_nonfinite != "record":
                raise ValueError(
                    f"with on_nonfinite={self.on_nonfinite!r} all ranks of a sharded model must decide "
                    "together, but here they do not communicate; use 'record', and decide in your loop"
                )
            self.records.shard = f"the shard of rank {distributed.get_rank()}"
        n = sum(p.numel() for p in divided if is_dtensor(p))
        ranks.check_alike({"sharded parameters": f"{len(divided)}, with {n:,} elements in all"})

    def _begin_step(self, reader: GradientReader, watch: StepWatch, is_recorded: bool) -> None:
        """Captures whole gradients before clipping, if the step is recorded.

        Layers may be added to a model in its training, so that parameters are looked for again now and then.
        """
        opt = self.opt
        n = self.records.n_added
        is_due = is_recorded and not n & (n - 1)  # 0, 1, 2, 4, 8 …
        if watch.begin(opt) or is_due or self._is_outdated or self._is_gathered:
            self._is_outdated = False
            self._refresh(opt)
        if self._is_gathered:
            self._is_gathered = False
            self._note_shards(reader, self.learn.ranks)
        self._capture = self._captured(reader, opt) if is_recorded else None
        self._is_by_hand = False
        if isinstance(opt, StepByHand):  # its gradients may be cleared when the step ends
            watch.make_by_hand()
            self._is_by_hand = True

    def _captured(self, reader: GradientReader, opt: Optimizer) -> StepCapture:
        scaler = self.learn.scaler
        lr, scale = detached_scalar(opt.param_groups[-1]["lr"]), scale_of(scaler, self.learn.model)
        grad_scale = 1.0 if is_unscaled(scaler, opt) else scale
        # set by a GradScaler of the user for a fused optimizer
        if scaler is None and isinstance(given := getattr(opt, "grad_scale", None), Tensor):
            grad_scale = scale = detached_scalar(given)
        is_detailed = self.records.n_added % self.detail_every == 0
        return reader.before_step(grad_scale, lr, scale, is_detailed=is_detailed)

    def _at_step(self) -> None:
        """The optimizer begins its step."""
        if self._capture is None or self._reader is None:
            return
        if self._is_by_hand:  # weights were only moved, and maybe moved back, before an optimizer's step
            self._is_by_hand, self._capture = False, self._captured(self._reader, self.opt)
        else:
            self._reader.at_step(self._capture)

    def _end_step(self, is_cancelled: bool, has_scaler: bool = False) -> None:
        """Adds the record of a step that was made or cancelled."""
        if self._reader is None or self._watch is None:
            return
        skipped = self._watch.end(is_cancelled, has_scaler)
        self.records.count_step(skipped)
        capture, self._capture = self._capture, None
        if capture is not None:
            capture.not_optimized = self._watch.missing(self._reader.with_grad)
            facts = getattr(self.learn, "facts", None)  # of a loop that hookcb does not run
            self.records.is_clipped = facts is not None and facts.n_clipped > 0 and not facts.reports_steps
            self._reader.after_step(capture, skipped)
            self.records.add_step(capture, self.epoch, self.train_iter)

    @torch.no_grad()
    def _nonfinite(self) -> str | None:
        """Description of the first gradient that is not finite; None while a GradScaler adapts its scale.

        An overflow halves the scale; at a scale of 1 the gradient is not finite for another reason.
        """
        scaler, bad = self.learn.scaler, first_nonfinite(find_params(self.learn.model), self.learn.ranks)
        if bad is None or (scaler is not None and scaler.get_scale() > 1):
            return None
        name, n = bad
        return f"the gradient of {name!r} has {n:,} NaN or infinite element{'s' * (n != 1)}"

    # ---- records

    columns = GradientRecords.columns
    names = forwarded_property(GradientRecords.names)
    stats = forwarded_property(GradientRecords.stats)
    step_stats = forwarded_property(GradientRecords.step_stats)
    buffer_stats = forwarded_property(GradientRecords.buffer_stats)
    skipped = forwarded_property(GradientRecords.skipped)
    series = forwarded(GradientRecords.series)
    merged = forwarded(GradientRecords.merged)
    steps = forwarded(GradientRecords.steps)
    table = forwarded(GradientRecords.table)
    to_frame = forwarded(GradientRecords.to_frame)
    step_series = forwarded(GradientRecords.step_series)
    buffer_series = forwarded(GradientRecords.buffer_series)
    flow = forwarded(GradientRecords.flow)
    plot_flow = forwarded(GradientRecords.plot_flow)
    plot_updates = forwarded(GradientRecords.plot_updates)
    report = forwarded(GradientRecords.report)
    _repr_html_ = forwarded(GradientRecords._repr_html_)
    save = forwarded(GradientRecords.save)
    without_grad: list[str] = forwarded_attribute("without_grad")
    frozen: list[str] = forwarded_attribute("frozen")
    left_out: dict[str, str] = forwarded_attribute("left_out")
    not_optimized: list[str] = forwarded_attribute("not_optimized")
    shard: str = forwarded_attribute("shard")
    output_stats: OutputGradients | None = forwarded_attribute("output_stats")

    @staticmethod
    def load(path: str | Path) -> GradientRecords:
        """The records in a file written by `save`; see `GradientRecords.load`."""
        return GradientRecords.load(path)

    # ---- resuming

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"recorded": self.records.state()}
        if self._reader:
            state |= {"n_steps": self._n_steps, "sketches": dict(self._reader.starts)}
            state |= {"part": self._part} if self.has_rank_state else {}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.records = GradientRecords.from_state(state["recorded"])
        if self._reader:
            self._n_steps, self._reader.memory = state["n_steps"], self.records.memory
            if state.get("part", ()) == self._part:  # else they are those of other elements
                self._reader.starts.update(state.get("sketches", {}))  # those of 0.2 had other elements
        if self._outputs and self.records.output_stats is not None:
            self._outputs.stats = self.records.output_stats

    def __getstate__(self) -> dict[str, Any]:
        self.records.flush()
        parts = "_reader", "_watch", "_outputs", "_capture"  # they belong to the fit, and hold the model
        return super().__getstate__() | dict.fromkeys(parts)
