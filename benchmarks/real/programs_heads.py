"""Programs whose head does not fit the loss or the targets."""

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
    standard,
    standard_table,
    table,
    temperatures,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, RMSprop

HEADS: list[Program] = []


@program(
    HEADS, "softmax over one unit", "tumors, accuracy stays at the share of one class", "head.degenerate", 0.9
)
def tumors(fixed: bool) -> Training:
    x, y = standard_table("breast_cancer")
    model = nn.Sequential(
        nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid() if fixed else nn.Softmax(dim=1)
    )
    batches, opt = loader(x, column(y)), Adam(model.parameters(), lr=1e-3)
    return Training(model, nn.BCELoss(), opt, batches, 12, binary_accuracy(x, y, 0.5), plain_loop)


class Sentiment(nn.Module):
    """LSTM over words, whose last state gives one probability."""

    def __init__(self, fixed: bool):
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.lstm = nn.LSTM(16, 32, batch_first=True)
        self.fc = nn.Linear(32, 1)
        self.fixed = fixed

    def forward(self, words: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(self.embedding(words))
        out = self.fc(hidden[-1])
        return (torch.sigmoid(out) if self.fixed else F.softmax(out, dim=-1)).squeeze(1)


@program(HEADS, "softmax over one unit", "sentiment by an LSTM, the loss is constant", "head.degenerate", 0.8)
def sentiment(fixed: bool) -> Training:
    x, y = reviews()
    model = Sentiment(fixed)
    batches, opt = loader(x, y.float()), Adam(model.parameters(), lr=5e-3)
    return Training(model, nn.BCELoss(), opt, batches, 10, binary_accuracy(x, y, 0.5))


class ConvWithWrongDim(nn.Module):
    """Convolutions over rows of pixels; scores have the shape (N, 1, 10)."""

    def __init__(self, fixed: bool):
        super().__init__()
        self.conv = nn.Conv1d(8, 16, 3, padding=1)
        self.fc = nn.Linear(16 * 8, 10)
        self.dim = 2 if fixed else 1

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x.squeeze(1))).flatten(1)
        return F.log_softmax(self.fc(x).unsqueeze(1), dim=self.dim)


@program(
    HEADS,
    "softmax over one unit",
    "log_softmax over the wrong dimension, the loss is 0",
    "head.degenerate",
    0.9,
)
def wrong_dim(fixed: bool) -> Training:
    x, y = images()
    model = ConvWithWrongDim(fixed)
    opt = Adam(model.parameters(), lr=3e-3)

    def loss_func(pred: Tensor, y: Tensor) -> Tensor:
        return F.nll_loss(pred.squeeze(1), y)

    return Training(model, loss_func, opt, loader(x, y, size=64), 6, accuracy(x, y), plain_loop)


class Forecast(nn.Module):
    """LSTM over days that forecasts the next one."""

    def __init__(self, fixed: bool):
        super().__init__()
        self.lstm = nn.LSTM(1, 24, batch_first=True)
        self.out = nn.Linear(24, 1)
        self.fixed = fixed

    def forward(self, x: Tensor) -> Tensor:
        y = self.out(self.lstm(x)[0][:, -1])
        return y if self.fixed else torch.tanh(y)


@program(HEADS, "targets out of the head's range", "temperatures by a tanh", "head.range", 0.5)
def forecast(fixed: bool) -> Training:
    x, y = temperatures()
    model = Forecast(fixed)
    opt = Adam(model.parameters(), lr=1e-2)
    return Training(model, nn.MSELoss(), opt, loader(x, y), 20, r_squared(x, y), plain_loop)


@program(HEADS, "targets out of the head's range", "progression of diabetes by a sigmoid", "head.range", 0.3)
def progression(fixed: bool) -> Training:
    x, y = standard_table("diabetes")
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    if not fixed:
        model.append(nn.Sigmoid())
    opt = Adam(model.parameters(), lr=1e-2)
    return Training(model, nn.SmoothL1Loss(), opt, loader(x, column(y)), 40, r_squared(x, column(y)))


class Digits(nn.Module):
    """Three layers; whatever follows the last one is the `head`."""

    def __init__(self, head: nn.Module | None = None):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(64, 48), nn.Linear(48, 24), nn.Linear(24, 10)
        self.head = head or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.head(self.fc3(x))


@program(HEADS, "ReLU head", "digits, some of which are never predicted", "head.activation unit.dead", 0.88)
def relu_scores(fixed: bool) -> Training:
    x, y = digits()
    model = Digits(None if fixed else nn.ReLU())
    opt = SGD(model.parameters(), lr=0.2)
    return Training(model, nn.CrossEntropyLoss(), opt, loader(x, y), 14, accuracy(x, y), plain_loop)


