"""DeviceReader: reads gradients and weights of the parameters on one device, without a device sync."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hookcb.core.precision import at_least_float32, wide_norm
from hookcb.gradients.samples import (
    RUN,
    SKETCH,
    Gather,
    can_gather,
    sketch,
    sketch_copy,
    sketch_places,
    tracked_places,
)
from hookcb.gradients.stats import (
    SAFE_HIGH,
    SAFE_LOW,
    WHOLE,
    Number,
    elements_of,
    large_sums,
    number_of,
    plain_gradient,
    row_norms,
)
from hookcb.gradients.sums import READ, Sums, works_on
from hookcb.hooks.params import Param
from hookcb.records.memory import Memory

Numbers = Sequence[float] | Tensor  # floats on a CPU, made one tensor later, for many steps together


@dataclass(slots=True)
class Capture:
    """Numbers captured around one step, for the parameters of one reader.

    Attributes:
        reader: the reader.
        before: small gradients, if no kernels read them, and tracked weights before the step, concatenated.
        grads: numbers of each other gradient, see `large_sums`.
        scale: factor by which these are too large.
        after: tracked weights after the step.
        weights: norm and sum of each parameter of middle size.
        clipped: norms of all gradients as the optimizer got them; None if they are as before.
    """

    reader: "DeviceReader"
    before: Tensor
    grads: Numbers
    scale: Number = 1.0
    after: Tensor | None = None
    weights: Numbers = ()
    clipped: Numbers | None = None

    @property
    def n_elements(self) -> int:
        """Number of elements held until they are reduced; an eighth on a card, which has more memory."""
        n = self.before.numel() + self.reader.n_tracked
        return n if self.before.is_cpu else n // 8


class DeviceReader:
    """Reads parameters with gradients on one device.

    Up to 1,024 elements of a parameter are copied before and after a step, to see what it has changed. Small
    gradients are copied too, and reduced for many steps together; large ones are reduced at their step. On a
    card with Triton, kernels read all gradients at once, and copy all samples at once.

    Args:
        params: the parameters.
        memory: lends memory for what is copied.

    Attributes:
        params: the parameters, the small ones first.
        n_small: number of those with up to 1,024 elements.
        n_copied: number of those whose gradients are copied.
        n_elements: number of elements of these gradients.
        lengths: number of tracked elements of each parameter.
        n_tracked: the sum of these.
        middle: indices of the parameters of up to 65,536 elements that are not small.
        start: tracked weights before the first step.
    """

    def __init__(self, params: Sequence[Param], memory: Memory) -> None:
        self.device, self._memory = params[0].p.device, memory
        in_order = sorted(params, key=lambda param: (param.p.is_complex(), param.p.numel(), param.p.shape))
        small = [param for param in in_order if param.p.numel() <= SKETCH]
        self.params = [*small, *(param for param in in_order if param.p.numel() > SKETCH)]
        self.n_small = len(small)
        weights = [param.p for param in self.params]
        self.numels, self.shapes = [p.numel() for p in weights], [p.shape for p in weights]
        self.is_complex = [p.is_complex() for p in weights]
        self.lengths = [min(p.numel(), SKETCH) * (1 + p.is_complex()) for p in weights]
        self.n_tracked = sum(self.lengths)
        self.middle = [i for i, n in enumerate(self.numels) if SKETCH < n <= WHOLE]
        self.start: Tensor | None = None
        is_double = any(p.dtype in (torch.float64, torch.complex128) for p in weights)
        self.dtype = torch.float64 if is_double else torch.float32  # of the recorded numbers
        self.has_kernels = works_on(self.device) and all(map(can_gather, weights))
        self.n_copied = 0 if self.has_kernels else self.n_small
        self.n_elements = sum(self.numels[: self.n_copied])
        # elements of a row, 0 without rows
        self.widths = [p.numel() // max(1, len(p)) if p.ndim > 1 else 0 for p in weights]
        self._views: list[Tensor] = []
        # by index of the parameters without a view; see `sketch_places`
        self._missing: dict[int, tuple[Tensor, Tensor] | None] = {}
        self._addresses: list[int] = []
        if self.has_kernels:
            self._gather = Gather(self.device, self.dtype)
            self._sums, self._sums_of_weights = Sums(self.device), Sums(self.device)

    # ---- around a step

    def before(self, grads: Sequence[Tensor], scale: Number, is_detailed: bool) -> Capture:
        """Numbers of gradients, `scale` times too large, in the order of `params`, and of weights."""
        if self.has_kernels:
            return Capture(self, self._tracked([]), self._read(grads)[:, :-1], scale)
        plain = _wide(grads)
        if not isinstance(scale, float) or scale != 1:
            plain = [_unscaled(g, scale) for g in plain]
        sums = self._row(large_sums(plain[self.n_copied :], is_detailed))
        return Capture(self, self._tracked(plain[: self.n_copied]), sums)

    def at_step(self, capture: Capture) -> None:
        """Reads the gradients again, as the optimizer gets them."""
        grads = []
        for param, shape in zip(self.params, self.shapes, strict=True):
            g = None if param.p.grad is None else usable(param.p.grad)
            grads.append(torch.zeros(shape, device=self.device) if g is None else g)
        if self.has_kernels:
            capture.clipped = self._read(grads)[:, 0]
        else:
            capture.clipped = self._row([norm_of(g) for g in _wide(grads)])

    def after(self, capture: Capture) -> None:
        """Reads the weights after the step."""
        capture.after = self._tracked([])
        middle = [self.params[i].p for i in self.middle]
        if self.has_kernels:
            sums = self._sums_of_weights.of([_in_rows(p) for p in middle], [0] * len(middle))
            capture.weights = sums[:, ::5]  # the norm and the sum
            return
        numbers: list[Number] = []
        for p in middle:
            x = plain_gradient(p)
            numbers += [math.nan] * 2 if x is None else [norm_of(x), number_of(x.sum())]
        capture.weights = self._row(numbers)

    # ---- reading

    def _read(self, grads: Sequence[Tensor]) -> Tensor:
        return self._sums.of([_in_rows(elements_of(g)) for g in grads], self.widths)

    def _tracked(self, small: Sequence[Tensor]) -> Tensor:
        """A concatenated copy of small gradients and of the tracked elements of all weights."""
        if self.has_kernels:
            return self._gather.of([param.p for param in self.params], tracked_places)
        addresses = [param.p.data_ptr() for param in self.params if param.p.layout is torch.strided]
        if addresses != self._addresses or not self._views:  # also after `p.data` was replaced
            views = [sketch(param.p) for param in self.params]
            missing = [i for i, view in enumerate(views) if view is None]
            self._addresses = addresses
            self._missing = {i: sketch_places(self.params[i].p) for i in missing}
            self._views = [torch.empty(0, device=self.device) if view is None else view for view in views]
        for i, source in self._missing.items():
            copy = sketch_copy(self.params[i].p) if source is None else source[0].index_select(0, source[1])
            self._views[i] = copy if i < self.n_small else copy.view(-1, RUN)
        n = self.n_elements + self.n_tracked if small else self.n_tracked
        xs = [*(x if x.ndim == 1 else x.reshape(-1) for x in small), *self._views[: self.n_small]]
        runs = self._views[self.n_small :]
        if self.device.type != "cpu" or self.dtype is not torch.float32:
            joined = [torch.cat(same).view(-1) for same in (xs, runs) if same]
            return at_least_float32(torch.cat(joined))
        whole, n_flat = self._memory.lend(torch.Size([n])), n - sum(self.lengths[self.n_small :])
        if xs:
            torch.cat(xs, out=whole[:n_flat])
        if runs:
            torch.cat(runs, out=whole[n_flat:].view(-1, RUN))
        return whole

    def _row(self, numbers: list[Number]) -> Numbers:
        """The numbers as one tensor on the device, without a sync; on a CPU a list of floats."""
        if self.device.type == "cpu" or not numbers:
            return numbers  # type: ignore[return-value]  # on a CPU all are floats
        on_device = [x if isinstance(x, Tensor) else torch.full((), x, device=self.device) for x in numbers]
        return torch.stack([x.to(self.dtype) for x in on_device])


def usable(g: Tensor) -> Tensor | None:
    """A gradient that kernels can read, and plain operations too; None if its elements cannot be read."""
    usual = type(g) is Tensor and g.dtype in READ and g.layout is torch.strided and not g.requires_grad
    return g if usual and not g.is_neg() else plain_gradient(g)


def _in_rows(x: Tensor) -> Tensor:
    """A tensor in memory without gaps, row after row."""
    if x.is_contiguous():
        return x
    is_dense = x.permute(sorted(range(x.ndim), key=x.stride, reverse=True)).is_contiguous()
    return x if is_dense and x.stride(0) == x.numel() // len(x) else x.contiguous()


def _wide(xs: Sequence[Tensor]) -> list[Tensor]:
    return [x if x.dtype is torch.float32 else at_least_float32(x) for x in xs]


def _unscaled(x: Tensor, scale: Number) -> Tensor:
    return x / scale if x.layout is torch.strided else (x / scale).coalesce()


def norm_of(x: Tensor) -> Number:
    """L2 norm of a tensor of `plain_gradient`."""
    x = elements_of(x)
    norm = number_of(torch.linalg.vector_norm(x) if x.numel() <= WHOLE else row_norms(row_norms(x))[0])
    if isinstance(norm, float) and (norm < SAFE_LOW or norm > SAFE_HIGH):  # squares may be out of range
        return number_of(wide_norm(x.reshape(-1), dim=0))
    return norm
