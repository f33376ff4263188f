"""Models and batches for the tests of the summary."""

import functools
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint

from tests.support import Net

S = torch.Size


class Calls(nn.Module):
    """Its forward is the function given; called with the module first."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


class Recursive(nn.Module):
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
    model = Calls(lambda m, ids: m.decoder(m.embed(ids)), embed=nn.Embedding(11, 6), decoder=nn.Linear(6, 11))
    model.decoder.weight = model.embed.weight
    return model


def shared_between_blocks():
    fc = nn.Linear(3, 3)

    def block():
        return nn.Sequential(OrderedDict(fc=fc, own=nn.Linear(3, 3)))

    return Calls(lambda m, x: m.b(m.a(x)), a=block(), b=block())


def parameter_containers():
    return Calls(
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
    model = Calls(
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


def deep(n=60):
    model = nn.Linear(2, 2)
    for _ in range(n):
        model = nn.Sequential(model)
    return model


def by_block(kind):
    blocks = [nn.Linear(4, 4), nn.Linear(4, 4)]
    return Calls(
        lambda m, x: functools.reduce(
            lambda h, k: m.blocks[k](h), m.blocks if kind is nn.ModuleDict else (0, 1), x
        ),
        blocks=kind({"up": blocks[0], "down": blocks[1]} if kind is nn.ModuleDict else blocks),
    )


def checkpointed():
    return Calls(lambda m, x: checkpoint(m.fc, x, use_reentrant=False), fc=nn.Linear(4, 3))


PACKED = pack_sequence([randn(3, 5), randn(2, 5)])
IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])
MASK = torch.tensor([[False, False, False, True, True]] * 3)
MODELS = {
    "cnn": lambda: (cnn(), randn(4, 3, 8, 8)),
    "LSTM, a single layer": lambda: (nn.LSTM(5, 7, 2, batch_first=True, bidirectional=True), randn(2, 6, 5)),
    "GRU of packed sequences": lambda: (nn.GRU(5, 7, bidirectional=True), PACKED),
    "TransformerEncoder": lambda: (encoder(), randn(3, 5, 8)),
    "TransformerEncoder with a bool mask": lambda: (
        Calls(lambda m, x, mask: m.enc(x, src_key_padding_mask=mask), enc=encoder()),
        randn(3, 5, 8),
        MASK,
    ),
    "MultiheadAttention": lambda: (nn.MultiheadAttention(8, 2, batch_first=True), *randn(3, 3, 5, 8)),
    "lone parameter": lambda: (Calls(lambda m, x: x @ m.w, w=nn.Parameter(torch.ones(3, 4))), randn(2, 3)),
    "shared layer, lone parameter": lambda: (Net(), randn(4, 2)),
    "shared between blocks": lambda: (shared_between_blocks(), randn(4, 3)),
    "tied weights": lambda: (tied(), IDS),
    "recursion": lambda: (Recursive(), randn(4, 3)),
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
    "deep": lambda: (deep(), randn(3, 2)),
    "wide": lambda: (nn.Sequential(*(nn.Linear(2, 2) for _ in range(150))), randn(3, 2)),
    "checkpointed": lambda: (checkpointed(), randn(2, 4)),
    "several inputs": lambda: (nn.Bilinear(3, 4, 5), randn(2, 3), randn(2, 4)),
    "a batch of one": lambda: (cnn(), randn(1, 3, 8, 8)),
    "an empty batch": lambda: (mlp(), randn(0, 10)),
    "int input": lambda: (nn.EmbeddingBag(11, 4), IDS),
}
models = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
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
