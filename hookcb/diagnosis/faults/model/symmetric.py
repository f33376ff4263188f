"""init.symmetric: hidden units that begin equal."""

import torch
from torch import Tensor, nn

from hookcb.core.precision import at_least_float32
from hookcb.core.shards import is_shard
from hookcb.core.text import as_layer
from hookcb.core.torch_private import Convolution
from hookcb.diagnosis.fault import EVERYTHING, Fault, Site, fault
from hookcb.diagnosis.frame import is_of_torch, own_weight
from hookcb.diagnosis.measurements.parameters import Parameters
from hookcb.diagnosis.rules import MIN_UNITS
from hookcb.diagnosis.run import Run
from hookcb.diagnosis.verdict import Finding
from hookcb.hooks.modules import named_modules

MAX_ROWS, MAX_COLUMNS = 256, 64
ALIKE = 0.99  # share of pairs of rows


@fault("init.symmetric", Site.MODULES, needs="model", leads_to=f"{EVERYTHING} param.not_stepped", exact=True)
class Symmetric(Fault):
    """Units of a hidden layer that begin equal up to sign: they get equal gradients and act as one unit.

    Formula: ≥ 99 % of pairs of rows of the weight are equal up to sign, fan-in and fan-out ≥ 4, in a linear
    or convolutional layer that is trained and is not the last.

    Source: Goodfellow, Bengio & Courville, Deep Learning, 2016, section 8.4.
    """

    headline = "The units of a layer begin equal"
    uses = (Parameters,)
    passed = "symmetric initialization"

    def __init__(self) -> None:
        super().__init__()
        self._constant: list[tuple[str, nn.Parameter]] = []
        self._at_start: list[Finding] = []

    def on_model(self, run: Run) -> None:
        modules = named_modules(run.loop.model)
        self._see_layers(modules)
        self._at_start = self.seen
        custom = {
            f"{prefix}.{name}" if prefix else name
            for prefix, m in modules.items()
            if not is_of_torch(m) or isinstance(m, nn.RNNBase)
            for name, _ in m.named_parameters(recurse=False)
        }
        begun = ((name, p) for name, (p, _) in run.measured(Parameters).begins.items() if name in custom)
        self._constant = [(name, p) for name, p in begun if _is_constant(p)]

    def _see_layers(self, modules: dict[str, nn.Module]) -> None:
        layers = [(name, m) for name, m in modules.items() if isinstance(m, nn.Linear | Convolution)]
        for name, m in layers[:-1]:  # the targets tell units of the last layer apart
            if (weight := own_weight(m)) is None or not weight.requires_grad or weight.is_meta:
                continue
            if (share := _share_alike(weight.detach())) >= ALIKE and bool(weight.any()):
                self.see(
                    f"{share:.0%} of the pairs of units of {as_layer(name)} begin with the same weights "
                    f"(limit {ALIKE:.0%}), so they get the same gradients and act as a single unit.",
                    at=name,
                    param=f"{name}.weight",
                    value=share,
                    causes=("weights were initialized to a constant",),
                    next_steps=(
                        "Initialize weights at random, as torch does by default; use constants for biases",
                    ),
                )

    def tell(self, run: Run) -> None:
        # constant matrices may be meant to scale each element, but not if all units are still equal
        self.seen = list(self._at_start)
        for name, p in self._constant:
            rows = p.detach().flatten(1)
            if run.measured(Parameters).moved.get(name) and max(map(_share_alike, (rows, rows.T))) >= ALIKE:
                self.see(
                    f"Parameter {name} began as a constant, and after {run.n_steps} steps all its units "
                    "still have the same weights: they act as a single unit.",
                    at=name.rpartition(".")[0],
                    param=name,
                    value=1.0,
                    causes=("weights were initialized to a constant",),
                    next_steps=("Initialize weights at random; use constants for biases",),
                )

    def freeze(self) -> None:
        self._constant = []


def _share_alike(weight: Tensor) -> float:
    """Share of the pairs of its first 256 rows that are equal up to sign; 0 below 4 rows or columns."""
    rows = weight.flatten(1)
    if min(rows.shape) < MIN_UNITS:
        return 0.0
    rows = rows[:MAX_ROWS, :: max(1, rows.shape[1] // MAX_COLUMNS)].float()
    rows = torch.where((rows[:, :1] < 0), -rows, rows)
    counts, n = torch.unique(rows, dim=0, return_counts=True)[1].cpu().double(), len(rows)
    return float((counts * (counts - 1)).sum() / (n * (n - 1)))


def _is_constant(p: Tensor) -> bool:
    if is_shard(p) or p.ndim != 2 or min(p.shape) < MIN_UNITS or not p.is_floating_point() or p.is_meta:
        return False
    low, high = torch.aminmax(at_least_float32(p.detach()))  # float8 supports no comparison
    return bool(low == high) and bool(high != 0)
