"""DeviceReader: reads gradients and weights of the parameters on one device, without a device sync."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hookcb.core.precision import at_least_float32, widest
from hookcb.gradients.samples import SKETCH, Gather, can_gather, flat, is_native, sketch_copy, tracked_places
from hookcb.gradients.stats import (
    WHOLE,
    Number,
    Numbers,
    gradient_sums,
    in_rows,
    norms_as_read,
    plain_gradient,
    quick_sums,
)
from hookcb.gradients.sums import READ, Sums, works_on
from hookcb.hooks.params import Param
from hookcb.processes.shards import is_dtensor, local_part
from hookcb.records.memory import Memory


@dataclass(slots=True)
class Capture:
    """Numbers captured around one step, for the parameters of one reader.

    Attributes:
        reader: the reader.
        before: small gradients, if no kernels read them, and tracked weights before the step, concatenated.
        grads: sums of each other gradient, see `gradient_sums`.
        scale: factor by which all gradients are too large.
        after: tracked weights after the step.
        weights: norms, then sums, of all parameters of middle size.
        clipped: norms of all gradients as the optimizer got them; None if they are as before.
    """

    reader: "DeviceReader"
    before: Tensor
    grads: Numbers
    scale: Number
    after: Tensor | None = None
    weights: Numbers = ()
    clipped: Numbers | None = None

    @property
    def n_elements(self) -> int:
        """Number of elements held until they are reduced; an eighth on a card, which has more memory."""
        n = self.before.numel() + self.reader.n_tracked
        return n if self.before.is_cpu else n // 8


class DeviceReader:
    """Reads parameters with gradients on one device; of sharded ones, this rank's parts.

    Up to 1,024 elements of a parameter are copied before and after a step, to see what it has changed. Small
    gradients are copied too, and reduced for many steps together; large ones are reduced at their step. On a
    card with Triton, kernels read all gradients at once, and copy all samples at once.

    Args:
        params: the parameters, at least one.
        memory: lends memory for copies.

    Attributes:
        params: those with up to 1,024 elements, by shape, then the others; complex ones last in each.
        device, dtype: where they are, and in what the numbers are recorded.
        numels, shapes, n_rows: their sizes; no rows with fewer than two dimensions.
        n_copied: number of those whose gradients are copied.
        n_elements: number of elements of these gradients.
        lengths: number of tracked elements of each parameter.
        n_tracked: the sum of these.
        middle: indices of the parameters with more than 1,024, up to 65,536 elements.
        start: tracked weights before the first step.
    """

    def __init__(self, params: Sequence[Param], memory: Memory) -> None:
        self.params = sorted(params, key=_group)
        self._are_shards = any(is_dtensor(param.p) for param in params)
        weights = self._weights()
        self.device, self._memory = weights[0].device, memory
        self.numels, self.shapes = [p.numel() for p in weights], [p.shape for p in weights]
        self.n_rows = [len(p) if p.ndim > 1 else 0 for p in weights]
        self.is_complex = [p.is_complex() for p in weights]
        self.lengths = [min(p.numel(), SKETCH) * (1 + p.is_complex()) for p in weights]
        self.n_tracked = sum(self.lengths)
        self.middle = [i for i, n in enumerate(self.numels) if SKETCH < n <= WHOLE]
        self.start: Tensor | None = None
        is_double = any(p.dtype in (torch.float64, torch.complex128) for p in weights)
        self.dtype = torch.float64 if is_double else torch.float32
        # parts are merged by sums in float64, which need the digits of their means
        self._as_read = widest(self.device) if self._are_shards else self.dtype
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
        if self._are_shards:  # which costs time
            return [local_part(param.p) for param in self.params]
        return [param.p for param in self.params]

    # ---- around a step

    def before(self, grads: Sequence[Tensor | None], scale: Number, is_detailed: bool) -> Capture:
        """Numbers of gradients, `scale` times too large, in the order of `params`, and of weights."""
        found = self._all(grads)
        if self.has_kernels:
            return Capture(self, self._tracked([]), self._read(found)[:, :-1], scale)
        plain = _wide(found)
        rows = [in_rows(g) for g in plain[self.n_copied :]]
        sums = None if is_detailed else quick_sums(rows)
        if sums is None:
            sums = [x for own in rows for x in self._numbers(gradient_sums(own))]
        return Capture(self, self._tracked(plain[: self.n_copied]), self._row(sums), scale)

    def at_step(self, capture: Capture, grads: Sequence[Tensor | None]) -> None:
        """Reads the gradients again, as the optimizer gets them."""
        found = self._all([None if g is None else usable(g) for g in grads])
        if self.has_kernels:
            capture.clipped = self._read(found)[:, 0]
        else:
            capture.clipped = self._row(norms_as_read([in_rows(g) for g in _wide(found)]))

    def after(self, capture: Capture) -> None:
        """Reads the weights after the step."""
        capture.after = self._tracked([])
        weights = self._weights()
        middle = [weights[i].detach() for i in self.middle]
        if self.has_kernels:
            sums = self._sums_of_weights.of([_without_gaps(p) for p in middle], [0] * len(middle))
            capture.weights = sums[:, ::5].t()  # the norm and the sum
            return
        xs = [in_rows(x.to(self._as_read)) for p in middle if (x := plain_gradient(p)) is not None]
        capture.weights = self._row([*norms_as_read(xs), *(self._numbers(x.sum())[0] for x in xs)])

    # ---- reading

    def _all(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """The gradients, zeros in place of those that are not here."""
        both = zip(grads, self.shapes, strict=True)
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
        n = self.n_tracked + (self.n_elements if small else 0)
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
