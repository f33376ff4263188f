"""Healthy language models, each close to a fault of `faults_large.py`."""

import math
from functools import partial

import torch
from case import Callbacks, Case, Run, control, follow
from data import generator
from experts import MixtureModel, train_experts
from faults_large import clip_at_first, on_small_loss, with_z_loss
from language import (
    N_CHARACTER,
    LanguageModel,
    SelfAttention,
    adamw,
    character_batches,
    future,
    warm_up,
)
from nets import token_loss
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LinearLR

LARGE_CONTROLS: list[Case] = []


# ---- attention logits


@control(LARGE_CONTROLS, "LM: queries and keys normalized at a rate of 0.04", target=2.7)
def normalized(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel(attn=partial(SelfAttention, qk_norm=True))
    opt = AdamW(model.parameters(), lr=0.04, weight_decay=0.0)
    warm = LinearLR(opt, 0.05, total_iters=20)
    batches = character_batches(seed, n_step=320)
    return follow(model, token_loss, opt, batches, cbs, seed, clip=1.0, schedule=warm)


def far_below(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention whose mask adds -1e4 to the logits."""
    mask = -1e4 * future(q.shape[-2])
    return (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) + mask).softmax(-1) @ v


@control(LARGE_CONTROLS, "LM: a mask that adds -1e4, 300 steps", target=2.6)
def masked_by_numbers(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel(attn=partial(SelfAttention, attend=far_below))
    opt = adamw(model)
    batches, schedule = character_batches(seed, n_step=300), warm_up(opt, n_step=300)
    return follow(model, token_loss, opt, batches, cbs, seed, clip=1.0, schedule=schedule)


# ---- experts


@control(LARGE_CONTROLS, "MoE: one of eight experts, load-balancing loss of 0.01", target=2.9)
def balanced(seed: int, cbs: Callbacks) -> Run:
    """As the rate is high, a few experts get most of the tokens for fifty steps, until that heals."""
    return train_experts(MixtureModel(), seed, cbs, coefficient=1e-2)


@control(LARGE_CONTROLS, "MoE: two of four experts, load-balancing loss of 0.01", target=2.9)
def two_of_four(seed: int, cbs: Callbacks) -> Run:
    return train_experts(MixtureModel(n=4, k=2), seed, cbs, coefficient=1e-2, lr=3e-3)


# ---- moments of Adam


@control(LARGE_CONTROLS, "LM: clipping that ends at step 200, and a second moment of 20 steps", target=2.5)
def fresh_moment(seed: int, cbs: Callbacks) -> Run:
    return clip_at_first(seed, cbs, beta2=0.95)


@control(LARGE_CONTROLS, "LM: one batch of random characters", target=2.9)
def one_bad_batch(seed: int, cbs: Callbacks) -> Run:
    """Its loss and its gradients are far larger, and the next ones as before."""
    batches = character_batches(seed)
    x, y = batches[100]
    rng = generator(seed)
    batches[100] = (
        torch.randint(N_CHARACTER, x.shape, generator=rng),
        torch.randint(N_CHARACTER, y.shape, generator=rng),
    )
    model = LanguageModel()
    return follow(model, token_loss, adamw(model), batches, cbs, seed)


@control(LARGE_CONTROLS, "LM: gradients of 1e-11 and an eps of 1e-15", target=2.8e-8)
def small_eps(seed: int, cbs: Callbacks) -> Run:
    return on_small_loss(seed, cbs, eps=1e-15)


# ---- scores of the head


@control(LARGE_CONTROLS, "LM: z-loss of 1e-4", target=2.6)
def small_z_loss(seed: int, cbs: Callbacks) -> Run:
    return with_z_loss(seed, cbs, coefficient=1e-4)


@control(LARGE_CONTROLS, "LM: no z-loss, head with a bias", target=2.6)
def no_z_loss(seed: int, cbs: Callbacks) -> Run:
    return with_z_loss(seed, cbs, coefficient=0.0)
