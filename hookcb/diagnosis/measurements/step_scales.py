"""StepScales: what the gradients of each step are multiplied by, in clipping and by a GradScaler."""

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor
from torch.amp import GradScaler
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from hookcb.core.optim import detached_scalar
from hookcb.core.torch_private import CLIP
from hookcb.diagnosis.fault import EVERY, Measurement
from hookcb.diagnosis.heard import Ear, heard
from hookcb.diagnosis.run import Run
from hookcb.gradients.steps import scale_of
from hookcb.processes.shards import is_dtensor

Number = float | Tensor
OfSteps = tuple[tuple[int, Any], ...]  # numbers with their steps

# numbers before a step that are shown, and that are kept, as a GPU tells of a spike later; spans likewise
N_SHOWN, N_KEPT, N_SPANS = 32, 64, 8
MAX_PARAMS = 64  # whose calls of clipping are told apart
MIN_SPAN, RISE = 32, 1.5  # steps of a limit that has then ended, or risen by at least so much


class Call(NamedTuple):
    """A call of clipping: its number, from 1, the limit, and the norm before it; NaN if unknown.

    `n_params` is the number of parameters that it was given.
    """

    n: int
    limit: float
    norm: Number
    n_params: int


class Clipping(Ear):
    """Calls of torch's clipping to a norm, also of a program that has bound `clip_grad_norm_` before."""

    calls = ((clip_grad, CLIP, "observe"),) if hasattr(clip_grad, CLIP) else ()

    def __init__(self) -> None:
        self.n = 0
        self.latest: dict[int, Call] = {}  # by id of the first parameter with a gradient

    def observe(
        self, params: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any
    ) -> Iterator[None]:
        yield
        first = next((p for p in params if p.grad is not None), None) if isinstance(params, list) else None
        if first is None or (len(self.latest) >= MAX_PARAMS and id(first) not in self.latest):
            return
        self.n += 1
        is_known = isinstance(total_norm, Tensor) and not is_dtensor(total_norm)
        self.latest[id(first)] = Call(
            self.n,
            float(max_norm) if isinstance(max_norm, int | float) else math.nan,
            detached_scalar(total_norm) if is_known else math.nan,
            len(params),
        )


class ScaleUpdates(Ear):
    """Calls of `update` of GradScalers, each of which may change its scale, and of `unscale_`."""

    calls = ((GradScaler, "update", "observe"), (GradScaler, "unscale_", "observe_unscale"))

    def __init__(self) -> None:
        self.n = Counter[int]()  # by id of the scaler
        self.n_clipped: dict[int, int] = {}  # before the last `unscale_`, by id of its optimizer

    def observe(self, scaler: Any, /, *args: Any, **kwargs: Any) -> Iterator[None]:
        yield
        self.n[id(scaler)] += 1

    def observe_unscale(self, scaler: Any, /, *args: Any, **kwargs: Any) -> Iterator[None]:
        self.n_clipped[id([*args, *kwargs.values()][0])] = heard(Clipping).n
        yield


class Span(NamedTuple):
    """Steps in a row with one limit of clipping: the first, their number, and the limit, inf without any."""

    first: int
    n: int
    limit: float


class LimitChange(NamedTuple):
    """End or rise of a limit of clipping: its first step, how many had the one before, and both limits."""

    step: int
    n_before: int
    before: float
    after: float


class Rescaled(NamedTuple):
    """Step whose backward had another scale of the GradScaler than was there at the step."""

    step: int
    before: Number
    after: Number


class Scaled(NamedTuple):
    """Steps in a row, clipped before `unscale_`: first and last, their number, limit, and the last scale."""

    first: int
    last: int
    n: int
    limit: float
    scale: Number


