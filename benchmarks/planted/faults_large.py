"""Faults that large models are known for, in small language models."""

import torch
from case import Callbacks, Case, Run, fault, follow
from experts import MixtureModel, train_experts
from language import LanguageModel, character_batches
from nets import token_loss
from torch.optim import AdamW
from torch.optim.lr_scheduler import LinearLR

LARGE_FAULTS: list[Case] = []


# ---- attention logits


@fault(LARGE_FAULTS, "LM: attention logits that grow at a rate of 0.04", codes=["attn.logits"])
def growing_logits(seed: int, cbs: Callbacks) -> Run:
    """With queries and keys that are normalized, the same training learns."""
    model = LanguageModel()
    opt = AdamW(model.parameters(), lr=0.04, weight_decay=0.0)
    warm = LinearLR(opt, 0.05, total_iters=20)
    batches = character_batches(seed, n_step=320)
    return follow(model, token_loss, opt, batches, cbs, seed, clip=1.0, schedule=warm)


# ---- experts


BLOCKS = ["blocks.0.mlp", "blocks.1.mlp"]


@fault(LARGE_FAULTS, "MoE: no load-balancing loss", codes=["moe.imbalance", "moe.dead"], layers=BLOCKS)
def unbalanced(seed: int, cbs: Callbacks) -> Run:
    """Experts that get more tokens learn more, and get more."""
    return train_experts(MixtureModel(), seed, cbs, coefficient=0.0)


@fault(LARGE_FAULTS, "MoE: two experts with a bias of -20", codes=["moe.dead"], layers=["blocks.1.mlp"])
def shut_out(seed: int, cbs: Callbacks) -> Run:
    """As of a checkpoint with fewer experts."""
    model = MixtureModel(k=2)
    with torch.no_grad():
        model.mixtures[1].router.bias[[2, 5]] = -20.0
    return train_experts(model, seed, cbs, coefficient=1e-2, lr=3e-3)
