"""The gradients that an optimizer works on."""

import torch
from torch import Tensor
from torch.optim import Optimizer


def gradients(opt: Optimizer) -> list[Tensor]:
    """Those there are, in the order of the optimizer's parameters."""
    return [p.grad for group in opt.param_groups for p in group["params"] if p.grad is not None]


def scale_gradients(opt: Optimizer, factor: float) -> None:
    """Multiplies each of them, in place; a factor of 1 leaves them untouched."""
    if factor != 1:
        with torch.no_grad():  # a backward with create_graph=True gives gradients that have a graph
            for grad in gradients(opt):
                grad.mul_(factor)
