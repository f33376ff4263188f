"""init.symmetric, init.zero, gate.shut: weights that begin so that a part of the model learns nothing."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hookcb.core.precision import at_least_float32
from hookcb.core.text import as_layer, join_names
from hookcb.core.torch_private import Convolution, parameters_of
from hookcb.diagnosis.fault import EVERYTHING, Fault, Result, Site, fault
from hookcb.diagnosis.frame import is_of_torch, own_weight
from hookcb.diagnosis.measurements.parameters import Parameters
from hookcb.diagnosis.rules import LATEST, MIN_UNITS, has_learned
from hookcb.diagnosis.run import Param, Passed, Run, Skipped
from hookcb.diagnosis.verdict import Finding
from hookcb.hooks.modules import named_modules
from hookcb.processes.shards import is_shard

MAX_ROWS, MAX_COLUMNS = 256, 64
ALIKE = 0.99  # share of pairs of rows
SHUT = 0.03  # a gate below this lets nothing through; same limit as for a saturated sigmoid
GATES = {"LSTM": ("input", "forget", "cell", "output"), "GRU": ("reset", "update", "new")}


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


@fault(
    "init.zero",
    Site.MODULES,
    needs="gradients",
    leads_to="loss.flat loss.trivial unit.dead grad.attenuated act.collapse update.too_small",
    exact=True,
    shown_by="params.norm",
)
class ZeroLayer(Fault):
    """A hidden layer whose weight is all zero and gets no gradient, so it stays zero.

    Formula: the norms of the weight and of its gradient are 0 in each of at least five inspected steps, and
    it is not the last weight. A note if the loss falls by a fifth and the model is better than a constant, as
    a branch may be masked to zero on purpose.

    A branch that begins with zeros on purpose gets gradients.
    """

    headline = "A hidden layer of zeros stays zero"

    def findings(self, run: Run) -> Iterator[Result]:
        weights = [p for p in run.params.values() if p.is_weight and p.stats and 0 not in p.shape]
        if not (zero := [p for p in weights[:-1] if _is_zero(p, "weight_norm") and _is_zero(p, "norm")]):
            is_known = any(len(p.series("norm")) >= LATEST for p in weights)
            why = Skipped(f"no weight had a gradient in {LATEST} inspected steps")
            yield Passed("layers of zeros that stay so") if is_known else why
            return
        first, *others = zero
        also = f"; the same is true of {join_names([p.name for p in others], 3)}" if others else ""
        yield self.finding(
            f"{first.name} and its gradient are all zero, so it stays zero{also}.",
            "info" if has_learned(run, run.first_loss) else "error",
            at=first,
            when=first.series("norm"),
            value=0.0,
            causes=("all weights were initialized with zeros", "a branch that is masked to zero"),
            next_steps=(
                "Initialize weights randomly, torch.nn.init.kaiming_normal_(layer.weight); zeros are for "
                "biases",
            ),
        )


def _is_zero(param: Param, stat: str) -> bool:
    series = param.series(stat)
    return len(series) >= LATEST and not any(series.values)


@fault(
    "gate.shut",
    Site.MODULES,
    needs="batches model",
    leads_to="grad.* loss.* act.collapse update.too_small",
    subject="gates",
)
class ShutGate(Fault):
    """A gate of an LSTM or GRU that its bias keeps closed.

    Formula: median over units of sigmoid(bias) below 0.03; above 0.97 for the update gate of a GRU. A large
    positive bias of the forget gate, which keeps it open, is usual.

    Source: Jozefowicz et al., An Empirical Exploration of Recurrent Network Architectures, 2015.
    """

    headline = "A gate of a recurrent layer stays closed"
    passed = "closed gates"

    def on_model(self, run: Run) -> None:
        for name, m in named_modules(run.loop.model).items():
            if isinstance(m, nn.LSTM | nn.GRU) and m.bias and "bias_ih_l0" in parameters_of(m):
                self._see_gates(name, m)

    def _see_gates(self, name: str, m: nn.LSTM | nn.GRU) -> None:
        title, gates = name or type(m).__name__, GATES.get(type(m).__name__, GATES["LSTM"])
        for layer in range(m.num_layers):
            bias = getattr(m, f"bias_ih_l{layer}").detach() + getattr(m, f"bias_hh_l{layer}").detach()
            for gate, part in zip(gates, bias.chunk(len(gates)), strict=True):
                open_ = torch.sigmoid(part.float()).median().item()
                if gate == "update":  # in a GRU it keeps the old state
                    open_ = 1 - open_
                if open_ < SHUT and gate not in ("cell", "new"):
                    self.see(
                        f"The bias of the {gate} gate of {title} keeps it shut: half of its units let less "
                        f"than {open_:.1g} through (limit {SHUT:g}), so nothing is remembered or learned "
                        "there.",
                        at=name,
                        param=f"{name}.bias_ih_l{layer}" if name else f"bias_ih_l{layer}",
                        value=open_,
                        causes=(f"the bias of the {gate} gate begins at a large negative number",),
                        next_steps=("Set the bias of the forget gate to 1, and of the others to 0",),
                    )
