"""Probes: all that Diagnose looks at by itself, in one place."""

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookcb.core.batch import batch_size, parts
from hookcb.core.fetches import FetchTimer
from hookcb.core.optim import detached_scalar, largest_lr
from hookcb.diagnosis.evidence import Evidence, Observation, Series
from hookcb.diagnosis.failures import told_failure
from hookcb.diagnosis.frame import Frame
from hookcb.diagnosis.probes.attention import FEWEST, OpHooks, look_at_attention
from hookcb.diagnosis.probes.batch import (
    COLUMNS,
    constant_of,
    guess_of,
    input_numbers,
    look_at_head,
    look_at_inputs,
    look_at_labels,
)
from hookcb.diagnosis.probes.curves import Curve, ResidentMemory
from hookcb.diagnosis.probes.dead_units import EXAMPLES, DeadUnits
from hookcb.diagnosis.probes.layer import KEEP, LayerProbe
from hookcb.diagnosis.probes.loss_graph import COMPILED, LossGraph, read_loss
from hookcb.diagnosis.probes.model import look_at_model, look_at_optimizers
from hookcb.diagnosis.probes.motion import Motion
from hookcb.diagnosis.probes.nan import SeenBatch, look_for_origin
from hookcb.diagnosis.probes.norm import NormProbe
from hookcb.diagnosis.probes.overfit import look_at_labels_by_heart
from hookcb.diagnosis.probes.plain_run import graph_of_original
from hookcb.diagnosis.probes.replicas import is_replica, look_at_replicas
from hookcb.diagnosis.probes.retained_graphs import RetainedGraphs
from hookcb.diagnosis.probes.step import LostUpdates, StaleGradients
from hookcb.diagnosis.verdict import Finding
from hookcb.gradients.hand_steps import StepByHand
from hookcb.hooks.modules import ModelGoneError
from hookcb.hooks.params import find_params
from hookcb.nans.replay import Autocast, autocasts
from hookcb.records.store import StatStore

OFTEN, MOST_OFTEN = 64, 512  # steps at the beginning in which dead units are looked for each time
MANY = 4 * EXAMPLES  # examples, of which small batches take more of these steps
SMALL = 65_536  # elements of an output up to which it is looked at in each batch


