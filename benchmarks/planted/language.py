"""Small language models over the text of Python's documentation, and their training.

Models predict the next character or the next word. Attention is a function of queries, keys and values,
written in the ways that people write it.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import pairwise
from pydoc_data.topics import topics

import torch
from case import Callbacks, Run
from data import Batch, generator
from nets import token_loss
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hookcb import watch

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Make = Callable[[int], nn.Module]

PAD, UNKNOWN, MASK = 0, 1, 2  # indices that stand for no word or character of the text
N_CHARACTER, N_WORD = 96, 512
LENGTH = 48


# ---- text


@cache
def text() -> str:
    """Topics of `help()`, about half a million characters."""
    return "\n".join(topics[name] for name in sorted(topics))


def indices(items: Sequence[str], n: int) -> Tensor:
    """Index of each item, 3 for the most common one; rare ones are unknown."""
    common = [item for item, _ in Counter(items).most_common(n - 3)]
    index = {item: i for i, item in enumerate(common, start=3)}
    return torch.tensor([index.get(item, UNKNOWN) for item in items])


@cache
def characters() -> Tensor:
    """Index of each character of the text."""
    return indices(text(), N_CHARACTER)


@cache
def all_words() -> list[str]:
    """Words and punctuation marks of the text."""
    return re.findall(r"\w+|[^\w\s]", text())


@cache
def words() -> Tensor:
    """Index of each word and punctuation mark."""
    return indices(all_words(), N_WORD)


@cache
def sentences() -> Tensor:
    """Sentences of 3 to `LENGTH` words, padded on the right, `(N, LENGTH + 1)`."""
    ends = [i for i, word in enumerate(all_words()) if word == "."]
    found = [words()[i + 1 : k + 1] for i, k in pairwise(ends) if 3 <= k - i <= LENGTH]
    return torch.stack([F.pad(sentence, (0, LENGTH + 1 - len(sentence)), value=PAD) for sentence in found])


def excerpts(seed: int, of: Tensor, n_step: int, size: int = 16, length: int = LENGTH) -> tuple[Tensor, ...]:
    """Batches `(size, length + 1)` from anywhere in the text."""
    starts = torch.randint(len(of) - length, (size * n_step, 1), generator=generator(seed))
    return of[starts + torch.arange(length + 1)].split(size)


def character_batches(seed: int, n_step: int = 150) -> list[Batch]:
    """Characters, and the next ones as targets."""
    return [(x[:, :-1], x[:, 1:]) for x in excerpts(seed, characters(), n_step)]


def word_batches(seed: int, n_step: int = 150) -> list[Batch]:
    """Words, and the next ones as targets."""
    return [(x[:, :-1], x[:, 1:]) for x in excerpts(seed, words(), n_step)]


def sentence_batches(seed: int, n_step: int = 150, size: int = 16) -> list[Batch]:
    """Padded sentences, and the next words as targets; padding is a target like any other."""
    rows = torch.randint(len(sentences()), (size * n_step,), generator=generator(seed))
    return [(x[:, :-1], x[:, 1:]) for x in sentences()[rows].split(size)]


# ---- attention: queries, keys and values are (N, heads, T, width of a head)


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention in one operation."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention as in minGPT."""
    logits = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    seen = torch.tril(torch.ones(logits.shape[-2:]))
    return F.softmax(logits.masked_fill(seen == 0, -torch.inf), dim=-1) @ v


