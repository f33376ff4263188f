"""Programs whose layers are wrong: saturated, dropped, linear, badly initialized or frozen."""

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from program import Program, Training, plain_loop, program
from samples import (
    accuracy,
    binary_accuracy,
    column,
    digits,
    images,
    loader,
    r_squared,
    reviews,
    standard_table,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

LAYERS: list[Program] = []


def stack(widths: list[int], act: type[nn.Module]) -> nn.Sequential:
    """Linear layers with an activation between any two."""
    model = nn.Sequential()
    for n_in, n_out in pairwise(widths):
        model.extend([nn.Linear(n_in, n_out), act()])
    return model[:-1]


def training_accuracy(x: Tensor, y: Tensor) -> Callable[[nn.Module], float]:
    """Accuracy that a training loop prints: in train mode."""

    def score(model: nn.Module) -> float:
        return accuracy(x, y)(model.train())

    return score


@program(
    LAYERS,
    "vanishing gradients",
    "seven layers of sigmoids",
    "grad.attenuated act.collapse unit.saturated",
    0.8,
)
def deep_sigmoids(fixed: bool) -> Training:
    x, y = digits()
    model = stack([64, 50, 50, 50, 50, 50, 50, 10], nn.ReLU if fixed else nn.Sigmoid)
    opt = Adam(model.parameters(), lr=1e-3)
    return Training(model, nn.CrossEntropyLoss(), opt, loader(x, y), 8, accuracy(x, y), plain_loop)


class Autoencoder(nn.Module):
    """Encoder and decoder of three layers each."""

    def __init__(self, act: type[nn.Module]):
        super().__init__()
        self.encoder = stack([64, 48, 32, 16], act)
        self.decoder = stack([16, 32, 48, 64], act)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.decoder(self.encoder(x)))


@program(
    LAYERS,
    "vanishing gradients",
    "an autoencoder that outputs the mean image",
    "grad.attenuated act.collapse",
    0.2,
)
def sigmoid_autoencoder(fixed: bool) -> Training:
    x, _ = digits()
    model = Autoencoder(nn.ReLU if fixed else nn.Sigmoid)
    opt = SGD(model.parameters(), lr=1.0, momentum=0.9)

    def score(model: nn.Module) -> float:
        return float(1 - F.mse_loss(model(x), x) / x.var(0).mean())

    return Training(model, nn.MSELoss(), opt, loader(x, x), 10, score)


class Recall(nn.Module):
    """Recurrent network that classifies by its last state."""

    def __init__(self, rnn: nn.RNNBase):
        super().__init__()
        self.rnn = rnn
        self.fc = nn.Linear(rnn.hidden_size, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.rnn(x)[0][:, -1])


@program(
    LAYERS,
    "vanishing gradients",
    "an RNN that should remember its first input",
    "grad.attenuated act.collapse",
    0.9,
)
def long_memory(fixed: bool) -> Training:
    x = 0.1 * torch.randn(512, 50, 1)
    y = (torch.rand(512) < 0.5).long()
    x[:, 0, 0] = 2.0 * y - 1
    model = Recall(nn.RNN(1, 24, batch_first=True))
    if fixed:  # begin with a memory that neither grows nor fades
        nn.init.eye_(model.rnn.weight_hh_l0)
    opt = Adam(model.parameters(), lr=1e-3)
    return Training(model, nn.CrossEntropyLoss(), opt, loader(x, y), 20, accuracy(x, y), plain_loop)


@program(LAYERS, "dropout", "dropout of the class scores", "dropout.scores", 0.8)
def dropped_scores(fixed: bool) -> Training:
    x, y = digits()
    layers = [nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)]
    model = nn.Sequential(*layers, *([] if fixed else [nn.Dropout(0.5)]))
    opt = Adam(model.parameters(), lr=3e-3)
    return Training(model, nn.CrossEntropyLoss(), opt, loader(x, y), 8, training_accuracy(x, y), plain_loop)


class KeepProb(nn.Module):
    """Hidden layers with dropout, whose probability is that of TensorFlow 1: of keeping."""

    def __init__(self, p: float):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(64, 40), nn.Linear(40, 40), nn.Linear(40, 10)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(F.relu(self.fc1(x)), self.p, self.training)
        x = F.dropout(F.relu(self.fc2(x)), self.p, self.training)
        return self.fc3(x)


@program(LAYERS, "dropout", "0.9 to keep becomes 0.9 to drop, by F.dropout", "dropout.extreme", 0.85)
def keep_prob(fixed: bool) -> Training:
    x, y = digits()
    model = KeepProb(0.1 if fixed else 0.9)
    opt = Adam(model.parameters(), lr=2e-3)
    return Training(model, nn.CrossEntropyLoss(), opt, loader(x, y), 8, accuracy(x, y), plain_loop)


@program(LAYERS, "dropout", "nn.Dropout2d of 0.95 in a small conv net", "dropout.extreme", 0.85)
def dropped_maps(fixed: bool) -> Training:
    x, y = images()
    p = 0.05 if fixed else 0.95
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Dropout2d(p), nn.Flatten(), nn.Linear(16 * 36, 32), nn.ReLU(),
        nn.Dropout(p), nn.Linear(32, 10),
    )  # fmt: skip
    opt = Adam(model.parameters(), lr=2e-3)
    return Training(model, nn.CrossEntropyLoss(), opt, loader(x, y), 5, accuracy(x, y))


