"""Hooks that attach to layers and come off again, and the selection of layers."""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Self

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookcb.batch import map_tensors

HookFunc = Callable[[nn.Module, Any, Any], Any]
Gate = Callable[[], bool] | None
Where = str | type[nn.Module] | nn.Module | Callable[[nn.Module], bool]


class Hook:
    """Calls `hook_func(module, input, output)` after each forward of `m`; what it returns is in `stored`.

    It observes: the output goes on as it was. A copy or pickle of the module carries no live hook.

    Args:
        m: the module to watch.
        hook_func: what to call; `input` is the tuple of positional inputs.
        detach: give it inputs and outputs without their graph.
        gate: asked at each call; while it says False nothing is called, and `stored` stays as it is.

    >>> import torch
    >>> from hookcb import Hook
    >>> layer = torch.nn.Linear(2, 3)
    >>> with Hook(layer, lambda m, i, o: o.shape) as hook:
    ...     _ = layer(torch.zeros(5, 2))
    >>> hook.stored
    torch.Size([5, 3])
    """

    def __init__(self, m: nn.Module, hook_func: HookFunc, *, detach: bool = True, gate: Gate = None) -> None:
        if not isinstance(m, nn.Module):
            raise TypeError(f"m is {m!r:.80}, no nn.Module")
        self.hook_func, self.detach, self.gate = hook_func, detach, gate
        self.stored: Any = None
        self._handle: RemovableHandle | None = m.register_forward_hook(_Tap(self))

    def remove(self) -> None:
        """Takes the hook off; a second time does nothing. `stored` stays."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


class Hooks:
    """One `Hook` on each of several modules; attached all, or none where one fails.

    Args:
        ms: one module, several, an `nn.Sequential` (its children), or what `find_modules` gives.
        hook_func, detach, gate: as for `Hook`.

    >>> import torch
    >>> from hookcb import Hooks
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    >>> with Hooks(model, lambda m, i, o: o.mean().item()) as hooks:
    ...     _ = model(torch.zeros(1, 2))
    >>> len(hooks.stored)
    2
    """

    def __init__(
        self,
        ms: nn.Module | Iterable[nn.Module] | Mapping[str, nn.Module],
        hook_func: HookFunc,
        *,
        detach: bool = True,
        gate: Gate = None,
    ) -> None:
        self.hooks: list[Hook] = []
        try:
            for m in _modules(ms):
                self.hooks.append(Hook(m, hook_func, detach=detach, gate=gate))
        except BaseException:
            self.remove()
            raise

    @property
    def stored(self) -> list[Any]:
        """What each hook's function returned last, None before its first call."""
        return [hook.stored for hook in self.hooks]

    def remove(self) -> None:
        """Takes all hooks off; what they stored stays."""
        for hook in self.hooks:
            hook.remove()

    def __getitem__(self, i: int) -> Hook:
        return self.hooks[i]

    def __len__(self) -> int:
        return len(self.hooks)

    def __iter__(self) -> Iterator[Hook]:
        return iter(self.hooks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


def hook_output(module: nn.Module, detach: bool = True) -> Hook:
    """A hook that stores the output of `module`: a copy, with `detach=False` the output itself."""
    return Hook(module, _copy if detach else _output, detach=detach)


def hook_outputs(
    modules: nn.Module | Iterable[nn.Module] | Mapping[str, nn.Module], detach: bool = True
) -> Hooks:
    """Hooks that store the outputs of `modules`, each as `hook_output` does."""
    return Hooks(modules, _copy if detach else _output, detach=detach)


def find_modules(
    model: nn.Module, where: Where | Iterable[Where] | None = None, include_paramless: bool = False
) -> dict[str, nn.Module]:
    """The modules of `model` that `where` selects, by qualified name, in the order of `named_modules()`.

    A shared module is found once, under its first name.

    Args:
        model: where to look.
        where: None (leaves with parameters), a glob on qualified names (`"blocks.*.attn"`, where `*` also
            spans dots), a type, a predicate, a module of the model, or several of these.
        include_paramless: with None, also the leaves without parameters, such as activation functions.

    Raises:
        LookupError: where one of them selects nothing; the message lists what there is.
        TypeError: where `where` is of another kind.
    """
    named = dict(model.named_modules())
    if where is None:
        leaves = {name: m for name, m in named.items() if not any(True for _ in m.children())}
        found = {
            name: m
            for name, m in leaves.items()
            if include_paramless or any(True for _ in m.parameters(recurse=False))
        }
        if not found:
            raise LookupError(
                f"no module of {type(model).__name__} is a leaf with parameters; it has: {_listing(named)}"
            )
        return found
    aliases = list(model.named_modules(remove_duplicate=False))
    several = [where] if _is_single(where) else list(where)  # type: ignore[arg-type]  # then it is iterable
    if not several:
        raise LookupError(f"where is empty; give what to select of {type(model).__name__}: {_listing(named)}")
    selected: set[int] = set()
    for one in several:
        ids = {id(m) for name, m in aliases if _selects(one, name, m)}
        if not ids:
            raise _nothing(model, one, named)
        selected |= ids
    return {name: m for name, m in named.items() if id(m) in selected}


class _Tap:
    """What is registered on the module: leads to the hook; a copy or pickle of it leads nowhere."""

    def __init__(self, hook: Hook | None = None) -> None:
        self.hook = hook

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        hook = self.hook
        if hook is not None and (hook.gate is None or hook.gate()):
            if hook.detach:
                args, output = _without_graph(args), _without_graph(output)
            hook.stored = hook.hook_func(module, args, output)

    def __reduce__(self) -> tuple[type["_Tap"], tuple[()]]:
        return _Tap, ()


def _output(module: nn.Module, args: Any, output: Any) -> Any:
    return output


def _copy(module: nn.Module, args: Any, output: Any) -> Any:
    # a view would show what an in-place successor, such as ReLU(inplace=True), has made of it
    return map_tensors(Tensor.clone, output)


def _without_graph(item: Any) -> Any:
    return map_tensors(Tensor.detach, item)


def _modules(ms: nn.Module | Iterable[nn.Module] | Mapping[str, nn.Module]) -> list[nn.Module]:
    if isinstance(ms, nn.Sequential):
        return list(ms.children())
    if isinstance(ms, nn.Module) and not isinstance(ms, nn.ModuleList):
        return [ms]
    return list(ms.values() if isinstance(ms, Mapping) else ms)


def _is_single(where: Any) -> bool:
    return isinstance(where, str | type | nn.Module) or callable(where) or not isinstance(where, Iterable)


def _selects(where: Any, name: str, module: nn.Module) -> bool:
    if isinstance(where, str):
        return fnmatchcase(name, where) and name != ""
    if isinstance(where, nn.Module):
        return module is where
    if isinstance(where, type):
        return isinstance(module, where)
    if callable(where):
        return bool(where(module))
    raise TypeError(
        f"{where!r:.80} selects no modules; give a glob, a type, a predicate, a module or a list of these"
    )


def _nothing(model: nn.Module, where: Any, named: dict[str, nn.Module]) -> LookupError:
    close = difflib.get_close_matches(where, named, n=1) if isinstance(where, str) else []
    hint = f"did you mean {close[0]!r}? " if close else ""
    what = f"matches {where!r}" if isinstance(where, str) else f"is selected by {where!r:.80}"
    return LookupError(f"no module of {type(model).__name__} {what}; {hint}it has: {_listing(named)}")


def _listing(named: dict[str, nn.Module], most: int = 20) -> str:
    names = [name for name in named if name]
    return ", ".join(names[:most]) + (f" … and {len(names) - most} more" if len(names) > most else "")
