"""Frame: layers and parameters of a model by name, with the optimizers that have them."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from hookcb.core.optim import detached_scalar, is_adaptive, largest_lr
from hookcb.core.torch_private import BatchNorm, Convolution, Dropout, parameters_of, plain_class
from hookcb.diagnosis.run import Absent, Param, Partial, Reason
from hookcb.hooks.modules import has_uninitialized, named_modules
from hookcb.hooks.params import find_params

SUBJECTS: dict[str, tuple[tuple[type[nn.Module], ...], str]] = {  # types and name of the layers by subject
    "dropout": ((Dropout, nn.MultiheadAttention, nn.RNNBase, torch.jit.ScriptModule), "dropout layer"),
    "gates": ((nn.LSTM, nn.GRU, torch.jit.ScriptModule), "LSTM or GRU"),
    "modes": ((BatchNorm, Dropout, nn.MultiheadAttention, nn.RNNBase), "batch norm or dropout"),
    "attention": ((nn.MultiheadAttention,), "attention"),
    "sequences": ((nn.RNNBase, nn.MultiheadAttention), "recurrent or attention layer of torch"),
    "embeddings": ((nn.Embedding,), "embedding"),
    "tokens": ((nn.Embedding,), "embedding"),
    "flat ends": ((nn.Tanh, nn.Sigmoid, torch.jit.ScriptModule), "Tanh or Sigmoid layer"),
}
SHARDED = ("DTensor", "FlatParameter")  # types of parameters of which this process has a part
LOW_PRECISION = (torch.bfloat16, torch.float16)
AS_FUNCTIONS = ("modes", "attention", "embeddings", "tokens")  # a module of one's own may call them too


@dataclass(slots=True)
class Frame:
    """Layers and parameters of a model as plain values, which outlive it.

    Attributes:
        about: type and sizes by layer, `Linear 64→64`.
        params: parameters that require a gradient, by name, without statistics.
        frozen: size of the weight by layer of torch, for those without a parameter that requires a gradient;
            norms and embeddings are left out.
        n_optimizers: number of known optimizers.
        foreign: shapes of their parameters that are not the model's.
        silent: layers that were never called, with the likely reason.
        reasons: see `Run.reasons`.
    """

    about: dict[str, str] = field(default_factory=dict)
    params: dict[str, Param] = field(default_factory=dict)
    frozen: dict[str, int] = field(default_factory=dict)
    n_optimizers: int = 0
    foreign: set[tuple[int, ...]] = field(default_factory=set)
    silent: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, Reason] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, optimizers: Iterable[Optimizer]) -> "Frame":
        """Frame of a model and its known optimizers."""
        modules, known = named_modules(model), list(optimizers)
        frame = cls({name: about(m) for name, m in modules.items()}, n_optimizers=len(known))
        frame.frozen = dict(_frozen(modules))
        frame.reasons = {what: Partial(why) for what, why in _partial(model)}
        frame.reasons |= {what: Absent(why) for what, why in _absent(model, known)}
        groups = [(i, opt, group) for i, opt in enumerate(known) for group in opt.param_groups]
        group_of = {id(p): where for where in groups for p in where[2]["params"]}
        own = {id(p) for p in model.parameters()}
        every = (p for _, _, group in groups for p in group["params"])
        frame.foreign = {tuple(p.shape) for p in every if id(p) not in own}
        for place, (name, p, kind) in enumerate(find_params(model)):
            if not p.requires_grad or isinstance(p, UninitializedParameter):
                continue
            is_path = kind == "ParameterDict" and "/" in name  # as in Keras: dense/kernel
            layer = name.rpartition("/" if is_path else ".")[0]
            param = Param(name, layer, kind, frame.about.get(layer, ""), place, tuple(p.shape))
            if p.dtype.is_floating_point:
                param.resolution = torch.finfo(p.dtype).eps
            if id(p) in group_of:
                param.optimizer, opt, group = group_of[id(p)]
                rate = detached_scalar(group["lr"])
                param.lr = rate if isinstance(rate, float) else largest_lr(opt)
                param.weight_decay = float(group.get("weight_decay", 0.0))
                param.is_adaptive, eps = is_adaptive(opt), group.get("eps")
                param.eps = float(eps) if isinstance(eps, float) and "betas" in group else math.nan
                param.maximizes = bool(group.get("maximize", False))
            frame.params[name] = param
        return frame


def _frozen(modules: dict[str, nn.Module]) -> Iterator[tuple[str, int]]:
    """Names of frozen linear, convolutional and recurrent layers, and the sizes of their weights."""
    for name, m in modules.items():
        params = [p for p in m.parameters(recurse=False) if not isinstance(p, UninitializedParameter)]
        size = max((p.numel() for p in params if p.ndim > 1), default=0)
        is_frozen = size and not any(p.requires_grad for p in params)
        if is_frozen and isinstance(m, nn.Linear | Convolution | nn.RNNBase):
            yield name, size


def _absent(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, str]]:
    """Subjects of checks that a training of this model does not have, with the reason."""
    modules = list(model.modules())
    is_all_of_torch = all(map(is_of_torch, modules))
    for subject, (kinds, name) in SUBJECTS.items():
        is_hidden = subject in AS_FUNCTIONS and not is_all_of_torch
        if not is_hidden and not any(isinstance(m, kinds) for m in modules):
            yield subject, f"there is no {name}"
    if not any(p.dtype in LOW_PRECISION and p.ndim > 1 for p in model.parameters()):
        yield "low precision", "there are no weights in low precision"
    if len(optimizers) < 2:
        yield "players", "there are fewer than two optimizers"


def _partial(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Sources of evidence that cannot cover all of this model, with the reason."""
    if any(isinstance(m, torch.jit.ScriptModule) for m in model.modules()):
        for source in ("activations", "model"):
            yield source, "part of the model is TorchScript, which hides its layers"
    elif any(type(p).__name__ in SHARDED for p in model.parameters()):
        yield "model", "parameters are sharded over processes, and this process has only a part of them"


def about(m: nn.Module) -> str:
    """Type and sizes of a layer: `Linear 64→64`, `Conv2d 3→16`."""
    kind = plain_class(m).__name__
    if has_uninitialized(m):
        return kind
    pairs = ("in_features", "out_features"), ("in_channels", "out_channels"), ("input_size", "hidden_size")
    for names in (*pairs, ("num_features",), ("embed_dim",)):
        sizes = [getattr(m, name, None) for name in names]
        if all(isinstance(size, int) for size in sizes):
            return f"{kind} {'→'.join(map(str, sizes))}"
    return kind


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
