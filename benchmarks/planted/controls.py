"""Healthy training runs that a diagnosis must not flag, although the numbers of some look suspicious."""

from collections import OrderedDict

import torch
from case import Callbacks, Case, Run, control, fit, follow
from data import (
    batched,
    digit_batches,
    digits,
    generator,
    image_batches,
    images,
    recall_batches,
    text_batches,
)
from facts_loads import FACTS_LOADS_CONTROLS
from facts_weights import FACTS_WEIGHTS_CONTROLS
from nets import Cnn, Encoded, Gpt, Mlp, Recurrent, ResNet, stack, token_loss
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from hookcb import GradientAccumulation, GradientClip, Schedule

CONTROLS: list[Case] = [
    *FACTS_WEIGHTS_CONTROLS,
]


@control(CONTROLS, "ReLU MLP, Adam", target=0.8)
def relu_mlp(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU, depth=3)
    return fit(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), digit_batches(seed), cbs, seed)


@control(CONTROLS, "tanh MLP, SGD", target=0.9)
def tanh_mlp(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.Tanh)
    opt = SGD(model.parameters(), lr=0.1)
    return follow(model, F.cross_entropy, opt, digit_batches(seed), cbs, seed)


@control(CONTROLS, "two sigmoid layers", target=0.9)
def two_sigmoids(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.Sigmoid)
    return fit(model, F.cross_entropy, Adam(model.parameters(), lr=1e-2), digit_batches(seed), cbs, seed)


@control(CONTROLS, "GELU and batch norm", target=0.8)
def gelu_batch_norm(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.GELU, depth=3, norm=True)
    opt = AdamW(model.parameters(), lr=3e-3)
    return follow(model, F.cross_entropy, opt, digit_batches(seed), cbs, seed)


@control(CONTROLS, "dropout 0.5", target=1.2)
def dropout(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU, width=128, drop=0.5)
    return fit(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), digit_batches(seed), cbs, seed)


@control(CONTROLS, "CNN and batch norm", target=0.8)
def cnn_batch_norm(seed: int, cbs: Callbacks) -> Run:
    model = Cnn()
    opt = SGD(model.parameters(), lr=0.05, momentum=0.9)
    return fit(model, F.cross_entropy, opt, image_batches(seed), cbs, seed)


@control(CONTROLS, "CNN trained to 1e-9", target=1e-9)
def cnn_to_nothing(seed: int, cbs: Callbacks) -> Run:
    """Fits a number to each of 16 images until all gradients are almost zero."""
    x, y = images(seed, n=16)
    model = Cnn(n_out=1)
    batches = [(x, (y[:, None] - 4.5) / 3)] * 250
    return fit(model, F.mse_loss, Adam(model.parameters(), lr=2e-3), batches, cbs, seed)


@control(CONTROLS, "ResNet whose last gammas begin at zero", target=0.8)
def resnet(seed: int, cbs: Callbacks) -> Run:
    model = ResNet()
    opt = SGD(model.parameters(), lr=0.05, momentum=0.9)
    return fit(model, F.cross_entropy, opt, image_batches(seed), cbs, seed)


@control(CONTROLS, "LSTM with clipping", target=1.0)
def lstm(seed: int, cbs: Callbacks) -> Run:
    model = Recurrent(nn.LSTM(5, 32, batch_first=True), 4)
    opt = Adam(model.parameters(), lr=1e-2)
    return fit(model, F.cross_entropy, opt, recall_batches(seed, length=8), [*cbs, GradientClip(1.0)], seed)


@control(CONTROLS, "pre-norm GPT", target=1.5)
def gpt(seed: int, cbs: Callbacks) -> Run:
    model = Gpt()
    opt = AdamW(model.parameters(), lr=5e-3)
    return follow(model, token_loss, opt, text_batches(seed, n_step=100), cbs, seed, clip=1.0)


@control(CONTROLS, "autoencoder", target=0.3)
def autoencoder(seed: int, cbs: Callbacks) -> Run:
    x, _ = digits(seed)
    model = nn.Sequential(OrderedDict(encoder=stack(64, 48, 12), decoder=stack(12, 48, 64)))
    batches = batched(x, x, seed=seed)
    return fit(model, F.mse_loss, Adam(model.parameters(), lr=5e-3), batches, cbs, seed)


