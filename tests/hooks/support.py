"""Layers and models that real code has and hooks trip over.

Those of the zoo, `MODELS`, take float32 (4, 4) and give a tensor; those of the summary, `SUMMED`, come with
their batch.
"""

import collections
import copy
import functools
import warnings
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from hookcb import HookCallback, Learner

D = 4


X = torch.randn(D, D, generator=torch.Generator().manual_seed(7))


G = torch.randn(D, D, generator=torch.Generator().manual_seed(8))


Pair = namedtuple("Pair", "y z")


@dataclass
class Out:
    logits: torch.Tensor
    state: object = None


@dataclass(frozen=True)
class Frozen:
    logits: torch.Tensor
    state: object = None


@dataclass(frozen=True, slots=True)
class Slotted:
    logits: torch.Tensor
    state: object = None


@dataclass
class NoInit:
    """Its constructor does not take what it holds, and one of its properties fails."""

    n: int
    logits: torch.Tensor = field(init=False)

    def __post_init__(self):
        assert self.n == 3
        self.logits = None

    @property
    def angry(self):
        raise RuntimeError("nobody asked for this property")


class OddTuple(tuple):
    """A tuple whose constructor takes two arguments."""

    def __new__(cls, a, b):
        return super().__new__(cls, (a, b))


class Angry:
    """Does not like to be looked at."""

    def __init__(self, t):
        object.__setattr__(self, "t", t)

    def __getattr__(self, name):
        raise RuntimeError(f"no {name} here")

    def _fail(self, *args):
        raise RuntimeError("leave me alone")

    __len__ = __iter__ = __eq__ = __bool__ = __getitem__ = __repr__ = _fail
    __hash__ = object.__hash__


class Sub(torch.Tensor):
    """A tensor subclass that adds nothing."""


class Layer(nn.Module):
    """Calls `f(self, …)`; has a Linear to give it parameters and a child."""

    def __init__(self, f):
        super().__init__()
        self.fc = nn.Linear(D, D)
        self.f = f

    def forward(self, *args, **kwargs):
        return self.f(self, *args, **kwargs)


class Around(nn.Module):
    """Linear, a layer under test, and a Linear of what `pick` makes of its output."""

    def __init__(self, f, pick):
        super().__init__()
        self.before, self.odd, self.after = nn.Linear(D, D), Layer(f), nn.Linear(D, D)
        self.pick = pick

    def forward(self, x):
        h = self.before(x)
        return self.after(self.pick(self.odd(h), h))


