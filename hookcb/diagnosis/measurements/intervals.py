"""Intervals: the backwards between two steps, and whether their gradients were cleared before a step."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from hookcb.core.batch import parts
from hookcb.core.optim import detached_scalar, mark_of
from hookcb.core.whose import frames_of, garbage_kept, is_of_user, line_in
from hookcb.diagnosis.fault import EVERY, Measurement
from hookcb.diagnosis.heard import Ear, heard
from hookcb.diagnosis.measurements.lines import place_of
from hookcb.diagnosis.measurements.steps import Steps, is_there
from hookcb.diagnosis.run import Run
from hookcb.gradients.samples import sketch_copies
from hookcb.hooks.optimizer_steps import StepHook, params_of

MAX_STEPS = 64
N_WITHOUT = 16  # steps in a row that throw nothing away, after which no others are looked at
ALIKE = 0.9999  # cosine of the gradient of the last backwards and that at the step, if it was at most scaled
Lines = tuple[tuple[CodeType, int], ...]  # of the user that are in progress, the innermost first


class ClearedByCall(Ear):
    """Calls of zero_grad of optimizers and modules: how often, and the line of the last one."""

    calls = ((Optimizer, "zero_grad", "observe"), (nn.Module, "zero_grad", "observe"))
    options: ClassVar[dict[str, bool]] = {"nested": False}

    def __init__(self) -> None:
        self.counts: Any = WeakIdKeyDictionary()  # by optimizer or module
        self.lines: Lines = ()  # of the last call, while `wants_lines`
        self.wants_lines = False

    def observe(self, holder: Any, /, *args: Any, **kwargs: Any) -> Iterator[None]:
        self.counts[holder] = self.counts.get(holder, 0) + 1
        if self.wants_lines:
            self.lines = lines_of(sys._getframe(1))[:1]
        yield

    def n_calls(self, p: nn.Parameter) -> int:
        """Number of calls that have cleared the gradient of a parameter."""
        return sum(n for holder, n in list(self.counts.items()) if _holds(holder, p))


def _holds(holder: Any, p: nn.Parameter) -> bool:
    if isinstance(holder, Optimizer):
        return id(p) in params_of(holder)
    return any(p is own for own in holder.parameters())


def lines_of(frame: FrameType | None) -> Lines:
    """Lines of the user that lead to a frame, innermost first."""
    return tuple((found.f_code, line_in(found)) for found in frames_of(frame, is_of_user))


@dataclass(slots=True)
class Interval:
    """The backwards between two steps.

    Attributes:
        n: their number.
        n_thrown: number of those whose gradients were cleared before the next one.
        is_used: whether something else may have used these: the gradient of an input, another optimizer.
        lines: where the backwards were called.
        moved: above 0 if weights have moved between the backwards, as in sharpness-aware minimization.
        cosine: of the gradient after the last backward and at the step; -1 if it is unknown.
    """

    n: int = 0
    n_thrown: int = 0
    is_used: bool = False
    lines: set[Lines] = field(default_factory=set)
    moved: float | Tensor = 0.0
    cosine: float | Tensor = -1.0

    @property
    def is_wasted(self) -> bool:
        """Whether gradients were thrown away that nothing has used."""
        is_plain = bool(self.n_thrown) and not self.is_used and len(self.lines) == 1
        return is_plain and not float(self.moved) and float(self.cosine) > ALIKE


class Intervals(Measurement):
    """The backwards between two steps, of the first 64 steps; of 16 if nothing was thrown away in these."""

    cadence = EVERY
    uses = (Steps,)
    hears = (ClearedByCall,)

    def __init__(self) -> None:
        self.past: list[Interval] = []
        self._now = Interval()
        self._mark: tuple[int, int] | None = None  # of the gradient when the last backward had ended
        self._n_calls = 0  # of zero_grad, likewise
        self._is_there = self._has_stepped = self._is_cancelled = False  # since then
        self._weights: list[Tensor] = []  # samples of weights and of their gradients, likewise
        self._grads: list[Tensor] = []
        self._n_thrown = 0
        self._hook: StepHook | None = None
        self._thread = get_ident()
        self.place = ""  # where zero_grad is called

    def on_model(self, run: Run) -> None:
        self._hook = StepHook(self._note_step)

    def _note_step(self, *seen: Any) -> None:
        self._has_stepped = True

    def on_backward(self, run: Run) -> None:
        """Sees whether the gradients of the backward before are gone."""
        now, p = self._now, run.measured(Steps).first_param
        with garbage_kept():
            lines = lines_of(sys._current_frames().get(self._thread))
        if now.n and p is not None and self._is_there and self._is_cleared(p):
            now.is_used |= self._has_stepped or (not self._weights and self._n_thrown > 0)
            now.n_thrown, self._n_thrown = now.n, self._n_thrown + 1
            now.moved = now.moved + _differ(self._weights, _samples(p, run))
            if (ear := heard(ClearedByCall)).lines:
                self.place = place_of(*ear.lines[0])
            ear.wants_lines = not self.place
        now.is_used |= any(isinstance(x, Tensor) and x.requires_grad for _, x in parts(run.loop.xb))
        now.lines.add(lines)

    def _is_cleared(self, p: nn.Parameter) -> bool:
        if p.grad is None or p.grad.is_cpu:
            return not is_there(p.grad)
        is_changed = mark_of(p.grad) != self._mark
        return is_changed and heard(ClearedByCall).n_calls(p) > self._n_calls

    def on_gradients(self, run: Run) -> None:
        self._now.n += 1
        self._has_stepped, p = False, run.measured(Steps).first_param
        self._is_there = p is not None and is_there(p.grad)
        if p is None or not self._is_there:
            return
        if not p.is_cpu:
            self._mark, self._n_calls = mark_of(p.grad), heard(ClearedByCall).n_calls(p)
        if self._n_thrown:
            self._weights, self._grads = _samples(p, run), _samples(p, run, of_grads=True)

    def on_step(self, run: Run) -> None:
        if self._now.n_thrown and self._grads and (p := run.measured(Steps).first_param) is not None:
            self._now.cosine = _cosine(self._grads, _samples(p, run, of_grads=True))

    def on_cancel(self, run: Run, level: str) -> None:
        self._is_cancelled |= level == "step"

    def on_between(self, run: Run) -> None:
        if self._now.n and not self._is_cancelled:
            self.past.append(self._now)
            self._now, n = Interval(), len(self.past)
            self.done = n >= MAX_STEPS or (n >= N_WITHOUT and not self._n_thrown)
            if self.done:
                self.close(run)
        self._is_cancelled = False

    def close(self, run: Run) -> None:
        hook, self._hook = self._hook, None
        if hook is not None:
            hook.remove()

    def freeze(self) -> None:
        self._weights, self._grads, self._now = [], [], Interval()
        for x in self.past:
            x.lines, x.moved, x.cosine = {()} if len(x.lines) == 1 else set(), float(x.moved), float(x.cosine)


def _samples(p: nn.Parameter, run: Run, of_grads: bool = False) -> list[Tensor]:
    """Samples of a parameter and of the model's last one with a gradient when the backward had ended."""
    last = next((x for x in reversed(list(run.loop.model.parameters())) if x.requires_grad), p)
    chosen: list[Tensor | None] = [x.grad for x in (p, last)] if of_grads else [p, last]
    return sketch_copies([x for x in chosen if x is not None and x.device == p.device])


def _differ(before: list[Tensor], now: list[Tensor]) -> float | Tensor:
    """Number of the samples that differ."""
    if not before:
        return 0.0
    if [x.shape for x in before] != [x.shape for x in now]:
        return 1.0
    changed = [(x != y).any() for x, y in zip(before, now, strict=True)]
    return detached_scalar(torch.stack(changed).sum())


def _cosine(before: list[Tensor], now: list[Tensor]) -> float | Tensor:
    if [x.shape for x in before] != [x.shape for x in now]:
        return -1.0
    return detached_scalar(torch.cosine_similarity(torch.cat(before), torch.cat(now), dim=0))
