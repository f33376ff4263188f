"""Probes of a model and its optimizers that need no step."""

from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from hookcb.core.text import as_layer
from hookcb.core.torch_private import Convolution, Dropout, parameters_of
from hookcb.diagnosis.run import Observation
from hookcb.hooks.modules import named_modules
from hookcb.hooks.params import named_params

MAX_ROWS, MAX_COLUMNS = 256, 64
ALIKE = 0.99  # share of pairs of rows
MIN_UNITS = 4  # and inputs of each
EXTREME = 0.9  # dropout
SHUT = 0.03  # a gate below this lets nothing through; same limit as for a saturated sigmoid
SHARDED = ("DTensor", "FlatParameter")  # types of parameters of which this process has a part
GATES = {"LSTM": ("input", "forget", "cell", "output"), "GRU": ("reset", "update", "new")}


def observe_model(model: nn.Module) -> Iterator[Observation]:
    """Faults in the weights and layers of a model as it is now."""
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
                text=f"Layer {title} drops {p:.0%} of its input during training (limit {EXTREME:.0%}).",
                causes=("p is the share that is dropped, not the share that is kept",),
                next_steps=("Try p=0.1 to 0.5",),
            )
        if isinstance(m, nn.LSTM | nn.GRU):
            yield from _shut_gates(name, m)


def _symmetric(modules: dict[str, nn.Module]) -> Iterator[Observation]:
    layers = [(name, m) for name, m in modules.items() if isinstance(m, nn.Linear | Convolution)]
    for name, m in layers[:-1]:  # the targets tell units of the last layer apart
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
                text=f"{share:.0%} of the pairs of units of {as_layer(name)} begin with the same weights "
                f"(limit {ALIKE:.0%}), so they get the same gradients and act as a single unit.",
                causes=("weights were initialized to a constant",),
                next_steps=(
                    "Initialize weights at random, as torch does by default; use constants for biases",
                ),
            )


def is_of_torch(m: nn.Module) -> bool:
    """Whether it is one of torch's own layers; parameter lists do not count, as custom layers use them."""
    is_list = isinstance(m, nn.ParameterList | nn.ParameterDict)
    return type(m).__module__.startswith("torch.nn") and not is_list


def own_weight(m: nn.Module) -> nn.Parameter | None:
    """Weight of a module, if it is a parameter of that module: a computed weight may change when read."""
    weight = parameters_of(m).get("weight")
    if weight is None or isinstance(weight, UninitializedParameter) or type(weight).__name__ in SHARDED:
        return None
    return weight if weight.numel() else None  # DeepSpeed's ZeRO-3 empties it outside of a forward


def share_alike(weight: Tensor) -> float:
    """Share of the pairs of rows of a weight that are equal up to sign; 0 below 4 rows or columns.

    At most the first 256 rows and 64 columns are compared.
    """
    rows = weight.flatten(1)
    if min(rows.shape) < MIN_UNITS:
        return 0.0
    rows = rows[:MAX_ROWS, :: max(1, rows.shape[1] // MAX_COLUMNS)].float()
    rows = torch.where((rows[:, :1] < 0), -rows, rows)
    counts = torch.unique(rows, dim=0, return_counts=True)[1].cpu().double()
    n = len(rows)
    return float((counts * (counts - 1)).sum() / (n * (n - 1)))


def _shut_gates(name: str, m: nn.LSTM | nn.GRU) -> Iterator[Observation]:
    if not m.bias or "bias_ih_l0" not in parameters_of(m):
        return
    title, gates = name or type(m).__name__, GATES[type(m).__name__ if type(m).__name__ in GATES else "LSTM"]
    for layer in range(m.num_layers):
        bias = getattr(m, f"bias_ih_l{layer}").detach() + getattr(m, f"bias_hh_l{layer}").detach()
        for gate, part in zip(gates, bias.chunk(len(gates)), strict=True):
            if gate in ("cell", "new"):
                continue
            open_ = torch.sigmoid(part.float()).median().item()
            if gate == "update":  # in a GRU it keeps the old state
                open_ = 1 - open_
            if open_ < SHUT:
                yield Observation(
                    "gate.shut",
                    name,
                    f"{name}.bias_ih_l{layer}" if name else f"bias_ih_l{layer}",
                    value=open_,
                    text=f"The bias of the {gate} gate of {title} keeps it shut: half of its units let less "
                    f"than {open_:.1g} through (limit {SHUT:g}), so nothing is remembered or learned there.",
                    causes=(f"the bias of the {gate} gate begins at a large negative number",),
                    next_steps=("Set the bias of the forget gate to 1, and of the others to 0",),
                    severity="error",
                )


def observe_frozen(
    model: nn.Module, optimizers: Iterable[Optimizer], n_backward: int
) -> Iterator[Observation]:
    """A model of which no parameter requires a gradient, although backwards were run."""
    params = list(model.parameters())
    if not n_backward or not params or any(p.requires_grad for p in params):
        return
    held = {id(p) for opt in optimizers for group in opt.param_groups for p in group["params"]}
    n_held = sum(id(p) in held for p in params)
    yield Observation(
        "param.frozen",
        value=float(len(params)),
        text=f"Backward ran {n_backward} time{'s' * (n_backward != 1)}, but none of the {len(params)} "
        "parameters of the model requires a gradient, so nothing is trained; "
        f"the optimizer holds {n_held} of them.",
        causes=("weights that are frozen on purpose, with adapters that were loaded frozen, too",),
        next_steps=(
            "Call requires_grad_() on what is to be trained, before the optimizer is created; PEFT does it "
            "with from_pretrained(…, is_trainable=True)",
        ),
    )


def observe_optimizers(model: nn.Module, optimizers: Iterable[Optimizer]) -> Iterator[Observation]:
    """Parameters that are in the groups of one optimizer more than once."""
    several: Counter[int] = Counter()  # highest count in one optimizer, by id of the parameter
    for opt in optimizers:
        several |= Counter(id(p) for group in opt.param_groups for p in group["params"])
    for name, p in named_params(model).items():
        if several[id(p)] > 1:
            yield Observation(
                "param.duplicated",
                name.rpartition(".")[0],
                name,
                value=float(several[id(p)]),
                text=f"Parameter {name} is in the optimizer's groups {several[id(p)]} times, and is updated "
                "as often.",
                causes=("tied weights, or a part of the model that was passed twice",),
                next_steps=("Pass each parameter once: list(dict.fromkeys(params)) removes duplicates",),
            )
