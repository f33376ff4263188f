"""Hook and Hooks: functions called at the forward or backward of layers and tensors."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self, overload

import torch
from fastcore.foundation import L
from torch import Tensor, distributed, nn
from torch.nn.parameter import UninitializedParameter

from hookcb.core.batch import concat, map_tensors, parts
from hookcb.core.text import as_layer, name_of
from hookcb.core.torch_private import in_transform, is_transform_tensor, plain_class, without_transform
from hookcb.hooks.backward import EnterTap, GradientWatch, LeaveTap, keep_gradient_taps_out_of_graphs
from hookcb.hooks.modules import torchscript_message
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
    """Calls a function at each forward or backward of a module or tensor; `stored` is its last result.

    | what is hooked | called as | when |
    |---|---|---|
    | a module | `hook_func(module, input, output)` | after its forward |
    | … with `pre` | `hook_func(module, input)` | before its forward |
    | … not `is_forward` | `hook_func(module, grad_input, grad_output)` | gradients of its inputs are known |
    | … not `is_forward`, `pre` | `hook_func(module, grad_output)` | gradients of its outputs are known |
    | a parameter | `hook_func(parameter, grad)` | a gradient was accumulated in its `.grad` |
    | … with `pre`, or any other tensor | `hook_func(tensor, grad)` | its gradient is known |

    `input` is the tuple of positional inputs, and `grad_input` has its structure. `grad_output` has the
    structure of the output if that is a tuple or list, else it is a tuple of one. None means no gradient.
    `grad_input` belongs to this call alone: gradients that bypass it, in a residual connection, do not count.

    It observes: its result goes nowhere else. Copies and files of the hooked object do not contain it.
    An error in `hook_func` gets a note that names the layer, and removes the hook.

    Args:
        m: the module, parameter or tensor.
        hook_func: the function to call.
        is_forward: whether to hook a module's forward, or its backward.
        detach: pass tensors without their graph.
        cpu: move stored tensors to the CPU when they are read; `hook_func` gets tensors on their device.
        gather: reading `stored` concatenates the values of all ranks along the first dimension, on the CPU;
            then each rank must read it.
        pre: call it before the forward, or before the gradients pass the module.
        modify: the result of `hook_func`, unless None, replaces the output, the inputs (`pre`) or the
            gradient. The tensors then keep their graph. A gradient hook is called for each tensor when its
            gradient is known, the others being None.
        prepend: call it before the other hooks on the forward.
        with_kwargs: pass keyword inputs too, as a dict after `input` or `grad_input`.
        always_call: call it even if the forward raises; `output` is then None.
        gate: called at each forward; the hook acts if it returns True.

    Raises:
        TypeError: If `m` or `hook_func` is of another type.
        ValueError: If options exclude each other, or a tensor requires no gradient.

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
        # called with module and output after the first call; if it returns False, gate and `hook_func` follow
        self.quick: Callable[[Any, Any], bool] | None = None
        # called with module and output while Dynamo compiles, in place of all else
        self.traced: Callable[[Any, Any], object] | None = None
        self.is_idle = False  # whether it does nothing, so that neither these nor the gate are called
        # called with an error of the function or the gate, which then does not reach the forward
        self.take_error: Callable[[Exception], object] | None = None
        _check(self, m)
        self.title = _title(hook_func)
        self.kind = self.name = plain_class(m).__name__
        self.fired = False  # hook_func has been called
        self.why_silent = ""
        self.without_grad: str | None = None  # why a gradient is unknown
        self.left_out: dict[str, str] = {}  # type of what is not a tensor in the first output, by path
        self.results: dict[Call, Any] | None = None  # the stored value of each call since `restart`
        self.calls: list[Call] = []
        self.n_without_graph = 0  # calls whose gradients cannot be followed
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
            # always called, as notes made before a forward must be dropped if it raises
            leave = LeaveTap(self, watch)
            self._on(m.register_forward_hook, leave, with_kwargs=True, always_call=not self.pre)

    def _on(self, on: Callable[..., Any], tap: Tap, **options: bool) -> None:
        self._taps.append(tap)
        self._handles.append(register(on, tap, **options))

    def next_call(self, time: int = 0) -> Call:
        """Key of this call among those since `restart`; keys sort by `time`, then by order."""
        call = time, len(self.calls)
        if self.results is not None:  # compiled code would be compiled anew each time the list has grown
            self.calls.append(call)
        return call

    def restart(self) -> None:
        """Counts calls from 0 again, and keeps the value of each in `results`."""
        self.results, self.calls, self._stored, self.n_without_graph = {}, [], None, 0

    def call(self, m: Any, seen: tuple[Any, ...], call: Call) -> Any:
        """Calls the function with the arguments of a tap, and stores its result."""
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
        else:  # a view of the output would show later in-place changes, as by ReLU(inplace=True)
            self._stored = _copied(result) if self.detach and result is seen[-1] else result
        self._is_brought = False
        if self.results is not None:
            self.results[call] = self._stored
        return result

    @property
    def where(self) -> str:
        """The hooked module or tensor, for a message."""
        return self.name if self.name == self.kind else f"{as_layer(self.name)} ({self.kind})"

    @property
    def stored(self) -> Any:
        """The last result of the function; None before its first call."""
        if not self._is_brought:
            self._stored, self._is_brought = self.bring(self._stored), True
        return self._stored

    def bring(self, item: Any) -> Any:
        """A stored value as it is read: on the CPU with `cpu`, from all ranks with `gather`."""
        if self.gather and distributed.is_available() and distributed.is_initialized():
            of_ranks: list[Any] = [None] * distributed.get_world_size()
            distributed.all_gather_object(of_ranks, map_tensors(_on_cpu, item))
            return concat(of_ranks)
        return map_tensors(_on_cpu, item) if self.cpu else item

    def rest(self) -> None:
        """Takes it off its module, where it then costs nothing, until `wake`."""
        while self._handles:
            self._handles.pop().remove()

    def wake(self, m: Hookable) -> None:
        """Puts it on its module again, after the other hooks, if it rests and was not removed."""
        if not (self._handles or self.removed):
            self._taps.clear()
            self._attach(m)

    @property
    def removed(self) -> bool:
        """Whether the hook was removed."""
        return not self._taps

    def remove(self) -> None:
        """Removes the hook; a second time does nothing. `stored` stays."""
        for tap in self._taps:
            tap.close()
        self.rest()
        self._taps = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()

    def __getstate__(self) -> dict[str, Any]:
        # a copy hooks nothing, and keeps the stored values
        off: dict[str, Any] = {"_taps": [], "_handles": [], "hook_func": None, "gate": always}
        off |= {"quick": None, "traced": None, "take_error": None}
        return self.__dict__ | off | {"_stored": detached(self._stored), "results": detached(self.results)}