def quietly(f, *args, **kwargs):
    """For prototype features of torch, which warn where they are made."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return f(*args, **kwargs)


def no_init(s, x):
    out = NoInit(3)
    out.logits = s.fc(x)
    return out


def cyclic(s, x):
    out = [s.fc(x)]
    out.append(out)
    return out


def deep(s, x):
    out = s.fc(x)
    for _ in range(3000):
        out = [out]
    return out


def undeep(o, h):
    while isinstance(o, list):
        o = o[0]
    return o


def jagged(s, x):
    return torch.nested.nested_tensor_from_jagged(s.fc(x), offsets=torch.tensor([0, 1, 4]))


def quantized(s, x):
    return quietly(torch.quantize_per_tensor, s.fc(x).detach(), 0.1, 0, torch.quint8)


def first(o, h):
    return o[0]


def logits(o, h):
    return o.logits


def itself(o, h):
    return o


# what a layer returns, and what the model makes of it (o: the output, h: the layer's input)
OUTPUTS = {
    "tensor": (lambda s, x: s.fc(x), itself),
    "tuple": (lambda s, x: (s.fc(x), x * 2), lambda o, h: o[0] * 3 + o[1]),
    "tuple_of_one": (lambda s, x: (s.fc(x),), first),
    "empty_tuple": (lambda s, x: (), lambda o, h: h),
    "list": (lambda s, x: [s.fc(x), x.tanh(), None], lambda o, h: o[0] * 3 + o[1]),
    "nested": (
        lambda s, x: [s.fc(x), {"a": (x.tanh(), None, 3), "b": []}],
        lambda o, h: o[0] * 3 + o[1]["a"][0],
    ),
    "partly_used": (lambda s, x: (s.fc(x), x.tanh(), (x.exp(), x.sin())), lambda o, h: o[0] + o[2][1]),
    "namedtuple": (lambda s, x: Pair(s.fc(x), x.tanh()), lambda o, h: o.y * 3 + o.z),
    "dict": (lambda s, x: {"logits": s.fc(x), "n": 3}, lambda o, h: o["logits"]),
    "ordered_dict": (
        lambda s, x: collections.OrderedDict(z=s.fc(x), a=x.tanh()),
        lambda o, h: o["z"] * 3 + o["a"],
    ),
    "dict_with_odd_keys": (
        lambda s, x: {1: s.fc(x), (2, 3): x.tanh(), None: x.exp()},
        lambda o, h: o[1] + o[2, 3] + o[None],
    ),
    "dict_of_dict": (lambda s, x: {"a": {"b": s.fc(x)}}, lambda o, h: o["a"]["b"]),
    "dataclass": (lambda s, x: Out(s.fc(x), (x.tanh(), 3)), lambda o, h: o.logits * 3 + o.state[0]),
    "frozen_dataclass": (lambda s, x: Frozen(s.fc(x), [x.tanh()]), lambda o, h: o.logits * 3 + o.state[0]),
    "slotted_dataclass": (
        lambda s, x: Slotted(s.fc(x), {"h": x.tanh()}),
        lambda o, h: o.logits + o.state["h"],
    ),
    "dataclass_with_another_init": (no_init, logits),
    "return_type_of_max": (lambda s, x: torch.max(s.fc(x), 1), lambda o, h: h * o.values[:, None]),
    "tuple_with_another_init": (lambda s, x: OddTuple(s.fc(x), x.tanh()), lambda o, h: o[0] * 3 + o[1]),
    "user_dict": (lambda s, x: UserDict(a=s.fc(x)), lambda o, h: o["a"]),
    "same_tensor_twice": (lambda s, x: (lambda y: (y, y))(s.fc(x)), lambda o, h: o[0] * 3 + o[1].tanh()),
    "none": (lambda s, x: None, lambda o, h: h),
    "bool": (lambda s, x: s.fc(x) > 0, lambda o, h: torch.where(o, h, -h)),
    "int": (lambda s, x: s.fc(x).argmax(1), lambda o, h: h[o]),
    "float8": (lambda s, x: s.fc(x).detach().to(torch.float8_e4m3fn), lambda o, h: h + o.float()),
    "bfloat16": (lambda s, x: s.fc(x).bfloat16(), lambda o, h: o.float()),
    "float64": (lambda s, x: s.fc(x).double(), lambda o, h: o.float()),
    "complex": (lambda s, x: torch.complex(s.fc(x), x), lambda o, h: o.real * 3 + o.imag),
    "sparse": (lambda s, x: s.fc(x).relu().to_sparse(), lambda o, h: o.to_dense()),
    "sparse_csr": (lambda s, x: quietly(s.fc(x).detach().to_sparse_csr), lambda o, h: h + o.to_dense()),
    "nested_tensor": (jagged, lambda o, h: o.values()),
    "quantized": (quantized, lambda o, h: h + o.dequantize()),
    "meta": (lambda s, x: s.fc(x).to("meta"), lambda o, h: h),
    "empty": (lambda s, x: s.fc(x)[:0], lambda o, h: h + o.sum()),
    "zero_d": (lambda s, x: s.fc(x).sum(), lambda o, h: h * o),
    "one_element": (lambda s, x: s.fc(x)[:1, :1], lambda o, h: h * o),
    "number": (lambda s, x: 3.0, lambda o, h: h * o),
    "string": (lambda s, x: "three", lambda o, h: h * len(o)),
    "object": (lambda s, x: object(), lambda o, h: h),
    "angry_object": (lambda s, x: Angry(s.fc(x)), lambda o, h: object.__getattribute__(o, "t")),
    "generator": (lambda s, x: (t for t in (s.fc(x), x.tanh())), lambda o, h: sum(o)),
    "set": (lambda s, x: {s.fc(x)}, lambda o, h: next(iter(o))),
    "cyclic_list": (cyclic, first),
    "deep_list": (deep, undeep),
    "module": (lambda s, x: s.fc, lambda o, h: o(h)),
    "own_parameter": (lambda s, x: s.fc.weight, lambda o, h: o + h),
    "fresh_leaf": (lambda s, x: torch.ones(D, D, requires_grad=True), lambda o, h: o * h),
    "its_input": (lambda s, x: x, itself),
    "its_input_and_more": (lambda s, x: (x, s.fc(x)), lambda o, h: o[0] + o[1]),
    "detached": (lambda s, x: s.fc(x).detach(), lambda o, h: o + h),
    "view": (lambda s, x: s.fc(x).view(2, -1), lambda o, h: o.view(D, D)),
    "expanded": (lambda s, x: s.fc(x)[:1].expand(D, D), itself),
    "views_of_chunk": (lambda s, x: s.fc(x).chunk(2, 1), lambda o, h: torch.cat(o, 1)),
    "unbound": (lambda s, x: s.fc(x).unbind(), lambda o, h: torch.stack(o)),
    "tensor_subclass": (lambda s, x: s.fc(x).as_subclass(Sub), lambda o, h: o.as_subclass(torch.Tensor)),
}


def step(f):
    """What comes after the layer's output, in place."""
    return (lambda s, x: s.fc(x), lambda o, h: f(o))


