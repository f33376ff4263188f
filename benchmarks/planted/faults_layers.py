"""Faults of the model: its initialization, its activations, and how its parts are assembled."""

from collections import OrderedDict

import torch
from case import Callbacks, Case, Run, fault, fit, follow
from data import batched, digit_batches, digits, image_batches, recall_batches, text_batches
from nets import (
    Cnn,
    Encoded,
    Gpt,
    Listed,
    MadeInForward,
    Mlp,
    Recurrent,
    Scaled,
    named_weights,
    stack,
    token_loss,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW

from hookcb import GradientClip

LAYER_FAULTS: list[Case] = []


def parts(*layers: str) -> list[str]:
    """Qualified names of these blocks of an `Mlp`, and of their linear layers and activations."""
    return [name for layer in layers for name in (layer, f"{layer}.linear", f"{layer}.act")]


@fault(
    LAYER_FAULTS,
    "eight sigmoid layers",
    codes=["grad.attenuated", "act.collapse", "unit.saturated"],
    layers=["blocks", *parts(*(f"blocks.{i}" for i in range(8)))],
)
def eight_sigmoids(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.Sigmoid, depth=8)
    return fit(model, F.cross_entropy, SGD(model.parameters(), lr=0.1), digit_batches(seed), cbs, seed)


@fault(
    LAYER_FAULTS,
    "init std ×10",
    codes=["act.scale", "loss.init", "unit.saturated", "grad.exploding"],
)
def large_init(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.Tanh, depth=3)
    with torch.no_grad():
        for weight in named_weights(model, nn.Linear):
            weight *= 10
    return fit(model, F.cross_entropy, SGD(model.parameters(), lr=0.05), digit_batches(seed), cbs, seed)


@fault(
    LAYER_FAULTS,
    "bias -10 in one layer",
    codes=["unit.dead", "act.collapse"],
    layers=parts("blocks.1"),
)
def low_bias(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU, depth=3)
    nn.init.constant_(model.blocks[1].linear.bias, -10)
    return fit(model, F.cross_entropy, Adam(model.parameters(), lr=1e-3), digit_batches(seed), cbs, seed)


@fault(LAYER_FAULTS, "constant init", codes=["init.symmetric"])
def constant_init(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU)
    for weight in named_weights(model, nn.Linear):
        nn.init.constant_(weight, 0.02)
    return follow(model, F.cross_entropy, SGD(model.parameters(), lr=0.05), digit_batches(seed), cbs, seed)


@fault(
    LAYER_FAULTS,
    "trunk detached",
    codes=["param.unreachable"],
    layers=["trunk", "trunk.0", "trunk.1", "trunk.2"],
)
def trunk_detached(seed: int, cbs: Callbacks) -> Run:
    model = Encoded(stack(64, 64, 32), nn.Sequential(nn.ReLU(), nn.Linear(32, 10)), detached=True)
    return follow(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), digit_batches(seed), cbs, seed)


