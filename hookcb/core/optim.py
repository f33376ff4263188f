"""What an optimizer works on: gradients, and the settings of its groups."""

import copy
import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Settings = list[dict[str, Any]]


def gradients(opt: Optimizer) -> list[Tensor]:
    """Those there are, in the order of the optimizer's parameters."""
    return [p.grad for group in opt.param_groups for p in group["params"] if p.grad is not None]


def scale_gradients(opt: Optimizer, factor: float) -> None:
    """Multiplies each of them, in place; a factor of 1 leaves them untouched."""
    if factor != 1:
        with torch.no_grad():  # a backward with create_graph=True gives gradients that have a graph
            for grad in gradients(opt):
                grad.mul_(factor)


def group_settings(opt: Optimizer) -> Settings:
    """What each group has besides its parameters, such as lr, momentum and betas; tensors are copied."""
    return [{k: _copied(v) for k, v in group.items() if k != "params"} for group in opt.param_groups]


@torch.no_grad()
def set_groups(opt: Optimizer, settings: Settings) -> None:
    """Puts back what `group_settings` gave; keys added since are removed, tensors stay the same objects."""
    for group, own in zip(opt.param_groups, settings, strict=False):
        for key in group.keys() - own.keys() - {"params"}:
            del group[key]
        for key, value in own.items():
            if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                group[key].copy_(value)
            else:
                group[key] = _copied(value)


def set_rate(opt: Optimizer, lr: float) -> None:
    """Sets the learning rate of all groups."""
    for group in opt.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, list | dict) else value  # what the user keeps there stays


def largest_lr(opt: Optimizer) -> float:
    """Of all groups; NaN where it is a tensor on a device."""
    rates = [detached_scalar(group["lr"]) for group in opt.param_groups]
    return max((x for x in rates if isinstance(x, float)), default=math.nan)


def is_adaptive(opt: Optimizer) -> bool:
    """Whether it divides gradients by their usual size, as Adam does."""
    names = {"betas", "beta2_decay", "rho", "alpha", "lr_decay", "etas"}
    return any(names & group.keys() for group in opt.param_groups)


def detached_scalar(value: float | Tensor) -> float | Tensor:
    """A number that later writes cannot change; what is on a GPU stays there, unwaited for."""
    if not isinstance(value, Tensor):
        return float(value)
    return float(value.item()) if value.is_cpu else value.detach().clone()
