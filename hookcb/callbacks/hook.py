"""HookCallback: hooks on layers from before_fit to after_fit."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from hookcb.callback import Callback
from hookcb.hooks import HookFunc, Hooks, Where, find_modules


class HookCallback(Callback):
    """Puts a hook on layers when a fit begins and takes it off when the fit ends, however it ends.

    Subclass it and define `hook(self, m, i, o)`, or pass a function as `hook=`. It is called after the
    forward of each layer in training, with inputs and output detached; `self.hooks.stored` keeps what it
    returned last.

    Args:
        modules: the layers, see `find_modules`; by default all leaves with parameters. Looked up at each fit.
        every: act on training batches 0, every, 2·every …; by default on all.
        remove_end: take the hooks off at the end of the fit; else `remove()` does, or the next fit.
        include_paramless: by default also the leaves without parameters, such as ReLU.
        hook: called as `hook(module, input, output)`, in place of a subclass's method.
        name: what the learner calls it.

    Raises:
        TypeError, ValueError: for arguments that cannot be.
        LookupError: at the beginning of a fit, where `modules` selects nothing.

    >>> from hookcb import HookCallback, synth_learner
    >>> learn = synth_learner()
    >>> with learn.no_logging():
    ...     learn.fit(1, cbs=HookCallback(hook=lambda m, i, o: o.mean().item(), name="means"))
    >>> len(learn.means.hooks.stored)
    2
    """

    run_valid = False

    def __init__(
        self,
        modules: Where | Iterable[Where] | None = None,
        every: int | None = None,
        remove_end: bool = True,
        *,
        include_paramless: bool = False,
        hook: HookFunc | None = None,
        name: str | None = None,
        **functions: Callable[[Any], object],
    ) -> None:
        super().__init__(name=name, **functions)
        if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
            raise ValueError(f"every is {every!r}; give a whole number of batches, 1 or more, or None")
        if hook is None and type(self).hook is HookCallback.hook:
            raise TypeError(
                f"{type(self).__name__} has nothing to call; define hook(self, m, i, o), or pass hook="
            )
        if hook is not None and not callable(hook):
            raise TypeError(f"hook is {hook!r:.80}; give a function (module, input, output)")
        self.modules, self.every, self.remove_end = modules, every, remove_end
        self.include_paramless, self._function = include_paramless, hook
        self.hooks: Hooks | None = None
        self.layers: dict[str, nn.Module] = {}
        self._names: dict[int, str] = {}
        self._acting = False

    def hook(self, m: nn.Module, i: Any, o: Any) -> Any:
        """What to do with a layer's input and output; define it in a subclass."""
        return self._function(m, i, o) if self._function else None

    def before_fit(self) -> None:
        self.remove()
        self.layers = find_modules(self.model, self.modules, self.include_paramless)
        self._names = {id(m): name for name, m in self.layers.items()}
        self.hooks = Hooks(self.layers, self._named, gate=self._acts)

    def before_train(self) -> None:
        self._acting = False  # a batch cut short has left it on

    def before_batch(self) -> None:
        self._acting = self.every is None or self.train_iter % self.every == 0

    def before_backward(self) -> None:
        self._acting = False  # what runs forward from here on is recomputation under activation checkpointing

    def after_batch(self) -> None:
        self._acting = False

    def after_fit(self) -> None:
        self._acting = False
        if self.remove_end:
            self.remove()

    def remove(self) -> None:
        """Takes the hooks off and lets go of the layers; what the hooks stored stays."""
        if self.hooks is not None:
            self.hooks.remove()
        self.layers = {}

    def layer_name(self, m: nn.Module) -> str:
        """The qualified name of a hooked layer, of the whole model its class."""
        return self._names[id(m)] or type(m).__name__

    def _acts(self) -> bool:
        # asked at each call, as the loop may be validating in the middle of a training batch
        return self._acting and self.learn.training

    def _named(self, m: nn.Module, i: Any, o: Any) -> Any:
        try:
            return self.hook(m, i, o)
        except Exception as error:
            error.add_note(f"in {type(self).__name__}.hook at layer {self.layer_name(m)!r}")
            raise

    def __getstate__(self) -> dict[str, Any]:
        # the model is not the callback's to take along
        return super().__getstate__() | {"hooks": None, "layers": {}, "_names": {}}
