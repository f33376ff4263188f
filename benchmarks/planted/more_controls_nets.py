"""Further healthy training runs: architectures."""

from collections import OrderedDict

import torch
from case import Callbacks, Case, Run, control, fit, follow
from data import (
    batched,
    digit_batches,
    digits,
    generator,
    image_batches,
    padded_batches,
    text_batches,
)
from more_nets import Checkpointed, Experts, Lora, PackedGru, ResMlp, TwoHeads, Vit
from nets import Cnn, Gpt, Layer, Listed, Mlp, Tagger, TextClassifier, named_weights, token_loss
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.optim import SGD, Adam, AdamW

from hookcb import GradientClip, watch

NET_CONTROLS: list[Case] = []


def on_digits(model: nn.Module, seed: int, cbs: Callbacks, lr: float = 2e-3) -> Run:
    """Classify digits with Adam."""
    opt = Adam([p for p in model.parameters() if p.requires_grad], lr=lr)
    return fit(model, F.cross_entropy, opt, digit_batches(seed), cbs, seed)


def on_images(model: nn.Module, seed: int, cbs: Callbacks, lr: float = 3e-3) -> Run:
    """Classify images of digits with Adam, in a plain loop."""
    opt = Adam(model.parameters(), lr=lr)
    return follow(model, F.cross_entropy, opt, image_batches(seed), cbs, seed)


@control(NET_CONTROLS, "residual branches and head that begin at zero", target=0.8)
def zero_init(seed: int, cbs: Callbacks) -> Run:
    return on_digits(ResMlp(zero=True), seed, cbs)


@control(NET_CONTROLS, "layer scale 1e-4", target=0.8)
def layer_scale(seed: int, cbs: Callbacks) -> Run:
    return on_digits(ResMlp(scale=1e-4), seed, cbs)


