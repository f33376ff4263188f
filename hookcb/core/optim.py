"""Gradients of an optimizer, and the settings of its parameter groups."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hookcb.core.arguments import check_number
from hookcb.core.torch_private import version_of

# one learning rate for all parameter groups, or one for each, or a range that is spread over them
Rates = float | Sequence[float] | slice
Settings = list[dict[str, Any]]


def gradients(opt: Optimizer) -> list[Tensor]:
    """Gradients that are not None, in the order of the optimizer's parameters."""
    return [p.grad for group in opt.param_groups for p in group["params"] if p.grad is not None]


def mark_of(grad: Tensor | None) -> tuple[int, int] | None:
    """Changes when the gradient is written to or replaced; None for no gradient, or a sparse one."""
    if grad is None or grad.layout is not torch.strided:
        return None
    return grad.data_ptr(), version_of(grad)


def scale_gradients(opt: Optimizer, factor: float) -> None:
    """Multiplies the gradients in place; a factor of 1 leaves them untouched."""
    if factor != 1:
        with torch.no_grad():  # after a backward with create_graph=True, gradients have a graph
            for grad in gradients(opt):
                grad.mul_(factor)


def group_settings(opt: Optimizer) -> Settings:
    """Settings of each parameter group, such as lr, momentum and betas; tensors are copied."""
    return [{k: copied_setting(v) for k, v in group.items() if k != "params"} for group in opt.param_groups]


@torch.no_grad()
def set_groups(opt: Optimizer, settings: Settings) -> None:
    """Restores the result of `group_settings`; removes keys added since, tensors stay the same objects."""
    for group, saved in zip(opt.param_groups, settings, strict=False):
        for key in group.keys() - saved.keys() - {"params"}:
            del group[key]
        for key, value in saved.items():
            if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                group[key].copy_(value)
            else:
                group[key] = copied_setting(value)


def set_rates(opt: Optimizer, lr: Rates) -> None:
    """Sets the learning rates of all groups."""
    for group, rate in zip(opt.param_groups, rates_of(lr, len(opt.param_groups)), strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def check_rates(name: str, lr: Rates, closed: bool = False) -> None:
    """Checks learning rates, whatever the number of groups.

    Args:
        name: name of the argument, for messages.
        lr: a number; a list or tuple of one for each group; `slice(lowest, highest)` or `slice(highest)`.
        closed: whether 0 is valid, too.

    Raises:
        TypeError: If it is none of these.
        ValueError: If one is out of range.
    """
    if isinstance(lr, slice):
        if lr.step is not None:
            raise ValueError(f"{name} must be slice(lowest, highest) or slice(highest), got {lr}")
        for rate in (lr.stop,) if lr.start is None else (lr.start, lr.stop):
            check_number(f"each rate of {name}={lr}", rate)
    elif isinstance(lr, list | tuple):
        for i, rate in enumerate(lr):
            check_number(f"{name}[{i}]", rate, closed=closed)
    else:
        hint = ", such as 1e-3, or a list of one for each parameter group, or slice(lowest, highest)"
        check_number(name, lr, closed=closed, hint=hint)


def rates_of(lr: Rates, n: int, name: str = "lr") -> list[float]:
    """One learning rate for each of `n` parameter groups.

    `slice(lowest, highest)` is spread over them by equal factors; `slice(highest)` is the rate of the last
    one, and a tenth of it that of the others. Both are as in fastai, `Optimizer.set_hyper`.

    Raises:
        ValueError: If there are not as many rates as groups.

    >>> rates_of(slice(1e-4, 1e-2), 3), rates_of(slice(1e-2), 3)
    ([0.0001, 0.001, 0.01], [0.001, 0.001, 0.01])
    """
    if isinstance(lr, slice):
        if lr.start is None:
            return [lr.stop / 10] * (n - 1) + [lr.stop]
        factor = (lr.stop / lr.start) ** (1 / max(1, n - 1))
        return [lr.start * factor**i for i in range(n - 1)] + [lr.stop]
    if not isinstance(lr, Sequence):
        return [lr] * n
    if len(lr) != n:
        raise ValueError(
            f"{name} has {len(lr)} rates, but the optimizer has {n} parameter groups; give one for each, or "
            "one for all"
        )
    return list(lr)


def copied_setting(value: Any) -> Any:
    """Copies a tensor, list or dict; other objects, which belong to the user, are returned as they are."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, list | dict) else value


def largest_lr(opt: Optimizer) -> float:
    """Largest learning rate of the groups; tensors on a GPU are left out, NaN if there are no others."""
    first, *others = [group["lr"] for group in opt.param_groups]
    if isinstance(first, float) and not others:  # the usual case, in each batch
        return first
    rates = [detached_scalar(rate) for rate in (first, *others)]
    return max((x for x in rates if isinstance(x, float)), default=math.nan)


def is_adaptive(opt: Optimizer) -> bool:
    """Whether the optimizer divides gradients by their running magnitude, as Adam does."""
    names = {"betas", "beta2_decay", "rho", "alpha", "lr_decay", "etas"}
    return any(names & group.keys() for group in opt.param_groups)


def detached_scalar(value: float | Tensor) -> float | Tensor:
    """Copies a number, so that later writes do not change it; on a GPU it stays there, without a sync."""
    if not isinstance(value, Tensor):
        return float(value)
    return float(value.item()) if value.is_cpu else value.detach().clone()
