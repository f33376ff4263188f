"""grad.stale: gradients of the last step that are still there when the next backward adds to them."""

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from statistics import median
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookcb.core.optim import detached_scalar
from hookcb.diagnosis.fault import EVERY, EVERYTHING, Fault, Site, fault
from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.run import Run
from hookcb.diagnosis.verdict import Severity
from hookcb.gradients.hand_steps import StepByHand
from hookcb.gradients.samples import sketch_copy

DOWN, ALONG = -0.1, 0.9  # cosine of a gradient and a move of its weight, if the move is a step along it
MIN_STEPS, MAX_STEPS = 3, 64
UNSEEN = "too little was seen of the time before a backward"


@dataclass(slots=True)
class _Track:  # of one optimizer
    # largest magnitude of an old gradient; over the backwards since the last step, the smallest of these
    dirty: Tensor | float | None = None
    # gradients that were there at the last of these backwards, by id of the parameter
    grads: dict[int, ReferenceType[Tensor]] = field(default_factory=dict)
    n_steps: int = 0
    n_stale: Tensor | float = 0.0
    n_seen: int = 0  # steps with a backward before them

    @property
    def is_settled(self) -> bool:
        """Whether enough steps were seen, and it is known that one of them did not use stale gradients."""
        if self.n_seen < MIN_STEPS - 1 or isinstance(self.n_stale, Tensor):
            return False
        return self.n_stale < self.n_steps - 1


@fault("grad.stale", Site.GRADIENTS, needs="batches steps", leads_to=EVERYTHING, exact=True)
class StaleGradients(Fault):
    """Gradients that are never zeroed, so each step adds to those of the step before.

    Formula: between any two steps of an optimizer, no backward began with gradients that were zero or None.
    A note if no optimizer has them and the loop moves their weights, but not along the gradients (a cosine of
    -0.1 to 0.9), as those of a target network: nothing uses these gradients.
    """

    headline = "Gradients are never cleared"
    # It reads the first and last gradient of each optimizer. If any backward between two of its steps finds
    # them zero or None, they were cleared. If the step finds other tensors there, they were replaced, for
    # example by gradients from torch.autograd.grad, and nothing was added.

    cadence = EVERY
    uses = (Steps,)
    passed = "gradients left over from the step before"
    unless = UNSEEN

    def __init__(self) -> None:
        super().__init__()
        self._ids: set[int] = set()  # other models may have gradients already
        self._tracks: MutableMapping[Optimizer, _Track] = WeakKeyDictionary()
        self._weight: tuple[nn.Parameter, Tensor] | None = None  # that the loop moves itself, and its values
        self._cosines: list[float | Tensor] = []  # of its gradient and its move
        self._is_cancelled = False

    def on_model(self, run: Run) -> None:
        self._ids = {id(p) for p in run.loop.model.parameters()}

    def on_backward(self, run: Run) -> None:
        for opt, track in self._tracks.items():
            if track.n_steps and track.dirty != 0.0 and not track.is_settled:
                grads = _dense(opt, self._ids)
                track.dirty = _smaller(_largest(list(grads.values())), track.dirty)
                track.grads = {i: ref(g) for i, g in grads.items()}

    def on_step(self, run: Run) -> None:
        """Copies a weight that the loop moves without an optimizer, to see if it follows its gradient."""
        self._weight, opt = None, run.loop.opt
        if isinstance(opt, StepByHand):
            dense = _dense(opt, self._ids)
            params = [p for group in opt.param_groups for p in group["params"] if id(p) in dense]
            p = max(params, key=Tensor.numel, default=None)
            self._weight = None if p is None else (p, sketch_copy(p))

    def on_cancel(self, run: Run, level: str) -> None:
        self._is_cancelled |= level == "step"

    def on_between(self, run: Run) -> None:
        if run.loop.opt is not None and not self._is_cancelled:
            self._end_step(run.loop.opt)
        self._is_cancelled = False
        self.done |= run.n_steps >= MAX_STEPS

    def _end_step(self, opt: Optimizer) -> None:
        if self._weight is not None and (grad := self._weight[0].grad) is not None:
            move = sketch_copy(self._weight[0]) - self._weight[1]
            self._cosines.append(detached_scalar(torch.cosine_similarity(move, sketch_copy(grad), dim=0)))
        self._weight = None
        track = self._tracks.setdefault(opt, _Track())
        if track.is_settled:
            return
        if track.dirty is not None:
            now = _dense(opt, self._ids)
            if any(g() is now.get(i, g) for i, g in track.grads.items()):  # else they were replaced
                track.n_stale = track.n_stale + (track.dirty > 0)
            track.n_seen += 1
        track.n_steps += 1
        track.dirty, track.grads = None, {}

    def tell(self, run: Run) -> None:
        self.seen, self.unless, tracks = [], UNSEEN, list(self._tracks.values())
        if run.measured(Steps).n_optimizers != 1:  # several may clear each other's gradients unseen
            return
        self.unless = "" if any(track.n_seen >= MIN_STEPS - 1 for track in tracks) else UNSEEN
        is_idle = bool(self._cosines) and DOWN < median(map(float, self._cosines)) < ALONG
        for n_steps, n_stale in ((track.n_steps, float(track.n_stale)) for track in tracks):
            if n_steps < MIN_STEPS or n_stale < n_steps - 1:
                continue
            text, cause, next_step = (
                f"In {n_stale:.0f} of {n_steps} steps the gradients of the previous step were still there, "
                "and the new ones were added to them.",
                "gradients are not cleared after a step",
                "Call optimizer.zero_grad() after each optimizer.step()",
            )
            if is_idle:
                text, cause, next_step = (
                    f"The gradients of {n_steps} backwards add up in weights that no optimizer has, and "
                    "that the loop moves in other directions: nothing uses them.",
                    "a target network whose outputs are computed with gradients",
                    "Compute the targets under torch.no_grad(), or freeze that network with "
                    "requires_grad_(False)",
                )
            severity: Severity = "info" if is_idle else "error"
            self.see(text, severity, when=1, value=n_stale, causes=(cause,), next_steps=(next_step,))

    def freeze(self) -> None:
        self._tracks, self._weight, self._cosines = {}, None, []


def _smaller(now: Tensor | float, before: Tensor | float | None) -> Tensor | float:
    if isinstance(now, Tensor) and isinstance(before, Tensor):
        return torch.minimum(now, before)
    return now if before is None or not isinstance(now, Tensor) else before


def _dense(opt: Optimizer, ids: set[int]) -> dict[int, Tensor]:
    """Dense gradients of the optimizer's parameters with these ids, by id."""
    params = [p for group in opt.param_groups for p in group["params"] if id(p) in ids]
    grads = {id(p): p.grad for p in params if p.grad is not None}
    return {i: g for i, g in grads.items() if g.layout is torch.strided and g.numel()}


def _largest(dense: list[Tensor]) -> Tensor | float:
    """Largest magnitude in the first and the last of these gradients; 0.0 if empty."""
    if not dense:
        return 0.0
    ends = [dense[0], dense[-1]] if dense[0].device == dense[-1].device else dense[:1]
    largest = torch.stack([g.detach().abs().amax().float() for g in ends]).amax()
    return float(largest) if largest.is_cpu else largest
