"""SavedTensors: hooks that report each tensor that autograd saves, and change nothing."""

import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookcb.core import graph
from hookcb.core.text import as_layer
from hookcb.core.threads import this_thread
from hookcb.core.torch_private import (
    KNOWS_TOP,
    READS_ONLY,
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
_ON: list["SavedTensors"] = []  # active ones in any thread, innermost last


class Saved(NamedTuple):
    """Stored in the graph in place of a saved tensor."""

    tensor: Tensor
    version: int | None  # when it was saved; None for an inference tensor
    layer: str  # layer that saved it


class Pack:
    """The pack hook; a graph keeps it alive, so it must not keep anything else alive."""

    def __init__(self, owner: "SavedTensors") -> None:
        self.owner = weakref.ref(owner)

    def __call__(self, x: Tensor) -> Saved:
        """Reports a tensor that autograd saves."""
        owner = self.owner()
        layer = owner.see(x) if owner is not None else ""
        # not x itself: an output held by its own node is a cycle that Python's garbage collector cannot see
        return Saved(x.detach(), None if x.is_inference() else version_of(x), layer)


class SavedTensors:
    """Calls `see` with each tensor that autograd saves in this thread, from `start` to `stop`.

    While saved tensors have hooks, torch does not detect in-place changes of them before the backward; these
    hooks do. They give way to hooks entered later, such as those of `save_on_cpu` and activation
    checkpointing, and to transforms of `torch.func`, which refuse all such hooks.

    Args:
        see: returns the name of the layer, for the error about an in-place change.
    """

    def __init__(self, see: See) -> None:
        self.see = see
        self.pack = Pack(self)
        self._thread = 0
        self._aside_for: set[str] = set()  # reasons to stand aside, until `step_back`

    def start(self) -> str:
        """Adds the hooks; returns the reason if they would be in the way of others, else an empty string."""
        if not saved_hooks_enabled():
            return "hooks on saved tensors are switched off"
        if _are_others_on():
            return f"other hooks on saved tensors are active{_in_brackets(_title(_top()))}"
        self._thread, self._aside_for = this_thread(), set()
        _ON.append(self)
        _listen_to_transforms(True)
        self._push()
        return ""

    def stop(self) -> None:
        """Removes the hooks; does nothing the second time, or in a backward, which restores its hooks."""
        if not self.is_on or in_backward():
            return
        _ON.remove(self)
        _listen_to_transforms(bool(_ON))
        if not self._aside_for:
            self._take_off()

    @property
    def is_on(self) -> bool:
        """Whether the hooks are active."""
        return self in _ON

    def other_hooks(self) -> str:
        """Name of hooks that were entered later and act in place of these; empty if there are none."""
        pack = _top() if self.is_on else None
        return "" if pack is self.pack else _title(pack)

    def step_aside(self, reason: str) -> None:
        """Removes the hooks for code that refuses them, or would compile them."""
        if not self.is_on or not self._is_here() or not (self._aside_for or self._is_top()):
            return
        if not self._aside_for:
            pop_saved_hooks()
        self._aside_for.add(reason)

    def step_back(self, reason: str) -> None:
        """Adds the hooks again after that code."""
        if reason in self._aside_for and self._is_here():
            self._aside_for.remove(reason)
            if not self._aside_for:
                self._push()

    def see_graph(self, outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> None:
        """Reports tensors saved between `inputs` and `outputs` while the hooks were removed."""
        if self.is_on:
            for node in graph.walk([x.grad_fn for x in outputs], [x.grad_fn for x in inputs]):
                for saved in raw_saved(node):
                    self._see_saved(saved)

    def _see_saved(self, saved: Any) -> None:
        if hasattr(saved, "unpack_hook"):
            if saved.unpack_hook is None and isinstance(saved.data, Tensor):
                self.see(saved.data)
            return
        with suppress(RuntimeError):  # an older torch shows it to hooks only; existing hooks stay
            saved.register_hooks(self.pack, unpack)

    def _is_here(self) -> bool:
        return self._thread == this_thread()

    def _is_top(self) -> bool:
        return not KNOWS_TOP or _top() is self.pack  # else these are assumed to be the top ones

    def _push(self) -> None:
        push_saved_hooks(self.pack, unpack)

    def _take_off(self) -> None:
        """Removes these hooks, but not those entered later, such as those of a second callback."""
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
        RuntimeError: If it was changed in place since, as torch does without hooks.
    """
    x, version, layer = saved
    if version is not None and version_of(x) != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{x.dtype} {list(x.shape)}], saved in {as_layer(layer)}, is at version {version_of(x)}; "
            f"expected version {version} instead. Hint: enable anomaly detection to find the operation that "
            "failed to compute its gradient, with torch.autograd.set_detect_anomaly(True)."
        )
    return x


setattr(unpack, READS_ONLY, True)


def _top() -> Any:
    """The pack hook that would be called now; None if there is none or torch does not tell."""
    pair = top_saved_hooks()
    return None if pair is None else pair[0]


def _are_others_on() -> bool:
    if KNOWS_TOP:
        return _top() is not None
    with torch.enable_grad():
        # the node must outlive its saved tensors
        node = torch.ones(1, requires_grad=True, device="cpu").exp().grad_fn
        (saved,) = raw_saved(node)
    try:
        saved.register_hooks(torch.clone, torch.clone)
    except RuntimeError:  # it has hooks already
        return True
    return False


def _title(pack: Any) -> str:
    """Name of the owner of a pack hook, such as `save_on_cpu`; empty for None."""
    return "" if pack is None else getattr(pack, "__qualname__", type(pack).__name__).partition(".")[0]


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""


# ---- transforms of torch.func, which call these two functions


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
