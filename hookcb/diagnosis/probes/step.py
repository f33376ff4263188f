"""Probes of gradients and weights around a step that GradientHealth does not record."""

from collections.abc import Iterator, Mapping
from statistics import median
from typing import NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookcb.core.optim import detached_scalar, mark_of
from hookcb.diagnosis.run import Observation
from hookcb.gradients.hand_steps import StepByHand
from hookcb.gradients.stats import sketch_copy
from hookcb.hooks.params import named_params

LOW_PRECISION = (torch.bfloat16, torch.float16)
DOWN, ALONG = -0.1, 0.9  # cosine of a gradient and a move of its weight, if the move is a step along it
MAX_LOST = 0.5  # share of the weights
MIN_STEPS = 3


class LostUpdates:
    """Share of low-precision weights with a gradient that a step leaves unchanged."""

    def __init__(self, model: nn.Module) -> None:
        self._params = [
            (name, p) for name, p in named_params(model).items() if p.dtype in LOW_PRECISION and p.ndim > 1
        ]
        self._before: list[tuple[str, nn.Parameter, Tensor, Tensor]] = []
        self.shares: dict[str, list[tuple[int, Tensor]]] = {}

    def before_step(self) -> None:
        """Copies some weights, and records which of them have a gradient."""
        self._before = [
            (name, p, sketch_copy(p), sketch_copy(p.grad) != 0)
            for name, p in self._params
            if p.grad is not None
        ]

    def drop_step(self) -> None:
        """Discards the copies, as the step is not made."""
        self._before = []

    def after_step(self, step: int) -> None:
        """Compares the updated weights with their copies."""
        for name, p, before, has_grad in self._before:
            same = (sketch_copy(p) == before) & has_grad
            share = same.sum() / has_grad.sum().clamp(min=1)
            self.shares.setdefault(name, []).append((step, share.float()))
        self._before = []

    @property
    def has_looked(self) -> bool:
        """Whether a weight was compared in enough steps."""
        return any(len(shares) >= MIN_STEPS for shares in self.shares.values())

    def observations(self) -> Iterator[Observation]:
        """Weights that lose most of their updates in every step."""
        for name, shares in self.shares.items():
            values = [(step, float(share)) for step, share in shares]
            if len(values) >= MIN_STEPS and all(share > MAX_LOST for _, share in values):
                usual = sorted(share for _, share in values)[len(values) // 2]
                dtype = str(dict(self._params)[name].dtype).removeprefix("torch.")
                yield Observation(
                    "update.lost_to_rounding",
                    name.rpartition(".")[0],
                    name,
                    values[0][0],
                    usual,
                    f"{usual:.0%} of the weights of {name} that have a gradient are bit-identical after a "
                    f"step (limit {MAX_LOST:.0%}): the update is lost to rounding in {dtype}.",
                    (f"weights are stored in {dtype}, and the learning rate is small relative to them",),
                    ("Keep weights in float32, and use autocast with bfloat16 for the forward",),
                )


class ClearedGradients:
    """Counts steps before which the gradients of the backward were cleared, so that they do nothing.

    It follows one small gradient; on a GPU, which would have to be waited for, zeros are not seen.
    """

    def __init__(self) -> None:
        self._param: nn.Parameter | None = None  # had a gradient when the backward ended
        self.n_steps = self.n_cleared = 0

    def after_backward(self, param: nn.Parameter | None) -> None:
        """Remembers a parameter that has a gradient, as long as all steps came too late."""
        if self.n_cleared < self.n_steps or param is None or not _is_there(param.grad):
            param = None
        self._param = param

    def before_step(self) -> None:
        """Counts a step, and whether that gradient is gone."""
        self.n_steps += 1
        self.n_cleared += self._param is not None and not _is_there(self._param.grad)
        self._param = None

    @property
    def has_found(self) -> bool:
        """Whether all steps came after their gradients were cleared."""
        return self.n_cleared >= max(MIN_STEPS, self.n_steps)

    def observations(self) -> Iterator[Observation]:
        """One if all steps did nothing."""
        if self.has_found:
            yield Observation(
                "param.not_stepped",
                step=0,
                value=float(self.n_cleared),
                text=f"Gradients were cleared after the backward and before the step in all {self.n_steps} "
                "steps, so the optimizer changes nothing.",
                causes=("zero_grad() between backward() and step()",),
                next_steps=("Call zero_grad() after optimizer.step(), or before backward()",),
            )


def _is_there(grad: Tensor | None) -> bool:
    is_readable = grad is not None and grad.is_cpu and grad.layout is torch.strided
    return bool(grad.any()) if is_readable else grad is not None  # type: ignore[union-attr]


class _Track(NamedTuple):
    """State of one optimizer."""

    # largest magnitude of an old gradient; over the backwards since the last step, the smallest of these
    dirty: Tensor | float | None
    n_steps: int
    n_stale: Tensor | float
    n_seen: int = 0  # steps with a backward before them
    # gradients that were there at the last of these backwards, by id of the parameter
    grads: Mapping[int, ReferenceType[Tensor]] = {}

    @property
    def is_settled(self) -> bool:
        """Whether enough steps were seen, and it is known that one of them did not use stale gradients."""
        if self.n_seen < MIN_STEPS - 1 or isinstance(self.n_stale, Tensor):
            return False
        return self.n_stale < self.n_steps - 1


class StaleGradients:
    """Detects gradients of the last step that are still there when the next backward adds to them.

    It reads the first and last gradient of each optimizer. If any backward between two of its steps finds
    them zero or None, they were cleared. If the step finds other tensors there, they were replaced, for
    example by gradients from torch.autograd.grad, and nothing was added.
    """

    def __init__(self, model: nn.Module) -> None:
        self._ids = {id(p) for p in model.parameters()}  # other models may have gradients already
        self._tracks: WeakKeyDictionary[Optimizer, _Track] = WeakKeyDictionary()
        self._weight: tuple[nn.Parameter, Tensor] | None = None  # that the loop moves itself, and its values
        self._cosines: list[float | Tensor] = []  # of its gradient and its move

    def before_step(self, opt: Optimizer) -> None:
        """Copies a weight that the loop moves without an optimizer, to see if it follows its gradient."""
        self._weight = None
        if isinstance(opt, StepByHand):
            dense = _dense(opt, self._ids)
            params = [p for group in opt.param_groups for p in group["params"] if id(p) in dense]
            p = max(params, key=Tensor.numel, default=None)
            self._weight = None if p is None else (p, sketch_copy(p))

    def before_backward(self) -> None:
        """Reads the gradients that are present when a backward begins."""
        for opt, track in self._tracks.items():
            if track.n_steps and track.dirty != 0.0 and not track.is_settled:
                grads = _dense(opt, self._ids)
                dirty = _smaller(_largest(list(grads.values())), track.dirty)
                refs = {i: ref(g) for i, g in grads.items()}
                self._tracks[opt] = track._replace(dirty=dirty, grads=refs)

    def after_step(self, opt: Optimizer) -> None:
        """Counts a step of an optimizer, and whether it used stale gradients."""
        if self._weight is not None and (grad := self._weight[0].grad) is not None:
            move = sketch_copy(self._weight[0]) - self._weight[1]
            self._cosines.append(detached_scalar(torch.cosine_similarity(move, sketch_copy(grad), dim=0)))
        self._weight = None
        track = self._tracks.get(opt, _Track(None, 0, 0.0))
        if track.is_settled:
            return
        dirty, n_steps, n_stale, n_seen, grads = track
        if dirty is not None:
            now = _dense(opt, self._ids)
            if any(g() is now.get(i, g) for i, g in grads.items()):  # else they were replaced
                n_stale = n_stale + (dirty > 0)
        self._tracks[opt] = _Track(None, n_steps + 1, n_stale, n_seen + (dirty is not None))

    @property
    def has_looked(self) -> bool:
        """Whether enough steps of an optimizer had a backward before them."""
        return any(track.n_seen >= MIN_STEPS - 1 for track in self._tracks.values())

    @property
    def is_idle(self) -> bool:
        """Whether the loop moves the weights, but not along their gradients, as those of a target network."""
        return bool(self._cosines) and DOWN < median(map(float, self._cosines)) < ALONG

    def observations(self) -> Iterator[Observation]:
        """One for each optimizer that used stale gradients in all steps after the first."""
        for _, n_steps, n_stale, *_ in list(self._tracks.values()):
            if n_steps < MIN_STEPS or float(n_stale) < n_steps - 1:
                continue
            if self.is_idle:
                yield Observation(
                    "grad.stale",
                    step=1,
                    value=float(n_stale),
                    text=f"The gradients of {n_steps} backwards add up in weights that no optimizer has, and "
                    "that the loop moves in other directions: nothing uses them.",
                    causes=("a target network whose outputs are computed with gradients",),
                    next_steps=(
                        "Compute the targets under torch.no_grad(), or freeze that network with "
                        "requires_grad_(False)",
                    ),
                    severity="info",
                )
            else:
                yield Observation(
                    "grad.stale",
                    step=1,
                    value=float(n_stale),
                    text=f"In {float(n_stale):.0f} of {n_steps} steps the gradients of the previous step "
                    "were still there, and the new ones were added to them.",
                    causes=("gradients are not cleared after a step",),
                    next_steps=("Call optimizer.zero_grad() after each optimizer.step()",),
                )


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


class AddedBackwards:
    """Counts the backwards whose gradients each step adds up.

    It follows one small gradient. One that is gone, or zero on a CPU, before a later backward was cleared, so
    that what came before does not count; if it was changed otherwise, the number is unknown.

    Attributes:
        counts: numbers in all steps, 0 if unknown.
    """

    def __init__(self) -> None:
        self.counts: set[int] = set()
        self._n, self._is_known = 0, True  # since the last step
        self._mark: tuple[int, int] | None = None  # of the gradient when the last backward had ended

    def before_backward(self, param: nn.Parameter | None) -> None:
        """Checks whether the gradient is as the backward before has left it."""
        if param is None or self._mark is None:
            return
        if not _is_there(param.grad):
            self._n, self._is_known = 0, True
        elif mark_of(param.grad) != self._mark:
            self._is_known = False

    def after_backward(self, param: nn.Parameter | None) -> None:
        """Counts a backward."""
        self._n += 1
        self._mark = None if param is None else mark_of(param.grad)

    def before_step(self, param: nn.Parameter | None) -> None:
        """Checks the same before the step, as some loops divide the sum themselves, or clip it."""
        if param is not None and self._mark is not None and mark_of(param.grad) != self._mark:
            self._is_known = False

    def end_step(self) -> None:
        """Ends the count."""
        self.counts.add(self._n if self._is_known else 0)
        self._n, self._is_known, self._mark = 0, True, None


def observe_accumulation(n_backward: set[int], scale: float) -> Iterator[Observation]:
    """Losses of several batches that are summed to one step, not averaged.

    Args:
        n_backward: numbers of backwards that the steps of the only optimizer add up.
        scale: factor of the mean over samples in what backward is called on, NaN if unknown.
    """
    n = min(n_backward, default=0)
    if n > 1 and n_backward == {n} and scale == 1:
        yield Observation(
            "accum.divisor",
            value=float(n),
            text=f"Each step adds up the gradients of {n} backwards, and each of their losses is a whole "
            f"mean over its samples, so gradients are {n} times those of the mean over all.",
            causes=("losses that are accumulated without a divisor",),
            next_steps=(
                f"If these are parts of one batch, call (loss / {n}).backward(); SGD and clipping depend on "
                "the scale of the gradients, Adam does not",
            ),
        )
