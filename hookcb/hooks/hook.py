"""Hooks that attach to layers and tensors and come off again."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

import torch
from fastcore.foundation import L
from torch import Tensor, distributed, nn
from torch.nn.parameter import UninitializedParameter

from hookcb.core.batch import concat, map_tensors, parts
from hookcb.core.torch_private import in_transform, is_transform_tensor, without_transform
from hookcb.hooks.backward import EnterTap, GradientWatch, LeaveTap, keep_gradient_taps_out_of_graphs
from hookcb.hooks.own import register
from hookcb.hooks.taps import ParameterTap, Tap, TensorTap

HookFunc = Callable[..., Any]
Gate = Callable[[], bool]
Hookable = nn.Module | Tensor
Call = tuple[int, int]  # its time and its index
# keyword arguments of `Hook` that callbacks pass on
HOOK_OPTIONS = ("gather", "pre", "modify", "prepend", "with_kwargs", "always_call")


def always() -> bool:
    """The gate of a hook that always acts."""
    return True


class Hook:
    """Calls a function at each forward or backward of a module or tensor; `stored` is what it gave last.

    | what is hooked | called as | when |
    |---|---|---|
    | a module | `hook_func(module, input, output)` | after its forward |
    | … with `pre` | `hook_func(module, input)` | before its forward |
    | … not `is_forward` | `hook_func(module, grad_input, grad_output)` | gradients of its inputs are known |
    | … not `is_forward`, `pre` | `hook_func(module, grad_output)` | gradients of its outputs are known |
    | a parameter | `hook_func(parameter, grad)` | a gradient was accumulated in its `.grad` |
    | … with `pre`, or any other tensor | `hook_func(tensor, grad)` | a gradient has come to it |

    `input` is the tuple of positional inputs. `grad_input` has the structure of `input`, `grad_output` that
    of an output which is a tuple or list, else it is a tuple of one. None stands where there is no gradient.
    `grad_input` is of this call alone: what passes beside it, in a residual connection, does not count.

    It observes: what it returns goes nowhere else. A copy or file of what it is on does not contain it.
    An error in `hook_func` goes on with a note that names the layer, and takes the hook off.

    Args:
        m: the module, parameter or tensor.
        hook_func: what to call.
        is_forward: the forward of a module, or its backward.
        detach: give it tensors without their graph.
        cpu: what is stored moves to the CPU when it is read; `hook_func` gets tensors where they are.
        gather: reading `stored` joins what all ranks have stored, along the first dimension and on the CPU;
            then each rank must read it.
        pre: before the forward, or before the gradients pass the module.
        modify: what `hook_func` returns, unless None, replaces the output, the inputs (`pre`) or the
            gradient. It then gets tensors with their graph. A gradient hook is called for each tensor as its
            gradient comes, the others being None.
        prepend: before the other hooks on the forward.
        with_kwargs: give it keyword inputs too, as a dict after `input` or `grad_input`.
        always_call: also where the forward raises; `output` is then None.
        gate: asked at each forward; while it says False, nothing is called.

    Raises:
        TypeError: where `m` or `hook_func` is of another kind.
        ValueError: for options that do not go together, and tensors that have no gradient.

    >>> import torch
    >>> from hookcb import Hook
    >>> layer = torch.nn.Linear(2, 3)
    >>> with Hook(layer, lambda m, i, o: o.shape) as hook:
    ...     _ = layer(torch.zeros(5, 2))
    >>> hook.stored
    torch.Size([5, 3])
    """

    def __init__(
        self,
        m: Hookable,
        hook_func: HookFunc,
        is_forward: bool = True,
        detach: bool = True,
        cpu: bool = False,
        gather: bool = False,
        *,
        pre: bool = False,
        modify: bool = False,
        prepend: bool = False,
        with_kwargs: bool = False,
        always_call: bool = False,
        gate: Gate = always,
    ) -> None:
        self.hook_func, self.cpu, self.gather, self.gate = hook_func, cpu, gather, gate
        self.is_forward, self.pre, self.modify = is_forward, pre, modify
        self.prepend, self.with_kwargs, self.always_call = prepend, with_kwargs, always_call
        self.detach = detach and not modify
        _check(self, m)
        self.title = _title(hook_func)
        self.kind = self.name = type(m).__name__
        self.called = self.fired = False  # the forward has run; hook_func has been called
        self.why_silent = ""
        self.without_grad: str | None = None  # why a gradient could not be had
        self.left_out: dict[str, str] = {}  # what in the first output is no tensor, by path
        self.results: dict[Call, Any] | None = None  # what each call stored since `restart`
        self.calls: list[Call] = []
        self.n_without_graph = 0  # calls that gradients could not be followed from
        self._stored: Any = None
        self._is_brought = True
        self._taps: list[Tap] = []
        self._handles: list[Any] = []
        self._attach(m)

    def _attach(self, m: Hookable) -> None:
        if isinstance(m, Tensor):
            if m.is_leaf and not self.pre:
                self._on(m.register_post_accumulate_grad_hook, ParameterTap(self))
            else:
                self._on(m.register_hook, TensorTap(self, m))
        elif self.is_forward:
            options = {"prepend": self.prepend, "with_kwargs": self.with_kwargs}
            if self.pre:
                self._on(m.register_forward_pre_hook, Tap(self), **options)
            else:
                self._on(m.register_forward_hook, Tap(self), **options, always_call=self.always_call)
        else:
            keep_gradient_taps_out_of_graphs()
            watch = GradientWatch(self, outputs_only=self.pre)
            if not self.pre:
                self._on(m.register_forward_pre_hook, EnterTap(self, watch), with_kwargs=True)
            # always called, as what has been noted before a forward must go when that forward raises
            leave = LeaveTap(self, watch)
            self._on(m.register_forward_hook, leave, with_kwargs=True, always_call=not self.pre)

    def _on(self, on: Callable[..., Any], tap: Tap, **options: bool) -> None:
        self._taps.append(tap)
        self._handles.append(register(on, tap, **options))

    def next_call(self, time: int = 0) -> Call:
        """What tells this call from others since `restart`, in their order: by `time`, then as they come."""
        call = time, len(self.calls)
        if self.results is not None:  # a list that only grows would make compiled code compile each time
            self.calls.append(call)
        return call

    def restart(self) -> None:
        """From now on calls are counted anew, and `results` keeps what each stored."""
        self.results, self.calls, self._stored, self.n_without_graph = {}, [], None, 0

    def call(self, m: Any, seen: tuple[Any, ...], call: Call) -> Any:
        """Calls the function on what a tap has seen in that call, and stores what it gives."""
        if not torch.compiler.is_compiling() and not self.fired and self.is_forward:
            found = parts(seen[-1], self.name)
            self.left_out = {path: type(x).__name__ for path, x in found if not isinstance(x, Tensor)}
        if self.detach:
            seen = detached(seen)
        try:
            result = self.hook_func(m, *seen)
        except Exception as error:
            self.remove()
            error.add_note(f"in {self.title}, the hook on {self.where}, which is removed")
            raise
        self.fired = True
        if self.modify:
            self._stored = detached(result)
        else:  # a view of the output would show what an in-place successor, ReLU(inplace=True), makes of it
            self._stored = _copied(result) if self.detach and result is seen[-1] else result
        self._is_brought = False
        if self.results is not None:
            self.results[call] = self._stored
        return result

    @property
    def where(self) -> str:
        """What it is on, for a message."""
        return self.name if self.name == self.kind else f"{self.name} ({self.kind})"

    @property
    def stored(self) -> Any:
        """What the function returned last, None before its first call."""
        if not self._is_brought:
            self._stored, self._is_brought = self.bring(self._stored), True
        return self._stored

    def bring(self, item: Any) -> Any:
        """What was stored, as it is read: on the CPU or from all ranks, where that was asked for."""
        if self.gather and distributed.is_available() and distributed.is_initialized():
            of_ranks: list[Any] = [None] * distributed.get_world_size()
            distributed.all_gather_object(of_ranks, map_tensors(_on_cpu, item))
            return concat(of_ranks)
        return map_tensors(_on_cpu, item) if self.cpu else item

    @property
    def removed(self) -> bool:
        """Whether it is off."""
        return not self._taps

    def remove(self) -> None:
        """Takes the hook off; a second time does nothing. `stored` stays."""
        for tap in self._taps:
            tap.close()
        for handle in self._handles:
            handle.remove()
        self._taps, self._handles = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()

    def __getstate__(self) -> dict[str, Any]:
        # a copy is on nothing, and has what was stored
        off: dict[str, Any] = {"_taps": [], "_handles": [], "hook_func": None, "gate": always}
        return self.__dict__ | off | {"_stored": detached(self._stored), "results": detached(self.results)}


class Hooks:
    """One `Hook` on each of several modules or tensors; attached all, or none where one fails.

    Args:
        ms: one module, several, an `nn.Sequential` (its children), what `find_modules` gives, or parameters;
            pairs of a name and one of these, as `model.named_parameters()` gives them.
        hook_func, is_forward, detach, cpu, gather: as for `Hook`.
        **options: the keyword arguments of `Hook`.

    >>> import torch
    >>> from hookcb import Hooks
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    >>> with Hooks(model, lambda m, i, o: o.mean()) as hooks:
    ...     _ = model(torch.zeros(1, 2))
    >>> len(hooks.stored)
    2
    """

    def __init__(
        self,
        ms: Hookable | Iterable[Hookable] | Mapping[str, Hookable],
        hook_func: HookFunc,
        is_forward: bool = True,
        detach: bool = True,
        cpu: bool = False,
        gather: bool = False,
        **options: Any,
    ) -> None:
        self.hooks: list[Hook] = []
        try:
            for name, m in _named(ms):
                hook = Hook(m, hook_func, is_forward, detach, cpu, gather, **options)
                hook.name = name or hook.kind
                self.hooks.append(hook)
        except BaseException:
            self.remove()
            raise

    @property
    def stored(self) -> L:
        """What each hook's function returned last, None before its first call."""
        return L(hook.stored for hook in self.hooks)

    @property
    def results(self) -> dict[str, Any]:
        """What each call since `restart` has stored, by name: `fc`, or `fc#0`, `fc#1` of several calls."""
        found = {}
        for hook in self.hooks:
            calls = sorted(hook.calls)
            for call, value in sorted((hook.results or {}).items()):
                name = hook.name if len(calls) == 1 else f"{hook.name}#{calls.index(call)}"
                found[name] = hook.bring(value)
        return found

    def restart(self) -> None:
        """Has each hook count its calls from 0 and keep what each gives, see `Hook.restart`."""
        for hook in self.hooks:
            hook.restart()

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