@control(CONTROLS, "frozen backbone", target=0.8)
def frozen_backbone(seed: int, cbs: Callbacks) -> Run:
    """A trunk trained on the digits below 5, then a new head for the others."""
    x, y = digits(seed)
    model = Encoded(stack(64, 64, 64), nn.Sequential(nn.ReLU(), nn.Linear(64, 5)))
    opt = Adam(model.parameters(), lr=5e-3)
    for xb, yb in batched(x[y < 5], y[y < 5], seed=seed, n_step=60):
        F.cross_entropy(model(xb), yb).backward()
        opt.step()
        opt.zero_grad()
    model.trunk.requires_grad_(False)
    model.head = nn.Sequential(nn.ReLU(), nn.Linear(64, 5))
    batches = batched(x[y >= 5], y[y >= 5] - 5, seed=seed)
    return fit(model, F.cross_entropy, Adam(model.head.parameters(), lr=1e-2), batches, cbs, seed)


@control(CONTROLS, "batch size 4", target=1.5)
def batches_of_four(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU)
    opt = SGD(model.parameters(), lr=0.02, momentum=0.9)
    return fit(model, F.cross_entropy, opt, digit_batches(seed, size=4, n_step=250), cbs, seed)


@control(CONTROLS, "a tiny set overfitted to 1e-5", target=1e-5)
def overfit(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU, width=128)
    batches = batched(*digits(seed, n=16), seed=seed, size=16, n_step=250)
    return fit(model, F.cross_entropy, Adam(model.parameters(), lr=1e-2), batches, cbs, seed)


@control(CONTROLS, "embedding with rare tokens", target=0.45)
def rare_tokens(seed: int, cbs: Callbacks) -> Run:
    """Bags of words distributed by Zipf's law; a batch lacks most words, and a common one decides."""
    rng, n = generator(seed), 32 * 200
    weights = 1 / torch.arange(1.0, 1001)
    words = torch.multinomial(weights, n * 12, replacement=True, generator=rng).view(n, 12)
    good = torch.rand(1000, generator=rng) < 0.5
    y = (good[words].float().mean(1, keepdim=True) > 0.5).float()
    model = nn.Sequential(nn.EmbeddingBag(1000, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    opt = Adam(model.parameters(), lr=1e-2)
    batches = list(zip(words.split(32), y.split(32), strict=True))
    return fit(model, F.binary_cross_entropy_with_logits, opt, batches, cbs, seed)


def negative_cosine(pred: Tensor, y: Tensor) -> Tensor:
    """Negative cosine between prediction and target, -1 at best."""
    return -F.cosine_similarity(pred, y).mean()


@control(CONTROLS, "cosine loss below zero", target=-0.85)
def cosine_loss(seed: int, cbs: Callbacks) -> Run:
    """An encoder that learns to point in the direction of a noisy view of the same digit."""
    x, _ = digits(seed)
    views = x + 0.3 * torch.randn(x.shape, generator=generator(seed))
    model = Mlp(nn.ReLU, n_out=64)
    opt = SGD(model.parameters(), lr=0.1, momentum=0.9)
    return fit(model, negative_cosine, opt, batched(views, x, seed=seed), cbs, seed)


@control(CONTROLS, "warm-up from 0", target=0.8)
def warm_up(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU, depth=3)
    opt = Adam(model.parameters(), lr=3e-3)
    schedule = LambdaLR(opt, lambda step: min(1.0, step / 50))
    return follow(model, F.cross_entropy, opt, digit_batches(seed), cbs, seed, schedule=schedule)


@control(CONTROLS, "cosine decay to 0", target=0.8)
def cosine_decay(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU)
    decay = Schedule(lambda opt: CosineAnnealingLR(opt, 150))
    opt = Adam(model.parameters(), lr=5e-3)
    return fit(model, F.cross_entropy, opt, digit_batches(seed), [*cbs, decay], seed)


@control(CONTROLS, "accumulation over 8 batches", target=1.2)
def accumulation(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU)
    opt = Adam(model.parameters(), lr=1e-2)
    batches = digit_batches(seed, size=16, n_step=240)
    return fit(model, F.cross_entropy, opt, batches, [*cbs, GradientAccumulation(8)], seed)


def smoothed_loss(pred: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy that cannot fall below 0.5, because a tenth of each target is spread over all classes."""
    return F.cross_entropy(pred, y, label_smoothing=0.1)


@control(CONTROLS, "label smoothing", target=1.1)
def label_smoothing(seed: int, cbs: Callbacks) -> Run:
    model = Cnn()
    return fit(model, smoothed_loss, Adam(model.parameters(), lr=3e-3), image_batches(seed), cbs, seed)


CONTROLS += FACTS_LOADS_CONTROLS
