"""Faults that large models are known for, in small language models."""

import torch
from case import Callbacks, Case, Run, fault, follow
from experts import MixtureModel, train_experts
from language import LanguageModel, TorchEncoder, character_batches, future
from nets import token_loss
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LinearLR

from hookcb import watch

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


# ---- moments of Adam


def clip_at_first(seed: int, cbs: Callbacks, beta2: float) -> Run:
    """Train a post-norm transformer with gradients that are clipped at 1e-3 in the first 200 of 260 steps."""
    model = TorchEncoder(mask=future, pre_norm=False)
    opt = AdamW(model.parameters(), lr=1e-2, betas=(0.9, beta2))
    torch.manual_seed(seed)
    with watch(model, opt, *cbs) as w:
        run = Run(w, [], model=model)
        for step, (x, y) in enumerate(character_batches(seed, n_step=260)):
            loss = w.report_loss(token_loss(model(x), y))
            run.losses.append(loss.item())
            loss.backward()
            if step < 200:
                w.begin_step(opt)
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            opt.step()
            opt.zero_grad()
    return run


@fault(
    LARGE_FAULTS,
    "LM: clipping that ends at step 200, and a second moment of 1,000 steps",
    codes=["update.spike"],
    planted_at=200,
    note_suffices=True,
)
def stale_moment(seed: int, cbs: Callbacks) -> Run:
    """Gradients become larger at once, and the second moment does not."""
    return clip_at_first(seed, cbs, beta2=0.999)


def on_small_loss(seed: int, cbs: Callbacks, eps: float) -> Run:
    """Train with a loss that is divided by 10⁸, to which Adam is blind but for its eps."""

    def loss_func(pred: Tensor, y: Tensor) -> Tensor:
        return token_loss(pred, y) * 1e-8

    model = LanguageModel()
    opt = AdamW(model.parameters(), lr=3e-3, eps=eps)
    return follow(model, loss_func, opt, character_batches(seed), cbs, seed)


@fault(LARGE_FAULTS, "LM: gradients far below an eps of 1e-8", codes=["adam.eps"])
def below_eps(seed: int, cbs: Callbacks) -> Run:
    return on_small_loss(seed, cbs, eps=1e-8)


# ---- scores of the head


def with_z_loss(seed: int, cbs: Callbacks, coefficient: float) -> Run:
    """Train with a z-loss, of which the loss that is reported has nothing."""
    model = LanguageModel(tied=False)
    model.head = nn.Linear(64, model.head.out_features)
    opt = AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(seed)
    with watch(model, opt, *cbs) as w:
        run = Run(w, [], model=model)
        for x, y in character_batches(seed, n_step=320):
            scores = model(x)
            loss = w.report_loss(token_loss(scores, y))
            run.losses.append(loss.item())
            (loss + coefficient * scores.logsumexp(-1).square().mean()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
    return run


@fault(LARGE_FAULTS, "LM: z-loss of the wrong sign", codes=["head.logits"], note_suffices=True)
def negative_z_loss(seed: int, cbs: Callbacks) -> Run:
    return with_z_loss(seed, cbs, coefficient=-1e-2)
