"""update.lost_to_rounding: updates that are smaller than the spacing of low-precision numbers."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from hookcb.diagnosis.fault import Fault, Site, fault
from hookcb.diagnosis.frame import LOW_PRECISION
from hookcb.diagnosis.run import Run
from hookcb.gradients.samples import on_cpu, sketch_copies
from hookcb.hooks.params import named_params

MAX_LOST = 0.5  # share of the weights
MIN_STEPS = 3


class _Sample(NamedTuple):  # of weights on one device, before a step
    names: list[str]
    lengths: list[int]
    weights: Tensor
    has_grad: Tensor


@fault(
    "update.lost_to_rounding",
    Site.OPTIMIZER,
    needs="steps",
    leads_to="param.not_stepped loss.flat loss.trivial update.too_small",
    subject="low precision",
    exact=True,
)
class LostToRounding(Fault):
    """Low-precision weights whose updates are smaller than the spacing of their numbers, so rounding drops them.

    Formula: share of weights with a gradient that are bit-identical after a step > 0.5, in each of at least
    three inspected steps.

    Source: Micikevicius et al., Mixed Precision Training, 2018, section 3.1.
    """  # noqa: E501

    headline = "Updates are lost to rounding"
    passed = "updates lost to rounding"
    unless = "too little was seen of the weights around a step"

    def __init__(self) -> None:
        super().__init__()
        self._params: dict[str, nn.Parameter] = {}
        self._before: dict[torch.device, _Sample] = {}
        self.shares: dict[str, list[tuple[int, Tensor]]] = {}  # by step

    def on_model(self, run: Run) -> None:
        params = named_params(run.loop.model)
        self._params = {name: p for name, p in params.items() if p.dtype in LOW_PRECISION and p.ndim > 1}

    def on_step(self, run: Run) -> None:
        self._before, known = {}, [(name, p) for name, p in self._params.items() if p.grad is not None]
        for device in {p.device for _, p in known}:
            names = [name for name, p in known if p.device == device]
            weights = sketch_copies([self._params[name] for name in names])
            grads = sketch_copies([g for name in names if (g := self._params[name].grad) is not None])
            lengths = [len(x) for x in weights]
            self._before[device] = _Sample(names, lengths, torch.cat(weights), torch.cat(grads) != 0)

    def on_cancel(self, run: Run, level: str) -> None:
        if level == "step":
            self._before = {}

    def on_between(self, run: Run) -> None:
        for device, before in self._before.items():
            now = torch.cat(sketch_copies([self._params[name] for name in before.names]))
            flags = torch.stack([(now == before.weights) & before.has_grad, before.has_grad], 1).float()
            owners = torch.repeat_interleave(torch.tensor(before.lengths, device="cpu"))
            counts = flags.new_zeros(len(before.names), 2)
            counts.index_add_(0, owners.to(device, non_blocking=True), flags)
            shares = counts[:, :1] / counts[:, 1:].clamp(min=1)
            for name, share in zip(before.names, shares, strict=True):
                self.shares.setdefault(name, []).append((run.step, share))
        self._before = {}

    def tell(self, run: Run) -> None:
        self.seen = []
        for name, shares in self.shares.items():
            if len(shares) < MIN_STEPS:
                continue
            self.unless = ""
            read = on_cpu([share for _, share in shares])
            values = [(step, float(share)) for (step, _), share in zip(shares, read, strict=True)]
            if all(share > MAX_LOST for _, share in values):
                usual = sorted(share for _, share in values)[len(values) // 2]
                dtype = str(self._params[name].dtype).removeprefix("torch.")
                self.see(
                    f"{usual:.0%} of the weights of {name} that have a gradient are bit-identical after a "
                    f"step (limit {MAX_LOST:.0%}): the update is lost to rounding in {dtype}.",
                    at=name.rpartition(".")[0],
                    param=name,
                    when=values[0][0],
                    value=usual,
                    causes=(
                        f"weights are stored in {dtype}, and the learning rate is small relative to them",
                    ),
                    next_steps=("Keep weights in float32, and use autocast with bfloat16 for the forward",),
                )

    def freeze(self) -> None:
        self._params, self._before, self.shares = {}, {}, {}
