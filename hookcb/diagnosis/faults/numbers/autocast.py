"""amp.outside: layers that compute in float32 or float64 though the loop has opened torch.autocast."""

from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hookcb.core.call_hook import CallHook
from hookcb.core.text import as_layer, join_names
from hookcb.core.torch_private import Convolution, compile_counts
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.frame import LOW_PRECISION, own_weight
from hookcb.diagnosis.run import Absent, Passed, Run, Skipped
from hookcb.hooks.modules import named_modules

N_LOOKS, MIN_LOOKS = 8, 3  # batches that are read; in all of which the model is outside
MAX_OUTSIDE = 1 / 3  # share of the multiplications of these layers


@fault("amp.outside", Site.MODULES, needs="activations batches", exact=True)
class OutsideAutocast(Fault):
    """Linear and convolutional layers in float32 or float64 though the loop has opened `torch.autocast`.

    Exact: a layer that is trained gives float32 where autocast is on, or is called where it is off while
    other layers, or the model, are called where it is on. A warning if these layers make a third or more of
    the multiplications, and are not the last one only; else a note, as a head may be kept in float32 on
    purpose, or if the model is called where it is off, and opens it for a part by itself. Or in each of
    three batches or more all layers are called where it is off, and the loop opens it between the model and
    the backward, as around the loss only: a warning. Norms, softmax and losses are in float32 by autocast
    itself. A layer with weights in float64 is a warning wherever autocast is on, as autocast leaves float64
    as it is; within autocast(enabled=False) that is on purpose.

    Source: PyTorch, "Automatic Mixed Precision package", Autocast Op Reference.
    """

    headline = "Layers run outside of autocast"
    passed = "layers outside of autocast"

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[str, int] = {}  # numbers of multiplications, of layers in their order
        self._is_outside: dict[str, bool] = {}
        self._doubles: list[str] = []  # layers with weights in float64, where autocast is on
        self._uses_autocast = False  # whether any layer, or the model, was called in it
        self._is_of_model = False  # whether the model itself opens it, for a part, as it was not called in it
        self._n_looks = self._n_opened = 0  # batches; those in which it was opened after the model was called
        self._device = ""
        # in this batch: whether a layer was called, the model has ended, and autocast was opened after that
        self._is_called = self._is_over = self._is_opened = False
        self._hook: CallHook | None = None
        self._trained: set[int] = set()

    def on_model(self, run: Run) -> None:
        layers = [m for m in named_modules(run.loop.model).values() if isinstance(m, nn.Linear | Convolution)]
        self._trained = {id(m) for m in layers if (w := own_weight(m)) is not None and w.requires_grad}
        self.done = not self._trained

    def on_batch(self, run: Run) -> None:
        self._is_called = self._is_over = self._is_opened = False
        if run.looking and self._hook is None and not compile_counts("frames"):  # else it may compile anew
            self._hook = CallHook(torch.autocast, "__enter__", self._see_open, self.failed)

    def _see_open(self, context: torch.autocast, *args: Any, **kwargs: Any) -> Generator[None, Any, None]:
        yield
        self._is_opened |= self._is_over and torch.is_autocast_enabled(context.device)

    def on_output(self, run: Run, name: str, m: nn.Module, output: Any) -> None:
        if torch.compiler.is_compiling() or id(m) not in self._trained or not isinstance(output, Tensor):
            return
        self._device = device = output.device.type
        is_on, self._is_called = torch.is_autocast_enabled(device), True
        self._uses_autocast |= is_on
        if (weight := own_weight(m)) is None:
            return
        if is_on and weight.dtype == output.dtype == torch.float64 and name not in self._doubles:
            self._doubles.append(name)
        if weight.dtype == torch.float32:
            self._sizes.setdefault(name, output.numel() * (weight.numel() // weight.shape[0]))
            self._is_outside[name] = output.dtype == torch.float32
            self._uses_autocast |= output.dtype in LOW_PRECISION  # opened by the layer itself

    def on_prediction(self, run: Run) -> None:
        is_on = bool(self._device) and torch.is_autocast_enabled(self._device)
        self._is_of_model, self._is_over = self._uses_autocast and not is_on, self._is_called
        self._uses_autocast |= is_on

    def on_gradients(self, run: Run) -> None:
        self._remove()
        self._n_looks, self._n_opened = self._n_looks + self._is_called, self._n_opened + self._is_opened
        self.done = self._n_looks >= N_LOOKS

    def _remove(self) -> None:
        hook, self._hook = self._hook, None
        if hook is not None:
            hook.remove()

    def on_batch_end(self, run: Run) -> None:
        self._remove()

    def close(self, run: Run) -> None:
        self._remove()

    def freeze(self) -> None:
        self._trained = set()

    def findings(self, run: Run) -> Iterator[Result]:
        outside, total = [name for name, x in self._is_outside.items() if x], sum(self._sizes.values())
        if self._n_looks >= MIN_LOOKS and self._doubles:
            n = len(self._doubles)
            yield self.finding(
                f"{n} linear and convolutional layers compute in float64 inside of autocast, which leaves "
                f"float64 as it is: {join_names(map(as_layer, self._doubles), 4)}.",
                "warning",
                at=self._doubles[0],
                value=float(n),
                limit=0.0,
                causes=("double() of a part of the model, or weights or inputs from NumPy, in float64",),
                next_steps=("Keep these layers and their inputs in float32: call .float() on both",),
            )
        elif self._n_looks < MIN_LOOKS or not total:
            yield Skipped(
                f"fewer than {MIN_LOOKS} batches with linear or convolutional layers were inspected"
            )
        elif self._uses_autocast and outside:
            body = [name for name in outside if name != next(reversed(self._sizes))]
            share = sum(self._sizes[name] for name in outside) / total
            is_note = not body or share < MAX_OUTSIDE or self._is_of_model
            where = "while the model opens autocast for others" if self._is_of_model else "inside of autocast"
            note = " That may be on purpose, as for a head." if is_note else ""
            yield self.finding(
                f"{len(outside)} of {len(self._sizes)} linear and convolutional layers, with {share:.0%} of "
                f"their multiplications (limit {MAX_OUTSIDE:.0%}), compute in float32 {where}: "
                f"{join_names(map(as_layer, outside), 4)}.{note}",
                "info" if is_note else "warning",
                at=(body or outside)[0],
                value=share,
                limit=MAX_OUTSIDE,
                causes=(
                    "autocast(enabled=False) around them, or a forward that casts to float32",
                    "a torch.autograd.Function without torch.amp.custom_fwd",
                ),
                next_steps=("Call these layers where autocast is on, without .float() on their inputs",),
            )
        elif self._n_opened == self._n_looks and not self._uses_autocast:
            yield self.finding(
                f"In all {self._n_looks} inspected batches the model is called outside of torch.autocast, "
                "which the loop opens only after that, so all layers compute in float32.",
                "warning",
                value=1.0,
                limit=MAX_OUTSIDE,
                causes=("with torch.autocast(…) around the loss only",),
                next_steps=("Call the model inside of torch.autocast, too; the backward outside",),
            )
        elif not self._uses_autocast:
            yield Absent("the model is not called in torch.autocast")
        else:
            yield Passed(self.passed)
