"""Freeze: a part of the model that is not trained, for a fit or its first epochs."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from hookcb.core import orders
from hookcb.core.arguments import check_count
from hookcb.core.callback import Callback
from hookcb.hooks.modules import Where, find_modules


class Freeze(Callback):
    """Keeps the weights of the modules that `where` selects, and of all in them, as they are.

    For transfer learning: train a new head on a frozen body, then `until` lets the body go along. Layers
    with running statistics in there, such as batch norm, are in eval mode while frozen, so that these stay
    too; dropout goes on. No optimizer moves a frozen weight, by weight decay or momentum neither: it has no
    gradient. A weight that a layer outside shares is frozen for both. After the fit each parameter requires
    its gradient, or does not, as before; one that was frozen already stays so. Of several `Freeze`, a
    parameter waits for the last that holds it. Acts in a fit only; `hookcb.freeze` does it for good.

    Args:
        where: see `find_modules`: a glob such as `"body.*"`, a type, a predicate, a module, or several.
        until: the epoch, from 0, from which on they train again; by default frozen for the whole fit.
        name: what the learner calls it.

    Raises:
        TypeError, ValueError: for an `until` that is no epoch, and before training, where nothing is left.
        LookupError: before training, where nothing is selected; the message lists what there is.

    >>> from hookcb import Freeze, synth_learner
    >>> learn = synth_learner()
    >>> before = learn.model[0].weight.clone()
    >>> with learn.no_logging():
    ...     learn.fit(1, cbs=Freeze("0"))
    >>> bool((learn.model[0].weight == before).all()), learn.model[0].weight.requires_grad
    (True, True)
    """

    order = orders.FREEZE

    def __init__(
        self, where: Where | Iterable[Where], until: int | None = None, *, name: str | None = None
    ) -> None:
        super().__init__(name=name)
        if until is not None:
            check_count("until", until, "epochs", least=0, hint=", or None for the whole fit")
        self.where = list(where) if isinstance(where, Iterator) else where  # each fit looks it up anew
        self.until = until
        self._forget()

    def _forget(self) -> None:
        self._held: list[nn.Parameter] = []  # those that required a gradient before
        self._norms: list[nn.Module] = []

    def before_fit(self) -> None:
        self._forget()
        modules, held_by_others = modules_of(self.model, self.where), self._held_by_others()
        self._norms = [m for m in modules if isinstance(getattr(m, "running_mean", None), Tensor)]
        if self.until == 0:
            return
        params = {id(p): p for m in modules for p in m.parameters(recurse=False)}.values()
        self._held = [p for p in params if p.requires_grad or id(p) in held_by_others]
        for p in self._held:
            p.requires_grad = False
            p.grad = None  # what an optimizer finds there it goes on with
        if not any(p.requires_grad for p in self.model.parameters()):
            raise ValueError(
                f"Freeze({self.where!r:.80}) leaves nothing to train of {type(self.model).__name__}; "
                "select a part of it"
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
        held_by_others = self._held_by_others()
        for p in self._held:
            if id(p) not in held_by_others:
                p.requires_grad = True
        self._forget()

    def _held_by_others(self) -> set[int]:
        others = [cb for cb in self.learn.cbs if isinstance(cb, Freeze) and cb is not self]
        return {id(p) for cb in others for p in cb._held}

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_held": [], "_norms": []}  # the model is not its to take along


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