class StepScales(Measurement):
    """Follows the clipping of each step, and the scale of a GradScaler; nothing waits for a GPU.

    Attributes:
        n_clipped: parameters that were given to clipping before the last step.
        limit: of clipping before the last step, inf without any.
        scaled: the last steps in a row whose gradients were clipped before they were unscaled.
    """

    cadence = EVERY
    hears = (Clipping, ScaleUpdates)

    def __init__(self) -> None:
        self._spans: dict[int, list[Span]] = {}  # by id of the optimizer
        self._n_heard: dict[int, int] = {}  # calls of clipping before its last step, likewise
        self._begin = 0  # those before the training
        self._are_own: dict[tuple[int, int], bool] = {}  # whether an optimizer has a parameter, by their ids
        self._is_cancelled = False
        self._updates = 0, 0  # id of a scaler, and the updates of it at the last backward
        self._norms = deque[tuple[int, Number]](maxlen=N_KEPT)  # before clipping, of steps that are clipped
        self._scales = deque[tuple[int, Number]](maxlen=N_KEPT)  # of the loss of each batch
        self._rescaled = deque[Rescaled](maxlen=N_SPANS)
        self.n_clipped, self.limit = 0, math.inf
        self.scaled: Scaled | None = None
        self._is_scaled = False  # whether the last step was

    def on_model(self, run: Run) -> None:
        self._begin = heard(Clipping).n

    def on_gradients(self, run: Run) -> None:
        self._updates, self._is_cancelled, scaler = (0, 0), False, run.loop.scaler
        if scaler is not None and scaler.is_enabled():
            self._scales.append((run.step, scale_of(scaler, run.loop.model)))
            self._updates = id(scaler), heard(ScaleUpdates).n[id(scaler)]

    def on_step(self, run: Run) -> None:
        (key, n), scaler = self._updates, run.loop.scaler
        if scaler is not None and id(scaler) == key and heard(ScaleUpdates).n[key] != n:
            now = scale_of(scaler, run.loop.model)
            self._rescaled.append(Rescaled(run.step, self._scales[-1][1], now))

    def on_cancel(self, run: Run, level: str) -> None:
        self._is_cancelled |= level == "step"  # before it may have been clipped

    def on_between(self, run: Run) -> None:
        opt, ear = run.loop.opt, heard(Clipping)
        if not isinstance(opt, Optimizer) or self._is_cancelled:
            return
        since = self._n_heard.get(id(opt), self._begin)
        self._n_heard[id(opt)] = ear.n
        new = [call for key, call in ear.latest.items() if call.n > since and self._is_own(opt, key)]
        self.limit, self.n_clipped = math.inf, sum(call.n_params for call in new)
        if new:
            _, self.limit, norm, _ = max(new)
            self._norms.append((run.step, norm))
        self._is_scaled, was_scaled = False, self._is_scaled
        if new and self._scales and min(new).n <= heard(ScaleUpdates).n_clipped.get(id(opt), 0):
            before = self.scaled if was_scaled else None
            first, n = (before.first, before.n) if before else (run.step, 0)
            self.scaled = Scaled(first, run.step, n + 1, self.limit, self._scales[-1][1])
            self._is_scaled = True
        limit, spans = self.limit, self._spans.setdefault(id(opt), [])
        if spans and spans[-1].limit == limit:
            spans[-1] = spans[-1]._replace(n=spans[-1].n + 1)
        else:
            spans.append(Span(run.step, 1, limit))
            del spans[:-N_SPANS]

    def _is_own(self, opt: Optimizer, param: int) -> bool:
        key = id(opt), param
        if key not in self._are_own:
            self._are_own[key] = any(id(p) == param for group in opt.param_groups for p in group["params"])
        return self._are_own[key]

    def limit_change(self, step: int, within: int) -> LimitChange | None:
        """The end or rise of a limit of clipping before a step, at most so many steps ago, and still so."""
        found = [x for spans in self._spans.values() if (x := _last_change(spans, step)) is not None]
        return max((x for x in found if x.step >= step - within), default=None)

    def norms(self, step: int) -> OfSteps:
        """Norms of the gradients before clipping, with their steps, of up to 32 before a step."""
        return _before(self._norms, step)

    def scales(self, step: int) -> OfSteps:
        """Scales of a GradScaler in the backwards of up to 32 batches before a step, with their steps."""
        return _before(self._scales, step)

    def rescaled(self, step: int, within: int) -> Rescaled | None:
        """The last step before, at most so many steps ago, whose scale changed after its backward."""
        return next((x for x in reversed(self._rescaled) if step - within <= x.step < step), None)

    def freeze(self) -> None:
        self._norms.clear()
        self._scales.clear()
        self._rescaled.clear()


def _before(numbers: Iterable[tuple[int, Number]], step: int) -> OfSteps:
    return tuple(x for x in numbers if x[0] < step)[-N_SHOWN:]


def _last_change(spans: list[Span], step: int) -> LimitChange | None:
    """The last change of a limit before a step, if it was an end or a rise."""
    before, now = ([Span(0, 0, math.inf)] * 2 + [x for x in spans if x.first < step])[-2:]
    is_change = before.n >= MIN_SPAN and before.limit * RISE <= now.limit and before.limit < math.inf
    return LimitChange(now.first, before.n, before.limit, now.limit) if is_change else None
