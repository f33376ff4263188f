"""Layout: order in which the numbers of the parameters on one device are captured."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hookcb.core.precision import numbers_to
from hookcb.gradients.stats import RUN, SKETCH, WHOLE, sketch, sketch_copy, sketch_places
from hookcb.hooks.params import Param


class Layout:
    """Parameters with gradients on one device, and the order in which their numbers are stored."""

    def __init__(self, params: Sequence[Param]) -> None:
        self.device = params[0].p.device
        in_order = sorted(params, key=lambda param: (param.p.is_complex(), param.p.numel(), param.p.shape))
        small = [param for param in in_order if param.p.numel() <= SKETCH]
        large = [param for param in in_order if param.p.numel() > SKETCH]
        self.params, self.n_small = [*small, *large], len(small)
        self.numels = [param.p.numel() for param in self.params]
        self.shapes = [param.p.shape for param in self.params]
        self.is_complex = [param.p.is_complex() for param in self.params]
        sizes = zip(self.numels, self.is_complex, strict=True)
        self.sketch_lengths = [min(n, SKETCH) * (1 + is_complex) for n, is_complex in sizes]
        self.is_middle = [n <= WHOLE for n in self.numels[self.n_small :]]
        middle = [i for i, n in enumerate(self.numels) if SKETCH < n <= WHOLE]
        n_rows = [shape[0] if len(shape) > 1 else 1 for shape in self.shapes[self.n_small :]]
        # elements of a step: small gradients, row norms of large gradients, tracked weights
        self.parts = [sum(self.numels[: self.n_small]), sum(n_rows), sum(self.sketch_lengths)]
        self.n_small_tracked = sum(self.sketch_lengths[: self.n_small])
        self.n_in_runs = self.parts[2] - self.n_small_tracked  # of tracked weights: those of large parameters
        self.n_flat = sum(self.parts) - self.n_in_runs
        self.middle = numbers_to(self.device, middle, torch.int64)
        self.start: Tensor | None = None  # the first sketch
        self.empty = torch.empty(0, device=self.device)
        is_double = any(param.p.dtype in (torch.float64, torch.complex128) for param in params)
        self.dtype = torch.float64 if is_double else torch.float32  # of the recorded numbers
        self.is_usual = self.device.type == "cpu" and self.dtype is torch.float32
        self._with_memory = [param.p for param in self.params if param.p.layout is torch.strided]
        self._addresses: list[int] = []
        self._views: list[Tensor] = []
        # by index in `_views`: parameters without such a view; flat views of others, and the places to copy
        self._copied: dict[int, nn.Parameter] = {}
        self._picked: dict[int, tuple[Tensor, Tensor]] = {}

    def tracked(self) -> tuple[list[Tensor], list[Tensor]]:
        """The tracked elements of each parameter, mostly views: of small ones, and of large ones in runs.

        `(n,)` of a small one, `(512, 2)` of a large one, `(1024, 2)` if it is complex.
        """
        addresses = [p.data_ptr() for p in self._with_memory]
        if addresses != self._addresses or not self._views:  # also after `p.data` was replaced
            self._addresses = addresses
            views = [sketch(param.p) for param in self.params]
            self._views = [self.empty if view is None else view for view in views]
            without = {i: self.params[i].p for i, view in enumerate(views) if view is None}
            self._picked = {i: picked for i, p in without.items() if (picked := sketch_places(p)) is not None}
            self._copied = {i: p for i, p in without.items() if i not in self._picked}
        for i, (flat, places) in self._picked.items():
            self._views[i] = flat.index_select(0, places).view(-1, RUN)
        for i, p in self._copied.items():
            self._views[i] = sketch_copy(p) if i < self.n_small else sketch_copy(p).view(-1, RUN)
        return self._views[: self.n_small], self._views[self.n_small :]