def add_to_item(o):
    o[0].mul_(2)
    return o[0] + o[1]


def in_no_grad(o):
    with torch.no_grad():
        o.clamp_(-1, 1)
    return o


def of_view(o):
    o[:, 0].mul_(3)
    return o


def of_transposed(o):
    o.t().sigmoid_()
    return o


def of_data(o):
    o.data.mul_(2)
    return o


def masked(o):
    o[o > 0] = 0
    return o


def through_detach(o):
    o.detach().add_(1)
    return o


IN_PLACE = {
    "relu": step(lambda o: F.relu(o, inplace=True)),
    "augmented_assignment": step(lambda o: o.__iadd__(1)),
    "twice": step(lambda o: o.mul_(2).sigmoid_()),
    "after_a_use": step(lambda o: o.sum() + o.mul_(2)),
    "view": step(of_view),
    "transposed_view": step(of_transposed),
    "mask": step(masked),
    "no_grad": step(in_no_grad),
    "data": step(of_data),
    "detached": step(through_detach),
    "item_of_a_tuple": (lambda s, x: (s.fc(x), x.tanh()), lambda o, h: add_to_item(o)),
    "item_of_a_dict": (lambda s, x: {"a": s.fc(x)}, lambda o, h: o["a"].mul_(2)),
    "view_output": (lambda s, x: s.fc(x).flatten(), lambda o, h: o.relu_().view(D, D)),
    "view_of_input": (lambda s, x: x.flatten(), lambda o, h: F.relu(o, inplace=True).view(D, D)),
    "slice_output": (
        lambda s, x: s.fc(x)[:, 1:],
        lambda o, h: h[:, 1:].mul(o.sigmoid_()).repeat(1, 2)[:, :D],
    ),
    "output_is_input": (lambda s, x: x, lambda o, h: o.mul_(2)),
    "input_inside": (lambda s, x: s.fc(x.mul_(2)), itself),
    "input_as_output": (lambda s, x: x.mul_(2), itself),
    "input_after_the_call": (lambda s, x: x.tanh(), lambda o, h: o + h.mul_(2)),
    "output_through_base": (
        lambda s, x: s.fc(x).t(),
        lambda o, h: o._base.mul_(2) if o._base is not None else o,
    ),
}


class Plain(nn.Module):
    """A module made of a function `f(self, …)`, named children, parameters and buffers."""

    def __init__(self, f, **parts):
        super().__init__()
        self.f = f
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args, **kwargs):
        return self.f(self, *args, **kwargs)


def lin():
    return nn.Linear(D, D)


def attend(s, x):
    """Uses its input three times."""
    q, k, v = s.q(x), s.k(x), s.v(x)
    return (q @ k.t()).softmax(1) @ v


