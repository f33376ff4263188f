"""Models of the controls that are rebuilt from other people's scripts."""

import torch
from nets import TransformerBlock, stack
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional as F


class TokenVit(nn.Module):
    """A vision transformer with a class token initialized to almost zero, as in timm.

    Source: R. Wightman, timm/models/vision_transformer.py, `init_weights`: a std of 1e-6 for the token, 0.02
    for positions and weights.
    """

    def __init__(self, width: int = 48, depth: int = 2, token_std: float = 1e-6) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, width, 2, stride=2)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.blocks = nn.ModuleList(TransformerBlock(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)
        for m in self.modules():
            if isinstance(m, nn.Linear):
                nn.init.trunc_normal_(m.weight, std=0.02)
                nn.init.zeros_(m.bias)
        nn.init.normal_(self.cls_token, std=token_std)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), patches], dim=1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


class ActorCritic(nn.Module):
    """A policy and a value; training calls one or both, but never the whole module.

    Source: Huang et al., cleanrl/ppo.py: orthogonal weights, a small last layer of the policy.
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.critic = stack(4, width, width, 1, act=nn.Tanh)
        self.actor = stack(4, width, width, 2, act=nn.Tanh)
        for net, last in ((self.critic, 1.0), (self.actor, 0.01)):
            layers = [m for m in net if isinstance(m, nn.Linear)]
            for layer in layers:
                nn.init.orthogonal_(layer.weight, last if layer is layers[-1] else 2**0.5)
                nn.init.zeros_(layer.bias)

    def value(self, x: Tensor) -> Tensor:
        return self.critic(x).squeeze(1)

    def policy(self, x: Tensor) -> Categorical:
        return Categorical(logits=self.actor(x))


class MemoryAttention(nn.Module):
    """Attention over the positions of an image and over some learned keys and values.

    Source: P. Wang, denoising-diffusion-pytorch, `Attention`.
    """

    def __init__(self, width: int, n_head: int = 2, n_memory: int = 4) -> None:
        super().__init__()
        self.n_head = n_head
        self.norm = nn.GroupNorm(1, width)
        self.memory = nn.Parameter(torch.randn(2, n_head, n_memory, width // n_head))
        self.to_qkv = nn.Conv2d(width, 3 * width, 1, bias=False)
        self.to_out = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        n, _, h, w = x.shape
        q, k, v = (
            self.to_qkv(self.norm(x)).flatten(2).unflatten(1, (3, self.n_head, -1)).transpose(3, 4).unbind(1)
        )
        memory_k, memory_v = self.memory.unsqueeze(1).expand(-1, n, -1, -1, -1)
        k, v = torch.cat([memory_k, k], dim=2), torch.cat([memory_v, v], dim=2)
        out = F.scaled_dot_product_attention(q, k, v)
        return x + self.to_out(out.transpose(2, 3).reshape(n, -1, h, w))


class TimeBlock(nn.Module):
    """Two convolutions with a shortcut; the noise's time step is added between them."""

    def __init__(self, n_in: int, n_out: int, n_time: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(n_in, n_out, 3, padding=1), nn.GroupNorm(4, n_out)
        self.conv2, self.norm2 = nn.Conv2d(n_out, n_out, 3, padding=1), nn.GroupNorm(4, n_out)
        self.time = nn.Linear(n_time, 2 * n_out)
        self.short = nn.Conv2d(n_in, n_out, 1) if n_in != n_out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale, shift = self.time(time)[:, :, None, None].chunk(2, dim=1)
        out = F.silu(self.norm1(self.conv1(x)) * (1 + scale) + shift)
        return self.short(x) + F.silu(self.norm2(self.conv2(out)))


class Unet(nn.Module):
    """A U-Net with two levels that predicts the noise in an 8×8 image."""

    def __init__(self, width: int = 16, n_time: int = 32) -> None:
        super().__init__()
        self.n_time = n_time
        self.time_mlp = nn.Sequential(nn.Linear(n_time, n_time), nn.GELU(), nn.Linear(n_time, n_time))
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.down = TimeBlock(width, width, n_time)
        self.shrink = nn.Conv2d(width, 2 * width, 4, stride=2, padding=1)
        self.mid1 = TimeBlock(2 * width, 2 * width, n_time)
        self.mid_attn = MemoryAttention(2 * width)
        self.mid2 = TimeBlock(2 * width, 2 * width, n_time)
        self.grow = nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1)
        self.up = TimeBlock(2 * width, width, n_time)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        rates = torch.exp(-torch.arange(self.n_time // 2) * (9.2 / (self.n_time // 2)))
        angles = t[:, None] * rates
        time = self.time_mlp(torch.cat([angles.sin(), angles.cos()], dim=1))
        wide = self.down(self.stem(x), time)
        deep = self.mid2(self.mid_attn(self.mid1(self.shrink(wide), time)), time)
        return self.head(self.up(torch.cat([self.grow(deep), wide], dim=1), time))
