"""Statistics of a layer's output: pure functions from a tensor to a small tensor."""

import torch
from torch import Tensor

LAYER_STATS = ("mean", "std", "near_zero")


def has_stats(x: object) -> bool:
    """Whether `x` is a tensor that `layer_stats` can describe: dense, real, with values in memory."""
    return (
        isinstance(x, Tensor)
        and type(x).__torch_dispatch__ is Tensor.__torch_dispatch__
        and x.layout is torch.strided
        and not (x.is_nested or x.is_quantized or x.is_meta or x.is_complex())
    )


def layer_stats(x: Tensor, eps: float = 0.05) -> Tensor:
    """Mean, standard deviation and share near zero of all elements, as `LAYER_STATS` names them.

    Args:
        x: of any shape and any real dtype; widened to float32, float64 stays.
        eps: magnitude up to which an element counts as near zero, in the unit of `x`.

    Returns:
        A float32 tensor `(3,)` on the device of `x`, without waiting for it: mean and unbiased standard
        deviation in the unit of `x`, NaN where there are too few elements; share of elements with |x| ≤ eps,
        0..1.

    Source: `torch.var_mean` (Welford's way), exact at any offset. Near zero goes by magnitude; fastai
    counts each negative value as near zero.
    """
    x = x.detach()
    x = x if x.dtype is torch.float64 else x.float()
    nan = x.new_full((), float("nan"))
    if x.numel() == 0:
        return torch.stack([nan, nan, nan]).float()
    var, mean = torch.var_mean(x) if x.numel() > 1 else (nan, x.reshape(()))
    mean = torch.where(mean.isnan(), x.mean(), mean)  # var_mean gives NaN where an infinite mean is true
    return torch.stack([mean, var.sqrt(), (x.abs() <= eps).to(x.dtype).mean()]).float()