def hook_output(module: nn.Module, detach: bool = True, cpu: bool = False, grad: bool = False) -> Hook:
    """A hook that stores the output of `module`, a copy; with `detach=False` the output itself.

    With `grad` it stores the gradients with respect to the output instead: `stored[0]`, or for an output that
    is a tuple or list, each at its place.
    """
    return Hook(module, _last, not grad, detach, cpu, pre=grad)


def hook_outputs(
    modules: nn.Module | Iterable[nn.Module] | Mapping[str, nn.Module],
    detach: bool = True,
    cpu: bool = False,
    grad: bool = False,
) -> Hooks:
    """Hooks that store the outputs of `modules`, or their gradients, each as `hook_output` does.

    >>> import torch
    >>> from hookcb import find_modules, hook_outputs
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    >>> with hook_outputs(find_modules(model, torch.nn.Linear), grad=True) as hooks:
    ...     model(torch.ones(4, 2)).sum().backward()
    >>> hooks.stored[-1][0].flatten()
    tensor([1., 1., 1., 1.])
    """
    return Hooks(modules, _last, not grad, detach, cpu, pre=grad)


def _last(module: nn.Module, *seen: Any) -> Any:
    return seen[-1]


def _copied(item: Any) -> Any:
    return map_tensors(Tensor.clone, item)


