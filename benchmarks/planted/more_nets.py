"""Models of the further controls."""

import torch
from nets import Make, TransformerBlock, stack
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint


class Branch(nn.Module):
    """Two layers with a shortcut, times an optional `scale`; the second can be initialized to zero."""

    def __init__(self, width: int, zero: bool = False, scale: float | None = None) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)
        self.gamma = None if scale is None else nn.Parameter(torch.full((width,), scale))
        if zero:
            nn.init.zeros_(self.fc2.weight)
            nn.init.zeros_(self.fc2.bias)

    def forward(self, x: Tensor) -> Tensor:
        out = self.fc2(self.act(self.fc1(x)))
        return x + (out if self.gamma is None else self.gamma * out)


class ResMlp(nn.Module):
    """A stem, residual branches, and a head; `zero` initializes branches and head to zero."""

    def __init__(self, n: int = 4, width: int = 48, zero: bool = False, scale: float | None = None) -> None:
        super().__init__()
        self.stem = nn.Linear(64, width)
        self.blocks = nn.Sequential(*(Branch(width, zero, scale) for _ in range(n)))
        self.head = nn.Linear(width, 10)
        if zero:
            nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)))


class Lora(nn.Module):
    """A frozen linear layer plus the product of two low-rank ones; the second is initialized to zero.

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022.
    """

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 4 * self.lora_b(self.lora_a(x))


class Vit(nn.Module):
    """A transformer over the 16 patches of an 8×8 image and a class token."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.blocks = nn.Sequential(TransformerBlock(width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.position
        return self.head(self.norm(self.blocks(x)[:, 0]))


class Experts(nn.Module):
    """Four experts and a router that chooses one for each input; the last is rarely chosen."""

    def __init__(self, n_in: int = 64, n_out: int = 10) -> None:
        super().__init__()
        self.router = nn.Linear(n_in, 4)
        self.experts = nn.ModuleList(stack(n_in, 32, n_out) for _ in range(4))
        with torch.no_grad():
            self.router.bias[3] -= 1.5

    def forward(self, x: Tensor) -> Tensor:
        gates, chosen = self.router(x).softmax(-1).max(-1)
        out = x.new_zeros(len(x), 10)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().squeeze(1)
            if len(rows):
                out = out.index_copy(0, rows, gates[rows, None] * expert(x[rows]))
        return out


class TwoHeads(nn.Module):
    """A trunk with a head, and a second one for an auxiliary task."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        self.head, self.aux_head = nn.Linear(64, 10), nn.Linear(64, 2)

    def forward(self, x: Tensor, with_aux: bool) -> tuple[Tensor, Tensor | None]:
        x = self.trunk(x)
        return self.head(x), self.aux_head(x) if with_aux else None


class PackedGru(nn.Module):
    """A GRU over packed sequences of token ids, with 0 as padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16, padding_idx=0)
        self.rnn, self.head = nn.GRU(16, 32, batch_first=True), nn.Linear(32, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        lengths = (tokens != 0).sum(1)
        packed = pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.rnn(packed)[1][0])


class Checkpointed(nn.Module):
    """Two blocks that recompute their activations in the backward."""

    def __init__(self, act: Make = nn.ReLU) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), act()) for _ in range(2))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Vae(nn.Module):
    """A variational autoencoder; returns the reconstruction, and mean and log-variance of the code."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 48), nn.ReLU())
        self.mean, self.log_var = nn.Linear(48, 8), nn.Linear(48, 8)
        self.decoder = stack(8, 48, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.encoder(x)
        mean, log_var = self.mean(h), self.log_var(h)
        return self.decoder(mean + torch.randn_like(mean) * (0.5 * log_var).exp()), mean, log_var


class Byol(nn.Module):
    """An online encoder with a predictor, and an untrained target encoder that follows it slowly."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = stack(64, 64, 16), stack(64, 64, 16)
        self.target.load_state_dict(self.online.state_dict())
        self.target.requires_grad_(False)
        self.predictor = stack(16, 32, 16)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            aim = self.target(b)
        return self.predictor(self.online(a)), aim

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Move the target toward the online encoder."""
        for p, q in zip(self.target.parameters(), self.online.parameters(), strict=True):
            p.lerp_(q, 0.02)


class Shared(nn.Module):
    """One encoder shared by several inputs."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.encoder(x) for x in xs)


class Gaussian(nn.Module):
    """A mean and a variance for each input."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.ReLU())
        self.mean, self.raw_var = nn.Linear(64, 1), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x)
        return self.mean(x), F.softplus(self.raw_var(x)) + 1e-4