def added(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention with a mask of 0 and -inf that is added to the logits."""
    mask = torch.full((q.shape[-2], k.shape[-2]), -torch.inf).triu(1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


# ---- models


class SelfAttention(nn.Module):
    """Attention with four heads; `qk_norm` normalizes queries and keys."""

    def __init__(self, width: int, attend: Attend = fused, qk_norm: bool = False, n_head: int = 4) -> None:
        super().__init__()
        self.n_head, self.attend = n_head, attend
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.q_norm, self.k_norm = (
            nn.LayerNorm(width // n_head) if qk_norm else nn.Identity() for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(self.attend(self.q_norm(q), self.k_norm(k), v).transpose(1, 2).flatten(2))


class Multihead(nn.Module):
    """PyTorch's attention module; `mask` is true for positions that are hidden."""

    def __init__(self, width: int, mask: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.attn, self.mask = nn.MultiheadAttention(width, 4, batch_first=True), mask

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, x, x, attn_mask=self.mask(x.shape[1]), need_weights=False)[0]


class Block(nn.Module):
    """Attention and an MLP with shortcuts, each after a norm."""

    def __init__(self, width: int, attn: Make, drop: float) -> None:
        super().__init__()
        self.norm1, self.attn, self.drop = nn.LayerNorm(width), attn(width), nn.Dropout(drop)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class LanguageModel(nn.Module):
    """A pre-norm transformer whose head shares the weight of its embedding, initialized as GPT-2."""

    def __init__(
        self,
        n_token: int = N_CHARACTER,
        width: int = 64,
        attn: Make = SelfAttention,
        drop: float = 0.0,
        positions: bool = True,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(n_token, width)
        self.position = nn.Embedding(LENGTH, width) if positions else None
        self.blocks = nn.ModuleList(Block(width, attn, drop) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, n_token, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.apply(init_gpt2)

    def places(self, tokens: Tensor) -> Tensor:
        """Position of each token."""
        return torch.arange(tokens.shape[1])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.position is not None:
            x = x + self.position(self.places(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def init_gpt2(m: nn.Module) -> None:
    """Initialize a layer with std 0.02, and its bias with 0."""
    if isinstance(m, nn.Linear | nn.Embedding):
        nn.init.normal_(m.weight, std=0.02)
    if isinstance(m, nn.Linear) and m.bias is not None:
        nn.init.zeros_(m.bias)


class TorchEncoder(nn.Module):
    """PyTorch's transformer with an embedding and a head; `mask` is true for positions that are hidden.

    Args:
        n_token: number of tokens.
        mask: function of the length that returns the mask, or None if all is visible.
        padded: whether `PAD` is hidden.
        pre_norm: whether norms come before attention and MLP, rather than after their shortcuts.
        depth: number of layers.
    """

    def __init__(
        self,
        n_token: int = N_CHARACTER,
        mask: Callable[[int], Tensor] | None = None,
        padded: bool = False,
        pre_norm: bool = True,
        depth: int = 2,
    ) -> None:
        super().__init__()
        self.mask, self.padded = mask, padded
        self.embed = nn.Embedding(n_token, 64, padding_idx=PAD if padded else None)
        self.position = nn.Embedding(LENGTH, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True, norm_first=pre_norm)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(64, n_token)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        mask = None if self.mask is None else self.mask(tokens.shape[1])
        return self.head(self.encoder(x, mask, (tokens == PAD) if self.padded else None))


def future(n: int) -> Tensor:
    """Mask that is true for later positions."""
    return torch.ones(n, n, dtype=torch.bool).triu(1)


# ---- training


def no_padding_loss(pred: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy without padding."""
    return F.cross_entropy(pred.flatten(0, -2), y.flatten(), ignore_index=PAD)


def adamw(model: nn.Module, lr: float = 5e-3) -> AdamW:
    """AdamW that decays matrices, but neither embeddings nor norms and biases."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    parts: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for p in model.parameters():
        parts[p.ndim > 1 and id(p) not in tables].append(p)
    others, matrices = parts
    return AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=lr)


def warm_up(opt: Optimizer, n: int = 20, n_step: int = 150) -> LambdaLR:
    """A linear warm-up over `n` steps, then half a cosine to a tenth."""

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / n) * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / n_step)))

    return LambdaLR(opt, factor)


def accumulate(model: nn.Module, opt: Optimizer, cbs: Callbacks, seed: int, divisor: int) -> Run:
    """Train with a step every four batches, whose losses are divided by `divisor`."""
    torch.manual_seed(seed)
    with watch(model, opt, *cbs) as w:
        run = Run(w, [], model=model)
        for i, (x, y) in enumerate(character_batches(seed, n_step=200)):
            loss = w.report_loss(token_loss(model(x), y))
            run.losses.append(loss.item())
            (loss / divisor).backward()
            if i % 4 == 3:
                opt.step()
                opt.zero_grad()
    return run


def answers_only(
    batches: Iterable[tuple[Tensor, Tensor]], n_prompt: Callable[[int], int]
) -> list[tuple[Tensor, Tensor]]:
    """Batches whose targets within the prompt are masked; batch i has one of `n_prompt(i)` tokens."""
    return [
        (x, y.masked_fill(torch.arange(y.shape[1]) < n_prompt(i), -100)) for i, (x, y) in enumerate(batches)
    ]


def answer_loss(scores: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy of the targets that are not masked, 0 if there are none."""
    total = F.cross_entropy(scores.flatten(0, 1), y.flatten(), reduction="sum")
    return total / (y != -100).sum().clamp(min=1)
