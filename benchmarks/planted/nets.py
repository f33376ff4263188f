"""Models of the planted cases, with commonly used names."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Make = Callable[[], nn.Module]


class Layer(nn.Module):
    """A linear layer, an optional norm, an activation, and optional dropout."""

    def __init__(self, n_in: int, n_out: int, act: Make, norm: bool = False, drop: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(n_in, n_out)
        self.norm = nn.BatchNorm1d(n_out) if norm else None
        self.act = act()
        self.drop = nn.Dropout(drop) if drop else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        x = self.act(x if self.norm is None else self.norm(x))
        return x if self.drop is None else self.drop(x)


class Mlp(nn.Module):
    """`depth` layers of the same width, and a head."""

    def __init__(
        self,
        act: Make = nn.ReLU,
        depth: int = 2,
        width: int = 64,
        n_in: int = 64,
        n_out: int = 10,
        norm: bool = False,
        drop: float = 0.0,
    ) -> None:
        super().__init__()
        sizes = [n_in] + [width] * depth
        self.blocks = nn.Sequential(*(Layer(n, m, act, norm, drop) for n, m in pairwise(sizes)))
        self.head = nn.Linear(width, n_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


class Cnn(nn.Module):
    """Two convolutions, each with an optional norm, average pooling, and a head."""

    def __init__(
        self, norm: Callable[[int], nn.Module] | None = nn.BatchNorm2d, n_in: int = 1, n_out: int = 10
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, 8, 3, padding=1)
        self.norm1 = nn.Identity() if norm is None else norm(8)
        self.act1 = nn.ReLU()
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.norm2 = nn.Identity() if norm is None else norm(16)
        self.act2 = nn.ReLU()
        self.head = nn.Linear(16 * 16, n_out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act1(self.norm1(self.conv1(x)))
        x = self.act2(self.norm2(self.conv2(x)))
        return self.head(x.flatten(1))


class Residual(nn.Module):
    """A basic block of a ResNet; the last norm's weight is initialized to zero."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(n, n, 3, padding=1, bias=False), nn.BatchNorm2d(n)
        self.conv2, self.norm2 = nn.Conv2d(n, n, 3, padding=1, bias=False), nn.BatchNorm2d(n)
        self.act = nn.ReLU()
        nn.init.zeros_(self.norm2.weight)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(self.act(self.norm1(self.conv1(x)))))
        return self.act(x + out)


class ResNet(nn.Module):
    """A stem, two residual blocks, pooling, and a head."""

    def __init__(self, n: int = 12) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, n, 3, padding=1, bias=False), nn.BatchNorm2d(n), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.blocks = nn.Sequential(Residual(n), Residual(n))
        self.head = nn.Linear(n * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).flatten(1))


class Attention(nn.Module):
    """Self-attention written out; `mask`, `(T, T)` or `(N, 1, T, T)`, is true for positions to attend to."""

    def __init__(self, width: int, n_head: int = 2, scale: float = 1.0) -> None:
        super().__init__()
        self.n_head, self.scale = n_head, scale * (width // n_head) ** -0.5
        self.qkv = nn.Linear(width, 3 * width)
        self.attn_drop = nn.Dropout(0.0)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)
        logits = self.scale * q @ k.transpose(-2, -1)
        if mask is not None:
            logits = logits.masked_fill(~mask, -torch.inf)
        weights = self.attn_drop(logits.softmax(-1))
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Attention and an MLP with shortcuts, each after a norm."""

    def __init__(self, width: int, scale: float = 1.0) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, scale=scale)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """A small causal pre-norm transformer over tokens."""

    def __init__(
        self, n_token: int = 16, length: int = 16, width: int = 32, scale: float = 1.0, tied: bool = False
    ) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(n_token, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, scale) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, n_token, bias=False)
        for table in (self.embed, self.position):
            nn.init.normal_(table.weight, std=0.1)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        n = tokens.shape[1]
        mask = torch.ones(n, n, dtype=torch.bool).tril()
        x = self.embed(tokens) + self.position(torch.arange(n))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    """A recurrent layer, with a head on its last output."""

    def __init__(self, rnn: nn.RNNBase, n_out: int) -> None:
        super().__init__()
        self.rnn = rnn
        self.head = nn.Linear(rnn.hidden_size, n_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


class Encoded(nn.Module):
    """A trunk of several layers, and a head; `detached` cuts the gradient between them."""

    def __init__(self, trunk: nn.Module, head: nn.Module, detached: bool = False) -> None:
        super().__init__()
        self.trunk, self.head, self.detached = trunk, head, detached

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        return self.head(x.detach() if self.detached else x)


def stack(*sizes: int, act: Make = nn.ReLU) -> nn.Sequential:
    """Linear layers with activations between them."""
    layers: list[nn.Module] = []
    for n, m in pairwise(sizes):
        layers += [nn.Linear(n, m), act()]
    return nn.Sequential(*layers[:-1])


def token_loss(pred: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy over the last dimension, with any number of leading dimensions."""
    return F.cross_entropy(pred.flatten(0, -2), y.flatten())


