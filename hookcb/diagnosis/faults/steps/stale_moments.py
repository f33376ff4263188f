"""update.spike: steps of Adam that are far too large, as its second moment is not up to date."""

import math
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookcb.diagnosis.fault import NOTES, Fault, Result, Site, fault
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.shifts import Shifts, compare_from
from hookcb.diagnosis.rules import need_not_fall, rise_of_loss
from hookcb.diagnosis.run import SPARSE_KINDS, Absent, Passed, Run, Skipped
from hookcb.diagnosis.verdict import Finding
from hookcb.gradients.samples import is_native, on_cpu, sketch_copies
from hookcb.hooks.params import find_params

MAX_RMS, N_HIGH = 2.3, 2  # of g / sqrt(v), in so many measured steps in a row
MIN_APART, MAX_APART = 4, 32  # steps between the first and the last of these
N_PARAMS, N_KEPT = 4, 1_024  # matrices that are sampled, and steps that are kept
MIN_RECORDS, FROM_STEP = 8, 64  # before which the moment is young, and each batch is noted
FIXED = ("cross-entropy",)  # losses with fixed targets; errors against values may have targets that move


class _Jump(NamedTuple):
    name: str  # of the parameter
    step: int  # first one with a large RMS
    until: int  # last one
    rms: float
    usual: float  # loss before
    loss: float  # mean of those after
    has_healed: bool


@fault(
    "update.spike",
    Site.OPTIMIZER,
    needs="loss",
    leads_to="loss.* update.too_large act.* unit.* grad.exploding attn.logits attn.collapse nonfinite.*",
    subject="Adam",
)
class StaleMoments(Fault):
    """Steps of Adam that are far too large, as its second moment lags behind gradients that have grown.

    Formula: RMS of g / max(sqrt(v), eps) of a matrix after a step, with the second moment v of Adam and its
    correction for the bias, of up to 1,024 elements of each of four matrices, the first, the last and two
    between them, in one of each 8 steps from step 64 on. Limit: 2.3 in two measured steps in a row, if the
    mean of the 16 losses after the first one is above the median of the 64 before it by six standard errors;
    1 is usual. A note if half of the rise is gone in the end, or if it is no cross-entropy, as targets of
    others may move; not judged if it is of no known kind. Large numbers alone are no finding, nor is a single
    one, as of an unusual batch. Embeddings are left out, as most of their rows get no gradient in a step.
    Only the last 8,000 steps or so are known.

    Inputs or targets that are others for good from one of the 32 steps before on, see `loss.spike`, are told
    beside it.

    Source: Wortsman et al., "Stable and low-precision training for large-scale vision-language models", 2023:
    an RMS above 2.3 precedes spikes of the loss by 1 to 8 steps.
    """

    headline = "Adam's second moment lags behind the gradients"
    passed = "a second moment that lags behind"
    uses = (Curves, Loss, Shifts)
    cadence = NOTES

    def __init__(self) -> None:
        super().__init__()
        self._params: dict[str, nn.Parameter] = {}
        self._kept: deque[tuple[int, tuple[str, ...], Tensor]] = deque(maxlen=N_KEPT)
        self.rms: dict[str, list[tuple[int, float]]] = {}  # with its step, by parameter
        self._is_adam: bool | None = None  # None before the first step

    def on_model(self, run: Run) -> None:
        matrices = {
            name: p
            for name, p, kind in find_params(run.loop.model)
            if p.ndim > 1 and p.requires_grad and kind not in SPARSE_KINDS and is_native(p)
        }
        names = list(matrices)
        chosen = sorted(
            {round(i * (len(names) - 1) / (N_PARAMS - 1)) for i in range(N_PARAMS)} if names else ()
        )
        self._params = {names[i]: matrices[names[i]] for i in chosen}
        self.done = not names

    def on_between(self, run: Run) -> None:
        opt = run.loop.opt
        if opt is None or run.step < FROM_STEP:
            return
        groups = {id(p): group for group in opt.param_groups for p in group["params"]}
        known = {name: p for name, p in self._params.items() if id(p) in groups and has_moments(opt, p)}
        self._is_adam = bool(self._is_adam or known)
        for device in {p.device for p in known.values()}:
            names = tuple(name for name, p in known.items() if p.device == device)
            params = [known[name] for name in names]
            self._kept.append((run.step, names, rms_of(opt, params, [groups[id(p)] for p in params])))

    def tell(self, run: Run) -> None:
        if self._is_adam is False:
            run.lack(Absent("no optimizer has the second moments of Adam"), "Adam")
        self.rms = {}
        kept = list(self._kept)
        for (step, names, _), values in zip(kept, on_cpu([x for *_, x in kept]), strict=True):
            for name, x in zip(names, values.tolist(), strict=True):
                if math.isfinite(x):
                    self.rms.setdefault(name, []).append((step, x))

    def freeze(self) -> None:
        self._params, self._kept = {}, deque()

    def findings(self, run: Run) -> Iterator[Result]:
        if max(map(len, self.rms.values()), default=0) < MIN_RECORDS:
            few = Skipped(f"fewer than {MIN_RECORDS} steps of Adam were measured")
            yield run.why_not("Adam") if "Adam" in run.reasons else few
            return
        if need_not_fall(run):
            yield Skipped("the loss is of no known kind, so it may rise as intended")
            return
        is_fixed = run.measured(Loss).graph_of_one.sure_kind in FIXED
        jumps = [jump for name, rms in self.rms.items() for jump in _jumps(run, name, rms)]
        if jumps:
            yield self._found(run, max(jumps, key=lambda x: (not x.has_healed, x.rms)), is_fixed)
        else:
            largest = max(_persistent(rms) for rms in self.rms.values())
            yield Passed(f"{self.passed} (RMS of g/√v at most {largest:.2g})", largest, MAX_RMS)

    def _found(self, run: Run, jump: _Jump, is_fixed: bool) -> Finding:
        layer, shift = jump.name.rpartition(".")[0], run.measured(Shifts).near(jump.step, MAX_APART)
        before = f" Before that, {shift.text}." if shift else ""
        return self.finding(
            f"The gradient of {jump.name} is {jump.rms:.2g} times the root of Adam's second moment from step "
            f"{jump.step} on (limit {MAX_RMS}; 1 is usual), and the loss then rises from {jump.usual:.3g} to "
            f"{jump.loss:.3g}{' for a while' if jump.has_healed else ''}.{before}",
            "info" if jump.has_healed or not is_fixed else "warning",
            at=layer,
            param=jump.name,
            when=(jump.step, jump.until),
            value=jump.rms,
            limit=MAX_RMS,
            causes=(
                "gradients that have grown faster than the second moment can follow at this β₂",
                "a change of clipping, of the scale of the loss, or of the data at that step",
            ),
            next_steps=(
                *([compare_from(shift.step)] if shift else []),
                "Lower β₂: betas=(0.9, 0.95), so that the second moment follows within 20 steps",
                "Divide the update by max(1, RMS), as StableAdamW does",
            ),
        )


