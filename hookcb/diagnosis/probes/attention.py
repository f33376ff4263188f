"""Probes of attention weights, operation by operation, and of saturated activation functions."""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from hookcb.core.text import as_layer
from hookcb.core.torch_private import DispatchMode
from hookcb.diagnosis.guard import Guard
from hookcb.diagnosis.measurements.replicas import hash_of
from hookcb.diagnosis.measurements.sequence_axis import SequenceAxis
from hookcb.diagnosis.measurements.tokens import Tokens
from hookcb.diagnosis.probes.dropout import DropoutProbe
from hookcb.diagnosis.run import Observation
from hookcb.hooks.hook import Hook
from hookcb.hooks.modules import is_compiled, named_modules

MIN_KEYS = 4
MAX_EVALUATED = 64  # calls in eval mode whose inputs are compared
MAX_QUERIES = 32  # inspected for each head
LOW_ENTROPY = 0.05  # mean entropy / ln T
MIN_BATCHES = 3
MAX_LOW_HEADS = 0.5  # share of the heads


Count = Callable[[str, Any, tuple[Any, ...], Any], object]


class OpProbe(DispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Measures attention weights as they are computed, in one forward of the model; sees embeddings too.

    Args:
        layer: returns the name of the module that is running.
        record: is called with the layer's name, attention weights `(…, queries, keys)`, and the positions of
            these queries in a sequence that attends to itself, None if it attends to another one.
        embedded: is called with the layer's name, the number of rows, the indices, and the index of padding.
        count: is called with the layer's name, each operation, its arguments and its result; None for none.
        guard: keeps errors out of the forward.
    """

    def __init__(
        self,
        layer: Callable[[], str],
        record: Callable[[str, Tensor, Tensor | None], object],
        embedded: Callable[[str, int, Tensor, int], object],
        count: Count | None = None,
        guard: Guard | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._layer, self._record, self._embedded, self._count = layer, record, embedded, count
        self._guard = guard or Guard()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs the operation unchanged; measures its result if it is attention."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self._guard.call("ops", self._see, func, args, kwargs, out)
        return out

    def _see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        name = func.overloadpacket.__name__
        if self._count is not None:
            self._count(self._layer(), func, args, out)
        if name in ("_softmax", "_safe_softmax"):
            self._measure_softmax(out, args[1])
        elif name.startswith("_scaled_dot_product") and "backward" not in name:
            self._measure_fused(args[0], args[1], kwargs, _is_causal(name, args, kwargs))
        elif name == "embedding":
            padding = kwargs.get("padding_idx", args[2] if len(args) > 2 else -1)
            self._embedded(self._layer(), len(args[0]), args[1], padding)

    def _measure_softmax(self, weights: Tensor, dim: int) -> None:
        is_last = dim in (-1, weights.ndim - 1)
        if is_last and weights.ndim > 2 and weights.shape[-1] >= MIN_KEYS and weights.shape[-2] > 1:
            is_square = weights.shape[-1] == weights.shape[-2]
            places = torch.arange(weights.shape[-1], device=weights.device) if is_square else None
            self._record(self._layer(), weights, places)

    def _measure_fused(self, q: Tensor, k: Tensor, kwargs: dict[str, Any], is_causal: bool) -> None:
        scale, mask = kwargs.get("scale"), kwargs.get("attn_mask")
        if q.ndim < 3 or k.shape[-2] < MIN_KEYS or q.shape[-2] < 2 or q.shape[-3] % k.shape[-3]:
            return
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)  # grouped-query attention: heads share keys
        places = torch.arange(q.shape[-2], device=q.device)[:: max(1, q.shape[-2] // MAX_QUERIES)]
        scores = q[..., places, :].float() @ k.float().transpose(-1, -2)
        scores = scores * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        if isinstance(mask, Tensor):
            rows = mask[..., places, :] if mask.shape[-2] > 1 else mask
            scores = scores.masked_fill(~rows, -math.inf) if rows.dtype is torch.bool else scores + rows
        if is_causal:
            later = torch.arange(k.shape[-2], device=q.device) > places[:, None]
            scores = scores.masked_fill(later, -math.inf)
        is_square = q.shape[-2] == k.shape[-2]
        self._record(self._layer(), scores.softmax(-1), places if is_square else None)


def _is_causal(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    place = {"_scaled_dot_product_efficient_attention": 6}.get(name, 4)
    given = kwargs.get("is_causal", args[place] if len(args) > place else False)
    return given is True


def low_heads(weights: Tensor) -> Tensor:
    """Share of the heads with a mean entropy below a twentieth of the entropy of uniform attention.

    Args:
        weights: attention weights, `(…, heads, queries, keys)`, each row a distribution; or
            `(batch · heads, queries, keys)`.

    Returns:
        A 0-d tensor, 0..1.
    """
    p = weights.float()
    relative = -torch.special.xlogy(p, p).sum(-1) / math.log(p.shape[-1])
    relative = relative.masked_fill(p.sum(-1) == 0, math.nan)  # queries that are fully masked
    by_head = relative.movedim(-2, 0).flatten(1) if p.ndim > 3 else relative
    share: Tensor = (by_head.nanmean(1) < LOW_ENTROPY).float().mean()
    return share


def is_blind(weights: Tensor) -> Tensor:
    """Whether each query can see a single key at most, the same one in all samples and heads.

    Args:
        weights: see `low_heads`.

    Returns:
        A 0-d bool tensor. Weights that are that sharp because scores are large differ between samples.
    """
    rows = (weights > 0).flatten(0, -3)
    return (rows.sum(-1) <= 1).all() & (rows == rows[:1]).all() & (len(rows) > 1)


def observe_attention(shares_by_layer: dict[str, list[tuple[int, Tensor]]]) -> Iterator[Observation]:
    """Layers with heads that attend to one place only, in each inspected batch."""
    for layer, shares in shares_by_layer.items():
        values = [(step, float(share)) for step, share in shares]
        known = [(step, x) for step, x in values if not math.isnan(x)]
        least = min((x for _, x in known), default=0.0)
        if len(known) >= MIN_BATCHES and least > MAX_LOW_HEADS:
            yield Observation(
                "attn.collapse",
                layer,
                step=known[0][0],
                value=least,
                text=f"At least {least:.0%} of the heads of {as_layer(layer) or 'the model'} attend to one "
                f"place only: its entropy is below {LOW_ENTROPY:.0%} of the entropy of uniform attention.",
                causes=("scores before the softmax are far too large, or are not divided by √d",),
                next_steps=("Divide the scores by √d, and check the size of the query and key weights",),
            )


def observe_blind(blind_by_layer: dict[str, list[tuple[int, Tensor]]]) -> Iterator[Observation]:
    """Layers in which each position can attend to one position only, in each inspected batch."""
    for layer, seen in blind_by_layer.items():
        if len(seen) >= MIN_BATCHES and all(bool(blind) for _, blind in seen):
            yield Observation(
                "mask.blind",
                layer,
                step=seen[0][0],
                text=f"Each position of {as_layer(layer) or 'the model'} attends to at most one position, "
                "the same in all samples and heads, so tokens do not see each other.",
                causes=("a mask that is inverted, or that excludes all positions but one",),
                next_steps=(
                    "Print the mask: in scaled_dot_product_attention True means attend, in "
                    "nn.MultiheadAttention it means do not",
                ),
            )


class OpHooks:
    """Enters an `OpProbe` when the model is called and exits it when the call ends or fails.

    A model that is compiled, in whole or in part, is not measured, because it would run uncompiled. If the
    first call of a model has no attention, it is not measured again.

    Args:
        model: model to measure.
        acts: whether to measure a call that begins.
        in_loop_thread: whether the training makes the call, and not another thread.
        count: is called with each operation of the first call that is measured, see `OpProbe`.
        sequences: is shown the weights of attention layers of torch.
        tokens: is shown what is embedded, and which positions attend to later ones.
        guard: keeps errors out of the forward.

    Attributes:
        step: number of the current batch.
        shares: steps and shares of heads that attend to one place, see `low_heads`, by name of the layer.
        blind: steps and whether each position sees at most one, see `is_blind`, by name of the layer.
        dropping: step of the first validation in which a layer dropped in eval mode, by layer.
        has_looked: whether a whole call of the model was measured.
        is_left_out: whether the model is compiled.
    """

    def __init__(
        self,
        model: nn.Module,
        acts: Callable[[], bool],
        in_loop_thread: Callable[[], bool],
        count: Count | None = None,
        sequences: SequenceAxis | None = None,
        tokens: Tokens | None = None,
        guard: Guard | None = None,
    ) -> None:
        self._acts, self._in_loop_thread, self.step = acts, in_loop_thread, 0
        self._guard = guard = guard or Guard()
        self._count = None if count is None else partial(guard.call, "layer_times", count)
        self.shares: dict[str, list[tuple[int, Tensor]]] = {}
        self.blind: dict[str, list[tuple[int, Tensor]]] = {}
        self._tokens, self._sequences = tokens or Tokens(), sequences
        self._attentions = {
            name: m for name, m in named_modules(model).items() if isinstance(m, nn.MultiheadAttention)
        }
        self.dropping: dict[str, int] = {}
        self._is_wanted = False  # whether the call that begins is to be measured
        self._n_eval, self._eval_step = 0, -1  # calls in eval mode that were measured, and before which batch
        self._evaluated: list[Tensor | None] = []  # hashes of inputs of calls with dropout before that batch
        self._names = {id(m): name for name, m in named_modules(model).items()}
        self._open: list[OpProbe | DropoutProbe] = []
        self.has_looked = False
        self.is_left_out = any(map(is_compiled, model.modules()))
        self._hooks: list[Hook] = []
        if not self.is_left_out:
            self._hooks = [
                Hook(model, self._enter, pre=True, detach=False, gate=self._may_enter),
                # prepended, so that of two diagnoses the last to enter exits first; else torch 2.6 crashes
                Hook(model, self._leave, always_call=True, prepend=True, detach=False, gate=self._may_leave),
            ]
            for hook in self._hooks:
                hook.take_error = self._fail

    def _fail(self, error: Exception) -> None:
        """Notes an error in a hook; the operations of the call are seen no more."""
        self._guard.note("ops", error)
        self._close()

    def _may_enter(self) -> bool:
        """Whether there may be something to measure in a call; False in most, which it must not slow down."""
        if torch.compiler.is_compiling():
            return True
        self._is_wanted = self._acts()
        is_same = self.step == self._eval_step and len(self._evaluated) < MAX_EVALUATED
        is_new = not torch.is_grad_enabled() and (not self._n_eval or (is_same and bool(self.dropping)))
        return (self._is_wanted or is_new) and self._in_loop_thread()

    def _may_leave(self) -> bool:
        return torch.compiler.is_compiling() or (bool(self._open) and self._in_loop_thread())

    def _enter(self, m: nn.Module, args: Any) -> None:
        if not (m.training or torch.is_grad_enabled() or torch.compiler.is_compiling()):
            self._enter_eval(m, args)
            return
        # without attention, measuring would cost as much as the forward, for nothing
        is_done = self.has_looked and not self.shares and not self._tokens.is_under_way
        if torch.compiler.is_compiling() or is_done or not self._is_wanted:
            return
        self._close()
        if not any(map(is_compiled, m.modules())):  # it may have been compiled since
            count = None if self.has_looked else self._count
            embedded = partial(self._guard.call, "tokens", self._tokens.add_indices)
            probe = OpProbe(self._layer, self._record, embedded, count, self._guard)
            probe.__enter__()  # type: ignore[no-untyped-call]
            self._open.append(probe)

    def _enter_eval(self, m: nn.Module, args: Any) -> None:
        """Looks for dropout in the first call in eval mode, and for the same inputs in those that follow."""
        self._close()
        if not self._n_eval or self.dropping:
            self._evaluated.append(hash_of(args))
        modules = list(m.modules())
        if self._n_eval == 0 and not any(x.training or is_compiled(x) for x in modules):
            self._n_eval, self._eval_step = 1, self.step
            probe = DropoutProbe(self._note_dropout, self._guard)
            probe.__enter__()  # type: ignore[no-untyped-call]
            self._open.append(probe)

    @property
    def has_evaluated(self) -> bool:
        """Whether a call in eval mode was measured."""
        return self._n_eval > 0

    def n_alike(self) -> int:
        """How often calls of the first validation had the same inputs; waits for the device."""
        counts = Counter(int(x) for x in self._evaluated if x is not None)
        return max(counts.values(), default=0)

    def _note_dropout(self) -> None:
        self.dropping.setdefault(self._layer(), self.step)

    def _record(self, layer: str, weights: Tensor, places: Tensor | None) -> None:
        self.shares.setdefault(layer, []).append((self.step, low_heads(weights)))
        if self._sequences is not None:
            seen = layer, self._attentions.get(layer), weights
            self._guard.call("sequences", self._sequences.see_attention, *seen)
        if len(blind := self.blind.setdefault(layer, [])) < MIN_BATCHES:
            blind.append((self.step, is_blind(weights)))
        if places is not None:
            self._guard.call("tokens", self._tokens.add_attention, layer, weights, places)

    def _leave(self, m: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            is_measured = any(isinstance(probe, OpProbe) for probe in self._open)
            self.has_looked = self.has_looked or (is_measured and output is not None)
            self._close()

    def _close(self) -> None:
        while self._open:
            self._open.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _layer(self) -> str:
        """Name of the innermost module of the model that is running."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            is_method = frame.f_code.co_varnames[:1] == ("self",)
            if is_method and (name := self._names.get(id(frame.f_locals.get("self")))) is not None:
                return name
            frame = frame.f_back
        return ""

    def remove(self) -> None:
        """Removes the hooks; exits a probe left open by Ctrl-C, after which torch calls no forward hook."""
        self._close()
        for hook in self._hooks:
            hook.remove()