class Hooks:
    """One `Hook` on each of several modules or tensors; if one fails, none is attached.

    Args:
        ms: one module, several, an `nn.Sequential` (its children), a result of `find_modules`, or parameters;
            or pairs of a name and one of these, like `model.named_parameters()`.
        hook_func, is_forward, detach, cpu, gather: see `Hook`.
        **options: keyword arguments of `Hook`.

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
        """The last result of each hook's function; None before its first call."""
        return L(hook.stored for hook in self.hooks)

    @property
    def results(self) -> dict[str, Any]:
        """The result of each call since `restart`, by name: `fc`, or `fc#0`, `fc#1` for several calls."""
        found = {}
        for hook in self.hooks:
            calls = sorted(hook.calls)
            for call, value in sorted((hook.results or {}).items()):
                name = hook.name if len(calls) == 1 else f"{hook.name}#{calls.index(call)}"
                found[name] = hook.bring(value)
        return found

    def restart(self) -> None:
        """Restarts each hook, see `Hook.restart`."""
        for hook in self.hooks:
            hook.restart()

    def rest(self) -> None:
        """Takes all hooks off their modules, see `Hook.rest`."""
        for hook in self.hooks:
            hook.rest()

    def remove(self) -> None:
        """Removes all hooks; stored values stay."""
        for hook in self.hooks:
            hook.remove()

    @overload
    def __getitem__(self, i: int) -> Hook: ...
    @overload
    def __getitem__(self, i: slice) -> list[Hook]: ...
    def __getitem__(self, i: int | slice) -> Hook | list[Hook]:
        return self.hooks[i]

    def __delitem__(self, i: int | slice) -> None:
        """Removes hooks from their modules, and from the list."""
        for hook in self.hooks[i] if isinstance(i, slice) else [self.hooks[i]]:
            hook.remove()
        del self.hooks[i]

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

    With `grad` it stores the gradients with respect to the output instead: `stored[0]`, or one for each item
    of an output that is a tuple or list.
    """
    return Hook(module, _last, not grad, detach, cpu, pre=grad)


def hook_outputs(
    modules: nn.Module | Iterable[nn.Module] | Mapping[str, nn.Module],
    detach: bool = True,
    cpu: bool = False,
    grad: bool = False,
) -> Hooks:
    """Hooks that store the outputs of `modules`, or their gradients, like `hook_output`.

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
    return x if x.is_meta else x.cpu()  # a non-blocking copy could be read before it has arrived


def detached(item: Any) -> Any:
    """`item` with its tensors detached; the usual cases are fast, as each call needs it."""
    if not torch.compiler.is_compiling() and in_transform():
        return map_tensors(_bare, item)  # inside a transform of torch.func
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
        raise TypeError(f"hook_func must be a function, got {hook.hook_func!r:.80}")
    if isinstance(m, torch.jit.ScriptModule):
        raise TypeError(torchscript_message(m))
    if isinstance(m, UninitializedParameter):
        raise ValueError("the parameter is not initialized yet; run its lazy module on a batch first")
    if isinstance(m, Tensor):
        kind, refused = "tensor", ["prepend", "with_kwargs", "always_call"]
        if not m.requires_grad:
            raise ValueError(
                f"the tensor of shape {tuple(m.shape)} requires no gradient; call requires_grad_() on it"
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
        hint = f"; pass an instance, {m.__name__}(…)" if isinstance(m, type) else ""
        raise TypeError(f"m must be an nn.Module or a tensor, got {m!r:.80}{hint}")
    for option in refused:
        if getattr(hook, option):
            raise ValueError(f"{option}=True cannot be combined with a {kind} hook; leave it out")


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
    owner = getattr(function, "__self__", None)  # of a method, the object it belongs to
    return name_of(function) if owner is None else f"{type(owner).__name__}.{name_of(function)}"