class Recursive(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = lin()

    def forward(self, x, n=2):
        return self(self.fc(x).tanh(), n - 1) if n else x


class SquareFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * x * g


def force(s, x):
    """Differentiates its own output with respect to its input, as models of atoms do."""
    x = x if x.requires_grad else x.clone().requires_grad_()
    energy = s.inner(x).tanh().sum()
    return torch.autograd.grad(energy, x, create_graph=True)[0]


def differing_by_identity(s, a, b):
    return s.fc(a) * 2 if a is b else s.fc(a) + s.fc(b) * 3


def tagged(s, x):
    h = s.before(x)
    h.tag = 3
    return s.reads(h)


def frozen(module):
    return module.requires_grad_(False)


def lstm(s, x):
    out, (_h, _c) = s.rnn(x[None])
    return out[0]


def packed(s, x):
    p = pack_padded_sequence(x[None].expand(2, D, D), [D, 2], batch_first=True)
    out, _ = s.rnn(p)
    return pad_packed_sequence(out, batch_first=True)[0].sum(0)


def autocast(s, x):
    with torch.autocast("cpu", torch.bfloat16):
        return s.b(s.a(x).relu()).float()


def with_no_grad(s, x):
    with torch.no_grad():
        x = s.a(x)
    return s.b(x)


MODELS = {
    "residual": lambda: Plain(lambda s, x: (lambda h: h + s.b(h))(s.a(x)), a=lin(), b=lin()),
    "residual_around_attention": lambda: Plain(
        lambda s, x: (lambda h: h + s.attn(h) + s.attn(h * 2))(s.stem(x)),
        stem=lin(),
        attn=Plain(attend, q=lin(), k=lin(), v=lin()),
    ),
    "post_activation_resnet": lambda: Plain(
        lambda s, x: (lambda h: F.relu(s.bn(s.b(h)).__iadd__(h), inplace=True))(s.act(s.a(x))),
        a=lin(),
        act=nn.ReLU(inplace=True),
        b=lin(),
        bn=nn.BatchNorm1d(D),
    ),
    "in_place_modules": lambda: nn.Sequential(
        lin(), nn.ReLU(inplace=True), lin(), nn.SiLU(inplace=True), nn.Dropout(0.3, inplace=True), lin()
    ),
    "in_place_twice": lambda: nn.Sequential(lin(), nn.LeakyReLU(inplace=True), nn.SiLU(inplace=True), lin()),
    "flatten_then_in_place": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, D, 2), nn.Flatten(), nn.ReLU(inplace=True), lin()
    ),
    "in_place_at_the_start": lambda: nn.Sequential(nn.Identity(), nn.ReLU(inplace=True), lin()),
    "shared": lambda: Plain(lambda s, x: s.fc(s.fc(x).tanh()), fc=lin()),
    "recursive": Recursive,
    "same_input_twice": lambda: Plain(
        lambda s, x: (lambda h: s.two(h, h))(s.a(x)), a=lin(), two=nn.Bilinear(D, D, D)
    ),
    "differs_by_identity": lambda: Plain(
        lambda s, x: (lambda h: s.two(h, h) + s.two(h, h * 2))(s.a(x)),
        a=lin(),
        two=Layer(differing_by_identity),
    ),
    "reads_attribute_of_input": lambda: Plain(
        tagged, before=lin(), reads=Plain(lambda s, x: s.fc(x) * x.tag, fc=lin())
    ),
    "parameter_as_input": lambda: Plain(
        lambda s, x: s.takes(s.fc.weight, x=x),
        fc=lin(),
        takes=Plain(lambda s, w, x: (w @ x) * isinstance(w, nn.Parameter) * 2),
    ),
    "keyword_inputs": lambda: Plain(
        lambda s, x: s.takes(a=s.fc(x), b={"c": [x, s.fc(x).tanh()]}),
        fc=lin(),
        takes=Plain(lambda s, a, b: s.fc(a) + b["c"][0] * b["c"][1], fc=lin()),
    ),
    "takes_a_generator": lambda: Plain(
        lambda s, x: s.takes(t for t in (s.fc(x), x)), fc=lin(), takes=Plain(lambda s, it: sum(it))
    ),
    "returns_what_it_changed": lambda: Plain(
        lambda s, x: (lambda d: (s.writes(d), d["y"])[1])({"x": s.fc(x)}),
        fc=lin(),
        writes=Plain(lambda s, d: d.update(y=s.fc(d["x"])), fc=lin()),
    ),
    "inner_gradient": lambda: Plain(
        lambda s, x: s.force(s.a(x)),
        a=lin(),
        force=Plain(force, inner=nn.Sequential(lin(), nn.Tanh(), lin())),
    ),
    "custom_function": lambda: Plain(
        lambda s, x: s.sq(s.fc(x)), fc=lin(), sq=Plain(lambda s, x: SquareFunction.apply(x))
    ),
    "reentrant_checkpoint": lambda: Plain(
        lambda s, x: s.c(checkpoint(s.block, s.a(x), use_reentrant=True)),
        a=lin(),
        block=nn.Sequential(lin(), nn.Dropout(0.3), nn.ReLU(inplace=True), lin()),
        c=lin(),
    ),
    "checkpoint": lambda: Plain(
        lambda s, x: s.c(checkpoint(s.block, s.a(x), use_reentrant=False)),
        a=lin(),
        block=nn.Sequential(lin(), nn.Dropout(0.3), nn.ReLU(inplace=True), lin()),
        c=lin(),
    ),
    "nested_checkpoint": lambda: Plain(
        lambda s, x: checkpoint(
            lambda y: s.b(checkpoint(s.a, y, use_reentrant=False)).tanh(), x, use_reentrant=False
        ),
        a=lin(),
        b=lin(),
    ),
    "attention": lambda: Plain(
        lambda s, x: (lambda h: s.mha(h, h, h)[0])(s.a(x)), a=lin(), mha=nn.MultiheadAttention(D, 2)
    ),
    "transformer_layer": lambda: Plain(
        lambda s, x: s.enc(x[None])[0], enc=nn.TransformerEncoderLayer(D, 2, 8, dropout=0.1, batch_first=True)
    ),
    "lstm": lambda: Plain(lstm, rnn=nn.LSTM(D, D, num_layers=2, dropout=0.1)),
    "packed_lstm": lambda: Plain(packed, rnn=nn.LSTM(D, D, batch_first=True)),
    "sparse_embedding": lambda: Plain(
        lambda s, x: s.fc(s.emb((x > 0).long().sum(1))), emb=nn.Embedding(9, D, sparse=True), fc=lin()
    ),
    "spectral_norm": lambda: nn.Sequential(
        torch.nn.utils.parametrizations.spectral_norm(lin()), nn.ReLU(), lin()
    ),
    "norm_and_dropout": lambda: nn.Sequential(lin(), nn.BatchNorm1d(D), nn.ReLU(), nn.Dropout(0.3), lin()),
    "autocast": lambda: Plain(autocast, a=lin(), b=lin()),
    "no_grad_part": lambda: Plain(with_no_grad, a=lin(), b=lin()),
    "frozen_first": lambda: nn.Sequential(frozen(lin()), nn.ReLU(), lin()),
    "frozen_in_the_middle": lambda: nn.Sequential(lin(), frozen(lin()), nn.ReLU(inplace=True), lin()),
    "frozen_all_but_the_input": lambda: Plain(
        lambda s, x: s.fc(x.clone().requires_grad_()), fc=frozen(lin())
    ),
    "unused_layer": lambda: Plain(lambda s, x: s.a(x), a=lin(), unused=lin()),
    "called_through_forward": lambda: Plain(lambda s, x: s.b(s.a.forward(x)), a=lin(), b=lin()),
    "unused_output": lambda: Plain(lambda s, x: (s.a(x), s.b(x))[1], a=lin(), b=lin()),
}


