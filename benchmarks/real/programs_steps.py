"""Programs whose steps are wrong: their number, size, gradients or parameters, or a penalty in them."""

import torch
from program import Program, Training, plain_loop, program
from samples import (
    accuracy,
    column,
    digits,
    images,
    loader,
    r_squared,
    standard,
    standard_table,
    temperatures,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW

STEPS: list[Program] = []


class ConvNet(nn.Module):
    """Two convolutions, a hidden layer and scores."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3)
        self.fc1, self.fc2 = nn.Linear(16 * 4, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.view(-1, 64)))
        return self.fc2(x)


def mlp(n_in: int, n_hidden: int, n_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(n_in, n_hidden),
        nn.ReLU(),
        nn.Linear(n_hidden, n_hidden),
        nn.ReLU(),
        nn.Linear(n_hidden, n_out),
    )


@program(STEPS, "too few epochs", "flowers, 10 epochs of SGD", "train.unfinished", 0.9)
def few_epochs(fixed: bool) -> Training:
    x, y = standard_table("iris")
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    opt = SGD(model.parameters(), lr=0.01)
    n_epoch = 150 if fixed else 10
    return Training(
        model, nn.CrossEntropyLoss(), opt, loader(x, y, size=16), n_epoch, accuracy(x, y), plain_loop
    )


@program(STEPS, "too few epochs", "images, a single epoch", "train.unfinished", 0.9)
def one_epoch(fixed: bool) -> Training:
    x, y = images()
    model = ConvNet()
    opt = SGD(model.parameters(), lr=0.05)
    return Training(
        model, nn.CrossEntropyLoss(), opt, loader(x, y, size=16), 12 if fixed else 1, accuracy(x, y)
    )


@program(STEPS, "rate too low", "digits by SGD of 1e-5", "update.too_small train.unfinished", 0.7)
def slow_sgd(fixed: bool) -> Training:
    x, y = digits()
    model = mlp(64, 64, 10)
    opt = SGD(model.parameters(), lr=0.1 if fixed else 1e-5)
    return Training(model, nn.CrossEntropyLoss(), opt, loader(x, y), 10, accuracy(x, y), plain_loop)


@program(STEPS, "rate too low", "diabetes by Adam of 1e-6", "update.too_small train.unfinished", 0.4)
def slow_adam(fixed: bool) -> Training:
    x, y = standard_table("diabetes")
    y = standard(column(y))
    model = mlp(10, 32, 1)
    opt = Adam(model.parameters(), lr=1e-3 if fixed else 1e-6)
    return Training(model, nn.MSELoss(), opt, loader(x, y, size=16), 20, r_squared(x, y))


@program(STEPS, "rate too low", "images by SGD of 1e-3", "update.too_small train.unfinished", 0.8)
def slow_images(fixed: bool) -> Training:
    x, y = images()
    model = ConvNet()
    opt = SGD(model.parameters(), lr=0.1 if fixed else 1e-3)
    return Training(model, nn.CrossEntropyLoss(), opt, loader(x, y), 10, accuracy(x, y), plain_loop)


@program(STEPS, "rate too high", "images by SGD of 1 with momentum", "update.too_large loss.diverging", 0.85)
def fast_sgd(fixed: bool) -> Training:
    x, y = images()
    model = ConvNet()
    opt = SGD(model.parameters(), lr=0.02 if fixed else 1.0, momentum=0.9)
    return Training(model, nn.CrossEntropyLoss(), opt, loader(x, y), 6, accuracy(x, y), plain_loop)


@program(STEPS, "rate too high", "digits by Adam of 0.5", "update.too_large loss.diverging", 0.85)
def fast_adam(fixed: bool) -> Training:
    x, y = digits()
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10))
    opt = Adam(model.parameters(), lr=5e-3 if fixed else 0.5)
    return Training(model, nn.CrossEntropyLoss(), opt, loader(x, y), 6, accuracy(x, y))


class Weather(nn.Module):
    """GRU that forecasts a temperature."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(1, 32, num_layers=2, batch_first=True)
        self.out = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.gru(x)[0][:, -1, :])


@program(STEPS, "rate too high", "temperatures by Adam of 1", "update.too_large loss.diverging", 0.8)
def fast_gru(fixed: bool) -> Training:
    x, y = temperatures()
    y = standard(y)
    model = Weather()
    opt = Adam(model.parameters(), lr=5e-3 if fixed else 1.0)
    return Training(model, nn.MSELoss(), opt, loader(x, y), 12, r_squared(x, y), plain_loop)


def forgetful_loop(training: Training) -> None:
    """Train as a script that forgets zero_grad."""
    t = training
    for _ in range(t.n_epoch):
        for x, y in t.batches:
            loss = t.loss_func(t.model(x), y)
            loss.backward()
            t.opt.step()


@program(STEPS, "zero_grad missing", "images, gradients of all batches are added", "grad.stale", 0.85)
def stale_images(fixed: bool) -> Training:
    x, y = images()
    model = ConvNet()
    opt = SGD(model.parameters(), lr=0.1)
    loop = plain_loop if fixed else forgetful_loop
    return Training(model, nn.CrossEntropyLoss(), opt, loader(x, y), 12, accuracy(x, y), loop)


