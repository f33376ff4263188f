"""What autograd saves for a backward: hooks that tell of each such tensor and change nothing."""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from hookcb.core.torch_private import (
    KNOWS_TOP,
    disable_saved_hooks,
    enable_saved_hooks,
    in_backward,
    pop_saved_hooks,
    push_saved_hooks,
    raw_saved,
    replace_saved_hooks_switch,
    saved_hooks_enabled,
    top_saved_hooks,
    version_of,
)

See = Callable[[Tensor], str]
_ON: list["SavedTensors"] = []  # those that are on, in any thread, the innermost last


class Saved(NamedTuple):
    """What stands in the graph for a saved tensor."""

    tensor: Tensor
    version: int | None  # when it was saved; None where it has none
    layer: str  # that saved it


class Pack:
    """What autograd calls; a graph that is kept keeps this too, and must keep no more with it."""

    def __init__(self, owner: "SavedTensors") -> None:
        self.owner = weakref.ref(owner)

    def __call__(self, x: Tensor) -> Saved:
        """Called with what autograd saves."""
        owner = self.owner()
        layer = owner.see(x) if owner is not None else ""
        # not x itself: an output that its own node holds is a cycle that Python's collector cannot see
        return Saved(x.detach(), None if x.is_inference() else version_of(x), layer)


class SavedTensors:
    """Calls `see` with each tensor that autograd saves in this thread, from `start` to `stop`.

    While saved tensors have hooks, torch does not notice where one of them is changed in place before its
    backward; these hooks do. They give way to hooks that are entered later, of `save_on_cpu` and activation
    checkpointing among them, and while transforms of `torch.func` run, which refuse all such hooks.

    Args:
        see: gives the name of the layer, for the error that tells of a change in place.
    """

    def __init__(self, see: See) -> None:
        self.see = see
        self.pack = Pack(self)
        self._thread = 0
        self._aside_for: set[str] = set()  # why it lets others pass, who will say when they are done

    def start(self) -> str:
        """Begins, and gives an empty text; where it cannot, as it would be in the way of others, why."""
        if not saved_hooks_enabled():
            return "hooks on saved tensors are switched off"
        if _are_others_on():
            return f"hooks of someone else are on saved tensors around all{_in_brackets(_title(_top()))}"
        self._thread, self._aside_for = threading.get_ident(), set()
        _ON.append(self)
        _listen_to_transforms(True)
        self._push()
        return ""

    def stop(self) -> None:
        """Ends; a second time does nothing, nor in a backward: autograd puts back what was on before."""
        if not self.is_on or in_backward():
            return
        _ON.remove(self)
        _listen_to_transforms(bool(_ON))
        if not self._aside_for:
            self._take_off()

    @property
    def is_on(self) -> bool:
        """Whether it has begun."""
        return self in _ON

    def other_hooks(self) -> str:
        """The name of hooks that were entered later and act in place of these, empty where there are none."""
        pack = _top() if self.is_on else None
        return "" if pack is self.pack else _title(pack)

    def step_aside(self, reason: str) -> None:
        """Lets code run that refuses such hooks, or would take them into what it compiles."""
        if not self.is_on or not self._is_here() or not (self._aside_for or self._is_top()):
            return
        if not self._aside_for:
            pop_saved_hooks()
        self._aside_for.add(reason)

    def step_back(self, reason: str) -> None:
        """That code is done."""
        if reason in self._aside_for and self._is_here():
            self._aside_for.remove(reason)
            if not self._aside_for:
                self._push()

    def see_graph(self, outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> None:
        """Sees what was saved between `inputs` and `outputs` while this stood aside."""
        for node in _nodes(outputs, inputs) if self.is_on else ():
            for saved in raw_saved(node):
                self._see_saved(saved)

    def _see_saved(self, saved: Any) -> None:
        if hasattr(saved, "unpack_hook"):
            if saved.unpack_hook is None and isinstance(saved.data, Tensor):
                self.see(saved.data)
            return
        with suppress(RuntimeError):  # an older torch shows it to hooks alone; where it has some, they stay
            saved.register_hooks(self.pack, unpack)

    def _is_here(self) -> bool:
        return self._thread == threading.get_ident()

    def _is_top(self) -> bool:
        return not KNOWS_TOP or _top() is self.pack  # else these are taken to be the last

    def _push(self) -> None:
        push_saved_hooks(self.pack, unpack)

    def _take_off(self) -> None:
        """Leaves hooks on that were entered later and are still there, as where two callbacks have some."""
        above = []
        while (top := top_saved_hooks()) is not None and top[0] is not self.pack:
            above.append(top)
            pop_saved_hooks()
        if top is not None or not KNOWS_TOP:
            pop_saved_hooks()
        for pair in reversed(above):
            push_saved_hooks(*pair)


def unpack(saved: Saved) -> Tensor:
    """The saved tensor, for its backward.

    Raises:
        RuntimeError: where it was changed in place since, as torch does where no hooks are.
    """
    x, version, layer = saved
    if version is not None and version_of(x) != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{x.dtype} {list(x.shape)}], saved in {layer}, is at version {version_of(x)}; expected version "
            f"{version} instead. Hint: enable anomaly detection to find the operation that failed to compute "
            "its gradient, with torch.autograd.set_detect_anomaly(True)."
        )
    return x


def _top() -> Any:
    """The pack hook that would be called now, None where there is none or torch cannot tell."""
    pair = top_saved_hooks()
    return None if pair is None else pair[0]


def _are_others_on() -> bool:
    if KNOWS_TOP:
        return _top() is not None
    with torch.enable_grad():
        node = torch.ones(1, requires_grad=True).exp().grad_fn  # which must outlive what it has saved
        (saved,) = raw_saved(node)
    try:
        saved.register_hooks(torch.clone, torch.clone)
    except RuntimeError:  # it has hooks
        return True
    return False


def _title(pack: Any) -> str:
    """The name of what a pack hook is of, `save_on_cpu` say; empty of none."""
    return "" if pack is None else getattr(pack, "__qualname__", type(pack).__name__).partition(".")[0]


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""


# ---- transforms of torch.func, which announce themselves by these two functions


def _disable_without_ours(*args: Any) -> None:
    for saved in reversed(_ON):
        saved.step_aside("transform")
    disable_saved_hooks(*args)


def _enable_with_ours() -> None:
    enable_saved_hooks()
    for saved in _ON:
        saved.step_back("transform")


def _listen_to_transforms(on: bool) -> None:
    if on:
        replace_saved_hooks_switch(_disable_without_ours, _enable_with_ours)
    else:
        replace_saved_hooks_switch(disable_saved_hooks, enable_saved_hooks)


# ---- graphs


def _nodes(outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> Iterator[Node]:
    """The nodes of the graph from `outputs` back to `inputs`, without those that made the inputs."""
    seen = {x.grad_fn for x in inputs}
    todo = [x.grad_fn for x in outputs]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [after for after, _ in node.next_functions]
            yield node
