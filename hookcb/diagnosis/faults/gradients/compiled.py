"""grad.compiled: a model whose gradients differ when it runs compiled and when it does not."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed

from hookcb.core.batch import called, parts
from hookcb.core.randomness import set_random_state
from hookcb.core.restore import (
    preserve_attribute,
    preserve_counts,
    preserve_modes,
    preserve_random,
    preserve_values,
)
from hookcb.core.torch_private import is_dynamo_imported
from hookcb.diagnosis.fault import EVERYTHING, Fault, Result, Site, fault
from hookcb.diagnosis.run import Absent, Run
from hookcb.hooks.modules import is_compiled
from hookcb.nans.replay import BatchStart, BatchStarts, autocasts, observing_taps

MAX_DIFFERENCE, ROUNDINGS = 1e-2, 16  # of a gradient's norm, and units of rounding of a lower precision
FAINT, FAINT_ROUNDINGS = 1e-4, 64  # share of the largest RMS below which a gradient may be rounding alone
OWN = 0.1  # share of the limit by which two runs without torch.compile may differ
OPT_IN = "compiled and uncompiled gradients are compared by Diagnose(compare_compiled=True)"


@fault("grad.compiled", Site.GRADIENTS, needs="batches", leads_to=f"{EVERYTHING} param.* train.*")
class CompiledGradients(Fault):
    """Gradients that torch.compile changes, or drops.

    Formula: ‖compiled - eager‖ / ‖eager‖ of a parameter's gradient, of one batch from the same state, for
    random gradients of the model's output; a gradient that is smaller than 1e-4 of the largest (64 units of
    rounding in low precision), by RMS, is divided by that. Limit: 1e-2, or 16 units of rounding. Only with
    `compare_compiled=True`, as it takes the memory and time of a few batches. It runs before the first step
    of the optimizer; random state, buffers, modes and gradients are restored. Not told if the forward draws
    random numbers, which compiled code may draw in another order, or if two runs without torch.compile
    differ, too; not with several processes.

    Source: the limit is a choice; `torch.finfo` has the unit of rounding of a dtype.
    """

    headline = "A gradient differs under torch.compile"
    passed = "gradients that torch.compile changes"
    unless = "no step of an optimizer was seen"

    def __init__(self) -> None:
        super().__init__()
        self.is_wanted = False
        self._xb: Any = None  # until the step of the first batch
        self._start: BatchStart | None = None

    def on_model(self, run: Run) -> None:
        if not (is_dynamo_imported() and any(map(is_compiled, run.loop.model.modules()))):
            run.lack(Absent("the model is not compiled"), self.code)
            self.unless = "the model is not compiled"
        elif not self.is_wanted:
            self.unless = OPT_IN
        elif distributed.is_available() and distributed.is_initialized():
            self.unless = "other processes take part in each call of the model"
        self.done = not self.is_wanted or self.unless != type(self).unless

    def on_batch(self, run: Run) -> None:
        if self._start is None and run.looking:
            self._start = BatchStarts().note(run.loop)

    def on_prediction(self, run: Run) -> None:
        if self._start is not None and self._xb is None:
            self._start.autocasts = autocasts(run.loop.model)

    def on_gradients(self, run: Run) -> None:
        if self._xb is None and self._start is not None:
            self._xb = run.loop.xb

    def on_step(self, run: Run) -> None:
        xb, start = self._xb, self._start
        if xb is not None and start is not None:
            self.freeze()
            self.done = True
            self._compare(run, xb, start)

    def freeze(self) -> None:
        self._xb = self._start = None

    def findings(self, run: Run) -> Iterator[Result]:
        unless: Any = self.unless
        if isinstance(known := run.reasons.get(self.code), Absent):
            unless = known
        return self.told(run, self.seen, unless)

    def _compare(self, run: Run, xb: Any, start: BatchStart) -> None:
        named = [(name, p) for name, p in run.loop.model.named_parameters() if p.requires_grad]
        params = [p for _, p in named]
        with _at_start(run.loop.model, start):
            compiled, _ = _gradients(run.loop.model, xb, start, params)
        with _at_start(run.loop.model, start), _uncompiled():
            eager, is_random = _gradients(run.loop.model, xb, start, params)
        eps = max([_rounding(p.dtype) for p in params] + [_rounding(d) for _, on, d in start.autocasts if on])
        limit = max(MAX_DIFFERENCE, ROUNDINGS * eps)
        apart = _differences(compiled, eager, max(FAINT, FAINT_ROUNDINGS * eps))
        worst = max(apart, default=0.0)
        if not math.isfinite(worst):
            self.unless = "gradients were not finite, so compiled ones were not compared"
        elif worst <= limit:
            self.unless = ""
        elif is_random:
            self.unless = "the forward draws random numbers, and compiled code may draw others"
        else:
            with _at_start(run.loop.model, start), _uncompiled():
                again, _ = _gradients(run.loop.model, xb, start, params)
            if max(_differences(again, eager, max(FAINT, FAINT_ROUNDINGS * eps))) > OWN * limit:
                self.unless = "two runs without torch.compile differ, so compiled gradients were not compared"
                return
            self._see(run, [name for name, _ in named], compiled, apart, limit)

    def _see(
        self, run: Run, names: list[str], compiled: list[Tensor], apart: list[float], limit: float
    ) -> None:
        wrong = [i for i, x in enumerate(apart) if x > limit]
        at = max(wrong, key=apart.__getitem__)
        is_lost = not bool(compiled[at].any())
        name, others = names[at].replace("_orig_mod.", ""), len(wrong) - 1
        more = f", as do those of {others} more parameters" if others > 1 else ""
        how = "is zero" if is_lost else f"differs by {apart[at]:.2g} of its norm"
        self.see(
            f"With torch.compile the gradient of {name} {how}, compared with the same batch without it "
            f"(limit {limit:.2g}){more}.",
            at=name.rpartition(".")[0],
            param=name,
            when=run.step,
            value=apart[at],
            limit=limit,
            causes=("a fault of the compiler's backend, or a custom operation with a wrong backward",),
            next_steps=(
                "Train without torch.compile, or with backend='aot_eager' to tell whether the backend is at "
                "fault; exclude the layer with torch.compiler.disable",
            ),
        )


@contextmanager
def _at_start(model: torch.nn.Module, start: BatchStart) -> Iterator[None]:
    """Runs a block in the state in which the batch began, and restores everything but the caches of torch."""
    with ExitStack() as stack:
        for restored in (
            preserve_random(),
            preserve_modes(model),
            preserve_counts(model),
            preserve_values(list(model.buffers()), only_changed=True),
            preserve_attribute(observing_taps(model), "hook", None),
            start.autocast(),
            torch.enable_grad(),
        ):
            stack.enter_context(restored)
        set_random_state(start.random_state())
        yield


def _gradients(
    model: torch.nn.Module, xb: Any, start: BatchStart, params: list[Tensor]
) -> tuple[list[Tensor], bool]:
    """Gradients for random ones of the outputs, and whether the forward drew random numbers."""
    out = called(model, xb)
    known = {"torch": [start.random["torch"]], "cuda": start.random.get("cuda", [])}
    now = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if known["cuda"] else [])]
    drew = not all(map(torch.equal, now, [*known["torch"], *known["cuda"]]))
    outputs = [x for _, x in parts(out) if isinstance(x, Tensor) and x.requires_grad]
    generator = torch.Generator("cpu").manual_seed(0)
    given = [torch.randn(x.shape, generator=generator, device="cpu").to(x) for x in outputs]
    grads = torch.autograd.grad(outputs, params, given, allow_unused=True)
    return [
        torch.zeros_like(p) if g is None else g.detach().clone() for p, g in zip(params, grads, strict=True)
    ], drew


def _differences(found: list[Tensor], eager: list[Tensor], faint: float) -> list[float]:
    """Norm of the difference / norm of the gradient, of each parameter."""
    pairs = [(a.float(), b.float()) for a, b in zip(found, eager, strict=True) if b.numel()]
    sizes = [float(b.square().mean().sqrt()) for _, b in pairs]
    least = faint * max(sizes, default=0.0)
    apart = [float((a - b).square().mean().sqrt()) for a, b in pairs]
    return [x / max(size, least) if x else 0.0 for x, size in zip(apart, sizes, strict=True)]


def _rounding(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def _uncompiled() -> AbstractContextManager[Any]:
    return torch.compiler.set_stance("force_eager") if is_dynamo_imported() else nullcontext()