def once_per_epoch_loop(training: Training) -> None:
    """Train as a script that zeroes gradients once per epoch."""
    t = training
    for _ in range(t.n_epoch):
        t.model.zero_grad()
        for x, y in t.batches:
            loss = t.loss_func(t.model(x), y)
            loss.backward()
            t.opt.step()


@program(STEPS, "zero_grad missing", "zero_grad once per epoch", "grad.stale", 0.45)
def stale_epochs(fixed: bool) -> Training:
    x, y = standard_table("diabetes")
    y = standard(column(y))
    model = mlp(10, 32, 1)
    opt = SGD(model.parameters(), lr=0.03, momentum=0.9)
    loop = plain_loop if fixed else once_per_epoch_loop
    return Training(model, nn.MSELoss(), opt, loader(x, y, size=16), 10, r_squared(x, y), loop)


def late_zero_loop(training: Training) -> None:
    """Train as a script that zeroes gradients between backward and step."""
    t = training
    for _ in range(t.n_epoch):
        for x, y in t.batches:
            loss = t.loss_func(t.model(x), y)
            loss.backward()
            t.opt.zero_grad()
            t.opt.step()


@program(STEPS, "zero_grad missing", "zero_grad between backward and step", "param.not_stepped", 0.85)
def zeroed_before_step(fixed: bool) -> Training:
    x, y = digits()
    model = mlp(64, 32, 10)
    opt = AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    loop = plain_loop if fixed else late_zero_loop
    return Training(model, nn.CrossEntropyLoss(), opt, loader(x, y), 5, accuracy(x, y), loop)


class ListOfLayers(nn.Module):
    """Layers in a list, which torch does not register, or in an nn.ModuleList."""

    def __init__(self, fixed: bool):
        super().__init__()
        layers = [nn.Linear(n_in, n_out) for n_in, n_out in ((64, 12), (12, 12), (12, 12))]
        self.layers = nn.ModuleList(layers) if fixed else layers
        self.out = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.out(x)


@program(STEPS, "wrong parameters in the optimizer", "layers in a Python list", "param.not_in_optimizer", 0.8)
def list_of_layers(fixed: bool) -> Training:
    x, y = digits()
    model = ListOfLayers(fixed)
    opt = Adam(model.parameters(), lr=5e-3)
    return Training(model, nn.CrossEntropyLoss(), opt, loader(x, y), 10, accuracy(x, y), plain_loop)


@program(
    STEPS,
    "wrong parameters in the optimizer",
    "a model made anew after its optimizer",
    "param.not_in_optimizer param.not_stepped",
    0.85,
)
def made_anew(fixed: bool) -> Training:
    x, y = digits()
    model = mlp(64, 32, 10)
    opt = Adam(model.parameters(), lr=3e-3)
    if not fixed:
        model = mlp(64, 32, 10)  # a second run of a notebook's cell
    return Training(model, nn.CrossEntropyLoss(), opt, loader(x, y), 6, accuracy(x, y), plain_loop)


class EncoderDecoder(nn.Module):
    """Narrow encoder and decoder of digits."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


@program(
    STEPS,
    "wrong parameters in the optimizer",
    "only the decoder in the optimizer",
    "param.not_in_optimizer",
    0.35,
)
def half_of_the_model(fixed: bool) -> Training:
    x, _ = digits()
    model = EncoderDecoder()
    opt = Adam((model if fixed else model.decoder).parameters(), lr=3e-3)

    def score(model: nn.Module) -> float:
        return float(1 - F.mse_loss(model(x), x) / x.var(0).mean())

    return Training(model, nn.MSELoss(), opt, loader(x, x), 10, score)


@program(STEPS, "penalty dominates", "weight decay of 0.5 in SGD", "wd.dominates", 0.7)
def strong_decay(fixed: bool) -> Training:
    x, y = digits()
    model = mlp(64, 64, 10)
    opt = SGD(model.parameters(), lr=0.1, weight_decay=1e-4 if fixed else 0.5)
    return Training(model, nn.CrossEntropyLoss(), opt, loader(x, y), 10, accuracy(x, y), plain_loop)


@program(STEPS, "penalty dominates", "an L1 penalty of all weights, times 0.1", "wd.dominates", 0.85)
def strong_l1(fixed: bool) -> Training:
    x, y = images()
    model = ConvNet()
    opt = Adam(model.parameters(), lr=2e-3)
    factor = 1e-5 if fixed else 0.1

    def loss_func(pred: Tensor, y: Tensor) -> Tensor:
        penalty = torch.stack([p.abs().sum() for p in model.parameters()]).sum()
        return F.cross_entropy(pred, y) + factor * penalty

    return Training(model, loss_func, opt, loader(x, y), 6, accuracy(x, y), plain_loop)


@program(STEPS, "penalty dominates", "a regression with weight decay of 3 in Adam", "wd.dominates", 0.4)
def strong_adamw(fixed: bool) -> Training:
    x, y = standard_table("diabetes")
    y = standard(column(y))
    model = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 1))
    opt = Adam(model.parameters(), lr=1e-2, weight_decay=1e-4 if fixed else 3.0)
    return Training(model, nn.MSELoss(), opt, loader(x, y), 20, r_squared(x, y))