MODELS |= {f"returns_{name}": lambda parts=parts: Around(*parts) for name, parts in OUTPUTS.items()}


MODELS |= {f"in_place_{name}": lambda parts=parts: Around(*parts) for name, parts in IN_PLACE.items()}


def make(name, seed=0):
    """A model of the zoo, always with the same weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MODELS[name]()


def sequential(*layers, seed=0):
    """What `layers` make, else Linear, Tanh and Linear, one after the other; always with the same weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(*[layer() for layer in layers or (lin, nn.Tanh, lin)])


def args(m, *what):
    """A hook function that stores all it is given."""
    return what


def explode(*what):
    """A hook function that fails."""
    raise ValueError("boom")


def make_input(seed=1):
    return torch.randn(D, D, generator=torch.Generator().manual_seed(seed))


def run(model, n=2, seed=2):
    """Outputs of `n` forward and backward passes, and what they leave: gradients, buffers, random state."""
    torch.manual_seed(seed)
    model.zero_grad()
    outs = []
    for k in range(n):
        out = model(make_input(k))
        outs.append(out.detach().clone())
        if out.requires_grad:
            (out * (out + 1)).sum().backward()
    grads = {
        name: None if p.grad is None else p.grad.to_dense().clone() for name, p in model.named_parameters()
    }
    return {
        "outs": outs,
        "grads": grads,
        "buffers": copy.deepcopy(dict(model.named_buffers())),
        "rng": torch.get_rng_state(),
    }


