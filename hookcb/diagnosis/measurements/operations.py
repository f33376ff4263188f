"""Operations: attention, embeddings and dropout inside of the forward, operation by operation."""

import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from hookcb.core.text import join_names
from hookcb.core.torch_private import DispatchMode
from hookcb.diagnosis.compiled_graphs import ATTENTION, CHOICE, IN_CUDA_GRAPHS, SCORES, uncompiled_parts
from hookcb.diagnosis.fault import EVERY, Measurement
from hookcb.diagnosis.measurements.replicas import hash_of
from hookcb.diagnosis.run import Absent, Partial, Run, Skipped
from hookcb.hooks.hook import Hook
from hookcb.hooks.modules import is_compiled, named_modules

MIN_BATCHES = 3  # in which attention is seen
MIN_KEYS = 4
MAX_EVALUATED = 64  # calls in eval mode whose inputs are compared
MAX_QUERIES = 32  # inspected for each head
PRODUCTS = {"mm": False, "addmm": False, "bmm": True, "baddbmm": True}  # of matrices, whether of batches
CHOICES = ("topk", "max", "argmax")
OF_TOKENS = (  # what compiled code hides, see `Run.lack`
    *("indices of embeddings", "tokens that are targets", "masks of the tokens", "padding of the tokens"),
)
OF_ATTENTION = ("attn.logits", "attn.collapse", "mask.blind")
AGAIN = "train 100 steps without torch.compile to see all"
Told = Callable[..., object]