@program(LAYERS, "no nonlinearity", "points in a circle by three linear layers", "model.linear_stack", 0.9)
def linear_circle(fixed: bool) -> Training:
    x = 2 * torch.rand(600, 2) - 1
    y = column((x.norm(dim=1) < 0.8).long())
    acts = [nn.ReLU(), nn.ReLU()] if fixed else [nn.Identity(), nn.Dropout(0.0)]
    model = nn.Sequential(nn.Linear(2, 32), acts[0], nn.Linear(32, 32), acts[1], nn.Linear(32, 1))
    opt = Adam(model.parameters(), lr=1e-2)
    batches = loader(x, y)
    return Training(model, nn.BCEWithLogitsLoss(), opt, batches, 15, binary_accuracy(x, y, 0), plain_loop)


class Curve(nn.Module):
    """Three layers, called one after another."""

    def __init__(self, fixed: bool):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(1, 40), nn.Linear(40, 40), nn.Linear(40, 1)
        self.fixed = fixed

    def forward(self, x: Tensor) -> Tensor:
        if self.fixed:
            return self.fc3(torch.tanh(self.fc2(torch.tanh(self.fc1(x)))))
        x = self.fc1(x)
        x = self.fc2(x)
        return self.fc3(x)


@program(LAYERS, "no nonlinearity", "a sine by a module without activations", "model.linear_stack", 0.9)
def linear_sine(fixed: bool) -> Training:
    x = 6 * torch.rand(500, 1) - 3
    y = torch.sin(math.pi / 2 * x)
    model = Curve(fixed)
    opt = Adam(model.parameters(), lr=1e-2)
    return Training(model, nn.MSELoss(), opt, loader(x, y), 40, r_squared(x, y), plain_loop)


@program(LAYERS, "bad initialization", "all weights and biases zero", "init.zero init.symmetric", 0.85)
def zeros(fixed: bool) -> Training:
    x, y = digits()
    model = stack([64, 32, 32, 10], nn.ReLU)

    def init(layer: nn.Module) -> None:
        if isinstance(layer, nn.Linear):
            nn.init.zeros_(layer.bias)
            (nn.init.kaiming_normal_ if fixed else nn.init.zeros_)(layer.weight)

    model.apply(init)
    opt = Adam(model.parameters(), lr=2e-3)
    return Training(model, nn.CrossEntropyLoss(), opt, loader(x, y), 6, accuracy(x, y))


@program(
    LAYERS,
    "bad initialization",
    "nn.init.normal_ with its default std of 1",
    "unit.saturated loss.init act.scale grad.exploding",
    0.75,
)
def unit_normal(fixed: bool) -> Training:
    x, y = digits()
    x = (x - 0.3) / 0.38
    model = stack([64, 128, 128, 128, 10], nn.Tanh)
    for name, p in model.named_parameters():
        if "weight" in name:
            (nn.init.xavier_normal_ if fixed else nn.init.normal_)(p)
    opt = SGD(model.parameters(), lr=0.01)
    return Training(model, nn.CrossEntropyLoss(), opt, loader(x, y), 6, accuracy(x, y), plain_loop)


@program(
    LAYERS, "bad initialization", "a constant of 0.1 for all weights of a table's net", "init.symmetric", 0.52
)
def constant_weights(fixed: bool) -> Training:
    x, y = standard_table("diabetes")
    y = (y - y.mean()) / y.std()
    model = stack([10, 32, 32, 1], nn.ReLU)
    for p in model.parameters():
        if p.dim() == 2 and not fixed:
            nn.init.constant_(p, 0.1)
    opt = Adam(model.parameters(), lr=3e-3)
    return Training(model, nn.MSELoss(), opt, loader(x, column(y)), 20, r_squared(x, y), plain_loop)


@program(LAYERS, "frozen layer", "a name that matches too much", "param.frozen_between", 0.8)
def frozen_middle(fixed: bool) -> Training:
    x, y = digits()
    model = nn.Sequential()
    for i, (n_in, n_out) in enumerate(((64, 32), (32, 6), (6, 6), (6, 6), (6, 10))):
        model.add_module(f"fc{i}", nn.Linear(n_in, n_out))
        if i < 4:
            model.add_module(f"act{i}", nn.ReLU())
    for name, p in model.named_parameters():
        p.requires_grad = fixed or not name.startswith(("fc2", "fc3"))
    opt = Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    return Training(model, nn.CrossEntropyLoss(), opt, loader(x, y), 25, accuracy(x, y), plain_loop)


class TwoParts(nn.Module):
    """Features and a classifier; `.data`, meant to save memory, cuts the graph between them."""

    def __init__(self, fixed: bool):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(64, 6), nn.ReLU())
        self.classifier = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 10))
        self.fixed = fixed

    def forward(self, x: Tensor) -> Tensor:
        features = self.features(x)
        return self.classifier(features if self.fixed else features.data)


@program(LAYERS, "frozen layer", "features behind .data", "param.unreachable", 0.7)
def detached_features(fixed: bool) -> Training:
    x, y = digits()
    model = TwoParts(fixed)
    opt = Adam(model.parameters(), lr=3e-3)
    return Training(model, nn.CrossEntropyLoss(), opt, loader(x, y), 8, accuracy(x, y))


class Pretrained(nn.Module):
    """Embedding, LSTM and head; embedding and head are new, and the LSTM should be trained, too."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 4)
        self.encoder = nn.LSTM(4, 6, num_layers=2, batch_first=True)
        self.head = nn.Linear(6, 2)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(words))[0][:, -1])


@program(
    LAYERS,
    "frozen layer",
    "an encoder that was to be trained after the first epoch",
    "param.frozen_between",
    0.97,
)
def frozen_encoder(fixed: bool) -> Training:
    x, y = reviews()
    model = Pretrained()
    model.encoder.requires_grad_(fixed)
    opt = Adam(filter(lambda p: p.requires_grad, model.parameters()), lr=1e-2)
    return Training(model, nn.CrossEntropyLoss(), opt, loader(x, y), 8, accuracy(x, y), plain_loop)