def alike(a, b):
    """Whether two nested things have the same types and, to the bit, the same values."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return alike_tensors(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(alike(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, (dict, UserDict)):
        return list(a) == list(b) and all(alike(a[k], b[k]) for k in a)
    if hasattr(a, "__dataclass_fields__"):
        return all(alike(getattr(a, k), getattr(b, k)) for k in a.__dataclass_fields__)
    return a is b or bool(a == b)


def alike_tensors(a, b):
    if (a.dtype, a.shape, a.layout, a.device) != (b.dtype, b.shape, b.layout, b.device):
        return a.is_nested and b.is_nested and all(map(torch.equal, a.unbind(), b.unbind()))
    if a.device.type == "meta":
        return True
    if a.is_nested:
        return len(a.unbind()) == len(b.unbind()) and all(map(torch.equal, a.unbind(), b.unbind()))
    if a.is_quantized:
        return torch.equal(a.int_repr(), b.int_repr())
    if a.layout is not torch.strided:
        return torch.equal(a.to_dense(), b.to_dense())
    if a.dtype is torch.float8_e4m3fn:
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return torch.equal(a, b)


def flat(out, path=()):
    """The tensors of a nested output as {path: tensor}; independent of the library's own walk."""
    if isinstance(out, torch.Tensor):
        return {path: out}
    if isinstance(out, (dict, UserDict)):
        items = list(out.items())
    elif isinstance(out, (tuple, list)):
        items = list(enumerate(out))
    elif hasattr(out, "__dataclass_fields__"):
        items = [(k, getattr(out, k)) for k in out.__dataclass_fields__]
    else:
        return {}
    return {p: t for k, v in items for p, t in flat(v, (*path, k)).items()}


def at(structure, path):
    """The item of a structure at a path, by attribute where there is one, else by key."""
    for key in path:
        structure = (
            getattr(structure, key) if isinstance(key, str) and hasattr(structure, key) else structure[key]
        )
    return structure


# ---- for the tests of the summary

S = torch.Size


class CallsItself(nn.Module):
    """Runs its layer three times, in calls of its own."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x, n=2):
        x = self.fc(x)
        return self(x, n - 1) if n else x


class Falsy(nn.Module):
    """A container that says it is empty."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def __len__(self):
        return 0

    def forward(self, x):
        return self.fc(x)


def randn(*shape, seed=0, **kwargs):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **kwargs)


def cnn():
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(3, 4, 3, padding=1),
            norm=nn.BatchNorm2d(4),
            act=nn.ReLU(inplace=True),
            pool=nn.AdaptiveAvgPool2d(1),
            flat=nn.Flatten(),
            drop=nn.Dropout(0.5),
            head=nn.Linear(4, 2),
        )
    )


def encoder(n=2, **kwargs):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **kwargs)
    return nn.TransformerEncoder(layer, n, enable_nested_tensor=False)


def mlp():
    return nn.Sequential(nn.Linear(10, 30), nn.ReLU(), nn.Linear(30, 2))


