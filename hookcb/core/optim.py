"""Gradients of an optimizer, and the settings of its parameter groups."""

import copy
import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Settings = list[dict[str, Any]]


def gradients(opt: Optimizer) -> list[Tensor]:
    """Gradients that are not None, in the order of the optimizer's parameters."""
    return [p.grad for group in opt.param_groups for p in group["params"] if p.grad is not None]


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


def set_rate(opt: Optimizer, lr: float) -> None:
    """Sets the learning rate of all groups."""
    for group in opt.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


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
