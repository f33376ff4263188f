"""GradientReader: captures gradients and weights around an optimizer step, without a device sync."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hookcb.core.precision import at_least_float32, moved, wide_norm
from hookcb.core.ranks import ALONE, Ranks
from hookcb.core.shards import has_no_part, is_shard, local_part
from hookcb.core.torch_private import flattened, norms_of, version_of
from hookcb.gradients.layout import Layout
from hookcb.gradients.shards import Columns, ShardCapture, ShardReader, count_nonfinite
from hookcb.gradients.stats import (
    RUN,
    SAFE_HIGH,
    SAFE_LOW,
    WHOLE,
    Number,
    elements_of,
    is_readable,
    mean_size,
    norms_of_rows,
    number_of,
    plain_gradient,
    row_norms,
    summarize_gradient,
)
from hookcb.hooks.params import Param
from hookcb.records.memory import Memory

Numbers = Sequence[float] | Tensor  # floats on a CPU, made one tensor later, for many steps together
About = dict[str, tuple[int, int, str]]  # by parameter: number of elements, of dimensions, type of the module


@dataclass(slots=True)
class Capture:
    """Numbers captured around one step, for the parameters of one layout.

    Attributes:
        layout: the layout.
        before: the parts of `layout.parts`: small gradients, row norms of large gradients, and tracked
            weights before the step, concatenated.
        nonfinite: number of NaN and infinities of each large gradient.
        details: smallest and largest element and mean |gradient| of each large gradient, `(n_large · 3,)`;
            None if they were not read.
        after: tracked weights after the step.
        weights: norm and sum of each parameter of middle size, `(n_middle · 2,)`.
        clipped_small: small gradients as the optimizer got them; None if they are as before.
        clipped_large: norms of the large ones.
    """

    layout: Layout
    before: Tensor
    nonfinite: Numbers
    details: Numbers | None = None
    after: Tensor | None = None
    weights: Numbers = ()
    clipped_small: Tensor | None = None
    clipped_large: Numbers = ()


@dataclass(slots=True)
class StepCapture:
    """Everything captured around one step.

    Attributes:
        captures: numbers of gradients and weights, one item for each device.
        lr: learning rate of the last parameter group; NaN if unknown.
        scale: factor of the GradScaler, 1.0 without one.
        about: sizes and kinds of the captured parameters, in the order of the model.
        without_grad: names of the parameters that require a gradient and have none.
        frozen: names of the parameters that require no gradient.
        left_out: types of the unreadable parameters or gradients, by name.
        not_optimized: names of the captured parameters that no optimizer has.
        skipped: 1.0 if the step was not made.
        record, step: index of its record and number of its batch, set when it is added to the records.
        buffers: sizes of the running statistics by name, and their concatenated values, by device.
        shards: numbers of parameters of which this rank has a part, while the step is in progress.
        merged: statistics of these parameters, by name.
    """

    captures: list[Capture]
    lr: Number
    scale: Number
    about: About = field(default_factory=dict)
    without_grad: list[str] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    not_optimized: list[str] = field(default_factory=list)
    skipped: Number = 0.0
    record: int = 0
    step: int = 0
    buffers: dict[torch.device, tuple[dict[str, int], Tensor]] = field(default_factory=dict)
    shards: ShardCapture | None = None
    merged: Columns = field(default_factory=dict)

    @property
    def n_elements(self) -> int:
        """Number of elements held until they are reduced."""
        n = sum(values.numel() for _, values in self.buffers.values())
        return n + sum(c.before.numel() + c.layout.parts[2] for c in self.captures)


class GradientReader:
    """Captures gradients and weights before and after a step.

    Args:
        params: the parameters to read.
        ranks: the ranks that merge statistics of sharded parameters; each must capture the same steps.
        memory: lends memory for the elements of a step; it may take them back once the step is reduced.

    Attributes:
        memory: the same.
        starts: tracked elements of each parameter before its first step, by name.
        pivots: mean of each sharded parameter at its first step, by name; the same on all ranks.
    """

    def __init__(self, params: Sequence[Param], ranks: Ranks = ALONE, memory: Memory | None = None) -> None:
        self.starts: dict[str, Tensor] = {}
        self.params: list[Param] = []
        self.pivots: dict[str, Tensor] = {}
        self.memory = Memory() if memory is None else memory
        self._ranks, self._sharded = ranks, frozenset[str]()
        self._shards: ShardReader | None = None
        self._left_out: dict[str, str] = {}
        self._key: list[int] = []
        self._layouts: list[tuple[Layout, list[int]]] = []  # with indices into the gradients of a step
        self._about: About = {}
        self._grads: list[
            tuple[Param, Tensor | None, int | None]
        ] = []  # with version counters, None for shards
        self.refresh(params, {})

    def refresh(
        self, params: Sequence[Param], buffers: dict[str, Tensor], sizes: dict[int, int] | None = None
    ) -> None:
        """Replaces the parameters to read, and the buffers with running statistics.

        Args:
            params: the parameters.
            buffers: the buffers, by name.
            sizes: numbers of elements on all ranks together, by id, of parameters that do not tell it.
        """
        if any(param.name in self._sharded and not is_shard(param.p) for param in params):
            return  # gathered for a moment, as after a validation
        named = {param.name: param.p for param in params}
        for param in self.params:  # a drift is that of one and the same parameter
            if (now := named.get(param.name)) is not None and now is not param.p and not is_shard(now):
                self.starts.pop(param.name, None)
        self.params = [param for param in params if is_readable(param.p)]
        sharded = [param for param in self.params if is_shard(param.p)]
        self._sharded = frozenset(param.name for param in sharded)
        tables = self.starts, self.pivots, self._ranks
        self._shards = ShardReader(sharded, sizes or {}, *tables) if sharded else None
        odd = [param for param in params if not is_readable(param.p)]
        self._left_out |= {param.name: type(param.p).__name__ for param in odd}
        self._buffers: dict[torch.device, list[Tensor]] = {}
        self._sizes: dict[torch.device, dict[str, int]] = {}
        for name, whole in buffers.items():
            b = local_part(whole)
            self._buffers.setdefault(b.device, []).append(b)
            self._sizes.setdefault(b.device, {})[name] = b.numel()

    def before_step(
        self,
        grad_scale: Number = 1.0,
        lr: Number = math.nan,
        scale: Number = 1.0,
        *,
        is_detailed: bool = True,
    ) -> StepCapture:
        """Captures weights and whole gradients, which are `grad_scale` times too large.

        Without details those of large gradients are not read, unless some are not finite on a CPU.
        """
        self._grads = []
        without_grad: list[str] = []
        frozen: list[str] = []
        grads, key = [], []
        shards: dict[str, Tensor | None] = {}
        is_unscaled = isinstance(grad_scale, float) and grad_scale == 1
        for param in self.params:
            name, p, _ = param
            g = p.grad
            if g is None and not has_no_part(p):
                (without_grad if p.requires_grad else frozen).append(name)
                continue
            if name in self._sharded or g is None:
                shards[name] = g
                self._grads.append((param, g, None))
                key += [id(p), 0]
                continue
            x = _plain(g)
            if x is None:
                self._left_out[name] = type(g).__name__
                continue
            self._grads.append((param, g, version_of(g)))
            grads.append(x if is_unscaled else _unscaled(x, grad_scale))
            key += [id(p), p.numel()]
        if key != self._key:
            self._key = key
            self._lay_out(self.with_grad)
        of_shards = self._shards.before_step(shards, grad_scale) if self._shards else None
        captures = [
            self._capture(layout, [grads[i] for i in places], is_detailed) for layout, places in self._layouts
        ]
        names = without_grad, frozen, dict(self._left_out)
        return StepCapture(captures, lr, scale, self._about, *names, shards=of_shards)

    def _capture(self, layout: Layout, grads: list[Tensor], is_detailed: bool) -> Capture:
        """Numbers of the gradients, in the order of the layout, and of the weights before the step."""
        small, large = _flat(grads[: layout.n_small]), grads[layout.n_small :]
        details, known = None, None if is_detailed else norms_of_rows(large)
        if known is None:
            found = [summarize_gradient(g) for g in large]
            known = [x.rows for x in found], [x.nonfinite for x in found]
            pairs = zip(found, map(mean_size, large), strict=True)
            details = _row([number for x, mean in pairs for number in (x.low, x.high, mean)], layout)
        rows, nonfinite = known
        tracked, runs = layout.tracked()
        before = self._joined([*small, *rows, *tracked], runs, layout, layout.n_flat)
        return Capture(layout, before, _row(nonfinite, layout), details)

    def _joined(self, xs: list[Tensor], runs: list[Tensor], layout: Layout, n: int) -> Tensor:
        """A concatenated copy of tensors with one dimension, `n` elements, then of runs, at least float32."""
        if not layout.is_usual:
            joined = [torch.cat(same).view(-1) for same in (xs, runs) if same]
            return at_least_float32(torch.cat(joined)) if joined else layout.empty
        whole = self.memory.lend(torch.Size([n + layout.n_in_runs if runs else n]))
        if xs:
            torch.cat(xs, out=whole[:n])
        if runs:
            torch.cat(runs, out=whole[n:].view(-1, RUN))
        return whole

    def _lay_out(self, params: list[Param]) -> None:
        by_device: dict[torch.device, list[Param]] = {}
        whole = [param for param in params if param.name not in self._sharded]
        for param in whole:
            by_device.setdefault(param.p.device, []).append(param)
        place = {id(param): i for i, param in enumerate(whole)}
        layouts = [Layout(on_device) for on_device in by_device.values()]
        self._layouts = [(layout, [place[id(param)] for param in layout.params]) for layout in layouts]
        sizes = self._shards.numels if self._shards else {}
        self._about = {name: (sizes.get(id(p), p.numel()), p.ndim, kind) for name, p, kind in params}

    @property
    def with_grad(self) -> list[Param]:
        """Parameters that had a gradient before this step."""
        return [param for param, *_ in self._grads]

    def at_step(self, step: StepCapture) -> None:
        """Captures gradients as the optimizer gets them, if they were changed since `before_step`."""
        if step.shards is not None and self._shards is not None:  # a DTensor does not count its changes
            self._shards.at_step(step.shards)
        for param, g, version in self._grads:
            if g is not None and version is not None and (param.p.grad is not g or version_of(g) != version):
                self._read_clipped(step)
                return

    @torch.no_grad()
    def _read_clipped(self, step: StepCapture) -> None:
        for capture in step.captures:
            layout = capture.layout
            grads = [param.p.grad for param in layout.params]
            plain = [None if g is None else _plain(g) for g in grads]
            small, large = plain[: layout.n_small], plain[layout.n_small :]
            shapes = zip(small, layout.shapes, strict=False)
            zeroed = [torch.zeros(shape, device=layout.device) if x is None else x for x, shape in shapes]
            capture.clipped_small = self._joined(_flat(zeroed), [], layout, layout.parts[0])
            norms = [0.0 if x is None else _norm(x) for x in large]
            capture.clipped_large = _row(norms, layout)

    def after_step(self, step: StepCapture, skipped: Number = 0.0) -> None:
        """Captures the updated weights; `skipped` is 1.0 if the step was not made.

        With sharded parameters all ranks must call it at the same step.
        """
        step.skipped = skipped
        if step.shards is not None and self._shards is not None:
            step.merged, step.shards = self._shards.after_step(step.shards, skipped), None
            captured = {name for c in step.captures for name, *_ in c.layout.params} | step.merged.keys()
            step.without_grad += [
                name for name in step.about if name not in captured and self._ranks.world > 1
            ]
        for capture in step.captures:
            layout = capture.layout
            capture.after = self._joined(*layout.tracked(), layout, layout.n_small_tracked)
            if layout.start is None:
                layout.start = self._start(layout, torch.split(capture.before, layout.parts)[2])
            numbers: list[Number] = []
            for param, is_middle in zip(layout.params[layout.n_small :], layout.is_middle, strict=True):
                if is_middle:
                    x = _plain(param.p.detach())
                    numbers += [torch.nan] * 2 if x is None else [_norm(x), number_of(x.sum())]
            capture.weights = _row(numbers, layout)
        self._grads = []
        for device, buffers in self._buffers.items():
            values = flattened([b.detach() for b in buffers]).clone()
            step.buffers[device] = self._sizes[device], self.memory.keep(values)

    def _start(self, layout: Layout, before: Tensor) -> Tensor:
        """Sketches of the parameters before their first step, which may have been in an earlier layout."""
        starts = []
        sketches = torch.split(before, layout.sketch_lengths)
        for param, now in zip(layout.params, sketches, strict=True):
            known = self.starts.get(param.name)
            if known is None or len(known) != len(now):
                known = self.starts[param.name] = now.clone()
            starts.append(known.to(now.device, non_blocking=True))
        return torch.cat(starts)


def _plain(g: Tensor) -> Tensor | None:
    usual = type(g) is Tensor and g.dtype is torch.float32 and g.layout is torch.strided
    return g if usual and not g.requires_grad else plain_gradient(g)  # a shortcut for most gradients


def _flat(xs: list[Tensor]) -> list[Tensor]:
    return [x if x.ndim == 1 else x.reshape(-1) for x in xs]


def _unscaled(x: Tensor, scale: Number) -> Tensor:
    return x / scale if x.layout is torch.strided else (x / scale).coalesce()


def _norm(x: Tensor) -> Number:
    x = elements_of(x)
    norm = number_of(torch.linalg.vector_norm(x) if x.numel() <= WHOLE else row_norms(row_norms(x))[0])
    if isinstance(norm, float) and (norm < SAFE_LOW or norm > SAFE_HIGH):  # squares may be out of range
        return number_of(wide_norm(x.reshape(-1), dim=0))
    return norm


def _row(numbers: list[Number], layout: Layout) -> Numbers:
    """The numbers as one tensor on the device, without a sync; on a CPU a list of floats."""
    if layout.device.type == "cpu" or not numbers:
        return numbers  # type: ignore[return-value]  # on a CPU all are floats
    whole = [x if isinstance(x, Tensor) else torch.full((), x, device=layout.device) for x in numbers]
    return torch.stack([x.to(layout.dtype) for x in whole])


def first_nonfinite(params: Iterable[Param], ranks: Ranks = ALONE) -> tuple[str, int] | None:
    """Name of the first parameter with a NaN or infinite gradient, and the number of such elements.

    Waits for the device, once if all gradients are finite. With sharded parameters all ranks must call it.
    """
    every = list(params)
    sharded = [param for param in every if is_shard(param.p)]
    counts = zip(sharded, count_nonfinite(sharded, ranks), strict=True) if sharded else ()
    if found := next(((param.name, math.ceil(n)) for param, n in counts if n), None):
        return found
    grads = [
        (param.name, x)
        for param in every
        if not is_shard(param.p) and (g := param.p.grad) is not None and (x := _plain(g)) is not None
    ]
    elements = [(name, elements_of(x)) for name, x in grads]
    if not elements:
        return None
    norms = norms_of([x for _, x in elements])
    if bool(torch.stack([moved(norm, norms[0].device) for norm in norms]).isfinite().all()):
        return None
    for name, x in elements:
        if n := int(x.isfinite().logical_not_().sum()):  # 0 if only a square has overflowed
            return name, n
    return None
