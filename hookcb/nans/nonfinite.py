"""Numbers that are not finite: whether tensors have any, of which kind, and how many."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hookcb.core.batch import parts
from hookcb.core.torch_private import coo_values, flattened, norms_of, plain_class
from hookcb.hooks.params import named_params
from hookcb.nans.report import ModuleCall
from hookcb.processes.shards import local_part

SMALL = 4_096  # maximum number of elements of a small gradient


@dataclass(frozen=True, slots=True)
class Kinds:
    """Kinds of nonfinite numbers: NaN or +inf, and -inf, which masks attention."""

    bad: bool = False
    minus_inf: bool = False

    @property
    def clean(self) -> bool:
        """Whether all numbers are finite."""
        return not (self.bad or self.minus_inf)


FINITE = Kinds()


def kinds(item: Any) -> Kinds:
    """Kinds of nonfinite numbers in the tensors of a nested item; waits for the device."""
    bad = minus_inf = False
    for _, x in tensors_in(item):
        if not bool(x.isfinite().all()):
            bad = bad or bool((x.isnan() | (x == math.inf)).any())
            minus_inf = minus_inf or bool((x == -math.inf).any())
    return Kinds(bad, minus_inf)


def tensors_in(item: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Floating-point tensors in a nested item, each with its path; dense, real and detached."""
    for at, x in parts(item, path):
        inside = [(at, x)]
        if not isinstance(x, Tensor | nn.Module | type) and hasattr(x, "__dict__"):
            # a custom output class
            inside = [(f"{at}.{key}", value) for key, value in vars(x).items()]
        for name, tensor in inside:
            if isinstance(tensor, Tensor) and (values := _values(tensor)) is not None:
                yield name, values


def _values(x: Tensor) -> Tensor | None:
    if not (x.is_floating_point() or x.is_complex()) or x.is_meta or x.is_nested or x.is_quantized:
        return None
    x = local_part(x.detach())
    x = x.wait() if type(x).__name__ == "AsyncCollectiveTensor" else x  # type: ignore[attr-defined]
    x = coo_values(x) if x.layout is torch.sparse_coo else x
    if x.layout is not torch.strided or type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return None
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.float() if x.element_size() == 1 else x  # float8 supports no comparison


def may_be_nonfinite(tensors: Iterable[Tensor]) -> bool:
    """Whether one of the tensors may contain NaN or inf; waits once for each device.

    Each tensor takes one reduction; if that overflows, finite numbers seem nonfinite. Of a DTensor, this
    rank's part is read.
    """
    of_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    with torch.no_grad():
        for x in map(local_part, tensors):
            of_device[x.device].append(coo_values(x) if x.layout is torch.sparse_coo else x)
        return any(not _seem_finite(device, xs) for device, xs in of_device.items())


def _seem_finite(device: torch.device, xs: list[Tensor]) -> bool:
    if device.type != "cpu":
        return bool(torch.stack([norm.float() for norm in norms_of(xs)]).isfinite().all())
    # on a CPU sums are fastest, one for all small tensors, and reading one costs nothing
    large, small = [x for x in xs if x.numel() > SMALL], [x for x in xs if x.numel() <= SMALL]
    flat = [flattened(small)] if small else []
    return all(math.isfinite(abs(x.sum().item())) for x in [*flat, *large])


def nonfinite_gradients(model: nn.Module) -> list[str]:
    """Names of the parameters whose gradient contains NaN or inf, in this rank's part of it."""
    grads = ((name, p.grad) for name, p in named_params(model).items() if p.grad is not None)
    return [name for name, grad in grads if not kinds(grad).clean]


def measured(module: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> ModuleCall:
    """Statistics of all elements of `tensors` as a `ModuleCall`; waits for the device."""
    low, high, n, zeros, nans, infs = math.inf, -math.inf, 0, 0, 0, 0
    for _, x in tensors:
        n, zeros = n + x.numel(), zeros + int((x == 0).sum())
        nans, infs = nans + int(x.isnan().sum()), infs + int(x.isinf().sum())
        finite = x[x.isfinite()]
        if finite.numel():
            low, high = min(low, finite.min().item()), max(high, finite.max().item())
    ends = (low, high) if low <= high else (math.nan, math.nan)
    share = zeros / n if n > nans + infs else math.nan
    return ModuleCall("", plain_class(module).__name__, *ends, share, nans, infs)
