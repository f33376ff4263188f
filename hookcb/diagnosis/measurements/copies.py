"""Copies: other models of the same structure that are evaluated, such as averages of the weights."""

import gc
import math
from collections.abc import Iterator
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from hookcb.diagnosis.fault import Measurement
from hookcb.diagnosis.measurements.parameters import Parameters
from hookcb.diagnosis.measurements.state_dicts import statistics
from hookcb.diagnosis.run import Run
from hookcb.gradients.samples import are_same, named_sketches, on_cpu
from hookcb.gradients.stats import is_readable
from hookcb.hooks.hook import Hook
from hookcb.hooks.modules import without_wrappers
from hookcb.processes.shards import is_in_memory
from hookcb.training.ema import EMA

SCANS = (2, 12)  # numbers of inspected batches after which copies are looked for; a scan takes 40 ms
MAX_COPIES = 4
MAX_SHARE = 0.25  # of the batches at which it is called: more often it gives targets
Samples = dict[str, Tensor]


class _Copy:
    """A model of the same structure, its sampled weights when it was found, and when it was evaluated.

    `whole` is the model, or the module in it that has all its parameters, of which this is a copy.
    """

    def __init__(self, m: nn.Module, whole: nn.Module, run: Run) -> None:
        self.model, self.whole, self._loop = ref(m), ref(whole), run.loop
        self.samples, self.first = _samples(m), run.step
        self.statistics = {name: x.clone() for name, x in _running_means(m).items()}
        self.uses_statistics = False  # whether it was evaluated in eval mode
        self.steps = set[int]()  # numbers of training batches before a call without gradients
        self.is_trained = False
        self.hook = Hook(m, self._called, pre=True, detach=False)

    def _called(self, m: nn.Module, *seen: Any) -> None:
        if not torch.is_grad_enabled():
            self.steps.add(self._loop.train_iter)
            self.uses_statistics |= not m.training
        elif m.training:
            self.is_trained = True

    def close(self) -> None:
        self.hook.remove()
        self._loop = None


class Copies(Measurement):
    """Finds copies of the model in memory, and how far they are from the weights at the beginning.

    `moved` has, of each copy that was evaluated and has changed, ‖copy - start‖ / ‖model - start‖ over the
    sampled elements, and the number of batches at which it was evaluated. A copy that is called at more than
    a quarter of the batches gives targets, as in BYOL; one that is trained is a model of its own; one that
    does not change is a reference. `stale` has the number of batch norms of each of them that was evaluated
    in eval mode, and whose running statistics have all stayed while those of the model have changed, and that
    of batches at which it was evaluated.
    """

    uses = (Parameters,)

    def __init__(self) -> None:
        self.moved: list[tuple[float, int]] = []
        self.stale: list[tuple[int, int]] = []
        self.n_scans = 0
        self._copies: list[_Copy] = []

    def on_batch_end(self, run: Run) -> None:
        if run.looking and run.n_looked in SCANS:
            self.n_scans += 1
            wholes = list(_wholes(without_wrappers(run.loop.model)))
            # objects refer to their class; a walk in Python over all objects takes twice as long
            candidates = gc.get_referrers(*{type(whole) for whole in wholes})
            for whole in wholes:
                for m in _alike(whole, candidates):
                    self._add(m, whole, run)

    def on_validation(self, run: Run) -> None:
        for cb in run.loop.cbs:
            if isinstance(cb, EMA) and cb.validate and hasattr(cb, "model"):
                self._add(cb.model, without_wrappers(run.loop.model), run)
                found = next((copy for copy in self._copies if copy.model() is cb.model), None)
                if found is not None:
                    found.steps.add(run.step)

    def _add(self, m: nn.Module, whole: nn.Module, run: Run) -> None:
        if len(self._copies) < MAX_COPIES and all(copy.model() is not m for copy in self._copies):
            self._copies.append(_Copy(m, whole, run))

    def tell(self, run: Run) -> None:
        self.moved, self.stale = [], []
        named = {id(p): x for p, x in run.measured(Parameters).begins.values()}
        for copy in self._copies:
            n = run.n_batches - copy.first
            if (
                (m := copy.model()) is None
                or (model := copy.whole()) is None
                or copy.is_trained
                or not 0 < len(copy.steps) <= max(1, MAX_SHARE * n)
            ):
                continue
            now = _samples(m)
            begins = {name: named[id(p)] for name, p in model.named_parameters() if id(p) in named}
            trained = _samples(model)
            if not all(are_same(list(now.values()), [copy.samples[name] for name in now])):
                far, own = _distance(trained, begins), _distance(now, begins)
                if far > 0:
                    self.moved.append((own / far, len(copy.steps)))
                mine, theirs = _running_means(m), _running_means(model)
                stay = [name for name, x in copy.statistics.items() if torch.equal(x, mine.get(name, x))]
                change = [
                    name for name, x in mine.items() if name in theirs and not torch.equal(x, theirs[name])
                ]
                if copy.uses_statistics and len(stay) == len(mine) == len(change) > 0:
                    self.stale.append((len(stay), len(copy.steps)))

    def close(self, run: Run) -> None:
        for copy in self._copies:
            copy.close()

    def freeze(self) -> None:
        self._copies = []


def _wholes(model: nn.Module) -> Iterator[nn.Module]:
    """The model, and modules in it that have all its parameters, if its class only adds the training."""
    own = {id(p) for p in model.parameters()}
    yield model
    while len(inner := [m for m in model.children() if any(True for _ in m.parameters())]) == 1:
        (model,) = inner
        if len(own) != len({id(p) for p in model.parameters()}):
            return
        yield model


def _alike(model: nn.Module, candidates: list[Any]) -> Iterator[nn.Module]:
    """Models among candidates of the same class and shapes that share no parameter with this one."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    own = {id(p) for p in model.parameters()}
    for m in candidates:
        if type(m) is type(model) and m is not model:  # never isinstance, which may run code of a proxy
            params = dict(m.named_parameters())
            is_like = bool(params) and {name: p.shape for name, p in params.items()} == shapes
            if is_like and own.isdisjoint(map(id, params.values())):
                yield m


def _samples(m: nn.Module) -> Samples:
    every = ((name, p) for name, p in m.named_parameters() if is_readable(p) and is_in_memory(p))
    return named_sketches({name: p for name, p in every if p.numel()})


def _running_means(m: nn.Module) -> Samples:
    """Running means of batch norms, by name."""
    known = statistics(m)
    means = ((name, x) for name, x in m.named_buffers() if name.endswith("running_mean"))
    return {name: x.detach() for name, x in means if name in known}


def _distance(samples: Samples, begins: Samples) -> float:
    """Norm of the difference of sampled elements; waits for the device, once for all."""
    both = [(samples[name], x) for name, x in begins.items() if name in samples]
    pairs = zip(*(on_cpu(same) for same in zip(*both, strict=True)), strict=True) if both else ()
    return math.sqrt(sum(float((a.float() - b.float()).square().sum()) for a, b in pairs))