class Frozen(nn.Module):
    """A model without trained weights; its inputs require a gradient, as checkpointing wants them."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x.clone().requires_grad_())


@fault(LAYER_FAULTS, "all weights frozen", codes=["param.frozen"])
def all_frozen(seed: int, cbs: Callbacks) -> Run:
    model = Frozen(stack(64, 64, 10))
    return follow(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), digit_batches(seed), cbs, seed)


@fault(LAYER_FAULTS, "softmax over one output", codes=["head.degenerate"])
def softmax_over_one(seed: int, cbs: Callbacks) -> Run:
    """A softmax where a sigmoid is meant: is the digit even?"""
    batches = [(x, (y % 2 == 0).float()[:, None]) for x, y in digit_batches(seed)]
    model = nn.Sequential(stack(64, 64, 32), nn.ReLU(), nn.Linear(32, 1), nn.Softmax(dim=1))
    return fit(model, F.binary_cross_entropy, Adam(model.parameters(), lr=2e-3), batches, cbs, seed)


@fault(LAYER_FAULTS, "sigmoid at the end of a regression", codes=["head.range"])
def sigmoid_regression(seed: int, cbs: Callbacks) -> Run:
    """Which digit it is, as a number from 0 to 9."""
    batches = [(x, y.float()[:, None]) for x, y in digit_batches(seed)]
    model = nn.Sequential(stack(64, 64, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid())
    return follow(model, F.mse_loss, Adam(model.parameters(), lr=2e-3), batches, cbs, seed)


@fault(LAYER_FAULTS, "ReLU at the end of a classifier", codes=["head.stuck"])
def relu_head(seed: int, cbs: Callbacks) -> Run:
    """Squared errors against one-hot rows; classes whose outputs are all 0 are never learned."""
    batches = [(x, F.one_hot(y, 10).float()) for x, y in digit_batches(seed)]
    model = nn.Sequential(stack(64, 64, 32), nn.ReLU(), nn.Linear(32, 10), nn.ReLU())
    return fit(model, F.mse_loss, Adam(model.parameters(), lr=2e-2), batches, cbs, seed)


@fault(
    LAYER_FAULTS,
    "softmax before cross-entropy",
    codes=["head.activation"],
    layers=["softmax", "head"],
)
def softmax_twice(seed: int, cbs: Callbacks) -> Run:
    layers = {"hidden": nn.Linear(64, 64), "act": nn.ReLU(), "head": nn.Linear(64, 10)}
    model = nn.Sequential(OrderedDict(layers, softmax=nn.Softmax(dim=1)))
    return fit(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), digit_batches(seed), cbs, seed)


@fault(LAYER_FAULTS, "conv bias -20", codes=["unit.dead", "act.collapse"], layers=["conv2", "act2"])
def low_conv_bias(seed: int, cbs: Callbacks) -> Run:
    model = Cnn(norm=None)
    nn.init.constant_(model.conv2.bias, -20)
    return fit(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), image_batches(seed), cbs, seed)


@fault(LAYER_FAULTS, "batch norm left in eval", codes=["mode.mismatch"], planted_at=20)
def left_in_eval(seed: int, cbs: Callbacks) -> Run:
    """Nobody calls `model.train()` after an evaluation on held-out images."""
    model = Cnn()
    held_out, _ = batched(*digits(seed), seed=seed, size=64, n_step=1)[0]

    def evaluate(step: int) -> None:
        if step == 19:
            model.eval()
            with torch.no_grad():
                model(held_out.view(-1, 1, 8, 8))

    opt = SGD(model.parameters(), lr=0.05, momentum=0.9)
    return follow(model, F.cross_entropy, opt, image_batches(seed), cbs, seed, after_step=evaluate)


@fault(
    LAYER_FAULTS,
    "batch norm with batch size 1",
    codes=["mode.mismatch"],
    layers=[*parts("blocks.0"), "blocks.0.norm"],
    planted_at=12,
)
def batch_of_one(seed: int, cbs: Callbacks) -> Run:
    """A last batch of one sample, because nobody set `drop_last`."""
    x, y = digits(seed, n=32 * 12 + 1)
    model = Mlp(nn.ReLU, norm=True)
    batches = list(zip(x.split(32), y.split(32), strict=True))
    opt = Adam(model.parameters(), lr=2e-3)
    return fit(model, F.cross_entropy, opt, batches, cbs, seed, n_epoch=3, raises=ValueError)


@fault(
    LAYER_FAULTS,
    "vanilla RNN over 64 steps that explodes",
    codes=["grad.exploding", "act.scale"],
    layers=["rnn"],
)
def exploding_rnn(seed: int, cbs: Callbacks) -> Run:
    model = Recurrent(nn.RNN(5, 32, batch_first=True), 4)
    nn.init.normal_(model.rnn.weight_hh_l0, std=2.5 * 32**-0.5)
    opt = Adam(model.parameters(), lr=1e-3)
    batches = recall_batches(seed, length=64, n_step=100)
    return fit(model, F.cross_entropy, opt, batches, cbs, seed)


@fault(
    LAYER_FAULTS,
    "LSTM forget bias -10",
    codes=["grad.attenuated", "gate.shut"],
    layers=["rnn"],
)
def forgetful_lstm(seed: int, cbs: Callbacks) -> Run:
    model = Recurrent(nn.LSTM(5, 32, batch_first=True), 4)
    nn.init.constant_(model.rnn.bias_ih_l0[32:64], -10)  # gates are input, forget, cell, output
    opt = Adam(model.parameters(), lr=1e-2)
    batches = recall_batches(seed, length=8)
    return fit(model, F.cross_entropy, opt, batches, [*cbs, GradientClip(1.0)], seed)


@fault(
    LAYER_FAULTS,
    "attention logits ×300",
    codes=["attn.collapse"],
    layers=[f"blocks.{i}.attn{part}" for i in range(2) for part in ("", ".qkv", ".attn_drop", ".proj")],
)
def sharp_attention(seed: int, cbs: Callbacks) -> Run:
    model = Gpt(scale=300.0)
    opt = AdamW(model.parameters(), lr=5e-3)
    return follow(model, token_loss, opt, text_batches(seed, n_step=100), cbs, seed, clip=1.0)


@fault(LAYER_FAULTS, "dropout after the last layer", codes=["dropout.scores"])
def dropped_scores(seed: int, cbs: Callbacks) -> Run:
    model = nn.Sequential(Mlp(), nn.Dropout(0.5))
    return fit(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), digit_batches(seed), cbs, seed)


@fault(LAYER_FAULTS, "hidden layers in a plain list", codes=["param.unregistered"])
def listed_layers(seed: int, cbs: Callbacks) -> Run:
    model = Listed([nn.Linear(64, 64) for _ in range(2)])
    return follow(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), digit_batches(seed), cbs, seed)


@fault(
    LAYER_FAULTS,
    "head made anew in each forward",
    codes=["param.unregistered"],
    layers=["head"],
)
def head_made_anew(seed: int, cbs: Callbacks) -> Run:
    model = MadeInForward(once=False)
    return follow(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), digit_batches(seed), cbs, seed)


@fault(
    LAYER_FAULTS,
    "head made in the first forward, after the optimizer",
    codes=["param.not_in_optimizer"],
    layers=["head"],
)
def head_made_late(seed: int, cbs: Callbacks) -> Run:
    model = MadeInForward(once=True)
    return follow(model, F.cross_entropy, SGD(model.parameters(), lr=0.1), digit_batches(seed), cbs, seed)


@fault(LAYER_FAULTS, "weight computed from a parameter once", codes=["param.unregistered"])
def computed_weight(seed: int, cbs: Callbacks) -> Run:
    model = Scaled()
    return fit(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), digit_batches(seed), cbs, seed)


@fault(LAYER_FAULTS, "LSTM without batch_first", codes=["layer.batch_first"], layers=["rnn"])
def forgotten_batch_first(seed: int, cbs: Callbacks) -> Run:
    model = Recurrent(nn.LSTM(5, 32), 4)
    opt = Adam(model.parameters(), lr=1e-2)
    return follow(model, F.cross_entropy, opt, recall_batches(seed, length=8), cbs, seed)


@fault(LAYER_FAULTS, "scores of pixels by view in place of permute", codes=["head.axis"])
def viewed_scores(seed: int, cbs: Callbacks) -> Run:
    batches = [(x + 0.3 * torch.randn_like(x), (x[:, 0] > 0.3).long()) for x, _ in image_batches(seed)]
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1))
    opt = Adam(model.parameters(), lr=5e-3)

    def loss_func(scores: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(scores.view(-1, 2), y.view(-1))

    return follow(model, loss_func, opt, batches, cbs, seed)
