"""Coverage: which layers and batches the hooks of a callback have seen."""

import inspect
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Self

import torch
from torch import nn

from hookcb.core.console import printable
from hookcb.core.text import as_layer
from hookcb.core.whose import is_of_program, is_of_user
from hookcb.hooks.modules import has_params, is_leaf, named_modules, names_around
from hookcb.records.records import module_of

if TYPE_CHECKING:
    from hookcb.hooks.hook import Hook

BY_CLOSURE = "LBFGS evaluates its closure several times in a step, and has no one gradient for it"
NOT_CALLED = "it was not called"
FROZEN = "it was not called; its parameters are frozen, so that no gradient tells whether they are used"
USED = (
    "its parameters get gradients, so it was used without being called here: by .forward, in another thread, "
    "by its weights alone, or in code compiled before the hooks were on, which torch.compiler.reset() drops"
)
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True, slots=True)
class Coverage:
    """Layers and batches that the hooks of a callback have seen in a fit.

    Attributes:
        hooked: names of the layers with a hook.
        fired: names of the layers whose hook was called, and has recorded something if it is to.
        silent: names of the others, with the likely reason.
        left_out: type of each output that is not a tensor or has no statistics, by path.
        without_grad: names of layers whose gradient is unknown, with the reason.
        n_batches: number of recorded batches.
        n_skipped: number of other training batches: left out by `every`, or cancelled.
        slices: outputs of which only this rank's part was seen, by path.
        added: names of layers with parameters that came into the model during the fit, and have no hook.

    >>> from hookcb import HookCallback, synth_learner
    >>> learn = synth_learner()
    >>> with learn.no_logging():
    ...     learn.fit(1, cbs=HookCallback(hook=lambda m, i, o: o.mean(), every=5))
    >>> print(learn.hook.coverage)
    2 of 2 layers seen in 2 batches, 8 batches not looked at
    """

    hooked: tuple[str, ...]
    fired: tuple[str, ...]
    silent: Mapping[str, str]
    left_out: Mapping[str, str]
    without_grad: Mapping[str, str]
    n_batches: int
    n_skipped: int
    slices: Mapping[str, str] = field(default_factory=dict)
    added: tuple[str, ...] = ()

    @classmethod
    def of_hooks(
        cls,
        hooks: Iterable["Hook"],
        left_out: dict[str, str],
        n_batches: int,
        n_skipped: int,
        added: tuple[str, ...] = (),
    ) -> Self:
        """Coverage of `hooks` after `n_batches` batches."""
        hooks = list(hooks)
        return cls(
            hooked=tuple(hook.name for hook in hooks),
            fired=tuple(hook.name for hook in hooks if hook.fired),
            silent={hook.name: hook.why_silent for hook in hooks if not hook.fired},
            left_out={path: kind for hook in hooks for path, kind in hook.left_out.items()} | left_out,
            without_grad={hook.name: hook.without_grad for hook in hooks if hook.without_grad},
            n_batches=n_batches,
            n_skipped=n_skipped,
            added=added,
        )

    def recorded(self, outputs: Iterable[str], slices: Mapping[str, str]) -> Self:
        """This coverage, of a callback with records of `outputs` only; of `slices` it has a part."""
        known = {module_of(path) for path in outputs}
        why = {name: reason for name, reason in self.silent.items() if name not in known}
        missing: dict[str, list[str]] = {}
        for path, kind in self.left_out.items():
            if module_of(path) in self.fired and module_of(path) not in known:
                missing.setdefault(module_of(path), []).append(kind)
        for name, kinds in missing.items():
            why[name] = f"no statistics of its output: {', '.join(kinds)}"
        fired = tuple(name for name in self.hooked if name not in why)
        return replace(self, fired=fired, silent=why, slices=slices)

    def __str__(self) -> str:
        layers, batches = _count(len(self.hooked), "layer"), _count(self.n_batches, "batch")
        skipped = f", {_count(self.n_skipped, 'batch')} not looked at" if self.n_skipped else ""
        lines = "\n".join(
            [
                f"{len(self.fired)} of {layers} seen in {batches}{skipped}",
                *(f"silent: {as_layer(name)}: {reason}" for name, reason in self.silent.items()),
                *(
                    f"not recorded: {as_layer(name)}: it came into the model during the fit"
                    for name in self.added
                ),
                *(f"left out: {as_layer(path)}: {kind}" for path, kind in self.left_out.items()),
                *(f"slice: {as_layer(path)}: {part}" for path, part in self.slices.items()),
                *(
                    f"without gradient: {as_layer(name)}: {reason}"
                    for name, reason in self.without_grad.items()
                ),
            ]
        )
        return printable(lines)

    def warning(self) -> str:
        """The warning if no hook was called at all."""
        layers = "".join(f"\n  {as_layer(name)}: {reason}" for name, reason in islice(self.silent.items(), 5))
        more = f"\n  … and {len(self.silent) - 5} more" if len(self.silent) > 5 else ""
        return (
            f"none of {_count(len(self.hooked), 'hooked layer')} was seen in the first batch; choose others "
            f"with modules=, or let the training call these; the likely reasons:{layers}{more}"
        )


