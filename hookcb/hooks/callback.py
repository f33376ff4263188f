"""HookCallback: hooks on layers from before_fit to after_fit."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from hookcb.core.console import warn
from hookcb.core.sampling import SamplingCallback
from hookcb.hooks.coverage import Coverage, introduce, note_used
from hookcb.hooks.hook import HookFunc, Hooks
from hookcb.hooks.modules import Where, find_modules, make_ready_for_hooks


class HookCallback(SamplingCallback):
    """Puts a hook on layers when a fit begins and takes it off when the fit ends, however it ends.

    Subclass it and define `hook(self, m, i, o)`, or pass a function as `hook=`. It is called in training
    only, unless a subclass sets `run_valid = True`, and not where checkpointing runs a forward again.

    Args:
        modules: the layers, see `find_modules`; by default all leaves with parameters. Looked up at each fit.
        every: act on training batches 0, every, 2·every …; by default on all.
        remove_end: take the hooks off at the end of the fit; else `remove()` does, or the next fit.
        is_forward, detach, cpu, pre, modify, prepend, with_kwargs, always_call: see `Hook`.
        include_paramless: by default also the leaves without parameters, such as ReLU.
        hook: called as `hook(module, input, output)`, in place of a subclass's method.
        name, **functions: see `Callback`.

    Attributes:
        hooks: `hooks.stored` has what each layer's hook gave last, in the last batch looked at.
        results: the same by layer name, every call: `fc#0`, `fc#1` of a layer called more than once.
        layers: the layers by name, while hooks are on.
        left_out: what could not be looked at, by path, with its type.
        coverage: what was looked at; a callback that saw nothing in its first batch warns.

    Raises:
        TypeError, ValueError, LookupError: for what cannot be hooked, `modules` that are not there among it.

    >>> from hookcb import HookCallback, synth_learner
    >>> learn = synth_learner()
    >>> with learn.no_logging():
    ...     learn.fit(1, cbs=HookCallback(hook=lambda m, i, o: o.mean().item(), name="means"))
    >>> list(learn.means.results)
    ['0', '2']
    """

    def __init__(
        self,
        modules: Where | Iterable[Where] | None = None,
        every: int | None = None,
        remove_end: bool = True,
        is_forward: bool = True,
        detach: bool = True,
        cpu: bool = True,
        include_paramless: bool = False,
        hook: HookFunc | None = None,
        *,
        pre: bool = False,
        modify: bool = False,
        prepend: bool = False,
        with_kwargs: bool = False,
        always_call: bool = False,
        name: str | None = None,
        **functions: Callable[[Any], object],
    ) -> None:
        super().__init__(every, name=name, **functions)
        if not callable(hook) and (hook is not None or type(self).hook is HookCallback.hook):
            kind = type(self).__name__
            raise TypeError(f"{kind} has no function to call; define hook(self, m, i, o), or pass hook=")
        self.modules, self.remove_end, self.is_forward = modules, remove_end, is_forward
        self.include_paramless, self._function = include_paramless, hook
        self._options = {"is_forward": is_forward, "detach": detach, "cpu": cpu, "pre": pre, "modify": modify}
        self._options |= {"prepend": prepend, "with_kwargs": with_kwargs, "always_call": always_call}
        self._acts_in: bool | None = None  # the value of `training` it acts in, None while it does not
        self.layers: dict[str, nn.Module] = {}
        self._names: dict[int, str] = {}
        self.left_out: dict[str, str] = {}
        self.hooks: Hooks | None = None

    def hook(self, m: nn.Module, i: Any, o: Any) -> Any:
        """What to do with a layer's input and output; define it in a subclass."""

    def before_fit(self) -> None:
        super().before_fit()
        self.remove()
        self.layers, self.left_out = find_modules(self.model, self.modules, self.include_paramless), {}
        self._names = {id(m): name or type(m).__name__ for name, m in self.layers.items()}
        make_ready_for_hooks(self.model)
        self.hooks = Hooks(self.layers, self._function or self.hook, gate=self._acts, **self._options)
        introduce(self.hooks, self.model, f"{type(self).__name__}.hook")

    def before_train(self) -> None:
        self._acts_in = None  # a batch cut short has left it on

    def before_batch(self) -> None:
        super().before_batch()
        if self.hooks and self.is_looking and not self.outside_main_phase:
            self._acts_in = self.training
            self.hooks.restart()

    def before_backward(self) -> None:
        if self.is_forward:  # for a forward from here on is recomputation under activation checkpointing
            self._acts_in = None

    def after_cancel_backward(self) -> None:
        self.is_looking = self.is_looking and self.is_forward

    def after_backward(self) -> None:
        self._acts_in = None
        if self.is_looking and not self.n_batches and self.hooks:
            note_used(self.layers, self.hooks)

    def after_batch(self) -> None:
        super().after_batch()
        if not self.outside_main_phase:
            self._acts_in = None
            if self.hooks and self.is_looking and self.n_batches == 1 and not self.coverage.fired:
                warn(self.coverage.warning(), stacklevel=2)

    def after_fit(self) -> None:
        self._acts_in = None
        if self.remove_end:
            self.remove()

    def remove(self) -> None:
        """Takes the hooks off and lets go of the layers; what the hooks stored stays."""
        if self.hooks is not None:
            self.hooks.remove()
        self.layers = {}

    def layer_name(self, m: nn.Module) -> str:
        """The qualified name of a hooked layer, of the whole model its class."""
        return self._names[id(m)]

    @property
    def results(self) -> dict[str, Any]:
        """What each call of a layer gave in the last batch looked at."""
        return self.hooks.results if self.hooks else {}

    @property
    def coverage(self) -> Coverage:
        """What was looked at so far, or in the last fit."""
        return Coverage.of(self.hooks or (), self.left_out, self.n_batches, self.n_skipped)

    def _acts(self) -> bool:
        return (
            self._acts_in is self.learn.training and self.learn.in_loop_thread
        )  # no validation inside a batch

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"layers": {}, "_names": {}}  # the model is not its to take along