class Operations(Measurement):
    """Shows attention and embeddings in forwards of the model to what listens, and sees dropout in eval mode.

    Of the inspected batches it measures the first three, others when their number has doubled, and each while
    a listener asks for more, as operations that are seen in Python take three times as long. A model that is
    compiled, in whole or in part, would run uncompiled, so only what `GraphEditor` shows of it is seen:
    scaled_dot_product_attention and choices. If the first call of a model has no attention, it is not
    measured again.
    """

    cadence = EVERY

    def __init__(self) -> None:
        # parts that have any of these methods: `see_attention(layer, module, weights)`, where the module is
        # that of torch, if it is one; `see_logits(layer, largest)`, the largest logit of attention that the
        # mask leaves; `add_attention(layer, weights, places)`, see `_record`;
        # `see_choice(layer, n, chosen, k)`, indices of the k largest of n numbers of the last dimension;
        # `add_indices(layer, n_rows, indices, padding)` of an embedding; `add_work(layer, operation, args,
        # result)` of each operation of the first forward. While one of them has a true `is_under_way`, a
        # model without attention is measured too.
        self.listeners: list[Any] = []
        self.n_seen: Counter[str] = Counter()  # calls of attention, by layer
        self.dropping: dict[str, int] = {}  # step of the first validation in which a layer dropped, by layer
        self.n_alike = 0  # calls of the first validation that had the same inputs
        self.has_attention = self.has_evaluated = self.has_looked = self.is_left_out = False
        self._uncompiled: list[str] = []  # names of parts
        self._hidden: dict[str, str] = {}  # what compiled code hides, with a layer of that
        self.unseen = ""  # why part of the operations is not seen, as the model is compiled
        self._n_inspected = self._last_measured = 0  # batches, and which of these was measured last
        self._loop: Any = None
        self._is_forward = False  # a later forward is a recomputation by activation checkpointing
        self._is_wanted = False  # whether the call that begins is to be measured
        self._step, self._eval_step = 0, -1  # of the current batch, and of that before the first validation
        self._evaluated: list[Tensor | None] = []  # hashes of inputs of calls with dropout before that batch
        self._names: dict[int, str] = {}
        self._attentions: dict[str, nn.MultiheadAttention] = {}
        self._probe: OpProbe | None = None
        self._is_eval = False  # whether it is that of the first call in eval mode
        self._kept: Any = None  # share of elements that the operation before has kept there
        self._is_batched = False  # whether the last product of matrices was one of batches, as of attention
        self._hooks: list[Hook] = []

    def on_model(self, run: Run) -> None:
        self._loop, model = run.loop, run.loop.model
        modules = named_modules(model)
        self._names = {id(m): name for name, m in modules.items()}
        self._attentions = {name: m for name, m in modules.items() if isinstance(m, nn.MultiheadAttention)}
        self.is_left_out = any(map(is_compiled, model.modules()))
        self._uncompiled = uncompiled_parts(model) if self.is_left_out else []
        if not self.is_left_out:
            enter = Hook(model, self._enter, pre=True, detach=False, gate=self._may_enter)
            # prepended, so that of two diagnoses the last to enter exits first; else torch 2.6 crashes
            leave = Hook(
                model, self._leave, always_call=True, prepend=True, detach=False, gate=self._may_leave
            )
            enter.take_error = leave.take_error = self._take_error
            self._hooks = [enter, leave]

    def on_batch(self, run: Run) -> None:
        self._step, self._is_forward = run.step, run.looking and self._is_due()

    def _is_due(self) -> bool:
        """Whether to measure the inspected batch that begins; counts it."""
        self._n_inspected += 1
        n, is_doubled = self._n_inspected, self._n_inspected >= 2 * self._last_measured
        is_due = n <= MIN_BATCHES or is_doubled or self._is_open
        self._last_measured = n if is_due else self._last_measured
        return is_due

    @property
    def _is_open(self) -> bool:
        """Whether a listener asks for more."""
        return any(getattr(listener, "is_under_way", False) for listener in self.listeners)

    def on_compiled_operation(
        self, run: Run, layer: str, what: str, xs: Sequence[Tensor] | None, numbers: Sequence[float]
    ) -> None:
        """Shows attention or a choice in compiled code; without tensors, notes what that hides."""
        if xs is None and what != SCORES:
            self._hidden.setdefault(what, layer)
        if xs is None or not self._is_forward:
            return
        with torch.no_grad(), torch.autocast(xs[0].device.type, enabled=False):
            if what == ATTENTION:
                (q, k, *masks), (is_causal, scale) = xs, numbers
                mask = masks[0] if masks else None
                self._see_fused(layer, q, k, mask, is_causal == 1, None if math.isnan(scale) else scale)
            elif what == CHOICE:
                self._show("see_choice", layer, int(numbers[0]), xs[0], int(numbers[1]))

    def on_backward(self, run: Run) -> None:
        self._is_forward = False

    on_batch_end = on_backward

    def _take_error(self, error: Exception) -> None:
        """Keeps an error in a hook; the operations of the call are seen no more."""
        self.failure = self.failure or error
        self._close()

    def _guarded(self, function: Told, *args: Any) -> None:
        if self.failure is None:
            try:
                function(*args)
            except Exception as error:  # the forward must go on
                self.failure = error

    def _show(self, event: str, *args: Any) -> None:
        for listener in self.listeners:
            if listener.failure is None and (see := getattr(listener, event, None)) is not None:
                try:
                    see(*args)
                except Exception as error:  # likewise
                    listener.failure = error

    @property
    def _in_loop_thread(self) -> bool:
        return self._loop is not None and bool(self._loop.in_loop_thread)

    def _may_enter(self) -> bool:
        """Whether there may be something to measure in a call; False in most, which it must not slow down."""
        if torch.compiler.is_compiling():
            return True
        self._is_wanted = self._is_forward and self._loop is not None and self._loop.training
        is_same = self._step == self._eval_step and len(self._evaluated) < MAX_EVALUATED
        is_first = not self.has_evaluated or (is_same and bool(self.dropping))
        return (self._is_wanted or (is_first and not torch.is_grad_enabled())) and self._in_loop_thread

    def _may_leave(self) -> bool:
        return torch.compiler.is_compiling() or (self._probe is not None and self._in_loop_thread)

    def _enter(self, m: nn.Module, args: Any) -> None:
        if not (m.training or torch.is_grad_enabled() or torch.compiler.is_compiling()):
            self._enter_eval(m, args)
            return
        # without attention, measuring would cost as much as the forward, for nothing
        is_done = self.has_looked and not self.n_seen and not self._is_open
        if torch.compiler.is_compiling() or is_done or not self._is_wanted:
            return
        self._close()
        if not any(map(is_compiled, m.modules())):  # it may have been compiled since
            self._start(self._see)

    def _enter_eval(self, m: nn.Module, args: Any) -> None:
        """Looks for dropout in the first call in eval mode, and for the same inputs in those that follow."""
        self._close()
        if not self.has_evaluated or self.dropping:
            self._evaluated.append(hash_of(args))
        if not self.has_evaluated and not any(x.training or is_compiled(x) for x in m.modules()):
            self.has_evaluated, self._eval_step = True, self._step
            self._start(self._see_eval)

    def _start(self, see: Told) -> None:
        probe = OpProbe(partial(self._guarded, see))
        probe.__enter__()  # type: ignore[no-untyped-call]
        self._probe, self._kept, self._is_eval = probe, None, see == self._see_eval

    def _record(self, layer: str, weights: Tensor, places: Tensor | None) -> None:
        """Shows attention weights `(…, queries, keys)`; with `places` of queries if it is self-attention."""
        self.n_seen[layer] += 1
        self._show("see_attention", layer, self._attentions.get(layer), weights)
        if places is not None:
            self._show("add_attention", layer, weights, places)

    def _leave(self, m: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self.has_looked |= self._probe is not None and not self._is_eval and output is not None
            self._close()

    def _close(self) -> None:
        probe, self._probe = self._probe, None
        if probe is not None:
            probe.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Sees attention and embeddings; for work, each operation of the first forward."""
        name = func.overloadpacket.__name__
        if not self.has_looked:
            self._show("add_work", self._layer(), func, args, out)
        if name in ("_softmax", "_safe_softmax") and args[1] in (-1, out.ndim - 1) and out.ndim > 2:
            n_queries, n_keys = out.shape[-2:]
            if n_keys >= MIN_KEYS and n_queries > 1:
                places = torch.arange(n_keys, device=out.device) if n_keys == n_queries else None
                self._record(layer := self._layer(), out, places)
                if self._is_batched:  # else of a router, or of a head
                    self._show_logits(layer, args[0][..., :: max(1, n_queries // MAX_QUERIES), :])
        elif name.startswith("_scaled_dot_product") and "backward" not in name:
            place = 6 if name == "_scaled_dot_product_efficient_attention" else 4
            is_causal = kwargs.get("is_causal", args[place] if len(args) > place else False) is True
            mask, scale = kwargs.get("attn_mask"), kwargs.get("scale")
            self._see_fused(self._layer(), args[0], args[1], mask, is_causal, scale)
        elif name in CHOICES:
            if args[0].ndim > 1 and (found := chosen(name, args, kwargs, out)) is not None:
                k = found.shape[-1] if found.ndim == args[0].ndim else 1
                self._show("see_choice", self._layer(), args[0].shape[-1], found, k)
        elif name in PRODUCTS:
            self._is_batched = PRODUCTS[name]
        elif name == "embedding":
            padding = kwargs.get("padding_idx", args[2] if len(args) > 2 else -1)
            self._show("add_indices", self._layer(), len(args[0]), args[1], padding)

    def _see_fused(
        self, layer: str, q: Tensor, k: Tensor, mask: Any, is_causal: bool, scale: float | None
    ) -> None:
        if q.ndim < 3 or k.shape[-2] < MIN_KEYS or q.shape[-2] < 2 or q.shape[-3] % k.shape[-3]:
            return
        is_square = q.shape[-2] == k.shape[-2]
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
        self._record(layer, scores.softmax(-1), places if is_square else None)
        self._show_logits(layer, scores)

    def _show_logits(self, layer: str, logits: Tensor) -> None:
        if any(hasattr(listener, "see_logits") for listener in self.listeners):
            self._show("see_logits", layer, logits.amax().float())

    def _see_eval(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Sees dropout in a forward without gradients: Bernoulli numbers, divided by their p."""
        name = func.overloadpacket.__name__
        kept, self._kept = self._kept, None
        is_whole = name == "native_dropout" and args[1] > 0 and args[2] is not False
        is_scaled = name == "div_" and isinstance(kept, float) and 0 < kept < 1 and args[1] == kept
        # of a fused attention, it is the first argument of this type
        p = next((x for x in args if isinstance(x, float)), 0.0)
        if is_whole or is_scaled or (name.startswith("_scaled_dot_product") and p > 0):
            self.dropping.setdefault(self._layer(), self._step)
        if name == "bernoulli_":
            self._kept = args[1] if len(args) > 1 else 0.5  # the default, which torch leaves out

    def _layer(self) -> str:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            is_method = frame.f_code.co_varnames[:1] == ("self",)
            if is_method and (name := self._names.get(id(frame.f_locals.get("self")))) is not None:
                return name
            frame = frame.f_back
        return ""

    def tell(self, run: Run) -> None:
        counts = Counter(int(x) for x in self._evaluated if x is not None)
        self.n_alike = max(counts.values(), default=0)
        self.has_attention = any(n >= MIN_BATCHES for n in self.n_seen.values())
        if self.is_left_out:
            self._tell_of_compiled(run)
        elif self.has_looked and not self.n_seen and self.failure is None:
            run.lack(Absent("the model has no attention operations"), "attention")
            run.lack(Skipped("no attention was seen, so masks were not checked"), "masks of the tokens")

    def _tell_of_compiled(self, run: Run) -> None:
        run.lack(Skipped("the model is compiled, which hides its embeddings"), *OF_TOKENS)
        if self._uncompiled:
            self.unseen = f"parts that are not compiled were not looked at: {join_names(self._uncompiled, 3)}"
        elif IN_CUDA_GRAPHS in self._hidden:
            self.unseen = f"compiled code hides {IN_CUDA_GRAPHS}; {AGAIN}"
        hidden = [f"{what} (layer {layer})" if layer else what for what, layer in self._hidden.items()]
        none = f"the model is compiled, and no scaled_dot_product_attention was seen; {AGAIN}"
        unseen = f"compiled code hides {join_names(hidden, 3)}; {AGAIN}" if hidden else self.unseen
        if not self.has_attention:
            run.lack(Skipped(unseen or none), "attention")
        elif unseen:
            run.lack(Partial(unseen), *OF_ATTENTION)

    def close(self, run: Run) -> None:
        """Removes the hooks; exits a probe left open by Ctrl-C, after which torch calls no forward hook."""
        self._close()
        for hook in self._hooks:
            hook.remove()

    def freeze(self) -> None:
        self.listeners, self._evaluated, self._hooks = [], [], []
        self._loop, self._names, self._attentions = None, {}, {}


def chosen(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Tensor | None:
    """Indices that an operation has chosen over the last dimension of its input; None if it is no choice."""
    place, default = (2, -1) if name == "topk" else (1, None)
    dim = kwargs.get("dim", args[place] if len(args) > place else default)
    indices = out if name == "argmax" else out[1] if isinstance(out, tuple | list) else None
    is_last = isinstance(dim, int) and dim in (-1, args[0].ndim - 1)
    return indices if is_last and isinstance(indices, Tensor) else None


class OpProbe(DispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Shows each operation of a forward, with its arguments and its result."""

    def __init__(self, see: Told) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._see(func, args, kwargs or {}, out)
        return out
