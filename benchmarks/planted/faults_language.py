"""Faults of language models; the codes were set down before the first run.

Some faults are not planted, as a training with them is the same as one that is right:

- Tied weights that are initialized twice, the second time with a sound std: only the last one is left. The
  fault here is seen by its scale alone.
- Tied weights that come apart, as a head gets a new parameter: a head of its own is usual, too.
- Clipping at 1e-3 with Adam, which divides by the size of gradients: a control.
- Logits not divided by the root of the width: weights may make up for it, so only their effect can be seen.
"""

import math
from functools import partial

import torch
from case import Callbacks, Case, Run, fault, fit, follow
from language import (
    N_WORD,
    PAD,
    LanguageModel,
    Multihead,
    SelfAttention,
    TorchEncoder,
    accumulate,
    adamw,
    answer_loss,
    answers_only,
    character_batches,
    future,
    sentence_batches,
    warm_up,
    word_batches,
)
from nets import token_loss
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW

from hookcb import GradientClip, Schedule

LANGUAGE_FAULTS: list[Case] = []


# ---- scales


@fault(
    LANGUAGE_FAULTS,
    "LM: one channel of a norm ×30",
    codes=["act.outliers"],
    layers=["blocks.1.norm1"],
    note_suffices=True,
)
def outlier_channel(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel()
    with torch.no_grad():
        model.blocks[1].norm1.weight[5] *= 30
    opt = adamw(model)
    batches = character_batches(seed, n_step=80)
    return follow(model, token_loss, opt, batches, cbs, seed, clip=1.0, schedule=warm_up(opt))


# ---- masks


@fault(LANGUAGE_FAULTS, "LM: prompts that mask all targets", codes=["label.ignored"])
def no_answers(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel()
    opt = adamw(model)
    batches = answers_only(character_batches(seed, n_step=80), lambda i: 1_000)
    return follow(model, answer_loss, opt, batches, cbs, seed, clip=1.0, schedule=warm_up(opt))


@fault(LANGUAGE_FAULTS, "LM: labels that are shifted twice", codes=["label.shifted"], layers=["embed"])
def shifted_twice(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel()
    batches = [(x[:, :-1], y[:, 1:]) for x, y in character_batches(seed, n_step=80)]
    return fit(model, token_loss, adamw(model), batches, [*cbs, GradientClip(1.0)], seed)


@fault(LANGUAGE_FAULTS, "LM: the mean of a batch without a target", codes=["nonfinite.first"])
def one_without_answers(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel()
    batches = answers_only(character_batches(seed, n_step=80), lambda i: 1_000 if i == 40 else 8)
    return fit(model, token_loss, adamw(model), batches, [*cbs, GradientClip(1.0)], seed)


@fault(LANGUAGE_FAULTS, "LM: no mask", codes=["mask.future"])
def no_mask(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel(attn=partial(SelfAttention, attend=F.scaled_dot_product_attention))
    opt = adamw(model)
    batches = character_batches(seed, n_step=80)
    return follow(model, token_loss, opt, batches, cbs, seed, clip=1.0, schedule=warm_up(opt))


def sees_next(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention whose mask begins one position too late."""
    mask = torch.full((q.shape[-2], k.shape[-2]), -torch.inf).triu(2)
    logits = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) + mask
    return logits.softmax(-1) @ v


@fault(LANGUAGE_FAULTS, "LM: mask that begins one position too late", codes=["mask.future"])
def late_mask(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel(attn=partial(SelfAttention, attend=sees_next))
    batches = character_batches(seed, n_step=80)
    return fit(model, token_loss, adamw(model), batches, [*cbs, GradientClip(1.0)], seed)


@fault(LANGUAGE_FAULTS, "LM: nn.TransformerEncoder without a mask", codes=["mask.future"])
def encoder_without_mask(seed: int, cbs: Callbacks) -> Run:
    model = TorchEncoder(N_WORD)
    opt = AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    return fit(model, token_loss, opt, word_batches(seed, n_step=80), cbs, seed)


def past(n: int) -> Tensor:
    """Mask that is true for a position and earlier ones."""
    return torch.ones(n, n, dtype=torch.bool).tril()


@fault(
    LANGUAGE_FAULTS, "LM: inverted mask of nn.MultiheadAttention", codes=["mask.future", "nonfinite.first"]
)
def inverted_mask(seed: int, cbs: Callbacks) -> Run:
    """True hides a position in this module; in `scaled_dot_product_attention` it shows one."""
    model = LanguageModel(attn=partial(Multihead, mask=past))
    batches = character_batches(seed, n_step=80)
    return follow(model, token_loss, adamw(model), batches, cbs, seed, clip=1.0)


def only_self(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention with all other positions hidden: the mask of the future and that of the past."""
    mask = torch.eye(q.shape[-2], dtype=torch.bool)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@fault(LANGUAGE_FAULTS, "LM: mask that hides all but the position itself", codes=["mask.blind"])
def blind(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel(attn=partial(SelfAttention, attend=only_self))
    opt = adamw(model)
    batches = character_batches(seed, n_step=80)
    return follow(model, token_loss, opt, batches, cbs, seed, clip=1.0, schedule=warm_up(opt))


class LeftPadded(LanguageModel):
    """A model that hides padding and the future with -inf; a row of padding on the left sees nothing."""

    def __init__(self) -> None:
        super().__init__(N_WORD, attn=partial(SelfAttention, attend=self.attend))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.zeros(q.shape[-2], k.shape[-2]).masked_fill(future(q.shape[-2]), -torch.inf)
        mask = mask + torch.zeros(len(q), 1, 1, q.shape[-2]).masked_fill(self.is_padding, -torch.inf)
        return F.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) + mask, dim=-1) @ v

    def forward(self, tokens: Tensor) -> Tensor:
        self.is_padding = (tokens == PAD)[:, None, None, :]
        return super().forward(tokens)


@fault(
    LANGUAGE_FAULTS,
    "LM: padding on the left that sees nothing",
    codes=["nonfinite.first"],
    layers=["blocks.0.attn"],
)
def left_padded(seed: int, cbs: Callbacks) -> Run:
    batches = [(y.flip(1)[:, :-1], x.flip(1)[:, :-1]) for x, y in sentence_batches(seed, n_step=60)]
    model = LeftPadded()
    return follow(model, token_loss, adamw(model), batches, cbs, seed)


# ---- targets


@fault(LANGUAGE_FAULTS, "LM: targets that are not shifted", codes=["label.copies_input"])
def not_shifted(seed: int, cbs: Callbacks) -> Run:
    batches = [(x, x.clone()) for x, _ in character_batches(seed, n_step=80)]
    model = LanguageModel()
    opt = adamw(model)
    return follow(model, token_loss, opt, batches, cbs, seed, clip=1.0, schedule=warm_up(opt))


@fault(LANGUAGE_FAULTS, "LM: padding counted in the loss", codes=["label.padding"])
def counted_padding(seed: int, cbs: Callbacks) -> Run:
    model = TorchEncoder(N_WORD, mask=future, padded=True)
    opt = AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    return fit(model, token_loss, opt, sentence_batches(seed, n_step=80), cbs, seed)


# ---- embeddings and positions


@fault(LANGUAGE_FAULTS, "LM: tokens of std 1e-3 beside positions N(0, 1)", codes=["embed.scale"])
def faint_tokens(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel(tied=False)
    nn.init.normal_(model.embed.weight, std=1e-3)
    nn.init.normal_(model.position.weight)
    batches = character_batches(seed, n_step=220)
    return follow(model, token_loss, adamw(model, lr=1e-3), batches, cbs, seed, clip=1.0)


@fault(LANGUAGE_FAULTS, "LM: embedding N(0, 1) tied to the head", codes=["embed.scale", "loss.init"])
def large_tied(seed: int, cbs: Callbacks) -> Run:
    """PyTorch's default for an embedding; the head gets it as its weight."""
    model = LanguageModel(N_WORD)
    nn.init.normal_(model.embed.weight)
    return fit(
        model, token_loss, adamw(model), word_batches(seed, n_step=80), [*cbs, GradientClip(1.0)], seed
    )


@fault(
    LANGUAGE_FAULTS,
    "LM: tied weights initialized twice, as a head of std 0.5",
    codes=["embed.scale", "loss.init"],
)
def tied_init(seed: int, cbs: Callbacks) -> Run:
    """The embedding is initialized, then the head, whose weight is the same."""
    model = LanguageModel()
    nn.init.normal_(model.head.weight, std=0.5)
    batches = character_batches(seed, n_step=80)
    return follow(model, token_loss, adamw(model, lr=1e-3), batches, cbs, seed, clip=1.0)


class AtZero(LanguageModel):
    """A model that takes all tokens to be at position 0."""

    def places(self, tokens: Tensor) -> Tensor:
        return torch.zeros_like(tokens)


@fault(LANGUAGE_FAULTS, "LM: positions that are all 0", codes=["embed.single_index"], layers=["position"])
def at_zero(seed: int, cbs: Callbacks) -> Run:
    model = AtZero()
    opt = adamw(model)
    batches = character_batches(seed, n_step=80)
    return follow(model, token_loss, opt, batches, cbs, seed, clip=1.0, schedule=warm_up(opt))


# ---- attention logits


def wrong_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention with logits times the root of the width, rather than divided by it."""
    logits = q @ k.transpose(-2, -1) * math.sqrt(q.shape[-1])
    return logits.masked_fill(future(q.shape[-2]), -torch.inf).softmax(-1) @ v


@fault(
    LANGUAGE_FAULTS, "LM: logits multiplied by the root of the width", codes=["attn.collapse", "attn.logits"]
)
def wrong_logits(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel(attn=partial(SelfAttention, attend=wrong_scale, n_head=1), tied=False)
    for block in model.blocks:
        block.attn.qkv.reset_parameters()
    batches = character_batches(seed, n_step=80)
    return follow(model, token_loss, adamw(model), batches, cbs, seed, clip=1.0)


@fault(LANGUAGE_FAULTS, "LM: queries and keys of std 1", codes=["attn.collapse", "attn.logits"])
def large_queries(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel(tied=False)
    for block in model.blocks:
        nn.init.normal_(block.attn.qkv.weight)
    batches = character_batches(seed, n_step=80)
    return fit(model, token_loss, adamw(model, lr=1e-3), batches, [*cbs, GradientClip(1.0)], seed)


# ---- steps


RATE = ["update.too_large", "loss.spike", "loss.diverging"]


@fault(LANGUAGE_FAULTS, "LM: rate of 0.1 without warm-up", codes=RATE)
def no_warm_up(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel()
    opt = adamw(model, lr=0.1)
    return follow(model, token_loss, opt, character_batches(seed, n_step=80), cbs, seed)


@fault(LANGUAGE_FAULTS, "LM: SGD with a rate of 1 without warm-up", codes=RATE)
def spike(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel()
    opt = SGD(model.parameters(), lr=1.0, momentum=0.9)
    return fit(model, token_loss, opt, character_batches(seed, n_step=60), [*cbs, GradientClip(100.0)], seed)


@fault(LANGUAGE_FAULTS, "LM: post-norm without warm-up that stalls", codes=RATE)
def stalled(seed: int, cbs: Callbacks) -> Run:
    """The original transformer, whose norms come after the shortcuts, needs a warm-up."""
    model = TorchEncoder(mask=future, pre_norm=False, depth=4)
    opt = AdamW(model.parameters(), lr=1e-2)
    return fit(model, token_loss, opt, character_batches(seed, n_step=80), cbs, seed)


@fault(LANGUAGE_FAULTS, "LM: clipping at 1e-3 with SGD", codes=["clip.always", "update.too_small"])
def clip_sgd(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel()
    opt = SGD(model.parameters(), lr=0.3, momentum=0.9)
    return follow(model, token_loss, opt, character_batches(seed, n_step=80), cbs, seed, clip=1e-3)


@fault(LANGUAGE_FAULTS, "LM: weight decay on norms and embeddings", codes=["wd.norms"], note_suffices=True)
def decayed_norms(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel()
    opt = AdamW(model.parameters(), lr=5e-3, weight_decay=0.5)
    batches = character_batches(seed, n_step=80)
    return follow(model, token_loss, opt, batches, cbs, seed, clip=1.0, schedule=warm_up(opt))


@fault(
    LANGUAGE_FAULTS,
    "LM: bfloat16 weights that swallow updates",
    codes=["update.lost_to_rounding", "update.too_small"],
)
def swallowed(seed: int, cbs: Callbacks) -> Run:
    model = TorchEncoder(mask=future).bfloat16()
    model.mask = lambda n: torch.zeros(n, n, dtype=torch.bfloat16).masked_fill(future(n), -torch.inf)
    opt = AdamW(model.parameters(), lr=3e-5)
    return follow(model, token_loss, opt, character_batches(seed, n_step=80), cbs, seed)


@fault(LANGUAGE_FAULTS, "LM: accumulated losses that are summed", codes=["accum.divisor"], note_suffices=True)
def summed(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel()
    return accumulate(model, SGD(model.parameters(), lr=0.1), cbs, seed, divisor=1)


@fault(
    LANGUAGE_FAULTS, "LM: accumulated losses that are summed, with momentum", codes=["accum.divisor", *RATE]
)
def summed_momentum(seed: int, cbs: Callbacks) -> Run:
    """The rate is four times that of the control, which learns."""
    model = LanguageModel()
    return accumulate(model, SGD(model.parameters(), lr=0.1, momentum=0.9), cbs, seed, divisor=1)


# ---- dropout in the wrong phase


class Dropping(nn.Module):
    """An MLP whose dropout is a function that nobody tells the phase."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.mlp(x), 0.2)


@fault(
    LANGUAGE_FAULTS,
    "LM: F.dropout without training=self.training",
    codes=["dropout.in_eval"],
    planted_at=60,
    note_suffices=True,
)
def functional_dropout(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel()
    for block in model.blocks:
        block.mlp = Dropping(block.mlp)
    batches = character_batches(seed, n_step=60), character_batches(seed + 50, n_step=8)
    cbs = [*cbs, Schedule(warm_up), GradientClip(1.0)]
    return fit(model, token_loss, adamw(model), batches, cbs, seed, n_epoch=2)


@fault(
    LANGUAGE_FAULTS, "LM: validation with dropout", codes=["mode.mismatch"], planted_at=24, note_suffices=True
)
def validated_in_train_mode(seed: int, cbs: Callbacks) -> Run:
    """Nobody calls `model.eval()`."""
    model = LanguageModel(drop=0.2)
    held_out, y = character_batches(seed + 50, n_step=1)[0]

    def evaluate(step: int) -> None:
        if step % 25 == 24:
            with torch.no_grad():
                token_loss(model(held_out), y)

    opt = adamw(model)
    batches = character_batches(seed, n_step=80)
    return follow(model, token_loss, opt, batches, cbs, seed, clip=1.0, after_step=evaluate)


@fault(LANGUAGE_FAULTS, "LM: left in eval mode, without dropout", codes=["mode.mismatch"], planted_at=25)
def left_in_eval(seed: int, cbs: Callbacks) -> Run:
    """Nobody calls `model.train()` after the first validation."""
    model = LanguageModel(drop=0.2)
    held_out, y = character_batches(seed + 50, n_step=1)[0]

    def evaluate(step: int) -> None:
        if step % 25 == 24:
            model.eval()
            with torch.no_grad():
                token_loss(model(held_out), y)

    opt = adamw(model)
    batches = character_batches(seed, n_step=80)
    return follow(model, token_loss, opt, batches, cbs, seed, clip=1.0, after_step=evaluate)
