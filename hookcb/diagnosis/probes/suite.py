"""Probes: everything that Diagnose measures itself, in one place."""

import math
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hookcb.diagnosis.frame import about
from hookcb.diagnosis.guard import Guard
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.measurements.layer_rows import LayerRows
from hookcb.diagnosis.measurements.layer_times import LayerTimes
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.loss_graph import LossGraph
from hookcb.diagnosis.measurements.sequence_axis import SequenceAxis
from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.measurements.tokens import Tokens
from hookcb.diagnosis.probes.attention import OpHooks
from hookcb.diagnosis.probes.dropout import dropped_share, observe_dropout
from hookcb.diagnosis.probes.embeddings import AddedTables
from hookcb.diagnosis.probes.linear_links import linear_links, observe_linear_links
from hookcb.diagnosis.probes.model import observe_model
from hookcb.diagnosis.run import Observation, Run
from hookcb.hooks.modules import named_modules
from hookcb.hooks.params import find_params


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
        self.run, self._is_forward, is_external = run, False, loop.is_external
        self.guard, model, made = guard, loop.model, guard.made
        self.about = {name: about(m) for name, m in named_modules(model).items()}
        self.observations: list[Observation] = []
        self.notes: list[str] = []
        self.is_dense, self.is_external = True, is_external
        self.observed: set[str] = set()  # see `Run.observed`
        self.sources = {"batches", "batch", "steps", "time"}
        self._is_after_look = False  # whether the batch before was inspected
        self.under_way: bool | None = None  # after the backward of a batch: whether that is inspected
        seen = run.measured(LayerTimes).add_work, run.measured(SequenceAxis), run.measured(Tokens)
        self.ops = made("ops", OpHooks, model, self._acts, lambda: loop.in_loop_thread, *seen, guard)
        self.tables = made("tables", AddedTables)
        self._has_read_loss = False
        self.n_batches = self.n_looked = self.n_steps = 0
        self._is_step_cancelled = False
        self.params = guard.call("params", find_params, model) or []
        self.observe("model", observe_model, model)

    def _acts(self) -> bool:
        loop: Any = self.run.loop
        return self._is_forward and loop.training and loop.in_loop_thread

    def observe(self, part: str, probe: Callable[..., Iterable[Observation]], *args: Any) -> None:
        """Adds what a probe observes."""
        self.observations += self.guard.call(part, lambda: list(probe(*args))) or []

    def close(self) -> None:
        """Removes all hooks."""
        self.guard.always("ops", lambda: self.ops.remove())

    # ---- a batch

    def begin_batch(self, loop: Any, looking: bool) -> None:
        """Measures inputs and modes at the beginning of a batch."""
        self.under_way = None
        self._is_forward = looking
        self.ops.step = loop.train_iter

    def record_loss(self, loop: Any, looking: bool) -> None:
        """Reads the graph of the first loss."""
        if not self._has_read_loss:
            self._has_read_loss = True
            self._read_graph(loop, loop.loss_node)
            self.observed.add("loss")

    def _read_graph(self, loop: Any, node: Any) -> None:
        call, last, step = self.guard.call, self.last_layer, loop.train_iter
        if (links := call("linear_links", linear_links, node)) is not None:
            self.observed.add("path from layer to layer")
            self.observe("linear_links", observe_linear_links, links, loop.model)
        call("tables", self.tables.read_graph, node, loop.model)
        share = call("dropout", dropped_share, node)
        if share is not None and not math.isnan(share):
            self.observed.add("input of the loss")
            self.observe("dropout", observe_dropout, share, last, step)

    @property
    def last_layer(self) -> str:
        """Name of the last layer measured in this batch, "" if there is none."""
        return self.run.measured(LayerRows).last

    def begin_backward(self, loop: Any, looking: bool) -> None:
        """Ends the time of the forward."""
        self._is_forward = False  # a later forward is a recomputation by activation checkpointing

    def end_backward(self, loop: Any, looking: bool) -> None:
        """Reads gradients when the backward has ended."""
        self.observed.add("backward")
        self.under_way = looking

    def end_step(self, loop: Any, looking: bool) -> None:
        """Records a step that was made or cancelled."""
        self.n_steps += 1
        self.observed.add("steps")

    def end_batch(self, loop: Any, looking: bool) -> None:
        """Records memory at the end of a batch."""
        self.under_way, self._is_forward = None, False
        self.n_batches += 1
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

    # ---- the end

    @property
    def graph(self) -> LossGraph | None:
        return self.run.measured(Loss).graph

    @property
    def graph_of_one(self) -> LossGraph:
        return LossGraph() if self.graph is None or len(self.optimizers) > 1 else self.graph
