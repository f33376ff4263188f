"""How precisely a device can count."""

from functools import cache

import torch
from torch import Tensor

WIDE = (torch.float32, torch.float64)


def widest(device: torch.device) -> torch.dtype:
    """Float64, or float32 on devices that lack it, as Apple's do."""
    if device.type in ("cpu", "cuda"):
        return torch.float64
    if torch.compiler.is_compiling():  # which cannot try
        return torch.float32
    return torch.float64 if _has_float64(device) else torch.float32


@cache
def _has_float64(device: torch.device) -> bool:
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):  # of MPS, and of others
        return False
    return True


def widened(x: Tensor) -> Tensor:
    """As precisely as its device can count: float64, or float32."""
    return x.to(widest(x.device))


def moved(x: Tensor, device: torch.device) -> Tensor:
    """On `device`, as precisely as it can count, and without float64 on one that lacks it."""
    wide = widest(device)
    return (x.float() if wide is torch.float32 else widened(x)).to(device).to(wide)


def at_least_float32(x: Tensor) -> Tensor:
    """Float32 and float64 as they are, others as float32."""
    return x if x.dtype in WIDE else x.float()


def scale_of(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """The largest magnitude along `dim`, which is kept; 1 where that is 0, NaN or infinite.

    Divided by it, elements can be squared and summed without leaving the range of their dtype.
    """
    size = x.abs().amax(dim, keepdim=True)
    return size.where((size > 0) & size.isfinite(), 1.0)


def scaled_norm(x: Tensor, dim: int) -> Tensor:
    """L2 norm along `dim`, also of elements whose squares are too small or too large for their dtype."""
    if not x.shape[dim]:
        return x.sum(dim)
    scale = scale_of(x, dim)
    norm: Tensor = torch.linalg.vector_norm(x / scale, dim=dim)
    return norm * scale.squeeze(dim)