class Probes:
    """What is recorded of a training beyond activations and gradients.

    Each method takes the loop, and whether the batch is one that is looked at closely.

    Args:
        loop: whose.
        acts: whether a call of the model that begins now is looked at.
        is_followed: whether the loop is not ours, so that its loss function is not known.

    Attributes:
        fetches: times those of batches.
        is_alarmed: whether something was seen that should be told at once.
    """

    def __init__(self, loop: Any, acts: Callable[[], bool], is_followed: bool) -> None:
        self.layers = LayerProbe(loop.model)
        self.sightings: list[Observation] = []
        self.notes: list[str] = []
        self.fetches, self.is_alarmed = FetchTimer(), False
        self._step = 0
        self.dead, self.swallowed = DeadUnits(loop.model), LostUpdates(loop.model)
        self._motion, self._n_backward = Motion(loop.model), 0
        self._under_way: bool | None = None  # in a batch whose backward is over, whether it is looked at
        self.stepped: list[int] = []  # optimizers of the steps looked at
        self.stale, self.kept = StaleGradients(loop.model), RetainedGraphs()
        self.loss, self.lr, self.wait, self.length, self.memory = (Curve() for _ in range(5))
        self._attention: dict[str, list[tuple[int, Tensor]]] = {}
        self._ops = OpHooks(loop.model, acts, self.see_attention, lambda: loop.in_loop_thread)
        self._norms = NormProbe(loop.model)
        self.optimizers: dict[int, Optimizer] = {}
        self.graph: LossGraph | None = None
        self.guess = self.constant = math.nan
        self.n_batches = self.n_looked = self.n_steps = 0
        self.n_examples = self._n_samples = 0  # whose gradients the next step gets; of the batch in progress
        self._is_step_cancelled = False
        self.losses: dict[int, Curve] = {}  # by id of the optimizer
        self._last_loss: float | Tensor | None = None
        self.n_without: Counter[str] = Counter()
        self._params = find_params(loop.model)
        self._autocasts: list[Autocast] | None = None
        self._resident = ResidentMemory()
        self._is_followed = is_followed
        self._inputs = StatStore(COLUMNS, KEEP)
        self._has_origin = self._has_labels = self._has_modeled = self._has_grouped = False
        self._has_compared = False  # replicas
        self._first_param: nn.Parameter | None = None
        self._ended = math.nan
        self.guarded(self._look_at_model, loop)

    def guarded(self, look: Callable[..., object], *args: Any) -> None:
        """Looks; where that fails, the training goes on and the verdict says so."""
        try:
            look(*args)
        except ModelGoneError:
            self._note("the model was freed before its watch was closed, so its end was not looked at")
        except Exception as error:  # whatever it is, it is not the training's fault
            self._note(told_failure("a part of Diagnose", error))

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def _look_at_model(self, loop: Any) -> None:
        self.sightings += look_at_model(loop.model)
        self._has_modeled = True

    def see_attention(self, layer: str, share: Tensor) -> None:
        """A layer's attention, in the batch in progress."""
        self._attention.setdefault(layer, []).append((self._step, share))

    def close(self) -> None:
        """Takes its hooks off."""
        self._ops.remove()
        self._resident.close()

    # ---- a batch

    def begin_batch(self, loop: Any, looking: bool) -> None:
        """Its inputs are known."""
        self._under_way = None
        waited, self._step = self.fetches.take(), loop.train_iter
        if loop.train_iter and not math.isnan(self._ended):
            self.wait.add(loop.train_iter, waited)
        self._n_samples = batch_size((*loop.yb, loop.xb))
        self.n_examples += self._n_samples
        self._norms.begin_batch(loop.train_iter, self._n_samples)
        if looking:
            self.layers.begin(loop.train_iter)
            numbers = input_numbers(loop.xb)
            if numbers is not None:
                self._inputs.put("x", [self._inputs.begin(0, loop.train_iter)], numbers[None].float())

    def see_pred(self, loop: Any, looking: bool) -> None:
        """The model has given its output, and nobody may tell the loss."""
        if looking:
            self._autocasts = autocasts(loop.model)
        if self._is_followed and not self._has_origin:
            outputs = [x for _, x in parts(loop.pred) if isinstance(x, Tensor) and x.is_floating_point()]
            at_hand = [x.detach() for x in outputs if x.is_cpu and x.numel() <= SMALL]
            if not all(bool(x.isfinite().all()) for x in at_hand):
                self._look_for_origin(loop, "the model's output is not finite", gradient=False)

    def see_loss(self, loop: Any, looking: bool) -> None:
        """The loss is known."""
        node = loop.loss_node
        if self.graph is None:
            self._see_graph(loop, node)
        self.kept.note(node, loop.train_iter)
        self._has_labels = self._has_labels or len(loop.yb) > 0
        self._last_loss = number = detached_scalar(loop.loss)
        self.loss.add(loop.train_iter, number)
        if isinstance(number, float) and not math.isfinite(number):
            self._look_for_origin(loop, f"the loss is {number}", gradient=False)

    def _see_graph(self, loop: Any, node: Any) -> None:
        self.graph = read_loss(node)
        self.guess = guess_of(self.graph, loop.pred, loop.yb)
        if self.graph.hidden_by == COMPILED:
            batch = SeenBatch(loop) if self._is_followed else loop
            try:
                self.graph, guess = graph_of_original(batch, self.graph, self._autocasts)
                self.guess = self.guess if math.isnan(guess) else guess
            except Exception as error:  # of the model's own; what gives the loss stays hidden
                self.notes.append(f"the model could not be run without torch.compile: {error!r:.80}")
        self.constant = constant_of(self.graph, loop.yb)
        if node is None:
            self.sightings.append(detached_loss(loop.train_iter))
        self.sightings += look_at_head(self.graph, self.layers.last, loop.train_iter)

    def _look_for_origin(self, loop: Any, noticed: str, gradient: bool) -> None:
        """Once, of the first that is not finite."""
        if not self._has_origin:
            self._has_origin = self.is_alarmed = True
            batch = SeenBatch(loop) if self._is_followed else loop
            self.sightings.append(look_for_origin(batch, noticed, gradient, loop.train_iter, self._autocasts))

    def begin_backward(self, loop: Any, looking: bool) -> None:
        """Gradients are as they were left."""
        if self.n_steps < OFTEN:
            self.stale.before_backward()

    def see_gradients(self, loop: Any, looking: bool) -> None:
        """The backward is over; what is not finite in it reaches the first layer."""
        self._n_backward += 1
        self._under_way = looking
        if self._has_origin or (loop.scaler is not None and loop.scaler.is_enabled()):
            return
        if self._first_param is None:
            self._first_param = self._smallest_first(loop.model)
        grad = None if self._first_param is None else self._first_param.grad
        if grad is not None and grad.is_cpu and not math.isfinite(float(grad.detach().sum())):
            self._look_for_origin(loop, "a gradient is not finite", gradient=True)

    def _smallest_first(self, model: nn.Module) -> nn.Parameter | None:
        """Of the first layer with a gradient the smallest parameter."""
        for m in model.modules():
            params = [p for p in m.parameters(recurse=False) if p.grad is not None]
            dense = [p for p in params if p.layout is torch.strided and p.grad.layout is torch.strided]  # type: ignore[union-attr]
            if dense:
                return min(dense, key=Tensor.numel)
        return None

    def _looks_for_dead(self) -> bool:
        """Whether units are followed in each step, which costs little."""
        return self.n_steps < OFTEN or (self.n_steps < MOST_OFTEN and self.dead.n_examples < MANY)

    def leave_out(self, loop: Any, looking: bool) -> None:
        """The batch in progress is cancelled, and gives no gradients."""
        self.n_examples -= self._n_samples
        self._n_samples = 0

    def cancel_step(self, loop: Any, looking: bool) -> None:
        """The step in progress is not made; its gradients may stay for the next one."""
        self.swallowed.drop()
        self._is_step_cancelled = True

    def begin_step(self, loop: Any, looking: bool) -> None:
        """Gradients are whole."""
        if looking or self._looks_for_dead():
            self.dead.look(loop.train_iter, self.n_examples)
            without = (name for name, p, _ in self._params if p.requires_grad and p.grad is None)
            self.n_without.update(without)
        if looking:
            self.swallowed.before_step()

    def end_step(self, loop: Any, looking: bool) -> None:
        """The step is made, or was cancelled."""
        self.n_steps += 1
        self.swallowed.after_step(loop.train_iter)
        is_made, self._is_step_cancelled = not self._is_step_cancelled, False
        if is_made:
            self.n_examples = 0
        if loop.opt is not None:
            self.optimizers[id(loop.opt)] = loop.opt
            if looking:
                self.stepped.append(id(loop.opt))
            if is_made and self.n_steps <= OFTEN:
                self.stale.after_step(loop.opt)
            if self._last_loss is not None:
                self.losses.setdefault(id(loop.opt), Curve()).add(loop.train_iter, self._last_loss)
            self.lr.add(loop.train_iter, largest_lr(loop.opt))

    def end_batch(self, loop: Any, looking: bool) -> None:
        """The batch is over."""
        now = time.perf_counter()
        if not math.isnan(self._ended):
            self.length.add(loop.train_iter, now - self._ended)
        self._ended, self._under_way = now, None
        self.n_batches += 1
        self.n_looked += looking
        if looking:
            self.layers.end()
            self.kept.look()
        if (used := self._resident.read()) is not None:
            self.memory.add(loop.train_iter, used)

    def end_epoch(self, loop: Any, looking: bool) -> None:
        """The training of an epoch is over; what comes until the next batch is no waiting for data."""
        self._ended = math.nan
        self.sightings += look_at_replicas(loop.model, loop.train_iter)
        self._has_compared = self._has_compared or is_replica(loop.model)

    # ---- all of it

    def evidence(self, frame: Frame) -> Evidence:
        """What was recorded so far."""
        evidence = Evidence(sources={"batches", "batch", "steps", "time"}, params=frame.params)
        # a batch that has gone back may be the last, whose end nobody tells
        evidence.n_batches = self.n_batches + (self._under_way is not None)
        evidence.n_looked = self.n_looked + bool(self._under_way)
        evidence.loss, evidence.lr = self.loss.series(), self.lr.series()
        places = {key: i for i, key in enumerate(self.optimizers)}
        evidence.losses = {places[key]: curve.series() for key, curve in self.losses.items()}
        if len(evidence.loss):
            evidence.sources.add("loss")
        evidence.loss_kind = self.graph.kind if self.graph and self.graph.is_pure else ""
        evidence.guess, evidence.constant = self.guess, self.constant
        evidence.waits, evidence.batches, evidence.memory = (
            curve.series() for curve in (self.wait, self.length, self.memory)
        )
        self._add_sources(evidence)
        evidence.n_steps = self.n_steps
        evidence.is_by_hand = any(isinstance(opt, StepByHand) for opt in self.optimizers.values())
        if evidence.is_by_hand:
            evidence.notes.append("the loop moves its weights without an optimizer, at a rate not known")
        self.layers.add_to(evidence.layers, frame.about)
        steps = [info.step for info in self._inputs.infos]
        rows = self._inputs.series("x").tolist()
        evidence.input_std = Series.of(steps, [row[0] for row in rows])
        evidence.input_rms = Series.of(steps, [row[1] for row in rows])
        for name, n in self.n_without.items():
            if name in evidence.params:
                evidence.params[name].n_without = n
        for name, dead in self.dead.found().items():
            if name in evidence.params:
                param = evidence.params[name]
                param.dead, param.never_alive, param.dead_since = dead.lately, dead.never, dead.since
                param.n_looked, param.n_examples = dead.n_looked, dead.n_examples
        for name, moved in self._motion.moved().items():
            if name in evidence.params:
                evidence.params[name].has_moved = moved
        evidence.stepped = [places[key] for key in self.stepped]
        evidence.observed = self._observed(evidence)
        evidence.notes += self.notes
        evidence.sightings = [*self.sightings, *self._late_sightings(steps, rows)]
        return evidence

    def _observed(self, evidence: Evidence) -> set[str]:
        """What there was to look at."""
        seen: dict[str, object] = {"inputs": self._inputs.infos, "labels": self._has_labels}
        seen |= {"loss": len(evidence.loss), "backward": self._n_backward, "steps": self.n_steps}
        seen |= {"batches": self.n_batches, "groups of the optimizer": self._has_grouped}
        seen["samples that differ"] = any(x > 0 for x in self._inputs.series("x")[:, -1].tolist())
        seen["attention"] = any(len(shares) >= FEWEST for shares in self._attention.values())
        seen["time before a backward"] = self.stale.has_looked and len(self.optimizers) == 1
        seen["weights around a step"] = self.swallowed.has_looked
        seen["graphs of 60 losses"] = self.kept.has_looked
        seen["replicas at the end of an epoch"] = self._has_compared
        return {name for name, is_there in seen.items() if is_there}

    def _add_sources(self, evidence: Evidence) -> None:
        """What could be looked at, and why the rest could not."""
        has = {"memory": len(evidence.memory), "model": self._has_modeled}
        evidence.sources |= {source for source, is_there in has.items() if is_there}
        evidence.missing["memory"] = "memory in use is not known on this system"
        evidence.missing["model"] = "the look at the model failed"
        if self.graph is not None:
            evidence.missing["graph"] = self.graph.why_hidden
            evidence.sources |= set() if self.graph.why_hidden else {"graph"}
        if self.layers.n_copies:
            copies = "layers ran as copies, as nn.DataParallel makes them, which were not looked at"
            evidence.notes.append(copies)
            evidence.partial |= {"activations": copies}
        if self._ops.is_left_out:
            evidence.missing["attention"] = "the model is compiled, which hides its attention"
        elif self._ops.has_looked and not self._ops.sees_attention:
            evidence.absent["attention"] = "there is no attention among the operations of the model"

    def _late_sightings(self, steps: list[int], rows: list[list[float]]) -> Iterator[Observation]:
        seen = {sighting.code for sighting in self.sightings}
        yield from (x for x in look_at_inputs(steps, rows, self._has_origin) if x.code not in seen)
        yield from self._norms.sightings(self.n_batches)
        yield from look_at_attention(self._attention)
        yield from self.swallowed.sightings()
        if len(self.optimizers) == 1:  # several clear the gradients of one another, at times not seen
            yield from self.stale.sightings()
        yield from self._motion.sightings(self.n_steps, self._n_backward)
        yield from self.kept.sightings()

    def look_at_labels(self, learn: Any, findings: tuple[Finding, ...], falls_slowly: bool) -> bool:
        """The fit is over, and this was found; whether there is something to add."""
        before = len(self.sightings)
        if not self._is_followed and raised() is None:
            self.guarded(self._look_by_heart, learn, findings, falls_slowly)
        return len(self.sightings) > before

    def _look_by_heart(self, learn: Any, findings: tuple[Finding, ...], falls_slowly: bool) -> None:
        self.sightings += look_at_labels_by_heart(learn, findings, self.n_batches, falls_slowly)

    def look_at_end(self, loop: Any, error: BaseException | None) -> None:
        """The training is over; with what it has raised, None where it ended well."""
        self.sightings += look_at_optimizers(loop.model, self.optimizers.values())
        self._has_grouped = bool(self.optimizers)
        if error is not None and not isinstance(error, KeyboardInterrupt):
            self.notes.append(f"the training was ended by {type(error).__name__}: {str(error)[:80]}")
            self._norms.look_at_error(error, loop.train_iter)
            with suppress(RuntimeError):  # of a GPU that has failed
                self.sightings += look_at_labels(loop.pred, loop.yb, error, loop.train_iter)


def raised() -> BaseException | None:
    """What is being handled: in after_fit, what has ended the fit."""
    return sys.exception()


def detached_loss(step: int) -> Observation:
    """A loss without a graph, at a step."""
    return Observation(
        "loss.detached",
        step=step,
        text="the loss does not depend on any parameter, so there is nothing to train.",
        causes=(
            "a .detach(), .item() or no_grad between the model and the loss, or all parameters are frozen",
        ),
        next_steps=("follow the model's output to the loss, and print .requires_grad on the way",),
    )
