"""What a model and its optimizers tell before a step is made."""

from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from hookcb.core.torch_private import Convolution, Dropout, parameters_of
from hookcb.diagnosis.evidence import Observation
from hookcb.hooks.modules import named_modules

MOST_ROWS, MOST_COLUMNS = 256, 64
ALIKE = 0.99  # share of pairs of rows
FEWEST = 4  # units, and inputs of each
EXTREME = 0.9  # dropout
SHUT = 0.03  # a gate below that lets nothing through, as a saturated sigmoid
SHARDED = ("DTensor", "FlatParameter")  # of which this process has a part
GATES = {"LSTM": ("input", "forget", "cell", "output"), "GRU": ("reset", "update", "new")}


def observe_model(model: nn.Module) -> Iterator[Observation]:
    """What is wrong with its weights and layers as they are."""
    modules = named_modules(model)
    yield from _symmetric(modules)
    for name, m in modules.items():
        p = m.p if isinstance(m, Dropout) else 0.0
        p = max(p, m.dropout) if isinstance(m, nn.MultiheadAttention | nn.RNNBase) else p
        title = name or type(m).__name__
        if p >= EXTREME:
            yield Observation(
                "dropout.extreme",
                name,
                value=p,
                text=f"{title} drops {p:.0%} of its input while it trains; limit {EXTREME:.0%}.",
                causes=("p is the share that is dropped, not the one that is kept",),
                next_steps=("try p=0.1 to 0.5",),
            )
        if isinstance(m, nn.LSTM | nn.GRU):
            yield from _shut_gates(name, m)


def _symmetric(modules: dict[str, nn.Module]) -> Iterator[Observation]:
    layers = [(name, m) for name, m in modules.items() if isinstance(m, nn.Linear | Convolution)]
    for name, m in layers[:-1]:  # units of the last one differ by their targets
        weight = own_weight(m)
        if weight is None or not weight.requires_grad or weight.is_meta:
            continue
        share = share_alike(weight.detach())
        if share >= ALIKE and bool(weight.any()):
            yield Observation(
                "init.symmetric",
                name,
                f"{name}.weight",
                value=share,
                text=f"{share:.0%} of the pairs of units of {name} begin with the same weights (limit "
                f"{ALIKE:.0%}), so they get the same gradients and stay one unit.",
                causes=("weights were initialised with a constant",),
                next_steps=(
                    "initialise weights at random, as torch does by itself; constants are for biases",
                ),
            )


def is_of_torch(m: nn.Module) -> bool:
    """Whether it is a layer of torch's own; its lists of parameters are what people build with."""
    is_list = isinstance(m, nn.ParameterList | nn.ParameterDict)
    return type(m).__module__.startswith("torch.nn") and not is_list


def own_weight(m: nn.Module) -> nn.Parameter | None:
    """Its weight, where that is a parameter of its own: one that is made of others may change when read."""
    weight = parameters_of(m).get("weight")
    is_whole = not isinstance(weight, UninitializedParameter) and type(weight).__name__ not in SHARDED
    return weight if is_whole else None


def share_alike(weight: Tensor) -> float:
    """Share of the pairs of rows of a weight that are equal up to sign; 0 of fewer than 4 rows or columns.

    Of more than 256 rows the first 256 are looked at, of more than 64 columns 64.
    """
    rows = weight.flatten(1)
    if min(rows.shape) < FEWEST:
        return 0.0
    rows = rows[:MOST_ROWS, :: max(1, rows.shape[1] // MOST_COLUMNS)].float()
    rows = torch.where((rows[:, :1] < 0), -rows, rows)
    counts = torch.unique(rows, dim=0, return_counts=True)[1].cpu().double()
    n = len(rows)
    return float((counts * (counts - 1)).sum() / (n * (n - 1)))


def _shut_gates(name: str, m: nn.LSTM | nn.GRU) -> Iterator[Observation]:
    if not m.bias or "bias_ih_l0" not in parameters_of(m):
        return
    gates = GATES[type(m).__name__ if type(m).__name__ in GATES else "LSTM"]
    for layer in range(m.num_layers):
        bias = getattr(m, f"bias_ih_l{layer}").detach() + getattr(m, f"bias_hh_l{layer}").detach()
        for gate, of in zip(gates, bias.chunk(len(gates)), strict=True):
            if gate in ("cell", "new"):
                continue
            open_ = torch.sigmoid(of.float()).median().item()
            if gate == "update":  # of a GRU it keeps the old state
                open_ = 1 - open_
            if open_ < SHUT:
                yield Observation(
                    "gate.shut",
                    name,
                    f"{name}.bias_ih_l{layer}" if name else f"bias_ih_l{layer}",
                    value=open_,
                    text=f"the {gate} gate of {name or type(m).__name__} is shut by its bias: half of its "
                    f"units let less than {open_:.1g} through (limit {SHUT:g}), so nothing is remembered or "
                    "learned there.",
                    causes=(f"the bias of the {gate} gate begins at a large negative number",),
                    next_steps=("set the bias of the forget gate to 1, of the others to 0",),
                    severity="error",
                )


def observe_optimizers(model: nn.Module, optimizers: Iterable[Optimizer]) -> Iterator[Observation]:
    """Parameters that their groups have more than once."""
    several: Counter[int] = Counter()  # of each parameter the most often that one optimizer has it
    for opt in optimizers:
        several |= Counter(id(p) for group in opt.param_groups for p in group["params"])
    for name, p in model.named_parameters():
        if several[id(p)] > 1:
            yield Observation(
                "param.duplicated",
                name.rpartition(".")[0],
                name,
                value=float(several[id(p)]),
                text=f"{name} is in the optimizer's groups {several[id(p)]} times, and is moved as often.",
                causes=("tied weights, or a part of the model that was given twice",),
                next_steps=("give each parameter once: list(dict.fromkeys(params)) removes the second",),
            )