@program(HEADS, "ReLU head", "a regression on standardized targets by a ReLU", "head.range", 0.45)
def relu_regression(fixed: bool) -> Training:
    x, y = standard_table("diabetes")
    y = standard(column(y))
    layers = [nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)]
    model = nn.Sequential(*layers, *([] if fixed else [nn.ReLU()]))
    opt = RMSprop(model.parameters(), lr=1e-3)
    return Training(model, nn.MSELoss(), opt, loader(x, y, size=16), 10, r_squared(x, y))


class LeNet(nn.Module):
    """Two convolutions and two linear layers; it returns scores, or log-probabilities."""

    def __init__(self, is_log: bool):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.fc1, self.fc2 = nn.Linear(64, 32), nn.Linear(32, 10)
        self.is_log = is_log

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = self.fc2(F.relu(self.fc1(torch.flatten(x, 1))))
        return F.log_softmax(x, dim=1) if self.is_log else x


@program(
    HEADS,
    "linear head, loss of probabilities",
    "NLLLoss of raw scores",
    "head.activation loss.unbounded",
    0.9,
)
def raw_nll(fixed: bool) -> Training:
    x, y = images()
    model = LeNet(is_log=fixed)
    opt = SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Training(model, nn.NLLLoss(), opt, loader(x, y), 5, accuracy(x, y), plain_loop)


@program(HEADS, "linear head, loss of probabilities", "BCELoss refuses raw scores", "head.activation", 0.9)
def raw_bce(fixed: bool) -> Training:
    x, y = standard_table("breast_cancer")
    model = nn.Sequential(nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 1))
    loss_func = nn.BCEWithLogitsLoss() if fixed else nn.BCELoss()
    opt = Adam(model.parameters(), lr=3e-3)
    return Training(model, loss_func, opt, loader(x, column(y)), 8, binary_accuracy(x, y, 0))


def hand_written_bce(p: Tensor, y: Tensor) -> Tensor:
    p = torch.clamp(p, 1e-7, 1 - 1e-7)
    return -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()


@program(
    HEADS,
    "linear head, loss of probabilities",
    "clamped scores in a hand-written BCE",
    "head.activation",
    0.93,
)
def clamped_bce(fixed: bool) -> Training:
    x, y = standard_table("breast_cancer")
    model = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    if fixed:
        model.append(nn.Sigmoid())
    opt = SGD(model.parameters(), lr=0.05)
    return Training(
        model, hand_written_bce, opt, loader(x, column(y)), 15, binary_accuracy(x, y, 0.5), plain_loop
    )


@program(HEADS, "sigmoid with categorical cross-entropy", "digits behind a sigmoid", "head.activation", 0.75)
def sigmoid_scores(fixed: bool) -> Training:
    x, y = digits()
    model = Digits(None if fixed else nn.Sigmoid())
    opt = SGD(model.parameters(), lr=0.1)
    return Training(model, nn.CrossEntropyLoss(), opt, loader(x, y), 10, accuracy(x, y))


@program(
    HEADS,
    "sigmoid with categorical cross-entropy",
    "wines, only the true class in the loss",
    "head.activation",
    0.9,
)
def true_class_only(fixed: bool) -> Training:
    x, y = standard_table("wine")
    model = nn.Sequential(
        nn.Linear(13, 16), nn.Tanh(), nn.Linear(16, 3), nn.Softmax(dim=1) if fixed else nn.Sigmoid()
    )

    def loss_func(p: Tensor, one_hot: Tensor) -> Tensor:
        return -(one_hot * torch.log(p + 1e-8)).sum(dim=1).mean()

    def score(model: nn.Module) -> float:
        return float(((model(x) > 0.5) == F.one_hot(y)).all(dim=1).float().mean())

    batches, opt = loader(x, F.one_hot(y).float(), size=16), Adam(model.parameters(), lr=1e-2)
    return Training(model, loss_func, opt, batches, 20, score, plain_loop)


@program(HEADS, "MSE of class probabilities", "digits, softmax and one-hot targets", "", 0.75)
def squared_softmax(fixed: bool) -> Training:
    x, y = digits()
    model = Digits(None if fixed else nn.Softmax(dim=1))
    opt = SGD(model.parameters(), lr=0.1)
    if fixed:
        return Training(model, nn.CrossEntropyLoss(), opt, loader(x, y), 10, accuracy(x, y))
    batches = loader(x, F.one_hot(y, 10).float())
    return Training(model, nn.MSELoss(), opt, batches, 10, accuracy(x, y))


@program(HEADS, "MSE of class probabilities", "rare flowers, sigmoid and MSE", "", 0.9)
def squared_sigmoid(fixed: bool) -> Training:
    x, y = table("iris")
    x, y = standard(x), (y == 1).long()
    model = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 1), nn.Sigmoid())
    loss_func = nn.BCELoss() if fixed else nn.MSELoss()
    opt = SGD(model.parameters(), lr=0.1)
    batches = loader(x, column(y), size=10)
    return Training(model, loss_func, opt, batches, 40, binary_accuracy(x, y, 0.5), plain_loop)
