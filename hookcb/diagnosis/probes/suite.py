"""Probes: everything that Diagnose measures itself, in one place."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookcb.core.batch import n_samples, parts
from hookcb.core.optim import detached_scalar
from hookcb.core.shards import has_no_part
from hookcb.diagnosis.frame import about
from hookcb.diagnosis.guard import Guard
from hookcb.diagnosis.measurements.curves import Curve, Curves
from hookcb.diagnosis.measurements.dead_units import MAX_DENSE, N_DENSE, DeadUnits
from hookcb.diagnosis.measurements.layer_rows import MAX_RECORDS, LayerRows, float_output
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.operations import MIN_BATCHES, Operations
from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.measurements.targets import Targets
from hookcb.diagnosis.probes.batch import (
    COLUMNS,
    column_squares,
    input_numbers,
    observe_labels,
    observe_refusal,
    observe_scaled_labels,
)
from hookcb.diagnosis.probes.buffers import has_own_buffers, observe_buffers
from hookcb.diagnosis.probes.class_axis import class_scores, observe_class_axis
from hookcb.diagnosis.probes.head import is_comparison_known, observe_output, stuck_share
from hookcb.diagnosis.probes.loss_graph import LossGraph
from hookcb.diagnosis.probes.model import observe_frozen, observe_model, observe_optimizers
from hookcb.diagnosis.probes.motion import Motion
from hookcb.diagnosis.probes.nan import ExternalBatch, find_origin
from hookcb.diagnosis.probes.norm import NormProbe, observe_unseen_validation
from hookcb.diagnosis.probes.outside import OutsideParameters
from hookcb.diagnosis.probes.overfit import observe_memorized_labels
from hookcb.diagnosis.probes.replicas import can_compare, observe_replicas
from hookcb.diagnosis.probes.samples import BatchHashes, RandomStates
from hookcb.diagnosis.probes.sequence_axis import SequenceAxis
from hookcb.diagnosis.probes.step import (
    AddedBackwards,
    ClearedGradients,
    LostUpdates,
    StaleGradients,
    observe_accumulation,
)
from hookcb.diagnosis.probes.tokens import Tokens
from hookcb.diagnosis.run import Observation, Run
from hookcb.diagnosis.verdict import Finding
from hookcb.hooks.modules import device_of, named_modules
from hookcb.hooks.params import find_params
from hookcb.records.store import StatStore

PENALTY_EVERY = 8  # batches, as a penalty may change fast
N_TABLES = 3  # batches whose columns are measured
MAX_OUTPUT = 65_536  # elements of an output that is checked for NaN in each batch


class Probes:
    """Measurements that ActivationStats and GradientHealth do not take.

    The methods for events take the loop, and whether the batch is inspected closely. Each probe is called by
    the guard, by the name of its attribute, so that its failure costs nothing but what it is for.

    Args:
        run: the run, live.
        guard: calls the probes.

    Attributes:
        is_dense: whether missing gradients are still counted in each step.
    """

    def __init__(self, run: Run, guard: Guard) -> None:
        loop = run.loop
        self.run, is_external = run, loop.is_external
        self.guard, model, made = guard, loop.model, guard.made
        self.about = {name: about(m) for name, m in named_modules(model).items()}
        self.observations: list[Observation] = []
        self.notes: list[str] = []
        self.is_dense, self.is_external = True, is_external
        self.observed: set[str] = set()  # see `Run.observed`
        self.sources = {"batches", "batch", "steps", "time"}
        self.sequences, self.tokens = made("sequences", SequenceAxis), made("tokens", Tokens)
        self.lost_updates = made("lost_updates", LostUpdates, model)
        self.motion = made("motion", Motion, model)
        self.outside = made("outside", OutsideParameters, model)
        self._factors: list[float | Tensor] = []  # gradients of the first losses that were reported
        self._is_after_look = False  # whether the batch before was inspected
        self.under_way: bool | None = None  # after the backward of a batch: whether that is inspected
        self.stale = made("stale", StaleGradients, model)
        self.cleared, self.added = made("cleared", ClearedGradients), made("added", AddedBackwards)
        self.stuck, self.sizes = (made(x, Curve) for x in ("stuck", "sizes"))
        for listener in (self.sequences, self.tokens):
            vars(listener)["failure"] = None
            run.measured(Operations).listeners.append(listener)
        self.norms = made("norms", NormProbe, model)
        self._has_read_loss = False
        self.n_batches = self.n_looked = self.n_steps = 0
        self._is_step_cancelled = False
        self.n_without: Counter[str] = Counter()
        self.params = guard.call("params", find_params, model) or []
        self.inputs = made("inputs", StatStore, COLUMNS, MAX_RECORDS)
        self.columns: list[Tensor] = []  # mean squares, on their device
        self.has_origin = False  # whether the origin of a NaN or infinity was looked for
        self.has_recurrent = any(isinstance(m, nn.RNNBase) for m in model.modules())
        # what only ranks compare; None for a process that trains alone
        is_replica, self.world = guard.call("replicas", can_compare, loop), loop.ranks.world
        self.hashes = made("hashes", BatchHashes) if is_replica else None
        self.random = made("random", RandomStates) if is_replica else None
        self.reduced = made("reduced", Curve) if is_replica else None
        self.loader: Any = None  # of the last epoch that has ended
        self.observe("model", observe_model, model)
        if not guard.has_failed("model"):
            self.sources.add("model")

    def observe(self, part: str, probe: Callable[..., Iterable[Observation]], *args: Any) -> None:
        """Adds what a probe observes."""
        self.observations += self.guard.call(part, lambda: list(probe(*args))) or []

    # ---- a batch

    def begin_batch(self, loop: Any, looking: bool) -> None:
        """Measures inputs and modes at the beginning of a batch."""
        self.under_way, call = None, self.guard.call
        if looking or self._is_after_look:
            call("tokens", self.tokens.begin_batch)
            self._is_after_look = looking
        if looking or self.has_modes:
            self.note_modes(loop, looking)
        if self.hashes is not None:
            call("hashes", self.hashes.add, loop.iter, loop.xb, loop.yb)
        if looking:
            call("sequences", self.sequences.begin_batch)
            if self.random is not None:
                call("random", self.random.begin_batch, device_of(loop.model))
            call("sizes", self._add_size, loop)
            call("inputs", self._add_inputs, loop)
            call("columns", self._add_columns, loop)

    def _add_size(self, loop: Any) -> None:
        size = sum(x.numel() for _, x in parts(loop.xb) if isinstance(x, Tensor))
        self.sizes.add(loop.train_iter, float(size))

    def _add_inputs(self, loop: Any) -> None:
        if (numbers := input_numbers(loop.xb)) is not None:
            self.observed.add("inputs")
            self.inputs.put("x", [self.inputs.begin(0, loop.train_iter)], numbers[None].float())

    def _add_columns(self, loop: Any) -> None:
        if len(self.columns) < N_TABLES and (squares := column_squares(loop.xb)) is not None:
            self.columns.append(squares)

    def note_modes(self, loop: Any, looking: bool) -> None:
        """Notes the number of samples, and the modes of layers that depend on it."""
        n = self.guard.call("norms", n_samples, (*loop.yb, loop.xb))
        self.guard.call("norms", self.norms.begin_batch, loop.train_iter, n)

    @property
    def has_modes(self) -> bool:
        """Whether the modes of layers are noted in each batch."""
        return self.norms.is_needed is True

    @property
    def checks_outputs(self) -> bool:
        """Whether outputs are checked in each batch, as in an external loop that may never tell its loss."""
        return self.is_external and self.n_losses < max(1, self.n_batches)

    def see_output(self, name: str, m: nn.Module, output: Any) -> None:
        """Shows a layer's output in an inspected batch."""
        if (x := float_output(name, output)) is None:
            return
        if torch.compiler.is_compiling():
            self.sequences.see_output(name, m, x)
        else:
            self.guard.call("sequences", self.sequences.see_output, name, m, x)

    def record_pred(self, loop: Any, looking: bool) -> None:
        """Reads what the output tells in an inspected batch, and checks it if `checks_outputs`."""
        if looking:
            guarded = partial(self.guard.call, "tokens")
            self.guard.call("tokens", self.tokens.follow, loop.pred, guarded)
            self.guard.call("outside", self.outside.follow, loop.pred, loop.xb, self.n_steps)
        if self.checks_outputs and not self.has_origin:
            outputs = [x for _, x in parts(loop.pred) if isinstance(x, Tensor) and x.is_floating_point()]
            at_hand = [x.detach() for x in outputs if x.is_cpu and x.numel() <= MAX_OUTPUT]
            if not all(bool(x.isfinite().all()) for x in at_hand):
                self._find_origin(loop, "The model's output is not finite", gradient=False)

    def record_loss(self, loop: Any, looking: bool) -> None:
        """Records the loss, and reads its graph once."""
        call, is_first = self.guard.call, not self._has_read_loss
        needs_node = is_first or looking or self.is_external
        node: Any = loop.loss_node if needs_node else None  # which torch makes a Python object of
        yb = self.run.measured(Targets).of_batch(self.run) if is_first or looking else ()
        if is_first:
            self._has_read_loss = True
            self._read_graph(loop, node, yb)
        if looking:
            if self.random is not None:
                call("random", self.random.end_loss, device_of(loop.model))
            call("sequences", self.sequences.compare, loop.xb, yb)
            call("stuck", self._add_stuck_share, loop, node, yb)
        if self.is_external and self._follows_factor(loop, node):
            node.register_prehook(lambda grads: call("added", self._add_factor, grads))
        number = detached_scalar(loop.loss)
        if is_first or looking:
            self.observed |= {"loss", "labels"} if len(loop.yb) else {"loss"}
        if isinstance(number, float) and not math.isfinite(number):
            self._find_origin(loop, f"The loss is {number}", gradient=False, loss_node=node)

    def _add_factor(self, grads: tuple[Tensor, ...]) -> None:
        """Records the gradient of a loss: what it is multiplied by before backward is called."""
        self._factors.append(detached_scalar(grads[0]))

    def _follows_factor(self, loop: Any, node: Any) -> bool:
        """Whether the gradient that will reach a reported loss tells by what it is divided."""
        is_reported = loop.facts.n_losses_reported > 0
        return is_reported and node is not None and len(self._factors) < MIN_BATCHES

    def _add_stuck_share(self, loop: Any, node: Any, yb: Any) -> None:
        graph = self.graph
        if graph is not None and (share := stuck_share(graph, node, loop.pred, yb)) is not None:
            self.stuck.add(loop.train_iter, detached_scalar(share))

    def _read_graph(self, loop: Any, node: Any, yb: Any) -> None:
        call, last, step = self.guard.call, self.last_layer, loop.train_iter
        if (graph := self.graph) is not None:
            self.observe("output", observe_output, graph, node, loop.pred, yb, last, step)
            if call("output", is_comparison_known, graph, node, loop.pred, yb):
                self.observed.add("output beside its targets")
        self.observe("scaled_labels", observe_scaled_labels, loop.xb, yb, step)
        if (scores := call("class_axis", class_scores, node)) is not None:
            self.observed.add("axis of the classes")
            self.observe("class_axis", observe_class_axis, scores)

    @property
    def last_layer(self) -> str:
        """Name of the last layer measured in this batch, "" if there is none."""
        return self.run.measured(LayerRows).last

    def _find_origin(self, loop: Any, noticed: str, gradient: bool, loss_node: Any = None) -> None:
        """Finds the origin of the first non-finite number, once."""
        if not self.has_origin:
            self.has_origin = self.run.alarmed = True
            batch = ExternalBatch(loop) if self.is_external else loop
            given = batch, noticed, gradient, loop.train_iter, self.run.measured(Loss).autocasts, loss_node
            self.observe("origin", lambda: [find_origin(*given)])

    def begin_backward(self, loop: Any, looking: bool) -> None:
        """Reads the gradients that are left from earlier steps."""
        if self.is_external:
            self.guard.call("added", self.added.before_backward, self.first_param)
        if self.n_steps < N_DENSE:
            self.guard.call("stale", self.stale.before_backward)

    def end_backward(self, loop: Any, looking: bool) -> None:
        """Checks the first layer's gradient, which any non-finite number in the backward reaches."""
        self.observed.add("backward")
        self.under_way = looking
        if self.is_external:
            self.guard.call("added", self.added.after_backward, self.first_param)
        if self.n_steps < N_DENSE:
            self.guard.call("cleared", self.cleared.after_backward, self.first_param)
        if self.has_origin or (loop.scaler is not None and loop.scaler.is_enabled()):
            return
        if looking and self.reduced is not None:
            self.guard.call("reduced", self._add_norm, self.reduced, loop.train_iter)
        try:
            grad = None if self.first_param is None else self.first_param.grad
            is_bad = grad is not None and grad.is_cpu and not math.isfinite(grad.detach().sum().item())
        except Exception as error:  # without a call, as in each batch
            self.guard.note("first_param", error)
        else:
            if is_bad:
                self._find_origin(loop, "A gradient is not finite", gradient=True)

    def _add_norm(self, curve: Curve, step: int) -> None:
        if self.first_param is not None and self.first_param.grad is not None:
            curve.add(step, detached_scalar(self.first_param.grad.norm()))

    def drop_batch(self, loop: Any, looking: bool) -> None:
        """Discards the current batch, which was cancelled and gives no gradients."""

    def cancel_step(self, loop: Any, looking: bool) -> None:
        """Records that the current step is not made; its gradients may stay for the next one."""
        self.guard.call("lost_updates", self.lost_updates.drop_step)
        self._is_step_cancelled = True

    def find_new_params(self, loop: Any) -> bool:
        """Looks for parameters that the model has got in its training; True if it has."""
        if not self.guard.call("outside", self.outside.has_joined):
            return False
        self.params = self.guard.call("params", find_params, loop.model) or self.params
        self.guard.call("motion", self.motion.begin, loop.model)
        return True

    def begin_step(self, loop: Any, looking: bool) -> None:
        """Reads the gradients and weights before a step."""
        call = self.guard.call
        if self.is_external:
            call("added", self.added.before_step, self.first_param)
        if self.n_steps < N_DENSE:
            call("cleared", self.cleared.before_step)
            call("stale", self.stale.before_step, loop.opt)
        if looking or self.is_dense:
            call("params", self._count_without)
        if looking:
            call("lost_updates", self.lost_updates.before_step)

    def _count_without(self) -> None:
        """Counts the parameters that require a gradient and have none."""
        without = ((name, p) for name, p, _ in self.params if p.requires_grad and p.grad is None)
        self.n_without.update(name for name, p in without if not has_no_part(p))

    def end_step(self, loop: Any, looking: bool) -> None:
        """Records a step that was made or cancelled."""
        self.n_steps += 1
        if self.is_dense:
            has_few = self.run.measured(DeadUnits).has_few
            self.is_dense = self.n_steps < N_DENSE or (self.n_steps < MAX_DENSE and has_few)
        if self.is_external:
            self.guard.call("added", self.added.end_step)
            if loop.facts.n_beside:
                self.observed.add("backward beside the model")
        self.observed.add("steps")
        if looking:
            self.guard.call("lost_updates", self.lost_updates.after_step, loop.train_iter)
        is_made, self._is_step_cancelled = not self._is_step_cancelled, False
        if loop.opt is not None and is_made and self.n_steps <= N_DENSE:
            self.guard.call("stale", self.stale.after_step, loop.opt)

    def end_batch(self, loop: Any, looking: bool) -> None:
        """Records memory at the end of a batch."""
        self.under_way = None
        self.n_batches += 1
        self.observed.add("batches")
        self.n_looked += looking

    @property
    def n_losses(self) -> int:
        """Number of losses that were recorded."""
        return self.run.measured(Curves).n_losses

    @property
    def first_param(self) -> nn.Parameter | None:
        return self.run.measured(Steps).first_param

    @property
    def optimizers(self) -> dict[int, Optimizer]:
        return self.run.measured(Steps).optimizers

    @property
    def n_backward(self) -> int:
        return self.run.measured(Steps).n_backward

    def end_epoch(self, loop: Any, looking: bool) -> None:
        """Compares replicas; time until the next batch does not count as waiting for data."""
        self.observe("replicas", observe_replicas, loop)
        self.observe("buffers", observe_buffers, loop)
        if self.guard.call("replicas", can_compare, loop):
            self.observed.add("replicas at the end of an epoch")
            self.loader = loop.dl  # read at the end of the fit, when the epoch of its sampler is known
        if self.guard.call("buffers", has_own_buffers, loop):
            self.observed.add("buffers of each replica")

    # ---- the end

    @property
    def graph(self) -> LossGraph | None:
        return self.run.measured(Loss).graph

    @property
    def graph_of_one(self) -> LossGraph:
        return LossGraph() if self.graph is None or len(self.optimizers) > 1 else self.graph

    def try_to_overfit(self, learn: Any, findings: tuple[Finding, ...], falls_slowly: bool) -> bool:
        """Tries to overfit a batch at the end of the fit; True if that adds an observation."""
        before = len(self.observations)
        if not self.is_external:
            probe = observe_memorized_labels
            self.observe("overfit", probe, learn, findings, self.n_batches, falls_slowly)
        return len(self.observations) > before

    def _observe_accumulation(self, loop: Any) -> Iterable[Observation]:
        """Compares backwards with steps, and with what the loss is multiplied by."""
        factors = {float(x) for x in self._factors} if loop.facts.n_losses_reported else {1.0}
        scale = self.graph_of_one.scale * (factors.pop() if len(factors) == 1 else math.nan)
        is_scaled = loop.scaler is not None and loop.scaler.is_enabled()
        if is_scaled or math.isnan(scale) or self.n_steps < MIN_BATCHES:
            return ()
        self.observed.add("divisor of the loss")
        return observe_accumulation(self.added.counts, scale)

    def observe_end(self, loop: Any, looking: bool) -> None:
        """Inspects the optimizers at the end of a training."""
        self.observe("optimizers", observe_optimizers, loop.model, self.optimizers.values())
        if self.first_param is None:
            self.observe("optimizers", observe_frozen, loop.model, self.optimizers.values(), self.n_backward)
        if self.is_external:
            self.observe("validation", observe_unseen_validation, loop)
            self.observe("added", self._observe_accumulation, loop)
        if self.optimizers:
            self.observed.add("groups of the optimizer")

    def observe_error(self, loop: Any, looking: bool, error: BaseException) -> None:
        """Inspects the exception that has ended a training."""
        is_end = isinstance(error, SystemExit) and not error.code  # as of sys.exit(main())
        if not is_end and not isinstance(error, KeyboardInterrupt):
            self.guard.call("norms", self.norms.read_error, error, loop.train_iter)
            self.guard.call("outside", self.outside.read_error, error)
            self.observe("error", self._observe_labels, loop, error)
            self.observe("error", observe_refusal, loop.yb, error, loop.train_iter)

    def _observe_labels(self, loop: Any, error: BaseException) -> Iterable[Observation]:
        with suppress(RuntimeError):  # reading from a GPU that has failed
            return list(observe_labels(loop.pred, loop.yb, error, loop.train_iter))
        return []
