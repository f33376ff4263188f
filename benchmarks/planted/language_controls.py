"""Healthy language models, each close to a fault of `faults_language.py`."""

from functools import partial

import torch
from case import Callbacks, Case, Run, control, fit, follow
from data import generator
from language import (
    LENGTH,
    MASK,
    N_WORD,
    LanguageModel,
    Multihead,
    SelfAttention,
    TorchEncoder,
    accumulate,
    adamw,
    added,
    answer_loss,
    answers_only,
    character_batches,
    characters,
    excerpts,
    future,
    no_padding_loss,
    sentence_batches,
    warm_up,
    word_batches,
    words,
    written_out,
)
from nets import token_loss
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW

from hookcb import GradientAccumulation, GradientClip, MixedPrecision, Schedule

LANGUAGE_CONTROLS: list[Case] = []


# ---- scales


@control(LANGUAGE_CONTROLS, "LM: one channel of a norm ×4", target=3.0)
def large_channel(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel()
    with torch.no_grad():
        model.blocks[1].norm1.weight[5] *= 4
    opt = adamw(model)
    batches = character_batches(seed)
    return follow(model, token_loss, opt, batches, cbs, seed, clip=1.0, schedule=warm_up(opt))


# ---- masks


@control(LANGUAGE_CONTROLS, "LM: fused causal attention, warm-up, clipping at 1", target=2.95)
def fused_gpt(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel()
    opt = adamw(model)
    batches = character_batches(seed)
    return follow(model, token_loss, opt, batches, cbs, seed, clip=1.0, schedule=warm_up(opt))


@control(LANGUAGE_CONTROLS, "LM: attention written out, dropout and validation", target=3.05)
def written_gpt(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel(attn=partial(SelfAttention, attend=written_out), drop=0.1)
    batches = character_batches(seed, n_step=75), character_batches(seed + 50, n_step=4)
    cbs = [*cbs, Schedule(warm_up), GradientClip(1.0)]
    return fit(model, token_loss, adamw(model), batches, cbs, seed, n_epoch=2)


@control(LANGUAGE_CONTROLS, "LM: nn.MultiheadAttention over words", target=4.1)
def multihead(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel(N_WORD, attn=partial(Multihead, mask=future))
    return follow(model, token_loss, adamw(model), word_batches(seed, n_step=120), cbs, seed, clip=1.0)


@control(LANGUAGE_CONTROLS, "LM: nn.TransformerEncoder with a causal mask", target=2.95)
def torch_encoder(seed: int, cbs: Callbacks) -> Run:
    model = TorchEncoder(mask=future)
    opt = AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    return follow(model, token_loss, opt, character_batches(seed), cbs, seed)


@control(LANGUAGE_CONTROLS, "LM: masked characters, all visible, one segment", target=3.0)
def masked_characters(seed: int, cbs: Callbacks) -> Run:
    """BERT: a seventh of the characters is hidden and predicted; all are in the first of two segments."""

    class Bert(TorchEncoder):
        def __init__(self) -> None:
            super().__init__()
            self.segment = nn.Embedding(2, 64)
            self.embed.register_forward_hook(lambda m, args, out: out + self.segment(torch.zeros_like(*args)))

    rng, batches = generator(seed), []
    for x in excerpts(seed, characters(), n_step=200, size=64, length=15):
        is_hidden = torch.rand(x.shape, generator=rng) < 0.15
        batches.append((x.masked_fill(is_hidden, MASK), x.masked_fill(~is_hidden, -100)))
    model = Bert()
    opt = AdamW(model.parameters(), lr=5e-3)
    return follow(model, token_loss, opt, batches, cbs, seed, clip=1.0, schedule=warm_up(opt, n_step=200))


@control(LANGUAGE_CONTROLS, "LM: answers only, and none in every fifth batch", target=3.0)
def answers(seed: int, cbs: Callbacks) -> Run:
    """Supervised fine-tuning: targets of the prompt are masked, in some batches all of them."""
    model = LanguageModel()
    opt = adamw(model)
    batches = answers_only(character_batches(seed), lambda i: 1_000 if i % 5 == 4 else 8)
    return follow(model, answer_loss, opt, batches, cbs, seed, clip=1.0, schedule=warm_up(opt))


@control(LANGUAGE_CONTROLS, "LM: words of which a seventh is replaced", target=2.0)
def denoising(seed: int, cbs: Callbacks) -> Run:
    """Most targets equal the inputs, as a word is usually the right one."""
    rng, batches = generator(seed), []
    for x in excerpts(seed, words(), n_step=150, length=LENGTH - 1):
        is_noise = torch.rand(x.shape, generator=rng) < 0.15
        batches.append((torch.where(is_noise, torch.randint(3, N_WORD, x.shape, generator=rng), x), x))
    model = TorchEncoder(N_WORD)
    return fit(model, token_loss, Adam(model.parameters(), lr=2e-3), batches, cbs, seed)


N_PREFIX = 16


def prefixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention that sees the whole prefix, and is causal after it."""
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    mask[:, :N_PREFIX] = True
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@control(LANGUAGE_CONTROLS, "LM: prefix of which all is visible", target=2.95)
def prefix(seed: int, cbs: Callbacks) -> Run:
    """The loss is that of the characters after the prefix."""

    def loss_func(pred: Tensor, y: Tensor) -> Tensor:
        return token_loss(pred[:, N_PREFIX - 1 :], y[:, N_PREFIX - 1 :])

    model = LanguageModel(attn=partial(SelfAttention, attend=prefixed))
    opt = adamw(model)
    return follow(model, loss_func, opt, character_batches(seed), cbs, seed, clip=1.0, schedule=warm_up(opt))


def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention to the last eight positions."""
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril().triu(-7)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@control(LANGUAGE_CONTROLS, "LM: sliding window", target=2.95)
def sliding_window(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel(attn=partial(SelfAttention, attend=windowed))
    cbs = [*cbs, Schedule(warm_up), GradientClip(1.0)]
    return fit(model, token_loss, adamw(model), character_batches(seed), cbs, seed)


@control(LANGUAGE_CONTROLS, "LM: padded sentences, padding hidden and not counted", target=4.2)
def padded(seed: int, cbs: Callbacks) -> Run:
    model = TorchEncoder(N_WORD, mask=future, padded=True)
    opt = Adam(model.parameters(), lr=2e-3)
    return follow(model, no_padding_loss, opt, sentence_batches(seed, n_step=120), cbs, seed, clip=1.0)


# ---- positions and embeddings


def biased(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention that prefers near positions.

    Source: Press et al., "Train Short, Test Long: Attention with Linear Biases", ICLR 2022.
    """
    n = q.shape[-2]
    distance = torch.arange(n) - torch.arange(n)[:, None]
    slopes = 2.0 ** -torch.arange(2.0, 2 + 2 * q.shape[1], 2)
    mask = slopes[:, None, None] * distance.masked_fill(distance > 0, 0)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.masked_fill(future(n), -torch.inf))


@control(LANGUAGE_CONTROLS, "LM: ALiBi instead of positions", target=2.95)
def alibi(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel(attn=partial(SelfAttention, attend=biased), positions=False)
    opt = adamw(model)
    batches = character_batches(seed)
    return follow(model, token_loss, opt, batches, cbs, seed, clip=1.0, schedule=warm_up(opt))


def rotary(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention with queries and keys rotated by their position.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    """
    rates = 10_000 ** -torch.linspace(0, 1, q.shape[-1] // 2)
    angles = torch.arange(q.shape[-2])[:, None] * rates
    cos, sin = angles.cos(), angles.sin()

    def rotate(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)

    return added(rotate(q), rotate(k), v)


@control(LANGUAGE_CONTROLS, "LM: rotary positions, queries and keys normalized", target=2.95)
def rope(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel(attn=partial(SelfAttention, attend=rotary, qk_norm=True), positions=False)
    cbs = [*cbs, Schedule(warm_up), GradientClip(1.0)]
    return fit(model, token_loss, adamw(model), character_batches(seed), cbs, seed)


class Sinusoidal(LanguageModel):
    """Embeddings that are scaled by the root of the width, and added to sines and cosines.

    Source: Vaswani et al., "Attention Is All You Need", 2017.
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__(positions=False, width=width)
        nn.init.normal_(self.embed.weight, std=width**-0.5)
        rates = 10_000 ** -torch.linspace(0, 1, width // 2)
        angles = torch.arange(LENGTH)[:, None] * rates
        waves = torch.cat([angles.sin(), angles.cos()], dim=1)
        self.embed.register_forward_hook(lambda m, args, out: width**0.5 * out + waves[: out.shape[1]])


@control(LANGUAGE_CONTROLS, "LM: scaled embeddings and sinusoidal positions", target=3.1)
def sinusoidal(seed: int, cbs: Callbacks) -> Run:
    model = Sinusoidal()
    opt = adamw(model)
    batches = character_batches(seed)
    return follow(model, token_loss, opt, batches, cbs, seed, clip=1.0, schedule=warm_up(opt))


@control(LANGUAGE_CONTROLS, "LM: tokens N(0, 1), positions begin at 0", target=2.95)
def positions_from_zero(seed: int, cbs: Callbacks) -> Run:
    """PyTorch's default for embeddings, with a head of its own."""
    model = LanguageModel(tied=False)
    nn.init.normal_(model.embed.weight)
    nn.init.zeros_(model.position.weight)
    return fit(model, token_loss, adamw(model), character_batches(seed), [*cbs, GradientClip(1.0)], seed)


# ---- steps


@control(LANGUAGE_CONTROLS, "LM: autocast to bfloat16", target=3.05)
def autocast(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel()
    cbs = [*cbs, MixedPrecision("bf16"), Schedule(warm_up), GradientClip(1.0)]
    return fit(model, token_loss, adamw(model), character_batches(seed, n_step=100), cbs, seed)


@control(LANGUAGE_CONTROLS, "LM: bfloat16 weights and a rate of 5e-3", target=3.05)
def bf16_weights(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel().bfloat16()
    opt = adamw(model)
    return follow(
        model,
        token_loss,
        opt,
        character_batches(seed, n_step=100),
        cbs,
        seed,
        clip=1.0,
        schedule=warm_up(opt, n_step=100),
    )


@control(LANGUAGE_CONTROLS, "LM: accumulation over 4 batches by hand", target=3.15)
def accumulation(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel()
    return accumulate(model, SGD(model.parameters(), lr=0.1, momentum=0.9), cbs, seed, divisor=4)


@control(LANGUAGE_CONTROLS, "LM: accumulation over 4 batches by the callback", target=3.15)
def accumulation_callback(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel()
    batches = character_batches(seed, n_step=200)
    return fit(model, token_loss, adamw(model, lr=1e-2), batches, [*cbs, GradientAccumulation(4)], seed)


@control(LANGUAGE_CONTROLS, "LM: clipping at 1e-3, which Adam undoes", target=2.95)
def clip_adam(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel()
    opt = adamw(model)
    batches = character_batches(seed)
    return follow(model, token_loss, opt, batches, cbs, seed, clip=1e-3, schedule=warm_up(opt))


@control(LANGUAGE_CONTROLS, "LM: SGD with momentum, validation by hand", target=3.1)
def sgd(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel(drop=0.1)
    opt = SGD(model.parameters(), lr=0.3, momentum=0.9)
    held_out, y = character_batches(seed + 50, n_step=1)[0]

    def evaluate(step: int) -> None:
        if step % 25 == 24:
            model.eval()
            with torch.no_grad():
                token_loss(model(held_out), y)
            model.train()

    batches = character_batches(seed)
    return follow(
        model, token_loss, opt, batches, cbs, seed, clip=1.0, schedule=warm_up(opt), after_step=evaluate
    )
