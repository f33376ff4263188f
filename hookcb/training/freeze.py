"""Freeze: keeps a part of the model untrained, for a fit or its first epochs."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from hookcb.core import orders
from hookcb.core.arguments import check_count
from hookcb.core.callback import Callback
from hookcb.hooks.modules import Where, find_modules


class Freeze(Callback):
    """Freezes the modules that `where` selects, and all modules in them.

    For transfer learning: train a new head on a frozen body, then let the body train too after `until`.
    Layers with running statistics, such as batch norm, are in eval mode while frozen, so that these stay the
    same; dropout stays on. Frozen weights have no gradient, so neither weight decay nor momentum moves them.
    A weight shared with a layer outside is frozen for both. After the fit, `requires_grad` of each parameter
    is as before; one that was frozen already stays frozen. If several `Freeze` select a parameter, it is
    frozen until the last one releases it. Acts in a fit only; for permanent freezing, use `hookcb.freeze`.

    Args:
        where: see `find_modules`: a glob such as `"body.*"`, a type, a predicate, a module, or several.
        until: the epoch, from 0, from which they train again; by default they are frozen for the whole fit.
        name: name of the callback in the learner, by default "freezing"; `learn.freeze()` is fastai's method.

    Raises:
        ValueError: Before training, if nothing is left to train.
        LookupError: Before training, if `where` selects nothing; the message lists the possible names.

    >>> from hookcb import Freeze, synth_learner
    >>> learn = synth_learner()
    >>> before = learn.model[0].weight.clone()
    >>> with learn.no_logging():
    ...     learn.fit(1, cbs=Freeze("0"))
    >>> bool((learn.model[0].weight == before).all()), learn.model[0].weight.requires_grad
    (True, True)
    """

    default_name = "freezing"  # freeze is a method of a Learner
    order = orders.FREEZE

    def __init__(
        self, where: Where | Iterable[Where], until: int | None = None, *, name: str | None = None
    ) -> None:
        super().__init__(name=name)
        if until is not None:
            check_count("until", until, "epochs", least=0, hint=", or None for the whole fit")
        self.where = list(where) if isinstance(where, Iterator) else where  # it is used in each fit
        self.until = until
        self._forget()

    def _forget(self) -> None:
        self._frozen: list[nn.Parameter] = []  # those that required a gradient before
        self._norms: list[nn.Module] = []

    def before_fit(self) -> None:
        self._forget()
        modules, frozen_by_others = modules_of(self.model, self.where), self._frozen_by_others()
        self._norms = [m for m in modules if isinstance(getattr(m, "running_mean", None), Tensor)]
        if self.until == 0:
            return
        params = {id(p): p for m in modules for p in m.parameters(recurse=False)}.values()
        self._frozen = [p for p in params if p.requires_grad or id(p) in frozen_by_others]
        for p in self._frozen:
            p.requires_grad = False
            p.grad = None  # else an optimizer would keep using it
        if not any(p.requires_grad for p in self.model.parameters()):
            raise ValueError(
                f"Freeze({self.where!r:.80}) leaves nothing to train in {type(self.model).__name__}; "
                "select only a part of it"
            )

    def before_epoch(self) -> None:
        if self.until is not None and self.epoch >= self.until:
            self._thaw()

    def before_train(self) -> None:
        for m in self._norms:
            m.eval()

    def after_fit(self) -> None:
        self._thaw()

    def _thaw(self) -> None:
        frozen_by_others = self._frozen_by_others()
        for p in self._frozen:
            if id(p) not in frozen_by_others:
                p.requires_grad = True
        self._forget()

    def _frozen_by_others(self) -> set[int]:
        others = [cb for cb in self.learn.cbs if isinstance(cb, Freeze) and cb is not self]
        return {id(p) for cb in others for p in cb._frozen}

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_frozen": [], "_norms": []}  # a copy does not contain the model


def freeze(model: nn.Module, where: Where | Iterable[Where] | None) -> None:
    """Freezes the parameters of the modules that `where` selects, and of all modules in them.

    They stay frozen until `unfreeze`; to freeze them during a fit, use the callback `Freeze`. Their gradients
    are dropped, as an optimizer would keep using them. Running statistics, such as those of batch norm, still
    change in train mode.

    Args:
        model: the model.
        where: see `find_modules`; None for the whole model.

    Raises:
        LookupError: If `where` selects nothing; the message lists the possible names.
        TypeError: If `where` has an invalid type.

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
    """Makes the parameters of the modules that `where` selects trainable, except integer parameters.

    Args:
        model: the model.
        where: see `find_modules`; by default the whole model.

    Raises:
        LookupError: If `where` selects nothing; the message lists the possible names.
        TypeError: If `where` has an invalid type.

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
    """Parameters of the modules that `where` selects and of all modules in them, each once; None for all."""
    return list({id(p): p for m in modules_of(model, where) for p in m.parameters(recurse=False)}.values())


def modules_of(model: nn.Module, where: Where | Iterable[Where] | None) -> list[nn.Module]:
    """The modules that `where` selects and all modules in them, each once; None for all."""
    selected = [model] if where is None else find_modules(model, where).values()
    return list({id(m): m for outer in selected for m in outer.modules()}.values())