def _on_cpu(x: Tensor) -> Tensor:
    return x if x.is_meta else x.cpu()  # a copy that does not block would be read before it has arrived


def detached(item: Any) -> Any:
    """`item` with its tensors detached; plain ones and tuples of them quickly, as each call does it."""
    if not torch.compiler.is_compiling() and in_transform():
        return map_tensors(_bare, item)  # a transform of torch.func is at work
    if type(item) is Tensor:
        return item.detach()
    if type(item) is tuple:
        return tuple([detached(x) for x in item])
    return map_tensors(Tensor.detach, item)


def _bare(x: Tensor) -> Tensor:
    """`x` without its graph, and without the transforms of torch.func, which it must not outlive."""
    x = x.detach()
    while is_transform_tensor(x):
        x = without_transform(x)
    return x


def _check(hook: Hook, m: Any) -> None:
    if not callable(hook.hook_func):
        raise TypeError(f"hook_func is {hook.hook_func!r:.80}; give a function")
    if isinstance(m, torch.jit.ScriptModule):
        raise TypeError(
            f"{type(m).__name__} is TorchScript, which calls no hooks; hook the module it was made of"
        )
    if isinstance(m, UninitializedParameter):
        raise ValueError("the parameter is not initialized yet; give its lazy module a first batch before")
    if isinstance(m, Tensor):
        kind, refused = "tensor", ["prepend", "with_kwargs", "always_call"]
        if not m.requires_grad:
            raise ValueError(
                f"the tensor of shape {tuple(m.shape)} needs no gradient; call requires_grad_() on it"
            )
    elif isinstance(m, nn.Module):
        kind = ("forward" if hook.is_forward else "gradient") + (" pre" if hook.pre else "")
        refused = {
            "forward": [],
            "forward pre": ["always_call"],
            "gradient": ["prepend", "always_call"],
            "gradient pre": ["prepend", "always_call", "with_kwargs"],
        }[kind]
    else:
        hint = f"; give an instance, {m.__name__}(…)" if isinstance(m, type) else ""
        raise TypeError(f"m is {m!r:.80}, no nn.Module and no tensor{hint}")
    for option in refused:
        if getattr(hook, option):
            raise ValueError(f"{option}=True does not go with a {kind} hook; leave it out")


def _named(ms: Any) -> list[tuple[str, Any]]:
    if isinstance(ms, Mapping):
        return list(ms.items())
    if isinstance(ms, nn.Sequential):
        return list(ms.named_children())
    if isinstance(ms, nn.ModuleList | nn.ParameterList):
        return [(str(i), m) for i, m in enumerate(ms)]
    several = [ms] if isinstance(ms, nn.Module | Tensor) else ms
    return [m if isinstance(m, tuple) and len(m) == 2 else ("", m) for m in several]


def _title(function: HookFunc) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    owner = getattr(function, "__self__", None)  # of a method, the object it belongs to
    return name if owner is None else f"{type(owner).__name__}.{name}"