def has_moments(opt: Optimizer, p: nn.Parameter) -> bool:
    """Whether an optimizer has a second moment of a parameter, and this a gradient."""
    state = opt.state.get(p, {})
    moment = state.get("exp_avg_sq")
    is_plain = p.grad is not None and p.grad.layout is torch.strided and is_native(p.grad)
    return is_plain and isinstance(moment, Tensor) and moment.shape == p.shape and "step" in state


def rms_of(opt: Optimizer, params: list[nn.Parameter], groups: list[dict[str, Any]]) -> Tensor:
    """RMS of g / max(sqrt(v), eps) of each parameter after a step, `(n,)`, on their device."""
    grads = sketch_copies([p.grad for p in params if p.grad is not None])
    states = [opt.state[p] for p in params]
    moments = sketch_copies([state.get("max_exp_avg_sq", state["exp_avg_sq"]) for state in states])
    lengths = torch.tensor([len(x) for x in grads], device="cpu")
    owners = torch.repeat_interleave(lengths).to(grads[0].device, non_blocking=True)
    g, v = torch.cat(grads), torch.cat(moments)
    corrections = [
        1 - group["betas"][1] ** _step_of(state) for state, group in zip(states, groups, strict=True)
    ]
    least = [group["eps"] ** 2 for group in groups]
    squares = g.square() / (v / _on(g, corrections)[owners]).maximum(_on(g, least)[owners])
    sums = g.new_zeros(len(params)).index_add_(0, owners, squares)
    return (sums / lengths.to(g.device, non_blocking=True)).sqrt()


def _step_of(state: dict[str, Any]) -> Any:
    """Number of steps of a parameter; on the device if it is counted there, as reading would wait for it."""
    step = state["step"]
    return step if isinstance(step, Tensor) and not step.is_cpu else float(step)


def _on(x: Tensor, numbers: list[Any]) -> Tensor:
    """Numbers as a tensor on the device of `x`."""
    if any(isinstance(number, Tensor) for number in numbers):
        return torch.stack([torch.as_tensor(number, device=x.device).to(x.dtype) for number in numbers])
    return torch.tensor(numbers, dtype=x.dtype, device="cpu").to(x.device, non_blocking=True)


def _persistent(rms: list[tuple[int, float]]) -> float:
    """Largest number that two measured steps in a row reach."""
    return max((min(a, b) for (_, a), (_, b) in pairwise(rms)), default=math.nan)


def _jumps(run: Run, name: str, rms: list[tuple[int, float]]) -> Iterator[_Jump]:
    """Times at which the RMS is too large and the loss rises."""
    for (first, a), (last, b) in pairwise(rms):
        is_high = min(a, b) > MAX_RMS and MIN_APART <= last - first <= MAX_APART
        if is_high and (rise := rise_of_loss(run, first)) is not None:
            yield _Jump(name, first, last, max(a, b), *rise)