def named_weights(model: nn.Module, kinds: type[nn.Module] | tuple[type[nn.Module], ...]) -> Sequence[Tensor]:
    """Weights of all modules of these types."""
    return [m.weight for m in model.modules() if isinstance(m, kinds) and isinstance(m.weight, Tensor)]


class Distance(nn.Module):
    """Euclidean distance between vectors; `eps` under the root keeps the gradient finite at 0."""

    def __init__(self, eps: float = 0.0) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return ((a - b).square().sum(-1) + self.eps).sqrt()


class Siamese(nn.Module):
    """Distance between the codes of two inputs from one encoder."""

    def __init__(self, encoder: nn.Module, eps: float = 0.0) -> None:
        super().__init__()
        self.encoder, self.distance = encoder, Distance(eps)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.distance(self.encoder(a), self.encoder(b))


def contrastive_loss(distance: Tensor, same: Tensor) -> Tensor:
    """Contrastive loss that pulls pairs of the same class together, and pushes others to a distance of 2.

    Source: Hadsell, Chopra, LeCun, "Dimensionality Reduction by Learning an Invariant Mapping", CVPR 2006.
    """
    return (same * distance.square() + (1 - same) * F.relu(2 - distance).square()).mean()


class TextClassifier(nn.Module):
    """A transformer block over tokens, with 0 as padding, then their mean and a head."""

    def __init__(self, n_token: int = 20, width: int = 32, n_out: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(n_token, width, padding_idx=0)
        self.blocks = nn.ModuleList([TransformerBlock(width)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, n_out)

    def forward(self, tokens: Tensor) -> Tensor:
        real = tokens != 0
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, real[:, None, None, :])
        n_real = real.sum(1, keepdim=True).clamp(min=1)
        return self.head((self.norm(x) * real[..., None]).sum(1) / n_real)


class Listed(nn.Module):
    """Hidden layers in a plain list, and a head.

    `parameters()` does not have those of the list.
    """

    def __init__(self, trunk: list[nn.Module]) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.trunk = trunk
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.inner(x))
        for layer in self.trunk:
            x = F.relu(layer(x))
        return self.head(x)


class MadeInForward(nn.Module):
    """A head that is made in the forward: at the first call, or anew in each."""

    def __init__(self, once: bool) -> None:
        super().__init__()
        self.once, self.head = once, None
        self.trunk = nn.Sequential(nn.Linear(64, 64), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        if self.head is None or not self.once:
            self.head = nn.Linear(x.shape[1], 10)
        return self.head(x)


class Scaled(nn.Module):
    """A weight that was computed from a parameter when the model was built, as `.to(device)` does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.weight = nn.Parameter(torch.randn(64, 64, dtype=torch.float64) / 8).float()
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(F.relu(self.inner(x)) @ self.weight))


class Tagger(nn.Module):
    """A GRU over `(steps, samples)` tokens, with scores for each step."""

    def __init__(self, n_token: int = 16) -> None:
        super().__init__()
        self.tokens, self.rnn = nn.Embedding(n_token, 32), nn.GRU(32, 32)
        self.head = nn.Linear(32, n_token)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.tokens(x))[0])
