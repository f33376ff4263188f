"""norm.running: running statistics of batch norms that do not follow the batches."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer

from hookcb.core.batch import n_samples
from hookcb.core.text import as_layer
from hookcb.core.torch_private import BatchNorm
from hookcb.diagnosis.fault import EVERY, Fault, Site, fault
from hookcb.diagnosis.run import Absent, Run
from hookcb.diagnosis.verdict import Finding
from hookcb.hooks.modules import named_modules

MIN_UPDATES = 3  # batches after which running statistics have moved
MAX_LEFT, MIN_SLOW = 0.5, 100  # share of the initial 0 and 1 in the running statistics; batches
MAX_EARLY = 0.8  # share of the first half of the batches, if momentum changes
MIN_LATEST, MAX_SAMPLES, MIN_LOADED = 0.9, 400, 20  # share of the latest batch; its samples; batches
USUAL = "Use momentum=0.1, the default, or 0.01 in long trainings"
CONVENTION = (
    "a momentum in the convention of another framework: in PyTorch it is the share of the new batch, so "
    "momentum 0.99 of TensorFlow or Keras is 0.01"
)


class _State(NamedTuple):
    """A batch norm as it is at one moment: batches it has seen, and its running mean and variance."""

    n: Tensor
    mean: Tensor
    var: Tensor

    @property
    def is_initial(self) -> bool:
        return not bool(self.mean.any()) and bool((self.var == 1).all())

    def equals(self, other: "_State") -> bool:
        return torch.equal(self.mean, other.mean) and torch.equal(self.var, other.var)


@dataclass(slots=True)
class _Norm:
    """A batch norm that is followed, its state at the beginning, and its momenta in batches in train mode."""

    of: ReferenceType[nn.Module]
    start: _State
    momenta: set[float | None] = field(default_factory=set)
    latest: float = 0.0
    n: int = 0  # batches
    log_left: float = 0.0  # logarithm of the share of the initial statistics that is left
    # the same after ever more batches
    past: list[tuple[int, float]] = field(default_factory=lambda: [(0, 0.0)])

    def note(self, momentum: float | None, n: int) -> None:
        """Sees the momentum after n batches; since the look before, the larger of both counts."""
        self.momenta.add(momentum)
        latest = momentum or 0.0
        left = 1 - max(latest, self.latest)
        self.log_left += (n - self.n) * math.log(left) if left > 0 else -math.inf
        self.latest, self.n = latest, n
        if n >= 2 * self.past[-1][0]:
            self.past.append((n, self.log_left))

    def early(self) -> tuple[int, float]:
        """A number of batches, of half of all or fewer, and their share in the statistics of now."""
        n, before = [x for x in self.past if 2 * x[0] <= self.n][-1]
        return n, math.exp(self.log_left - before) if math.isfinite(before) else 0.0


@fault("norm.running", Site.MODULES, needs="batches model", leads_to="valid.*", exact=True)
class RunningStatistics(Fault):
    """Batch norms whose running statistics do not follow the batches, so that eval mode differs.

    Formula: after three or more batches in train mode, as `num_batches_tracked` counts them, the running
    mean is exactly 0 and the variance exactly 1, as at the beginning: an error. A warning if (1 - momentum)ⁿ,
    the share of 0 and 1 that is left after n batches, is above one half for n of 100 or more; the usual
    momentum of 0.1 passes that in 7 batches, one of 0.01 in 69. Likewise if momentum is 0.9 or more, but not
    1, in batches of fewer than 400 samples: then eval mode uses the statistics of the latest batch, with its
    noise. Likewise if momentum changes, and the share of the first half of the batches, or of fewer, is above
    0.8 by the product of (1 - momentum), the larger momentum of two looks for the batches between. These are
    notes if no validation was seen, and the last one if momentum ends at 0, which may be a freeze. A note if
    loaded statistics stay the same because momentum is 0, or if there are none (`track_running_stats=False`)
    and the model is validated.

    Source: torch.nn.BatchNorm2d: running = (1 - momentum) · running + momentum · batch.
    """

    headline = "Running statistics do not follow the batches"
    passed = "running statistics that do not follow the batches"

    def __init__(self) -> None:
        super().__init__()
        self.unless = "too little was seen of the batch norms"
        self._norms: dict[str, _Norm] = {}
        self._stateless: list[str] = []  # without running statistics
        self._is_validated = False
        self._n_samples = 0

    def on_model(self, run: Run) -> None:
        norms = {name: m for name, m in named_modules(run.loop.model).items() if isinstance(m, BatchNorm)}
        self._stateless = [name for name, m in norms.items() if m.running_mean is None]
        for name, m in norms.items():
            if (state := _state_of(m)) is not None:
                self._norms[name] = _Norm(ref(m), _State(*(x.clone() for x in state)))
        if not norms:
            self.unless, self.done = Absent("there is no batch norm"), True

    def on_loss(self, run: Run) -> None:
        self._n_samples = max(self._n_samples, n_samples((*run.loop.yb, run.loop.xb)) or 0)

    def on_batch_end(self, run: Run) -> None:
        for norm in self._norms.values():
            if (m := norm.of()) is not None and m.training:
                norm.note(m.momentum, run.n_batches)  # type: ignore[arg-type]
                if len(norm.momenta) > 1:
                    self.cadence = EVERY  # looks are too far apart for its course

    def on_validation(self, run: Run) -> None:
        self._is_validated = True

    def tell(self, run: Run) -> None:
        if not (self._norms or self._stateless):
            return
        self.seen = [self._without()] if self._stateless and self._is_validated else []
        for name, norm in self._norms.items():
            m = norm.of()
            now = None if m is None else _state_of(m)
            if now is not None and (n := int(now.n) - int(norm.start.n)) >= MIN_UPDATES:
                self.unless = ""
                self.seen += self._judged(name, n, norm, now)

    def _judged(self, name: str, n: int, seen: _Norm, now: _State) -> Iterator[Finding]:
        start, momentum = seen.start, next(iter(seen.momenta)) if len(seen.momenta) == 1 else None
        norm = f"Batch norm {as_layer(name)}"
        if now.is_initial:
            how = " (momentum 0)" if momentum == 0 else ""
            yield self.finding(
                f"{norm} has seen {n} batches in train mode, but its running mean and variance are still 0 "
                f"and 1{how}. In eval mode it normalizes by these, and so differs from training.",
                at=name,
                value=0.0,
                limit=0.0,
                causes=(CONVENTION,) if momentum == 0 else ("something resets or restores these buffers",),
                next_steps=(USUAL if momentum == 0 else "Look for code that writes running_mean",),
            )
        elif len(seen.momenta) > 1 and None not in seen.momenta:
            yield from self._changed(name, norm, seen)
        elif momentum is None:
            return
        elif start.is_initial and n >= MIN_SLOW and (left := (1 - momentum) ** n) > MAX_LEFT:
            yield self.finding(
                f"{norm} has seen {n} batches in train mode, but with momentum {momentum:g} its "
                f"running mean and variance are still {left:.0%} the initial 0 and 1 (limit {MAX_LEFT:.0%}). "
                "In eval mode it normalizes by these, and so differs from training.",
                "warning" if self._is_validated else "info",
                at=name,
                value=left,
                limit=MAX_LEFT,
                causes=(CONVENTION,),
                next_steps=(USUAL,),
            )
        elif MIN_LATEST <= momentum < 1 and n >= MIN_LOADED and 0 < self._n_samples < MAX_SAMPLES:
            yield self.finding(
                f"The running mean and variance of batch norm {as_layer(name)} are {momentum:.2%} those of "
                f"the latest batch, of {self._n_samples} samples (limit {MIN_LATEST:.0%}): eval mode has its "
                "noise.",
                "warning" if self._is_validated else "info",
                at=name,
                value=momentum,
                limit=MIN_LATEST,
                causes=(CONVENTION,),
                next_steps=(f"Use momentum={1 - momentum:.2g}",),
            )
        elif momentum == 0 and n >= MIN_LOADED and now.equals(start):
            yield self.finding(
                f"{norm} has momentum 0: in train mode it normalizes by the batch, in eval mode by the "
                f"loaded running statistics, which {n} batches have not changed.",
                "info",
                at=name,
                value=0.0,
                causes=(CONVENTION, "a batch norm to be frozen, which eval mode would do"),
                next_steps=(
                    "To freeze it, call eval() on it and freeze its parameters; else set momentum=0.1",
                ),
            )

    def _changed(self, name: str, norm: str, seen: _Norm) -> Iterator[Finding]:
        n, share = seen.early() if seen.n >= MIN_SLOW else (0, 0.0)
        if share > MAX_EARLY:
            yield self.finding(
                f"{norm} has changed its momentum, which is {seen.latest:.2g} now: after {seen.n} batches "
                f"its running mean and variance are {share:.0%} those of before batch {n} (limit "
                f"{MAX_EARLY:.0%}). In eval mode it normalizes by these, while the weights have moved on.",
                "warning" if self._is_validated and seen.latest else "info",
                at=name,
                value=share,
                limit=MAX_EARLY,
                causes=("a momentum that decays too fast",),
                next_steps=(USUAL,),
            )

    def _without(self) -> Finding:
        return self.finding(
            f"Batch norm {as_layer(self._stateless[0])} has no running statistics "
            "(track_running_stats=False), so in eval mode, too, each output depends on the other samples of "
            "its batch.",
            "info",
            at=self._stateless[0],
            causes=("track_running_stats=False, or running_mean set to None",),
            next_steps=("If that is not meant: track_running_stats=True",),
        )

    def freeze(self) -> None:
        self._norms, self._stateless = {}, []


def _state_of(m: nn.Module) -> _State | None:
    """Its state, None if it has no running statistics, or does not count batches."""
    state = m.num_batches_tracked, m.running_mean, m.running_var
    is_known = all(isinstance(x, Tensor) and not isinstance(x, UninitializedBuffer) for x in state)
    return _State(*(x.detach() for x in state)) if is_known else None  # type: ignore[operator]
