"""The workloads of the benchmarks: MLPs, CNNs, transformers; ResNet-50 and a GPT for a GPU."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def loss_func(pred: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy over the last dimension, with any number of leading dimensions."""
    return F.cross_entropy(pred.flatten(0, -2), y.flatten())


@dataclass
class Workload:
    """A model and a batch for it."""

    title: str
    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    steps: int  # a turn

    def train(self) -> tuple[nn.Module, Callable[[], None]]:
        """A new model, and a function that trains it for a turn."""
        torch.manual_seed(0)
        model, (x, y) = self.model(), self.batch()
        opt = torch.optim.SGD(model.parameters(), lr=1e-3)

        def turn() -> None:
            for _ in range(self.steps):
                loss_func(model(x), y).backward()
                opt.step()
                opt.zero_grad()

        return model, turn


class Block(nn.Module):
    """Two convolutions with a shortcut around them."""

    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride, padding=1, bias=False)
        self.bn1, self.act1 = nn.BatchNorm2d(n_out), nn.ReLU()
        self.conv2 = nn.Conv2d(n_out, n_out, 3, padding=1, bias=False)
        self.bn2, self.act2 = nn.BatchNorm2d(n_out), nn.ReLU()
        self.shortcut = nn.Sequential()
        if stride > 1:
            conv = nn.Conv2d(n_in, n_out, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(n_out))

    def forward(self, x: Tensor) -> Tensor:
        out = self.act1(self.bn1(self.conv1(x)))
        return self.act2(self.bn2(self.conv2(out)) + self.shortcut(x))


def mlp() -> nn.Module:
    layers = nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    return nn.Sequential(*layers)


def resnet() -> nn.Module:
    stem = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()
    widths = [(64, 64), (64, 128), (128, 256), (256, 512)]
    blocks = [b for i, (n, m) in enumerate(widths) for b in (Block(n, m, 1 + (i > 0)), Block(m, m, 1))]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(1000, 256), encoder, nn.Linear(256, 1000))


class Bottleneck(nn.Module):
    """ResNet-50's block: three convolutions, four times as many channels at the end, and a shortcut."""

    def __init__(self, n_in: int, width: int, stride: int) -> None:
        super().__init__()
        n_out = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(n_in, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, n_out, 1, bias=False), nn.BatchNorm2d(n_out)
        self.act = nn.ReLU()
        self.shortcut = nn.Sequential()
        if n_in != n_out:
            conv = nn.Conv2d(n_in, n_out, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(n_out))

    def forward(self, x: Tensor) -> Tensor:
        out = self.act(self.bn1(self.conv1(x)))
        out = self.act(self.bn2(self.conv2(out)))
        return self.act(self.bn3(self.conv3(out)) + self.shortcut(x))


def resnet50(depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, n_classes: int = 1000) -> nn.Module:
    """ResNet-50 with the stride at the 3×3 convolution, as in torchvision: 25.6 million parameters."""
    stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    stem.append(nn.MaxPool2d(3, 2, 1))
    blocks, n_in = [], width
    for stage, depth in enumerate(depths):
        for k in range(depth):
            blocks.append(Bottleneck(n_in, width << stage, 2 if stage and not k else 1))
            n_in = 4 * (width << stage)
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n_in, n_classes))


