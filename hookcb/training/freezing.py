"""Freezing: which parameters of a model are trained."""

from collections.abc import Iterable

from torch import nn

from hookcb.hooks.modules import Where, find_modules


def freeze(model: nn.Module, where: Where | Iterable[Where] | None) -> None:
    """Stops the training of the parameters of the modules that `where` selects, and of all modules in them.

    For good, or until `unfreeze`; for the length of a fit take the callback `Freeze`. Their gradients are
    dropped, as an optimizer would go on with those that are left. Running statistics, as of batch norm, go on
    changing in train mode.

    Args:
        model: where to look.
        where: see `find_modules`; None for the whole model.

    Raises:
        LookupError: where it selects nothing; the message lists what there is.
        TypeError: where it is of another kind.

    >>> import torch
    >>> from hookcb import freeze, total_params
    >>> model = torch.nn.Sequential(torch.nn.Linear(10, 30), torch.nn.Linear(30, 2))
    >>> freeze(model, "0")
    >>> [total_params(m).trainable for m in model]
    [False, True]
    """
    for p in params_of(model, where):
        p.requires_grad = False
        p.grad = None


def unfreeze(model: nn.Module, where: Where | Iterable[Where] | None = None) -> None:
    """Makes the parameters of the modules that `where` selects trainable; those of integers cannot be.

    Args:
        model: where to look.
        where: see `find_modules`; by default the whole model.

    Raises:
        LookupError: where it selects nothing; the message lists what there is.
        TypeError: where it is of another kind.

    >>> import torch
    >>> from hookcb import freeze, total_params, unfreeze
    >>> model = torch.nn.Linear(10, 30)
    >>> freeze(model, None)
    >>> unfreeze(model)
    >>> total_params(model).trainable
    True
    """
    for p in params_of(model, where):
        if p.is_floating_point() or p.is_complex():
            p.requires_grad = True


def params_of(model: nn.Module, where: Where | Iterable[Where] | None) -> list[nn.Parameter]:
    """The parameters of the modules that `where` selects and of all in them, each once; None for all."""
    return list({id(p): p for m in modules_of(model, where) for p in m.parameters(recurse=False)}.values())


def modules_of(model: nn.Module, where: Where | Iterable[Where] | None) -> list[nn.Module]:
    """The modules that `where` selects, and all in them, each once; None for all."""
    found = [model] if where is None else find_modules(model, where).values()
    return list({id(m): m for outer in found for m in outer.modules()}.values())
