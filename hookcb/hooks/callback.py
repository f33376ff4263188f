"""HookCallback: hooks that are on layers during a fit."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from torch import nn

from hookcb.core.console import warn
from hookcb.core.sampling import SamplingCallback
from hookcb.core.torch_private import plain_class
from hookcb.hooks.coverage import Coverage, added_layers, introduce, note_used
from hookcb.hooks.hook import HOOK_OPTIONS, HookFunc, Hooks
from hookcb.hooks.modules import (
    ModelGoneError,
    Where,
    find_modules,
    make_ready_for_hooks,
    named_modules,
)


class HookCallback(SamplingCallback):
    """Puts a hook on layers when a fit begins and removes it when the fit ends, however it ends.

    Subclass it and define `hook(self, m, i, o)`, or pass a function as `hook=`. It is called in training
    only, unless a subclass sets `run_valid = True`, and not when checkpointing runs a forward again. If
    several ranks train, what it returns is of this rank.

    Args:
        modules: the layers, see `find_modules`; by default all leaves with parameters. Looked up at each fit.
        every: act on training batches 0, every, 2·every …; by default on all.
        remove_end: remove the hooks at the end of the fit; else `remove()` does, or the next fit.
        is_forward, detach, cpu: see `Hook`.
        include_paramless: by default also hook the leaves without parameters, such as ReLU.
        hook: called as `hook(module, input, output)`, in place of a subclass's method.
        name: see `Callback`.
        **options: `gather`, `pre`, `modify`, `prepend`, `with_kwargs`, `always_call`, see `Hook`;
            functions by event name, see `Callback`.

    Attributes:
        hooks: `hooks.stored` has the last value each layer's hook returned in the last recorded batch.
        results: the values of all calls in that batch by layer name; `fc#0`, `fc#1` for a layer called twice.
        layers: the layers by name, while hooks are on.
        left_out: type of each output that could not be recorded, by path.
        coverage: which layers and batches the hooks have seen. A callback that saw nothing in its first batch
            warns.

    Raises:
        TypeError, ValueError, LookupError: If an argument is invalid, or `modules` selects nothing; what
            depends on the model is checked when the fit begins.

    >>> from hookcb import HookCallback, synth_learner
    >>> learn = synth_learner()
    >>> with learn.no_logging():
    ...     learn.fit(1, cbs=HookCallback(hook=lambda m, i, o: o.mean().item(), name="means"))
    >>> list(learn.means.results)
    ['0', '2']
    """

    hook_options = HOOK_OPTIONS

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
        name: str | None = None,
        **options: Any,
    ) -> None:
        hook_options = {option: options.pop(option) for option in HOOK_OPTIONS if option in options}
        super().__init__(every, name=name, **options)
        if not callable(hook) and (hook is not None or type(self).hook is HookCallback.hook):
            kind = type(self).__name__
            raise TypeError(f"{kind} has no function to call; define hook(self, m, i, o), or pass hook=")
        self.modules, self.remove_end, self.is_forward = modules, remove_end, is_forward
        self.include_paramless, self._function = include_paramless, hook
        self._options = {"is_forward": is_forward, "detach": detach, "cpu": cpu} | hook_options
        self._acts_in: bool | None = None  # the value of `training` in which hooks act; None: they do not
        self.layers: dict[str, nn.Module] = {}
        self._names: dict[int, str] = {}
        self._left_out: dict[str, str] = {}
        self._others: frozenset[str] = frozenset()  # names of the modules without a hook
        self._added: tuple[str, ...] = ()  # see `Coverage`, when the fit had ended
        self.hooks: Hooks | None = None

    def hook(self, m: nn.Module, i: Any, o: Any) -> Any:
        """Called with a layer's input and output; define it in a subclass."""

    def before_fit(self) -> None:
        super().before_fit()
        self.remove()
        self.left_out.clear()
        self._has_pred = False  # whether the model was called in a batch; a watch may see a step alone
        self.layers = find_modules(self.model, self.modules, self.include_paramless)
        self._names = {id(m): name or plain_class(m).__name__ for name, m in self.layers.items()}
        self._others = frozenset(named_modules(self.model).keys() - self.layers.keys())
        make_ready_for_hooks(self.model)
        self.hooks = Hooks(self.layers, self._function or self.hook, gate=self.hooks_act, **self._options)
        for hook in self.hooks:
            hook.is_idle = True  # until a batch is looked at
        introduce(self.hooks, self.model, f"{type(self).__name__}.hook")

    def hooks_act(self) -> bool:
        """Whether hooks act now: the gate that each hook asks at each call.

        Events set its flag once a batch. A validation inside the batch, or code in another thread, triggers
        no event of this callback, so that the phase and the thread are looked at in each call.
        """
        return self._acts_in is self.learn.training and self.learn.in_loop_thread

    def _let_act(self, training: bool | None) -> None:
        """Has the hooks act in this value of `training`, or not at all: two states, as compiled code sees."""
        if training is not self._acts_in:
            self._acts_in = training
            for hook in self.hooks or ():
                hook.is_idle = training is None

    def before_train(self) -> None:
        self._let_act(None)  # a batch that was cut short has left it set

    def before_batch(self) -> None:
        super().before_batch()
        if self.is_looking and self.hooks and not self.outside_main_phase:
            self._let_act(self.training)
            self.hooks.restart()

    def after_pred(self) -> None:
        self._has_pred = True

    def before_backward(self) -> None:
        if self.is_forward:  # a forward after this is recomputation by activation checkpointing
            self._let_act(None)

    def after_cancel_backward(self) -> None:
        self.is_looking = self.is_looking and self.is_forward

    def after_backward(self) -> None:
        self._let_act(None)
        if self.is_looking and not self.n_batches and self.hooks:
            note_used(self.layers, self.hooks)

    def after_batch(self) -> None:
        super().after_batch()
        if self._is_due and not self.outside_main_phase:
            self._let_act(None)
            is_first = self._has_pred and self.n_batches == 1
            if self.hooks and self.is_looking and is_first and not any(hook.fired for hook in self.hooks):
                warn(self.coverage.warning(), stacklevel=2)

    def after_fit(self) -> None:
        self._let_act(None)
        self._added = self._find_added()
        if self.remove_end:
            self.remove()

    def remove(self) -> None:
        """Removes the hooks and releases the layers; what the hooks have stored stays."""
        if self.hooks is not None:
            self.hooks.remove()
        self.layers = {}

    def _find_added(self) -> tuple[str, ...]:
        """Names of the layers that came into the model after its hooks."""
        with suppress(ModelGoneError):
            return added_layers(self.model, self.layers.values(), self._others)
        return ()

    def layer_name(self, m: nn.Module) -> str:
        """Qualified name of a hooked layer; for the whole model its class."""
        return self._names[id(m)]

    @property
    def left_out(self) -> dict[str, str]:
        """Type of each output that could not be recorded, by path."""
        return self._left_out

    @property
    def results(self) -> dict[str, Any]:
        """The values of all calls in the last recorded batch, by layer name."""
        return self.hooks.results if self.hooks else {}

    @property
    def coverage(self) -> Coverage:
        """Layers and batches that the hooks have seen, in this fit or the last."""
        added = self._find_added() if self.layers else self._added
        return Coverage.of_hooks(self.hooks or (), self.left_out, self.n_batches, self.n_skipped, added)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"layers": {}, "_names": {}}  # a copy does not contain the model