class GPTBlock(nn.Module):
    """Causal attention and an MLP, each with a normalization before and a residual around."""

    def __init__(self, d: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (
            self.qkv(self.norm1(x)).view(b, t, 3, self.n_heads, d // self.n_heads).permute(2, 0, 3, 1, 4)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(out.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder as GPT-2, without dropout; by default with GPT-2 small's 124 million parameters."""

    def __init__(
        self, d: int = 768, n_layers: int = 12, n_heads: int = 12, vocab: int = 50_304, length: int = 1024
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, d), nn.Embedding(length, d)
        self.blocks = nn.Sequential(*(GPTBlock(d, n_heads) for _ in range(n_layers)))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.positions.weight[: x.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def tiny() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(20) for layer in (nn.Linear(16, 16), nn.ReLU())))


WORKLOADS = {
    "mlp": Workload(
        "MLP 784-512-512-10, batch 64", mlp, lambda: (torch.randn(64, 784), torch.randint(10, (64,))), 50
    ),
    "resnet": Workload(
        "ResNet-18-like, 3×32×32, batch 64",
        resnet,
        lambda: (torch.randn(64, 3, 32, 32), torch.randint(10, (64,))),
        1,
    ),
    "transformer": Workload(
        "transformer, 6 layers, d 256, T 128, batch 8",
        transformer,
        lambda: (torch.randint(1000, (8, 128)), torch.randint(1000, (8, 128))),
        1,
    ),
}
TINY = Workload(  # shows the cost per layer, whatever its size
    "20 × Linear(16, 16) and ReLU, batch 16",
    tiny,
    lambda: (torch.randn(16, 16), torch.randint(16, (16,))),
    50,
)


class Residual(nn.Module):
    """Two convolutions with group norms and a shortcut around them."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(n, n, 3, padding=1, bias=False), nn.GroupNorm(8, n)
        self.conv2, self.norm2 = nn.Conv2d(n, n, 3, padding=1, bias=False), nn.GroupNorm(8, n)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x + self.norm2(self.conv2(self.act(self.norm1(self.conv1(x))))))


def kept_mlp() -> nn.Module:
    layers = nn.Linear(600, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10)
    return nn.Sequential(*layers)


def kept_residual() -> nn.Module:
    begin = nn.Conv2d(3, 32, 3, padding=1), Residual(32), nn.MaxPool2d(2), nn.Conv2d(32, 64, 1), Residual(64)
    return nn.Sequential(*begin, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def kept_transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(192, 6, 768, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 5, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(500, 192), encoder, nn.Linear(192, 500))


KEPT = {  # nets on which nothing was tuned, for the targets of docs/costs.md
    "mlp": Workload(
        "MLP 600-512-512-10 with GELU, batch 64",
        kept_mlp,
        lambda: (torch.randn(64, 600), torch.randint(10, (64,))),
        100,
    ),
    "residual": Workload(
        "residual net with GroupNorm, 3×24×24, batch 32",
        kept_residual,
        lambda: (torch.randn(32, 3, 24, 24), torch.randint(10, (32,))),
        10,
    ),
    "transformer": Workload(
        "transformer, 5 layers, d 192, T 64, batch 8",
        kept_transformer,
        lambda: (torch.randint(500, (8, 64)), torch.randint(500, (8, 64))),
        6,
    ),
    "tiny": Workload(
        "20 × Linear(8, 8), batch 16",
        lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(20))),
        lambda: (torch.randn(16, 8), torch.randint(8, (16,))),
        200,
    ),
}


def learnable(workload: Workload) -> Workload:
    """The same work with something to learn, where otherwise targets are random.

    In inputs of numbers each class has a pattern of its own; of a token, another one is to be predicted.
    """

    @cache
    def patterns(n: int, n_dims: int) -> Tensor:
        return torch.randn(10, n, *[1] * (n_dims - 2))

    def batch() -> tuple[Tensor, Tensor]:
        x, y = workload.batch()
        if not x.is_floating_point():
            return x, (7 * x + 3) % 500
        return x + patterns(x.shape[1], x.ndim)[y], y

    return replace(workload, batch=batch)


def _images(n: int, size: int, n_classes: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, size, size), torch.randint(n_classes, (n,))


def _tokens(n: int, length: int, vocab: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(vocab, (n, length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


ON_GPU = {  # `benchmarks/gpu.py`
    "gpt2": Workload("GPT-2 small, T 1024, batch 8", GPT, lambda: _tokens(8, 1024, 50_304), 10),
    "resnet50": Workload("ResNet-50, 3×224×224, batch 64", resnet50, lambda: _images(64, 224, 1000), 10),
    "small": Workload(  # bound by launches
        "GPT of 6 layers, d 384, T 256, batch 32",
        lambda: GPT(384, 6, 6, 65, 256),
        lambda: _tokens(32, 256, 65),
        10,
    ),
}
SMALL = {  # the same architectures for a test without a GPU
    "gpt2": Workload(
        "GPT of 2 layers, d 16, T 8, batch 2", lambda: GPT(16, 2, 2, 20, 8), lambda: _tokens(2, 8, 20), 10
    ),
    "resnet50": Workload(
        "ResNet-50 of width 4, 3×32×32, batch 4",
        lambda: resnet50((1, 1, 1, 1), 4, 10),
        lambda: _images(4, 32, 10),
        10,
    ),
    "small": Workload(
        "GPT of 1 layer, d 8, T 8, batch 2", lambda: GPT(8, 1, 2, 20, 8), lambda: _tokens(2, 8, 20), 10
    ),
}
ON_CPU = {  # compiled in `benchmarks/host.py`
    "gpt4": Workload(
        "GPT of 4 layers, d 128, T 64, batch 8",
        lambda: GPT(128, 4, 4, 256, 64),
        lambda: _tokens(8, 64, 256),
        10,
    ),
}
