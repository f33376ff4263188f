"""GradientReader: looks at gradients and weights around a step of the optimizer, and waits for no device."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor, nn

from hookcb.core.precision import at_least_float32, moved, scaled_norm, widened, widest
from hookcb.core.torch_private import flattened, norms_of, version_of
from hookcb.gradients.stats import (
    SKETCH,
    WHOLE,
    GradColumns,
    Number,
    is_readable,
    plain_gradient,
    reduce_large,
    reduce_small,
    sketch,
    sketch_copy,
    sketch_stride,
    std_of,
    summarize_gradient,
    update_ratio,
    weight_stats,
)
from hookcb.hooks.params import Param

Numbers = Sequence[float] | Tensor  # those of a CPU are put side by side later, for many steps together


class Layout:
    """The parameters of a record that are on one device, and where their numbers are among all."""

    def __init__(self, params: Sequence[Param]) -> None:
        self.device = params[0].p.device
        in_order = sorted(params, key=lambda param: (param.p.is_complex(), param.p.numel(), param.p.shape))
        small = [param for param in in_order if param.p.numel() <= SKETCH]
        large = [param for param in in_order if param.p.numel() > SKETCH]
        self.params, self.n_small = [*small, *large], len(small)
        self.numels = [param.p.numel() for param in self.params]
        self.shapes = [param.p.shape for param in self.params]
        self.is_complex = [param.p.is_complex() for param in self.params]
        self.lengths = [  # of the sketches
            min(n, SKETCH) * (1 + of) for n, of in zip(self.numels, self.is_complex, strict=True)
        ]
        self.is_middle = [n <= WHOLE for n in self.numels[self.n_small :]]
        middle = [i for i, n in enumerate(self.numels) if SKETCH < n <= WHOLE]
        self.middle = torch.tensor(middle, dtype=torch.int64, device="cpu").to(self.device)
        self.strides = {n: sketch_stride(n) for n in self.numels if n > WHOLE}
        self.start: Tensor | None = None  # the first sketch
        self.is_known = False  # to those who keep the numbers
        self.nothing = torch.empty(0, device=self.device)
        is_double = any(param.p.dtype in (torch.float64, torch.complex128) for param in params)
        self.dtype = torch.float64 if is_double else torch.float32  # of what is recorded
        self._with_memory = [param.p for param in self.params if _has_memory(param.p)]
        self._addresses: list[int] = []
        self._views: list[Tensor] = []
        self._copied: dict[int, nn.Parameter] = {}  # of which there is no view, by place in these

    def sketch(self) -> Tensor:
        """The followed elements of all parameters, `(n,)`: a copy."""
        addresses = [p.data_ptr() for p in self._with_memory]
        if addresses != self._addresses or not self._views:  # also where `p.data` was replaced
            self._addresses = addresses
            views = [sketch(param.p) for param in self.params]
            self._views = [self.nothing if view is None else view for view in views]
            self._copied = {i: self.params[i].p for i, view in enumerate(views) if view is None}
        for i, p in self._copied.items():
            self._views[i] = sketch_copy(p)
        whole = torch.cat(self._views)
        return at_least_float32(whole)


def _has_memory(p: Tensor) -> bool:
    """Whether a parameter has an address of its own, which a DTensor has not."""
    return not hasattr(p, "full_tensor") and p.layout is torch.strided


@dataclass(slots=True)
class Taken:
    """What was taken around one step, of the parameters of one layout."""

    layout: Layout
    small: Tensor  # their gradients, one after the other
    rows: Tensor  # norms of rows of the large ones, one after the other
    numbers: Numbers  # of the large ones low, high, nonfinite, mean |gradient|: (n_large · 4,)
    before: Tensor  # sketch of the weights
    after: Tensor | None = None
    weights: Numbers = ()  # norm and sum of those of middle size: (n_middle · 2,)
    clipped_small: Tensor | None = None  # where clipping has changed them
    clipped_large: Numbers = ()  # norms


@dataclass(slots=True)
class StepTaken:
    """What was taken around one step."""

    takens: list[Taken]
    lr: Number
    scale: Number
    skipped: Number = 0.0
    record: int = 0
    at: int = 0  # number of the batch
    buffers: dict[torch.device, tuple[dict[str, int], Tensor]] = field(default_factory=dict)  # sizes, values

    @property
    def n_elements(self) -> int:
        """That wait to be reduced."""
        n = sum(values.numel() for _, values in self.buffers.values())
        return n + sum(t.small.numel() + t.rows.numel() + 2 * t.before.numel() for t in self.takens)


class GradientReader:
    """Takes what is needed of gradients and weights, before and after a step.

    Args:
        params: those looked at.

    Attributes:
        without_grad: names of those that require a gradient and had none in the last step.
        frozen: names of those that require none.
        left_out: names of those whose gradient has no statistics, with its type.
        starts: by name, the elements that are followed as they were in the first step.
    """

    def __init__(self, params: Sequence[Param]) -> None:
        self.without_grad: list[str] = []
        self.frozen: list[str] = []
        self.left_out: dict[str, str] = {}
        self._key: list[int] = []
        self._layouts: list[tuple[Layout, list[int]]] = []  # with places in grads
        self.starts: dict[str, Tensor] = {}
        self._grads: list[tuple[Param, Tensor, int]] = []  # with its version
        self.refresh(params, {})

    def refresh(self, params: Sequence[Param], buffers: dict[str, Tensor]) -> None:
        """The model may have other ones by now."""
        self.params = [param for param in params if is_readable(param.p)]
        odd = [param for param in params if not is_readable(param.p)]
        self.left_out |= {param.name: type(param.p).__name__ for param in odd}
        self._buffers: dict[torch.device, list[Tensor]] = {}
        self._sizes: dict[torch.device, dict[str, int]] = {}
        for name, b in buffers.items():
            self._buffers.setdefault(b.device, []).append(b)
            self._sizes.setdefault(b.device, {})[name] = b.numel()

    def before_step(self, scale: Number = 1.0) -> list[Taken]:
        """Gradients are whole, and `scale` times too large."""
        self._grads, self.without_grad, self.frozen = [], [], []
        grads, key = [], []
        for param in self.params:
            name, p, _ = param
            g = p.grad
            if g is None:
                (self.without_grad if p.requires_grad else self.frozen).append(name)
                continue
            x = _plain(g)
            if x is None:
                self.left_out[name] = type(g).__name__
                continue
            self._grads.append((param, g, version_of(g)))
            grads.append(x if isinstance(scale, float) and scale == 1 else _unscaled(x, scale))
            key += [id(p), p.numel()]
        if key != self._key:
            self._key = key
            self._lay_out([param for param, *_ in self._grads])
        return [_take(layout, [grads[i] for i in places]) for layout, places in self._layouts]

    def _lay_out(self, params: list[Param]) -> None:
        by_device: dict[torch.device, list[Param]] = {}
        for param in params:
            by_device.setdefault(param.p.device, []).append(param)
        place = {id(param): i for i, param in enumerate(params)}
        layouts = [Layout(of) for of in by_device.values()]
        self._layouts = [(layout, [place[id(param)] for param in layout.params]) for layout in layouts]

    @property
    def with_grad(self) -> list[Param]:
        """Those that had a gradient before this step."""
        return [param for param, *_ in self._grads]

    def at_step(self, takens: Iterable[Taken]) -> None:
        """Gradients are as the optimizer gets them."""
        if all(param.p.grad is g and version_of(g) == version for param, g, version in self._grads):
            return
        for taken in takens:
            layout = taken.layout
            grads = [param.p.grad for param in layout.params]
            plain = [None if g is None else _plain(g) for g in grads]
            small, large = plain[: layout.n_small], plain[layout.n_small :]
            taken.clipped_small = _flat(
                [
                    torch.zeros(shape, device=layout.device) if x is None else x
                    for x, shape in zip(small, layout.shapes, strict=False)
                ],
                layout.nothing,
            )
            norms = [0.0 if x is None else _norm(x) for x in large]
            taken.clipped_large = _row(norms, layout)

    def after_step(self, step: StepTaken, skipped: Number = 0.0) -> None:
        """Weights are updated, or the step was skipped."""
        step.skipped = skipped
        for taken in step.takens:
            layout = taken.layout
            taken.after = layout.sketch()
            if layout.start is None:
                layout.start = self._start(layout, taken.before)
            numbers: list[Number] = []
            for param, is_middle in zip(layout.params[layout.n_small :], layout.is_middle, strict=True):
                if is_middle:
                    x = _plain(param.p.detach())
                    numbers += [torch.nan] * 2 if x is None else [_norm(x), _number(x.sum())]
            taken.weights = _row(numbers, layout)
        self._grads = []
        for device, buffers in self._buffers.items():
            step.buffers[device] = self._sizes[device], _flat(buffers, torch.empty(0, device=device))

    def _start(self, layout: Layout, before: Tensor) -> Tensor:
        """The sketches with which the parameters began, also those that were in an earlier layout."""
        starts = []
        for param, own in zip(layout.params, torch.split(before, layout.lengths), strict=True):
            known = self.starts.get(param.name)
            if known is None or len(known) != len(own):
                known = self.starts[param.name] = own.clone()
            starts.append(known.to(own.device))
        return torch.cat(starts)


def _plain(g: Tensor) -> Tensor | None:
    usual = type(g) is Tensor and g.dtype is torch.float32 and g.layout is torch.strided
    return g if usual else plain_gradient(g)  # the usual one without further questions


def _unscaled(x: Tensor, scale: Number) -> Tensor:
    return x / scale if x.layout is torch.strided else (x / scale).coalesce()


def _flat(xs: list[Tensor], nothing: Tensor) -> Tensor:
    if not xs:
        return nothing
    if len({x.dtype for x in xs}) > 1:
        xs = [widened(x) for x in xs]
    flat = flattened(xs)
    return flat.clone() if len(xs) == 1 else flat  # of one it is a view


def _number(x: Tensor) -> Number:
    """A float of what is on a CPU, where that costs nothing."""
    return x.item() if x.is_cpu else x


def _norm(x: Tensor) -> Number:
    x = x if x.layout is torch.strided else x.values()
    norm = _number(torch.linalg.vector_norm(x))
    if isinstance(norm, float) and norm == math.inf:  # its squares alone may be beyond its dtype
        return _number(scaled_norm(x.double().reshape(-1), dim=0))
    return norm


def _row(numbers: list[Number], layout: Layout) -> Numbers:
    """Numbers side by side; without waiting for a device."""
    if layout.device.type == "cpu" or not numbers:
        return numbers  # type: ignore[return-value]  # on a CPU all are floats
    whole = [x if isinstance(x, Tensor) else torch.full((), x, device=layout.device) for x in numbers]
    return torch.stack([x.to(layout.dtype) for x in whole])


def _table(rows: Sequence[Numbers]) -> Tensor:
    """Such rows of several steps, as the device can: see `widest`."""
    if isinstance(rows[0], Tensor):
        return widened(torch.stack(rows))  # type: ignore[arg-type]  # all are
    return torch.tensor(rows, dtype=torch.float64, device="cpu")


def _followed(g: Tensor, layout: Layout) -> Tensor | None:
    """A sketch of a gradient above `WHOLE`; None of a sparse one."""
    if g.layout is not torch.strided or not g.is_contiguous():
        return None if g.layout is not torch.strided else sketch(g)
    stride = layout.strides[g.numel()]
    first = (g.numel() - stride * (SKETCH - 1)) // 2
    return g.as_strided((SKETCH,), (stride,), g.storage_offset() + first)


def _take(layout: Layout, grads: list[Tensor]) -> Taken:
    """Of gradients in the order of the layout."""
    n, device = layout.n_small, layout.device
    small = _flat(grads[:n], layout.nothing)
    rows: list[Tensor] = []
    numbers: list[Number] = []
    sketches: list[Tensor] = []  # of those above WHOLE, for their mean |gradient|
    places: list[int] = []
    for g, is_middle in zip(grads[n:], layout.is_middle, strict=True):
        summary = summarize_gradient(g)
        rows.append(summary.rows)
        elements = g if g.layout is torch.strided else g.values()
        mean: Number = 0.0
        followed = None if is_middle else _followed(g, layout)
        if followed is None:
            mean = _number(torch.linalg.vector_norm(elements, 1) / g.numel())
        else:
            places.append(len(numbers) + 3)
            sketches.append(followed)
        numbers += [summary.low, summary.high, summary.nonfinite, mean]
    if sketches:
        means = torch.linalg.vector_norm(torch.cat(sketches).view(-1, SKETCH), 1, dim=1) / SKETCH
        values: Sequence[Number] = means.tolist() if device.type == "cpu" else means.unbind()
        for place, value in zip(places, values, strict=True):
            numbers[place] = value
    of_rows = torch.cat(rows) if rows else layout.nothing
    return Taken(layout, small, of_rows, _row(numbers, layout), layout.sketch())


Columns = dict[str, Tensor]  # (R, n_columns) by name of the parameter


def reduce_steps(steps: Sequence[StepTaken]) -> Iterable[tuple[list[StepTaken], list[Columns]]]:
    """Statistics of steps, for as many together as have the same parameters.

    Returns:
        Of each run of steps these, and by device the columns: `GRAD_STATS` and the mean |gradient|.
    """
    for _, group in groupby(steps, _kind):
        run = list(group)
        n_devices = len(run[0].takens)
        skipped = [step.skipped for step in run]
        yield run, [_reduce([step.takens[i] for step in run], skipped) for i in range(n_devices)]


def _kind(step: StepTaken) -> tuple[object, ...]:
    """What those have in common that are reduced together."""
    return tuple(x for taken in step.takens for x in (id(taken.layout), taken.clipped_small is None))


def _reduce(takens: list[Taken], skipped: list[Number]) -> Columns:
    layout = takens[0].layout
    norm, abs_max, nonfinite, zero_rows, mean_abs = _of_gradients(takens)
    clipped = _clipped_norms(takens)
    made = numbers_on(layout.device, skipped)[:, None] == 0
    used = (norm if clipped is None else clipped).where(made, torch.nan)
    numels = torch.tensor(layout.numels, dtype=norm.dtype, device="cpu").to(layout.device)
    rms = norm / numels.sqrt()
    values = [norm, used, rms, abs_max, nonfinite, zero_rows, *_of_weights(takens, numels), mean_abs]
    by_param = torch.stack(values, 2).to(layout.dtype).transpose(0, 1).contiguous()
    return dict(zip([param.name for param in layout.params], by_param, strict=True))


def _of_gradients(takens: list[Taken]) -> GradColumns:
    """Of all parameters; those of one shape lie side by side, and are reduced together."""
    layout, n = takens[0].layout, takens[0].layout.n_small
    shapes = [(shape, len(list(same))) for shape, same in groupby(layout.shapes[:n])]
    small = _split(_stacked(taken.small for taken in takens), [k * shape.numel() for shape, k in shapes])
    found = [
        reduce_small(x.reshape(len(takens), k, -1) if x.shape[1] else x.new_empty(len(takens), k, 0), shape)
        for x, (shape, k) in zip(small, shapes, strict=True)
    ]
    large = [(shape, len(list(same))) for shape, same in groupby(layout.shapes[n:])]
    n_rows = [k * (shape[0] if len(shape) > 1 else 1) for shape, k in large]
    rows = _split(_stacked(taken.rows for taken in takens), n_rows)
    numbers = _table([taken.numbers for taken in takens]).view(len(takens), -1, 4)
    parts = _split(numbers, [k for _, k in large])
    for x, part, (shape, k) in zip(rows, parts, large, strict=True):
        found.append(reduce_large(x.reshape(len(takens), k, -1), part, len(shape)))
    return GradColumns(*(torch.cat(of, 1) for of in zip(*found, strict=True)))


def _of_weights(takens: list[Taken], numels: Tensor) -> list[Tensor]:
    """Norm, mean, std, update ratio and drift of all parameters, `(R, n_params)` each."""
    layout, n = takens[0].layout, takens[0].layout.n_small
    before, after = _stacked(taken.before for taken in takens), _stacked(taken.after for taken in takens)
    start = before[:1] if layout.start is None else layout.start[None]
    vectors = before, after, start, after - before, after - start
    kinds = zip(layout.lengths, layout.is_complex, strict=True)
    alike = [(kind, len(list(same))) for kind, same in groupby(kinds)]
    split = [_split(x, [k * length for (length, _), k in alike]) for x in vectors]
    found = []
    for ((length, is_complex), k), *parts in zip(alike, *split, strict=True):
        then, now, begun, change, drift = (x.reshape(len(x), k, length) for x in parts)
        ratios = update_ratio(change, then), update_ratio(drift, begun)
        found.append([*weight_stats(now, is_complex), *ratios])
    size, mean, std, ratio, drift = (torch.cat(of, 1) for of in zip(*found, strict=True))
    size[:, n:] *= (numels[n:] / SKETCH).sqrt()  # a norm grows with the number of elements
    if len(middle := layout.middle):
        exact, total = _table([taken.weights for taken in takens]).view(len(takens), -1, 2).unbind(2)
        std[:, middle] = std_of(exact, total, numels[middle], std[:, middle])
        size[:, middle], mean[:, middle] = exact, total / numels[middle]
    return [size, mean, std, ratio, drift]


def _clipped_norms(takens: list[Taken]) -> Tensor | None:
    """Of each parameter, `(R, n_params)`; None where nothing was changed."""
    layout, n = takens[0].layout, takens[0].layout.n_small
    if takens[0].clipped_small is None:
        return None
    small = _split(_stacked(taken.clipped_small for taken in takens), layout.numels[:n])
    norms = [scaled_norm(widened(x), dim=1) for x in small]
    large = _table([taken.clipped_large for taken in takens])
    return torch.cat([*(x[:, None] for x in norms), large.view(len(takens), -1)], 1)


def _split(x: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    return torch.split(x, list(sizes), dim=1)


def _stacked(xs: Iterable[Tensor | None]) -> Tensor:
    there = [x for x in xs if x is not None]
    if len({x.dtype for x in there}) > 1:
        there = [widened(x) for x in there]
    return torch.stack(there)


def numbers_on(device: torch.device, numbers: Sequence[Number]) -> Tensor:
    """Numbers of several steps, `(R,)`, on one device and as precise as it can: see `widest`."""
    if not any(isinstance(x, Tensor) for x in numbers):
        return torch.tensor(numbers, dtype=widest(device), device="cpu").to(device, non_blocking=True)
    own = [x if isinstance(x, Tensor) else torch.full((), x, device=device) for x in numbers]
    return torch.stack([moved(x.detach().reshape(()), device) for x in own])


def first_nonfinite(params: Iterable[Param]) -> tuple[str, int] | None:
    """The first parameter whose gradient is NaN or infinite somewhere, and in how many elements.

    Waits for the device, once where all is finite.
    """
    grads = [
        (param.name, x)
        for param in params
        if (g := param.p.grad) is not None and (x := _plain(g)) is not None
    ]
    elements = [(name, x if x.layout is torch.strided else x.values()) for name, x in grads]
    if not elements:
        return None
    norms = norms_of([x for _, x in elements])
    if bool(torch.stack([moved(norm, norms[0].device) for norm in norms]).isfinite().all()):
        return None
    for name, x in elements:
        if n := int(x.isfinite().logical_not_().sum()):  # none where only a square has overflowed
            return name, n
    return None
