"""DeviceReader: reads gradients and weights of the parameters on one device, without a device sync."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from hookcb.core.precision import at_least_float32, moved, numbers_to, widened, widest
from hookcb.gradients.samples import SKETCH, Gather, can_gather, flat, is_native, sketch_copy, tracked_places
from hookcb.gradients.stats import (
    WHOLE,
    Number,
    Numbers,
    columns_of,
    gradient_sums,
    in_rows,
    norm_of_any_size,
    norms_as_read,
    plain_gradient,
    quick_sums,
    std_of,
    weight_stats,
)
from hookcb.gradients.sums import READ, Sums, works_on
from hookcb.hooks.params import Param
from hookcb.processes.shards import local_part
from hookcb.records.memory import Memory

# names of parameters on one device; of R steps, `GRAD_STATS` and mean |gradient|: (n_params, R, n_columns)
Reduced = tuple[list[str], Tensor]


@dataclass(slots=True)
class Capture:
    """Numbers captured around one step, for the parameters of one reader.

    Attributes:
        reader: the reader.
        names: the parameters with a gradient.
        before: small gradients, if no kernels read them, and tracked weights before the step, concatenated.
        grads: sums of each other gradient, see `gradient_sums`.
        scale: factor by which all gradients are too large.
        after: tracked weights after the step.
        weights: norms, then sums, of all parameters of middle size.
        clipped: norms of all gradients as the optimizer got them; None if they are as before.
        skipped: 1.0 if the step was not made.
        merged: the statistics if ranks have merged them, `(n_names, 1, n_columns)`; then the rest is dropped.
    """

    reader: "DeviceReader"
    names: list[str]
    before: Tensor
    grads: Numbers
    scale: Number
    after: Tensor | None = None
    weights: Numbers = ()
    clipped: Numbers | None = None
    skipped: Number = 0.0
    merged: Tensor | None = None

    @property
    def n_elements(self) -> int:
        """Number of elements held until they are reduced; an eighth on a card, which has more memory."""
        n = self.before.numel() + (0 if self.after is None else self.after.numel())
        return n if self.before.is_cpu else n // 8


class DeviceReader:
    """Reads parameters with gradients on one device.

    Up to 1,024 elements of a parameter are copied before and after a step, to see what it has changed. Small
    gradients are copied too, and reduced for many steps together; large ones are reduced at their step. On a
    card with Triton, kernels read all gradients at once, and copy all samples at once.

    Args:
        params: the parameters, at least one.
        memory: lends memory for copies.
        starts: tracked elements of each parameter before its first step, by name; it is added to.

    Attributes:
        params: those with up to 1,024 elements, by shape, then the others; complex ones last in each.
        names: their names.
        device, dtype: where they are, and in what the numbers are recorded.
        numels, shapes, n_rows: their sizes; no rows with fewer than two dimensions.
        n_copied: number of those whose gradients are copied.
        n_elements: number of elements of these gradients.
        lengths: number of tracked elements of each parameter.
        middle: indices of the parameters with more than 1,024, up to 65,536 elements.
    """

    is_wide = False  # whether weights are read in the widest dtype, as parts that are merged need all digits

    def __init__(self, params: Sequence[Param], memory: Memory, starts: dict[str, Tensor]) -> None:
        self.params = sorted(params, key=_group)
        self.names = [param.name for param in self.params]
        weights = self._weights()
        self.device, self._memory, self._starts = weights[0].device, memory, starts
        self.numels, self.shapes = [p.numel() for p in weights], [p.shape for p in weights]
        self.n_rows = [len(p) if p.ndim > 1 else 0 for p in weights]
        self.is_complex = [p.is_complex() for p in weights]
        self.lengths = [min(p.numel(), SKETCH) * (1 + p.is_complex()) for p in weights]
        self._n_tracked = sum(self.lengths)
        self.middle = [i for i, n in enumerate(self.numels) if SKETCH < n <= WHOLE]
        self._start: Tensor | None = None  # tracked weights before the first step
        self._pivots: Tensor | None = None  # what is subtracted from means, `(n_params,)`
        is_double = any(p.dtype in (torch.float64, torch.complex128) for p in weights)
        self.dtype = torch.float64 if is_double else torch.float32
        self._as_read = widest(self.device) if self.is_wide else self.dtype
        self.has_kernels = works_on(self.device) and all(map(can_gather, weights))
        self.n_copied = 0 if self.has_kernels else sum(n <= SKETCH for n in self.numels)
        self.n_elements = sum(self.numels[: self.n_copied])
        self._addresses: list[int] = []
        self._views: list[Tensor] = []  # of all elements
        # places of the tracked ones, by index, where these are not all; None if there is no such view
        self._places: dict[int, Tensor | None] = {}
        if self.has_kernels:
            # elements of a row, 0 without rows
            self._widths = [p.numel() // max(1, len(p)) if p.ndim > 1 else 0 for p in weights]
            self._gather = Gather(self.device, self._as_read)
            self._sums, self._sums_of_weights = Sums(self.device), Sums(self.device)

    def _weights(self) -> list[Tensor]:
        return [param.p for param in self.params]

    # ---- around a step

    def before(self, grads: Mapping[str, Tensor | None], scale: Number, is_detailed: bool) -> Capture:
        """Numbers of gradients by name, `scale` times too large, and of weights."""
        found = self._all(grads)
        if self.has_kernels:
            return Capture(self, self.names, self._tracked([]), self._read(found)[:, :-1], scale)
        plain = _wide(found)
        rows = [in_rows(g) for g in plain[self.n_copied :]]
        sums = None if is_detailed else quick_sums(rows)
        if sums is None:
            sums = [x for own in rows for x in self._numbers(gradient_sums(own))]
        return Capture(self, self.names, self._tracked(plain[: self.n_copied]), self._row(sums), scale)

    def at_step(self, capture: Capture) -> None:
        """Reads the gradients again, as the optimizer gets them."""
        self._clip(capture, {name: None if p.grad is None else usable(p.grad) for name, p, _ in self.params})

    def _clip(self, capture: Capture, grads: Mapping[str, Tensor | None]) -> None:
        found = self._all(grads)
        if self.has_kernels:
            capture.clipped = self._read(found)[:, 0]
        else:
            capture.clipped = self._row(norms_as_read([in_rows(g) for g in _wide(found)]))

    def after(self, capture: Capture) -> None:
        """Reads the weights after the step."""
        if self._start is None:
            self._start = self._first(capture.before[self.n_elements :])
        capture.after = self._tracked([])
        weights = self._weights()
        middle = [weights[i].detach() for i in self.middle]
        if self.has_kernels:
            sums = self._sums_of_weights.of([_without_gaps(p) for p in middle], [0] * len(middle))
            capture.weights = sums[:, ::5].t()  # the norm and the sum
            return
        xs = [in_rows(x.to(self._as_read)) for p in middle if (x := plain_gradient(p)) is not None]
        capture.weights = self._row([*norms_as_read(xs), *(self._numbers(x.sum())[0] for x in xs)])

    def _first(self, before: Tensor) -> Tensor:
        """Tracked weights before the first step of each parameter, which another reader may have taken."""
        starts = []
        for name, now in zip(self.names, torch.split(before, self.lengths), strict=True):
            known = self._starts.get(name)
            if known is None or len(known) != len(now):
                known = self._starts[name] = now.clone()
            starts.append(known.to(now.device, non_blocking=True))
        return torch.cat(starts)

    # ---- reading

    def _all(self, grads: Mapping[str, Tensor | None]) -> list[Tensor]:
        """The gradients in the order of `params`, zeros in place of those that are not here."""
        both = zip(map(grads.get, self.names), self.shapes, strict=True)
        return [torch.zeros(shape, device=self.device) if g is None else g for g, shape in both]

    def _read(self, grads: Sequence[Tensor]) -> Tensor:
        return self._sums.of([_without_gaps(g) for g in grads], self._widths)

    def _tracked(self, small: Sequence[Tensor]) -> Tensor:
        """A concatenated copy of small gradients and of the tracked elements of all weights."""
        weights = self._weights()
        if self.has_kernels:
            return self._gather.of(weights, tracked_places)
        addresses = [p.data_ptr() for p in weights if p.layout is torch.strided]
        if addresses != self._addresses or not self._views:  # also after `p.data` was replaced
            views = [_view(p) for p in weights]
            self._addresses, self._views = addresses, [weights[0] if x is None else x for x in views]
            self._places = {
                i: None if view is None else tracked_places(n, self.device)
                for i, (n, view) in enumerate(zip(self.numels, views, strict=True))
                if view is None or n > SKETCH
            }
        tracked = self._views.copy()
        for i, places in self._places.items():
            tracked[i] = sketch_copy(weights[i]) if places is None else tracked[i].index_select(0, places)
        xs = [*(x if x.ndim == 1 else x.reshape(-1) for x in small), *tracked]
        if self.device.type != "cpu" or self._as_read is not torch.float32:
            return torch.cat(xs).to(self._as_read)
        n = self._n_tracked + (self.n_elements if small else 0)
        return torch.cat(xs, out=self._memory.lend(torch.Size([n])))

    def _numbers(self, x: Tensor) -> list[Number]:
        """Floats on a CPU, as reading needs no sync there; else 0-d tensors."""
        return x.reshape(-1).tolist() if x.is_cpu else list(x.reshape(-1).unbind())

    def _row(self, numbers: Sequence[Number]) -> Numbers:
        """The numbers as one tensor on the device, without a sync; on a CPU a list of floats."""
        if self.device.type == "cpu" or not numbers:
            return numbers  # type: ignore[return-value]  # on a CPU all are floats
        on_device = [x if isinstance(x, Tensor) else torch.full((), x, device=self.device) for x in numbers]
        return torch.stack([x.to(self._as_read) for x in on_device])

    # ---- reducing

    def reduced(self, captures: Sequence[Capture]) -> Reduced:
        """Statistics of the parameters in R steps."""
        numels = numbers_to(self.device, self.numels, widest(self.device))
        n_rows = numbers_to(self.device, self.n_rows, numels.dtype)
        skipped = numbers_on(self.device, [c.skipped for c in captures])
        return self.names, columns_of(self.moments(captures), numels, n_rows, skipped).to(self.dtype)

    def moments(self, captures: Sequence[Capture]) -> Tensor:
        """Norms, sums and extremes of the parameters in R steps, `(R, n_params, 13)`.

        Columns are `gradient_sums`; the norm of the gradient as the optimizer got it; norm, mean and std of
        the weights; and of tracked weights the norms of their change in the step, of themselves before it, of
        their change since the fit began, and of themselves then.
        """
        whole = torch.stack([c.before for c in captures])
        small, before = whole[:, : self.n_elements], whole[:, self.n_elements :]
        scale = numbers_on(self.device, [c.scale for c in captures])[:, None]
        norm, size, largest, nonfinite, rows = self._sums_of_gradients(captures, small).unbind(2)
        # of zeros the largest may be -0.0, to which 0.0 is added
        norm, largest = norm / scale, torch.where(largest < 0, largest, largest / scale + 0.0)
        of_gradient = [norm, size / scale, largest, nonfinite, rows, _clipped_norms(captures, norm)]
        return torch.stack([*of_gradient, *self._of_weights(captures, before)], 2)

    def _sums_of_gradients(self, captures: Sequence[Capture], small: Tensor) -> Tensor:
        """`gradient_sums` of all gradients in R steps, `(R, n_params, 5)`.

        Adjacent gradients of one shape that were copied are reduced together.

        Args:
            captures: captures of R steps.
            small: the gradients that were copied, `(R, n)`.
        """
        n_steps, found, begin = len(captures), [], 0
        for shape, same in groupby(self.shapes[: self.n_copied]):
            n_rows, n, k = shape[0] if len(shape) > 1 else 1, shape.numel(), len(list(same))
            x = small[:, begin : begin + k * n].reshape(n_steps, k, n_rows, n // max(1, n_rows))
            found.append(gradient_sums(x))
            begin += k * n
        if self.n_copied < len(self.params):
            found.append(_table([c.grads for c in captures]).view(n_steps, -1, 5))
        return torch.cat(found, 1)

    def _of_weights(self, captures: Sequence[Capture], before: Tensor) -> list[Tensor]:
        """The columns of weights of `moments`, from those tracked before R steps, `(R, n)`."""
        begin, at, found, pivots = 0, 0, [], self._pivots
        numels = numbers_to(self.device, self.numels, widest(self.device))
        after = torch.stack([c.after for c in captures if c.after is not None])
        start = before[:1] if self._start is None else self._start[None]
        for (length, is_complex), same in groupby(zip(self.lengths, self.is_complex, strict=True)):
            end = begin + length * (k := len(list(same)))
            own = None if pivots is None else pivots[at : at + k]
            then, now, first = (x[:, begin:end].reshape(len(x), k, length) for x in (before, after, start))
            change = norm_of_any_size(now - then)
            sizes = change, norm_of_any_size(then), norm_of_any_size(now - first), norm_of_any_size(first)
            found.append([*weight_stats(now, is_complex, own), *(x.expand_as(change) for x in sizes)])
            begin, at = end, at + k
        size, mean, std, *tracked = (torch.cat(column, 1) for column in zip(*found, strict=True))
        size *= (numels / SKETCH).clamp(min=1).sqrt()  # a norm grows with the number of elements
        if self.middle:
            exact, total = _table([c.weights for c in captures]).view(len(captures), 2, -1).unbind(1)
            middle = numbers_to(self.device, self.middle, torch.int64)
            std[:, middle] = std_of(exact, total, numels[middle], std[:, middle])
            size[:, middle] = exact
            mean[:, middle] = total / numels[middle] - (0.0 if pivots is None else pivots[middle])
        return [size, mean, std, *tracked]


def _group(param: Param) -> tuple[bool, bool, int, torch.Size]:
    p = local_part(param.p)
    return p.numel() > SKETCH, p.is_complex(), p.numel(), p.shape


def usable(g: Tensor) -> Tensor | None:
    """A gradient that kernels can read, and plain operations too; None if its elements cannot be read."""
    usual = type(g) is Tensor and g.dtype in READ and g.layout is torch.strided and not g.requires_grad
    return g if usual and not g.is_neg() else plain_gradient(g)


def _wide(xs: Sequence[Tensor]) -> list[Tensor]:
    return [x if x.dtype is torch.float32 else at_least_float32(x) for x in xs]  # a call of each takes time


def _without_gaps(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else in_rows(x).contiguous()


def _view(p: Tensor) -> Tensor | None:
    """A view of all elements of a parameter; None if there is none, as of a complex or sparse one."""
    if not is_native(p) or p.layout is not torch.strided or not p.is_floating_point():
        return None
    view = flat(p.detach())
    return view if view.data_ptr() == p.data_ptr() else None


def _clipped_norms(captures: Sequence[Capture], norm: Tensor) -> Tensor:
    """Gradient norms at the step, `(R, n_params)`; `norm` where the gradients were not changed."""
    clipped = {i: c.clipped for i, c in enumerate(captures) if c.clipped is not None}
    if not clipped:
        return norm
    index = numbers_to(norm.device, list(clipped), torch.int64)
    return norm.index_copy(0, index, _table([*clipped.values()]).to(norm.dtype))


def numbers_on(device: torch.device, numbers: Sequence[Number]) -> Tensor:
    """Numbers of several steps, `(R,)`, on one device, in its widest dtype; see `widest`."""
    if not any(isinstance(x, Tensor) for x in numbers):
        return numbers_to(device, numbers, widest(device))
    tensors = [x if isinstance(x, Tensor) else torch.full((), x, device=device) for x in numbers]
    return torch.stack([moved(x.detach().reshape(()), device) for x in tensors])


def _table(rows: Sequence[Numbers]) -> Tensor:
    """Rows of numbers of several steps, `(R, n)`, in the widest dtype of their device; see `widest`."""
    if isinstance(rows[0], Tensor):
        return widened(torch.stack(rows))  # type: ignore[arg-type]  # all are tensors
    return torch.tensor(rows, dtype=torch.float64, device="cpu")
