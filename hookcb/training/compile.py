"""Compile: torch.compile for the length of a fit."""

import inspect
from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch import nn

from hookcb.core import orders
from hookcb.core.arguments import did_you_mean
from hookcb.core.callback import Callback
from hookcb.core.torch_private import (
    backward_hooks,
    forward_hooks,
    plain_call,
    set_compiled_call,
    undo_compile,
)
from hookcb.hooks.modules import is_compiled


class Compile(Callback):
    """Compiles the model when a fit begins, and undoes it when the fit ends.

    The model is compiled in place: it stays the same object, with the same names in its `state_dict`. The
    first batch and the first validation take long, and so does a batch of another shape: have the loader drop
    a shorter last one. Hooks that are on the model when an epoch begins, also by callbacks, are compiled too;
    then all other compiled code of the process is compiled again. A model that is already compiled stays
    as it is. Only the call of the model is compiled, not its other methods.

    Args:
        name: name of the callback in the learner.
        **options: options of `torch.compile`: `mode`, `backend`, `dynamic`, `fullgraph`, `options` …

    Raises:
        TypeError: If torch.compile has no such option.
        Exception: Raised by torch before training, if the value of an option is invalid.

    >>> from hookcb import Compile, synth_learner
    >>> learn = synth_learner()
    >>> with learn.no_logging():
    ...     learn.fit(1, cbs=Compile(backend="eager"))
    >>> list(learn.model.state_dict())
    ['0.weight', '0.bias', '2.weight', '2.bias']
    """

    order = orders.COMPILE

    def __init__(self, *, name: str | None = None, **options: Any) -> None:
        super().__init__(name=name)
        check_options(torch.compile, options, ("model", "name"))
        self.options = options
        self._on = self._hooked = False

    def before_fit(self) -> None:
        self._hooked, self._on = False, not is_compiled(self.model)
        if self._on:
            _compile(self.model, self.options)

    def before_train(self) -> None:
        if not self._on:
            return
        # code compiled in an earlier fit may be reused, without the hooks added since (pytorch#117758)
        is_new = not self._hooked and _has_hooks(self.model)
        if is_new:
            self._hooked = True
            torch.compiler.reset()
        # torch 2.6 crashes once hooks are gone, if it was compiled before; or Distributed has wrapped it anew
        if is_new or not is_compiled(self.model):
            _compile(self.model, self.options)

    def after_fit(self) -> None:
        if self._on:
            undo_compile(self.model)
        self._on = False


def check_options(function: Callable[..., Any], options: Iterable[str], others: Container[str]) -> None:
    """Checks that a function of torch has the options, not counting its parameters `others`.

    Raises:
        TypeError: If it lacks one; the message names a similar one.
    """
    possible = [key for key in inspect.signature(function).parameters if key not in others]
    for key in options:
        if key not in possible:
            hint = did_you_mean(key, possible).strip() or f"possible are: {', '.join(possible)}"
            raise TypeError(f"torch's {function.__name__} takes no option {key!r}; {hint}")


def _compile(model: nn.Module, options: dict[str, Any]) -> None:
    model.compile(**options)
    if type(model).forward.__module__.startswith("torch.nn.modules."):
        # torch silently does not compile a forward in its own files, such as Sequential's (pytorch#150915)
        set_compiled_call(model, torch.compile(_traceable(model), **options))


def _traceable(model: nn.Module) -> Callable[..., Any]:
    # a bound method made here would end with the fit, and with it what torch 2.6 has compiled
    def traceable(*args: Any, **kwargs: Any) -> Any:
        return plain_call(model)(*args, **kwargs)

    return traceable


def _has_hooks(model: nn.Module) -> bool:
    return any(hooks for m in model.modules() for hooks in (*forward_hooks(m), *backward_hooks(m)))