def tied():
    model = Plain(lambda m, ids: m.decoder(m.embed(ids)), embed=nn.Embedding(11, 6), decoder=nn.Linear(6, 11))
    model.decoder.weight = model.embed.weight
    return model


def shared_and_scaled():
    """A layer under two names, called twice, and a parameter of the model itself."""
    fc = nn.Linear(2, 2)
    return Plain(lambda m, x: m.again(m.fc(x)) * m.scale, fc=fc, again=fc, scale=nn.Parameter(torch.ones(())))


def shared_between_blocks():
    fc = nn.Linear(3, 3)

    def block():
        return nn.Sequential(OrderedDict(fc=fc, own=nn.Linear(3, 3)))

    return Plain(lambda m, x: m.b(m.a(x)), a=block(), b=block())


def parameter_containers():
    return Plain(
        lambda m, x: x @ m.several[0] @ m.named["w"] * m.lone,
        several=nn.ParameterList([torch.ones(3, 4), torch.ones(5)]),
        named=nn.ParameterDict({"w": torch.ones(4, 2), "unused": torch.ones(7)}),
        lone=nn.Parameter(torch.ones(())),
    )


def frozen_part():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 3), nn.Tanh()), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    model[1].bias.requires_grad_(False)
    return model


def with_gaps():
    """Children and parameters that are None, an empty Sequential, a child nobody calls."""
    model = Plain(
        lambda m, x: m.falsy(m.skip(m.fc(x))),
        fc=nn.Linear(4, 4, bias=False),
        skip=nn.Sequential(),
        falsy=Falsy(),
        spare=nn.Linear(4, 9),
    )
    model.register_module("downsample", None)
    model.register_parameter("shift", None)
    model.register_buffer("cache", None)
    return model


def nested(n=60):
    model = nn.Linear(2, 2)
    for _ in range(n):
        model = nn.Sequential(model)
    return model


def by_block(kind):
    blocks = [nn.Linear(4, 4), nn.Linear(4, 4)]
    return Plain(
        lambda m, x: functools.reduce(
            lambda h, k: m.blocks[k](h), m.blocks if kind is nn.ModuleDict else (0, 1), x
        ),
        blocks=kind({"up": blocks[0], "down": blocks[1]} if kind is nn.ModuleDict else blocks),
    )


def checkpointed():
    return Plain(lambda m, x: checkpoint(m.fc, x, use_reentrant=False), fc=nn.Linear(4, 3))


PACKED = pack_sequence([randn(3, 5), randn(2, 5)])


IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


MASK = torch.tensor([[False, False, False, True, True]] * 3)


