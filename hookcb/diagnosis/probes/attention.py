"""Attention and saturation of functions that are no modules, seen operation by operation."""

import math
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from hookcb.core.torch_private import DispatchMode
from hookcb.diagnosis.evidence import Observation
from hookcb.hooks.hook import Hook
from hookcb.hooks.modules import is_compiled, named_modules

FEWEST_KEYS = 4
MOST_QUERIES = 32  # that are looked at, of each head
LOW = 0.05  # mean entropy / ln T
FEWEST = 3  # batches
HALF = 0.5  # of the heads
TANH, SIGMOID = 0.97, 0.03


class OpProbe(DispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Looks at attention weights as they are made, in one forward of the model.

    Args:
        layer: tells the name of the module that is being called.
        found: takes a layer's share of heads that look at one place, `()` on its device.
    """

    def __init__(self, layer: Callable[[], str], found: Callable[[str, Tensor], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._layer, self._found = layer, found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs the operation as it is; of attention, looks at what it gave."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in ("_softmax", "_safe_softmax"):
            self._tell(out, args[1])
        elif name.startswith("_scaled_dot_product") and "backward" not in name:
            self._tell_of(args[0], args[1], kwargs, _is_causal(name, args, kwargs))
        return out

    def _tell(self, weights: Tensor, dim: int) -> None:
        is_last = dim in (-1, weights.ndim - 1)
        if is_last and weights.ndim > 2 and weights.shape[-1] >= FEWEST_KEYS and weights.shape[-2] > 1:
            self._found(self._layer(), low_heads(weights))

    def _tell_of(self, q: Tensor, k: Tensor, kwargs: dict[str, Any], is_causal: bool) -> None:
        scale, mask = kwargs.get("scale"), kwargs.get("attn_mask")
        if q.ndim < 3 or k.shape[-2] < FEWEST_KEYS or q.shape[-2] < 2 or q.shape[-3] % k.shape[-3]:
            return
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)  # heads that share their keys
        places = torch.arange(q.shape[-2], device=q.device)[:: max(1, q.shape[-2] // MOST_QUERIES)]
        scores = q[..., places, :].float() @ k.float().transpose(-1, -2)
        scores = scores * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        if isinstance(mask, Tensor):
            rows = mask[..., places, :] if mask.shape[-2] > 1 else mask
            scores = scores.masked_fill(~rows, -math.inf) if rows.dtype is torch.bool else scores + rows
        if is_causal:
            later = torch.arange(k.shape[-2], device=q.device) > places[:, None]
            scores = scores.masked_fill(later, -math.inf)
        self._found(self._layer(), low_heads(scores.softmax(-1)))


def _is_causal(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    place = {"_scaled_dot_product_efficient_attention": 6}.get(name, 4)
    given = kwargs.get("is_causal", args[place] if len(args) > place else False)
    return given is True


def low_heads(weights: Tensor) -> Tensor:
    """Share of the heads whose mean entropy is below a twentieth of that of looking everywhere alike.

    Args:
        weights: attention weights, `(…, heads, queries, keys)`, each row a distribution; or
            `(batch · heads, queries, keys)`.

    Returns:
        A 0-d tensor, 0..1.
    """
    p = weights.float()
    relative = -torch.special.xlogy(p, p).sum(-1) / math.log(p.shape[-1])
    relative = relative.masked_fill(p.sum(-1) == 0, math.nan)  # of queries that are masked whole
    of_heads = relative.movedim(-2, 0).flatten(1) if p.ndim > 3 else relative
    share: Tensor = (of_heads.nanmean(1) < LOW).float().mean()
    return share


def observe_attention(seen: dict[str, list[tuple[int, Tensor]]]) -> Iterator[Observation]:
    """Layers whose heads look at one place only, in each batch looked at."""
    for layer, shares in seen.items():
        values = [(step, float(share)) for step, share in shares]
        known = [(step, x) for step, x in values if not math.isnan(x)]
        least = min((x for _, x in known), default=0.0)
        if len(known) >= FEWEST and least > HALF:
            yield Observation(
                "attn.collapse",
                layer,
                step=known[0][0],
                value=least,
                text=f"at least {least:.0%} of the heads of {layer or 'the model'} look at one place only: "
                f"the entropy of their attention is below {LOW:.0%} of that of looking everywhere alike.",
                causes=("scores before the softmax that are far too large, or not divided by √d",),
                next_steps=("divide the scores by √d, and look at the size of query and key weights",),
            )


def saturated_share(m: nn.Module, x: Tensor) -> Tensor | None:
    """Share of the outputs of a tanh or sigmoid that are near its ends; None of other modules."""
    if isinstance(m, nn.Tanh):
        return (x.abs() > TANH).float().mean()
    if isinstance(m, nn.Sigmoid):
        return ((x < SIGMOID) | (x > 1 - SIGMOID)).float().mean()
    return None


class OpHooks:
    """Enters an `OpProbe` when the model is called, and leaves it when the call ends, however it does.

    A model that is compiled, in whole or in part, is left alone: it would run uncompiled. One in which the
    first call has shown no attention is not looked at again.

    Args:
        model: whose forward.
        acts: whether a call that begins is looked at.
        found: takes a layer's name and what `OpProbe` has found there.
        in_loop_thread: whether it is the training that calls, and not another thread.
    """

    def __init__(
        self,
        model: nn.Module,
        acts: Callable[[], bool],
        found: Callable[[str, Tensor], object],
        in_loop_thread: Callable[[], bool],
    ) -> None:
        self._acts, self._found = acts, found
        self._names = {id(m): name for name, m in named_modules(model).items()}
        self._open: list[OpProbe] = []
        self.has_looked = False  # in one whole call of the model
        self.sees_attention = False
        self.is_left_out = any(map(is_compiled, model.modules()))
        self._hooks = (
            []
            if self.is_left_out
            else [
                Hook(model, self._enter, pre=True, detach=False, gate=in_loop_thread),
                Hook(model, self._leave, always_call=True, detach=False, gate=in_loop_thread),
            ]
        )

    def _enter(self, m: nn.Module, args: Any) -> None:
        is_useless = self.has_looked and not self.sees_attention  # looking costs as much as what it looks at
        if torch.compiler.is_compiling() or is_useless or not self._acts():
            return
        self._close()
        if not any(map(is_compiled, m.modules())):  # it may have been compiled since
            probe = OpProbe(self._layer, self._tell)
            probe.__enter__()  # type: ignore[no-untyped-call]
            self._open.append(probe)

    def _tell(self, layer: str, share: Tensor) -> None:
        self.sees_attention = True
        self._found(layer, share)

    def _leave(self, m: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self.has_looked = self.has_looked or bool(self._open and output is not None)
            self._close()

    def _close(self) -> None:
        while self._open:
            self._open.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _layer(self) -> str:
        """The innermost module of the model whose code is running."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            names = frame.f_code.co_varnames
            if (
                names
                and names[0] == "self"
                and (name := self._names.get(id(frame.f_locals["self"]))) is not None
            ):
                return name
            frame = frame.f_back
        return ""

    def remove(self) -> None:
        """Takes the hooks off; Ctrl-C in a forward has left one open, as torch then calls no hook."""
        self._close()
        for hook in self._hooks:
            hook.remove()