@control(NET_CONTROLS, "LoRA with B = 0", target=1.0)
def lora(seed: int, cbs: Callbacks) -> Run:
    """A model of the digits below 5 learns the others with all of its weights frozen except the head."""
    x, y = digits(seed)
    model = Mlp()
    opt = Adam(model.parameters(), lr=5e-3)
    for xb, yb in batched(x[y < 5], y[y < 5], seed=seed, n_step=60):
        F.cross_entropy(model(xb), yb).backward()
        opt.step()
        opt.zero_grad()
    for block in model.blocks:
        assert isinstance(block, Layer)
        block.linear = Lora(block.linear)
    model.head = nn.Linear(64, 10)
    opt = Adam([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    return fit(model, F.cross_entropy, opt, batched(x, y, seed=seed), cbs, seed)


@control(NET_CONTROLS, "CNN and group norm", target=0.8)
def group_norm(seed: int, cbs: Callbacks) -> Run:
    return on_images(Cnn(norm=lambda n: nn.GroupNorm(4, n)), seed, cbs)


@control(NET_CONTROLS, "CNN and instance norm", target=0.8)
def instance_norm(seed: int, cbs: Callbacks) -> Run:
    return on_images(Cnn(norm=lambda n: nn.InstanceNorm2d(n, affine=True)), seed, cbs)


@control(NET_CONTROLS, "CNN without norms", target=0.8)
def cnn_without_norm(seed: int, cbs: Callbacks) -> Run:
    return on_images(Cnn(norm=None), seed, cbs)


@control(NET_CONTROLS, "depthwise CNN and Hardswish", target=1.0)
def depthwise(seed: int, cbs: Callbacks) -> Run:
    layers = {
        "stem": nn.Conv2d(1, 16, 3, padding=1),
        "act1": nn.Hardswish(),
        "depthwise": nn.Conv2d(16, 16, 3, padding=1, groups=16),
        "pointwise": nn.Conv2d(16, 32, 1),
        "act2": nn.Hardswish(),
        "pool": nn.AdaptiveAvgPool2d(2),
        "flat": nn.Flatten(),
        "head": nn.Linear(128, 10),
    }
    return on_images(nn.Sequential(OrderedDict(layers)), seed, cbs, lr=1e-2)


@control(NET_CONTROLS, "twelve ReLU layers with He init", target=1.0)
def deep_he(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU, depth=12, width=48)
    for weight in named_weights(model.blocks, nn.Linear):
        nn.init.kaiming_normal_(weight, nonlinearity="relu")
    return on_digits(model, seed, cbs, lr=1e-3)


@control(NET_CONTROLS, "LeakyReLU MLP", target=0.8)
def leaky_relu(seed: int, cbs: Callbacks) -> Run:
    return on_digits(Mlp(nn.LeakyReLU, depth=3), seed, cbs)


@control(NET_CONTROLS, "PReLU MLP", target=0.8)
def prelu(seed: int, cbs: Callbacks) -> Run:
    return on_digits(Mlp(nn.PReLU, depth=3), seed, cbs)


@control(NET_CONTROLS, "SELU MLP with alpha dropout", target=1.0)
def selu(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(lambda: nn.Sequential(nn.SELU(), nn.AlphaDropout(0.1)), depth=4)
    for weight in named_weights(model, nn.Linear):
        nn.init.kaiming_normal_(weight, nonlinearity="linear")
    return on_digits(model, seed, cbs)


@control(NET_CONTROLS, "SiLU MLP, AdamW with weight decay 0.1", target=0.8)
def silu(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.SiLU, depth=3)
    opt = AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    return fit(model, F.cross_entropy, opt, digit_batches(seed), cbs, seed)


@control(NET_CONTROLS, "layer norm MLP", target=0.8)
def layer_norm(seed: int, cbs: Callbacks) -> Run:
    return on_digits(Mlp(lambda: nn.Sequential(nn.LayerNorm(64), nn.GELU()), depth=4), seed, cbs)


@control(NET_CONTROLS, "dropout 0.8", target=1.5)
def high_dropout(seed: int, cbs: Callbacks) -> Run:
    return on_digits(Mlp(nn.ReLU, width=256, depth=1, drop=0.8), seed, cbs)


@control(NET_CONTROLS, "weight norm", target=0.8)
def weight_normed(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(depth=3)
    for block in model.blocks:
        weight_norm(block.linear)
    return on_digits(model, seed, cbs)


@control(NET_CONTROLS, "spectral norm", target=1.0)
def spectral_normed(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.LeakyReLU)
    for block in model.blocks:
        spectral_norm(block.linear)
    return on_digits(model, seed, cbs, lr=5e-3)


@control(NET_CONTROLS, "vision transformer", target=1.5)
def vit(seed: int, cbs: Callbacks) -> Run:
    model = Vit()
    batches = image_batches(seed, n_step=150)
    return follow(model, F.cross_entropy, AdamW(model.parameters(), lr=5e-3), batches, cbs, seed)


@control(NET_CONTROLS, "torch's own transformer layer", target=1.0)
def torch_transformer(seed: int, cbs: Callbacks) -> Run:
    layers = {
        "embed": nn.Embedding(20, 32),
        "encoder": nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True),
        "flat": nn.Flatten(),
        "head": nn.Linear(320, 4),
    }
    model = nn.Sequential(OrderedDict(layers))
    opt = Adam(model.parameters(), lr=3e-3)
    return fit(model, F.cross_entropy, opt, padded_batches(seed, n_step=120), cbs, seed)


@control(NET_CONTROLS, "transformer over padded sequences", target=1.0)
def padded_transformer(seed: int, cbs: Callbacks) -> Run:
    model = TextClassifier()
    opt = AdamW(model.parameters(), lr=3e-3)
    return follow(model, F.cross_entropy, opt, padded_batches(seed, n_step=120), cbs, seed)


@control(NET_CONTROLS, "GPT with tied embeddings", target=1.5)
def tied_gpt(seed: int, cbs: Callbacks) -> Run:
    model = Gpt(tied=True)
    opt = AdamW(model.parameters(), lr=5e-3)
    batches = text_batches(seed, n_step=100)
    return fit(model, token_loss, opt, batches, [*cbs, GradientClip(1.0)], seed)


@control(NET_CONTROLS, "mixture of experts, one seldom chosen", target=1.0)
def experts(seed: int, cbs: Callbacks) -> Run:
    return on_digits(Experts(), seed, cbs, lr=5e-3)


@control(NET_CONTROLS, "an auxiliary head used every second step", target=0.9)
def aux_head(seed: int, cbs: Callbacks) -> Run:
    model = TwoHeads()
    opt = Adam(model.parameters(), lr=3e-3)
    with watch(model, opt, *cbs) as w:
        run = Run(w, [], model=model)
        for step, (x, y) in enumerate(digit_batches(seed)):
            pred, aux = model(x, with_aux=step % 2 == 1)
            loss = F.cross_entropy(pred, y)
            run.losses.append(loss.item())
            if aux is not None:
                loss = loss + 0.3 * F.cross_entropy(aux, y % 2)
            w.report_loss(loss).backward()
            opt.step()
            opt.zero_grad()
    return run


@control(NET_CONTROLS, "GRU over packed sequences", target=1.0)
def packed_gru(seed: int, cbs: Callbacks) -> Run:
    model = PackedGru()
    opt = Adam(model.parameters(), lr=1e-2)
    return fit(model, F.cross_entropy, opt, padded_batches(seed, length=8, n_step=150), cbs, seed)


@control(NET_CONTROLS, "time series and 1-d convolutions", target=0.7)
def time_series(seed: int, cbs: Callbacks) -> Run:
    """Noisy waves of three frequencies."""
    rng, n = generator(seed), 32 * 120
    y = torch.randint(3, (n,), generator=rng)
    phase = 6.28 * torch.rand(n, 1, generator=rng)
    wave = ((y[:, None] + 2) * 0.4 * torch.arange(32) + phase).sin()
    x = (wave + 0.3 * torch.randn(n, 32, generator=rng))[:, None]
    layers = {
        "conv1": nn.Conv1d(1, 8, 5, stride=2, padding=2),
        "act1": nn.ReLU(),
        "conv2": nn.Conv1d(8, 16, 5, stride=2, padding=2),
        "act2": nn.ReLU(),
        "flat": nn.Flatten(),
        "head": nn.Linear(128, 3),
    }
    model = nn.Sequential(OrderedDict(layers))
    batches = list(zip(x.split(32), y.split(32), strict=True))
    opt = SGD(model.parameters(), lr=0.1, momentum=0.9)
    return fit(model, F.cross_entropy, opt, batches, cbs, seed)


@control(NET_CONTROLS, "gradient checkpointing", target=0.8)
def gradient_checkpointing(seed: int, cbs: Callbacks) -> Run:
    return on_digits(Checkpointed(), seed, cbs)


@control(NET_CONTROLS, "batch norm frozen in eval while fine-tuning", target=0.8)
def frozen_batch_norm(seed: int, cbs: Callbacks) -> Run:
    """Pretrained norms keep their statistics and weights, as in detection models."""
    model = Cnn()
    opt = Adam(model.parameters(), lr=3e-3)
    for x, y in image_batches(seed + 100, n_step=60):
        F.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    model.head = nn.Linear(256, 10)
    for norm in (model.norm1, model.norm2):
        norm.eval().requires_grad_(False)
    return follow(
        model,
        F.cross_entropy,
        Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3),
        image_batches(seed),
        cbs,
        seed,
    )


@control(NET_CONTROLS, "log-softmax and NLL", target=0.8)
def log_softmax(seed: int, cbs: Callbacks) -> Run:
    model = nn.Sequential(OrderedDict(net=Mlp(), log_softmax=nn.LogSoftmax(dim=1)))
    return fit(model, F.nll_loss, Adam(model.parameters(), lr=2e-3), digit_batches(seed), cbs, seed)


@control(NET_CONTROLS, "layers in a plain list that the optimizer has", target=0.8)
def listed_and_trained(seed: int, cbs: Callbacks) -> Run:
    trunk = [nn.Linear(64, 64) for _ in range(2)]
    model = Listed(trunk)
    opt = Adam([*model.parameters(), *(p for layer in trunk for p in layer.parameters())], lr=2e-3)
    return follow(model, F.cross_entropy, opt, digit_batches(seed), cbs, seed)


@control(NET_CONTROLS, "a new head in mid-training, added to the optimizer", target=1.0)
def new_head(seed: int, cbs: Callbacks) -> Run:
    model = Mlp()
    opt = Adam(model.parameters(), lr=2e-3)
    losses = []
    with watch(model, opt, cbs=cbs) as loop:
        for i, (x, y) in enumerate(digit_batches(seed)):
            if i == 20:
                model.head = nn.Linear(64, 10)
                opt.add_param_group({"params": model.head.parameters()})
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    return Run(loop, losses, model=model)


@control(NET_CONTROLS, "layers of another model that is trained every 25 steps", target=0.8)
def seldom_trained(seed: int, cbs: Callbacks) -> Run:
    trunk = [nn.Linear(64, 64)]
    model, losses = Listed(trunk), []
    opt, other = Adam(model.parameters(), lr=2e-3), SGD(trunk[0].parameters(), lr=0.01)
    with watch(model, opt, cbs=cbs) as loop:
        for i, (x, y) in enumerate(digit_batches(seed)):
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            if i % 25 == 24:
                other.step()
                other.zero_grad()
            losses.append(loss.item())
    return Run(loop, losses, model=model)


@control(NET_CONTROLS, "weights with noise, by functional_call", target=0.8)
def noisy_weights(seed: int, cbs: Callbacks) -> Run:
    model, losses = Mlp(), []
    opt = Adam(model.parameters(), lr=2e-3)
    with watch(model, opt, cbs=cbs) as loop:
        for x, y in digit_batches(seed):
            noisy = {
                name: nn.Parameter(p + 1e-3 * torch.randn_like(p)) for name, p in model.named_parameters()
            }
            loss = F.cross_entropy(torch.func.functional_call(model, noisy, (x,)), y)
            loss.backward()
            for name, p in model.named_parameters():
                p.grad = noisy[name].grad
            opt.step()
            losses.append(loss.item())
    return Run(loop, losses, model=model)


@control(NET_CONTROLS, "GRU with the steps first, a target for each", target=1.2)
def steps_first(seed: int, cbs: Callbacks) -> Run:
    batches = [(x.T.contiguous(), y.T.contiguous()) for x, y in text_batches(seed)]
    model = Tagger()
    return follow(model, token_loss, Adam(model.parameters(), lr=1e-2), batches, cbs, seed)