SUMMED = {
    "cnn": lambda: (cnn(), randn(4, 3, 8, 8)),
    "LSTM, a single layer": lambda: (nn.LSTM(5, 7, 2, batch_first=True, bidirectional=True), randn(2, 6, 5)),
    "GRU of packed sequences": lambda: (nn.GRU(5, 7, bidirectional=True), PACKED),
    "TransformerEncoder": lambda: (encoder(), randn(3, 5, 8)),
    "TransformerEncoder with a bool mask": lambda: (
        Plain(lambda m, x, mask: m.enc(x, src_key_padding_mask=mask), enc=encoder()),
        randn(3, 5, 8),
        MASK,
    ),
    "MultiheadAttention": lambda: (nn.MultiheadAttention(8, 2, batch_first=True), *randn(3, 3, 5, 8)),
    "lone parameter": lambda: (Plain(lambda m, x: x @ m.w, w=nn.Parameter(torch.ones(3, 4))), randn(2, 3)),
    "shared layer, lone parameter": lambda: (shared_and_scaled(), randn(4, 2)),
    "shared between blocks": lambda: (shared_between_blocks(), randn(4, 3)),
    "tied weights": lambda: (tied(), IDS),
    "recursion": lambda: (CallsItself(), randn(4, 3)),
    "ModuleList": lambda: (by_block(nn.ModuleList), randn(2, 4)),
    "ModuleDict": lambda: (by_block(nn.ModuleDict), randn(2, 4)),
    "ParameterList and ParameterDict": lambda: (parameter_containers(), randn(2, 3)),
    "parametrized": lambda: (
        nn.Sequential(
            parametrizations.weight_norm(nn.Linear(4, 3)), parametrizations.spectral_norm(nn.Linear(3, 3))
        ),
        randn(2, 4),
    ),
    "spectral norm by a pre-hook": lambda: (
        nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(4, 3))),
        randn(2, 4),
    ),
    "no parameters": lambda: (nn.Sequential(nn.ReLU(), nn.Flatten()), randn(2, 3, 4)),
    "single layer": lambda: (nn.Linear(10, 30), randn(4, 10)),
    "empty": lambda: (nn.Sequential(), randn(4, 10)),
    "identity": lambda: (nn.Identity(), randn(4, 10)),
    "frozen part": lambda: (frozen_part(), randn(2, 4)),
    "all frozen": lambda: (mlp().requires_grad_(False), randn(2, 10)),
    "bfloat16": lambda: (mlp().bfloat16(), randn(2, 10).bfloat16()),
    "half": lambda: (mlp().half(), randn(2, 10).half()),
    "complex": lambda: (nn.Linear(3, 2, dtype=torch.complex64), randn(2, 3, dtype=torch.complex64)),
    "with gaps": lambda: (with_gaps(), randn(2, 4)),
    "deep": lambda: (nested(), randn(3, 2)),
    "wide": lambda: (nn.Sequential(*(nn.Linear(2, 2) for _ in range(50))), randn(3, 2)),
    "checkpointed": lambda: (checkpointed(), randn(2, 4)),
    "several inputs": lambda: (nn.Bilinear(3, 4, 5), randn(2, 3), randn(2, 4)),
    "a batch of one": lambda: (cnn(), randn(1, 3, 8, 8)),
    "an empty batch": lambda: (mlp(), randn(0, 10)),
    "int input": lambda: (nn.EmbeddingBag(11, 4), IDS),
}


projections = pytest.mark.filterwarnings("ignore:LSTM with projections")  # torch's own, at the first forward


def norm_net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(2, 4),
            nn.BatchNorm1d(4),
            nn.ReLU(inplace=True),
            nn.Dropout(0.3),
            Scaled(4),
            nn.Linear(4, 1),
        )


class Scaled(nn.Module):
    """Multiplies by a buffer, which its backward needs, and counts its calls in another."""

    def __init__(self, n):
        super().__init__()
        self.register_buffer("scale", torch.full((n,), 1.5))
        self.register_buffer("n_seen", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.n_seen += 1
        return x * self.scale


# ---- fits


def batches(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(D, D, generator=g), torch.randn(D, D, generator=g)) for _ in range(n)]


def learner(model, n_train=3, n_valid=2, cbs=(), **kwargs):
    kwargs = {"loss_func": F.mse_loss, "opt_func": torch.optim.SGD, "lr": 0.1} | kwargs
    learn = Learner((batches(n_train), batches(n_valid, 1) if n_valid else None), model, cbs=cbs, **kwargs)
    learn.remove_cbs([cb for cb in learn.cbs if cb.name == "progress"])
    return learn


def fit(model, *cbs, n_epoch=1, **kwargs):
    learn = learner(model, **kwargs)
    learn.fit(n_epoch, cbs=list(cbs))
    return learn


def three_layers(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Plain(
            lambda s, x: s.c(s.act(s.b(s.act(s.a(x))))),
            a=lin(),
            b=lin(),
            c=lin(),
            act=nn.ReLU(),
        )


def numbers(results):
    return {name: value.item() for name, value in results.items()}


class Means(HookCallback):
    """Keeps what it was called with: (epoch, iter, training, layer, mean of the output)."""

    def before_fit(self):
        super().before_fit()
        self.log = []

    def hook(self, m, i, o):
        self.log.append((self.epoch, self.iter, self.training, self.layer_name(m)))
        return o.mean()


class Gradients(HookCallback):
    def __init__(self, modules=None, **kwargs):
        super().__init__(modules, is_forward=False, **kwargs)

    def hook(self, m, gi, go):
        return gi, go
