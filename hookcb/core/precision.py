"""The highest floating-point precision of a device, and norms that neither overflow nor underflow."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

WIDE = (torch.float32, torch.float64)


def widest(device: torch.device) -> torch.dtype:
    """Float64, or float32 on devices without it, such as Apple's."""
    if device.type in ("cpu", "cuda"):
        return torch.float64
    if torch.compiler.is_compiling():  # compiled code cannot test it
        return torch.float32
    return torch.float64 if _has_float64(device) else torch.float32


@cache
def _has_float64(device: torch.device) -> bool:
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):  # TypeError on MPS, RuntimeError on others
        return False
    return True


def numbers_to(device: torch.device, numbers: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """Numbers, also in nested lists, as a tensor on a device, without waiting for the device."""
    return torch.tensor(numbers, dtype=dtype, device="cpu").to(device, non_blocking=True)


def widened(x: Tensor) -> Tensor:
    """Converts `x` to the widest dtype of its device, float64 or float32."""
    return x.to(widest(x.device))


def moved(x: Tensor, device: torch.device) -> Tensor:
    """Moves `x` to `device` in that device's widest dtype, never as float64 to a device without it."""
    wide = widest(device)
    return (x.float() if wide is torch.float32 else widened(x)).to(device).to(wide)


def at_least_float32(x: Tensor) -> Tensor:
    """Converts `x` to float32 unless it is float32 or float64."""
    return x if x.dtype in WIDE else x.float()


def scale_of(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Largest magnitude along `dim`, which is kept; 1 in place of 0, NaN or infinity.

    Elements divided by it can be squared and summed without leaving the range of their dtype.
    """
    size = x.abs().amax(dim, keepdim=True)
    return size.where((size > 0) & size.isfinite(), 1.0)


def scaled_norm(x: Tensor, dim: int) -> Tensor:
    """L2 norm along `dim`, even if squares of the elements are out of the range of their dtype."""
    if not x.shape[dim]:
        return x.sum(dim)
    scale = scale_of(x, dim)
    norm: Tensor = torch.linalg.vector_norm(x / scale, dim=dim)
    return norm * scale.squeeze(dim)


def wide_norm(x: Tensor, dim: int) -> Tensor:
    """L2 norm of real `x` along `dim` in the widest dtype, in which squares of smaller dtypes have room."""
    wide = widest(x.device)
    if wide is not torch.float64 or x.dtype is wide:
        return scaled_norm(x.to(wide), dim)
    norm: Tensor = torch.linalg.vector_norm(x, dim=dim, dtype=wide)  # a quarter of the time
    return norm