def introduce(hooks: Iterable["Hook"], model: nn.Module, title: str) -> None:
    """Gives hooks on layers of `model` the name of their function, and the likely reason for no call."""
    modules = named_modules(model)
    for hook in hooks:
        hook.title, hook.why_silent = title, why_not_called(modules, hook.name)


def note_used(layers: Mapping[str, nn.Module], hooks: Iterable["Hook"]) -> None:
    """Notes, after a backward, which layers have gradients and so were used without being called."""
    for m, hook in zip(layers.values(), hooks, strict=True):
        if hook.why_silent == NOT_CALLED and any(p.grad is not None for p in m.parameters()):
            hook.why_silent = USED


def added_layers(model: nn.Module, known: Iterable[nn.Module], others: Container[str]) -> tuple[str, ...]:
    """Names of the leaves with parameters that are neither `known` ones nor named as one of `others`."""
    ids = set(map(id, known))
    modules = named_modules(model).items()
    leaves = ((name, m) for name, m in modules if id(m) not in ids and name not in others)
    return tuple(name for name, m in leaves if is_leaf(m) and has_params(m))


def why_not_called(modules: Mapping[str, nn.Module], name: str) -> str:
    """Why the module `name` of `modules` may never be called, judged by its type and place."""
    if isinstance(modules.get(name), CONTAINERS):
        return f"a {type(modules[name]).__name__} is never called itself"
    if isinstance(modules.get(name), torch.jit.ScriptModule):
        return "TorchScript runs it without hooks"
    if isinstance(modules.get(name.rpartition(".")[0]), nn.MultiheadAttention):
        return "MultiheadAttention uses its weights without calling it"
    params = [] if name not in modules else list(modules[name].parameters())
    owner = _owner(modules, name)
    if not params and owner is not None and _is_of_package(owner):
        return f"it belongs to {type(owner).__name__}, a package's module, which need not call it"
    return FROZEN if params and not any(p.requires_grad for p in params) else NOT_CALLED


def _owner(modules: Mapping[str, nn.Module], name: str) -> nn.Module | None:
    """The innermost module that has `name` in it, other than a container."""
    around = (modules.get(outer) for outer in names_around(name))
    return next((m for m in around if not isinstance(m, (*CONTAINERS, nn.Sequential))), None)


def _is_of_package(m: nn.Module) -> bool:
    """Whether the forward of a module is in an installed package other than torch."""
    code = getattr(inspect.unwrap(type(m).forward), "__code__", None)
    return code is not None and is_of_program(code.co_filename) and not is_of_user(code.co_filename)


def _count(n: int, what: str) -> str:
    plural = f"{what}es" if what.endswith("ch") else f"{what}s"
    return f"{n} {what if n == 1 else plural}"
