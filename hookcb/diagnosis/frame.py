"""Frame: what a model and its optimizers are made of, by name."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hookcb.diagnosis.evidence import Param
from hookcb.diagnosis.records import is_adaptive, largest_lr
from hookcb.gradient_flow import find_params
from hookcb.modules import has_uninitialized, named_modules
from hookcb.store import kept


@dataclass(slots=True)
class Frame:
    """The layers and parameters of a model as plain values, which outlive it.

    Attributes:
        about: by layer its type and sizes, `Linear 64→64`.
        params: those that require a gradient, by name, without statistics.
    """

    about: dict[str, str] = field(default_factory=dict)
    params: dict[str, Param] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, optimizers: Iterable[Optimizer]) -> "Frame":
        """Of a model and the optimizers that are known of."""
        modules = named_modules(model)
        frame = cls({name: about(m) for name, m in modules.items()})
        groups: dict[int, tuple[int, Optimizer, dict[str, Any]]] = {
            id(p): (i, opt, group)
            for i, opt in enumerate(optimizers)
            for group in opt.param_groups
            for p in group["params"]
        }
        for place, (name, p, kind) in enumerate(find_params(model)):
            if not p.requires_grad or isinstance(p, nn.parameter.UninitializedParameter):
                continue
            layer = name.rpartition(".")[0]
            param = Param(name, layer, kind, frame.about.get(layer, ""), place, tuple(p.shape))
            if p.dtype.is_floating_point:
                param.resolution = torch.finfo(p.dtype).eps
            if id(p) in groups:
                param.optimizer, opt, group = groups[id(p)]
                rate = kept(group["lr"])
                param.lr = rate if isinstance(rate, float) else largest_lr(opt)
                param.weight_decay, param.is_adaptive = (
                    float(group.get("weight_decay", 0.0)),
                    is_adaptive(opt),
                )
            frame.params[name] = param
        return frame


def about(m: nn.Module) -> str:
    """Type and sizes of a layer: `Linear 64→64`, `Conv2d 3→16`."""
    kind = type(m).__name__
    if has_uninitialized(m):
        return kind
    for of, to in (
        ("in_features", "out_features"),
        ("in_channels", "out_channels"),
        ("input_size", "hidden_size"),
    ):
        sizes = getattr(m, of, None), getattr(m, to, None)
        if all(isinstance(size, int) for size in sizes):
            return f"{kind} {sizes[0]}→{sizes[1]}"
    size = next(
        (n for name in ("num_features", "embed_dim") if isinstance(n := getattr(m, name, None), int)), None
    )
    return kind if size is None else f"{kind} {size}"
