"""Programs whose inputs or labels are wrong."""

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
    text,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

DATA: list[Program] = []


class Classifier(nn.Module):
    """Two layers, and a dropout between them."""

    def __init__(self, n_in: int, n_hidden: int, n_out: int):
        super().__init__()
        self.hidden = nn.Linear(n_in, n_hidden)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(n_hidden, n_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.drop(F.relu(self.hidden(x))))


@program(DATA, "labels coded wrongly", "wines numbered from 1", "label.out_of_range", 0.9)
def wines_from_one(fixed: bool) -> Training:
    x, y = standard_table("wine")
    model = Classifier(13, 24, 3)
    opt = Adam(model.parameters(), lr=1e-2)
    batches = loader(x, y if fixed else y + 1, size=16)
    return Training(model, nn.CrossEntropyLoss(), opt, batches, 10, accuracy(x, y), plain_loop)


@program(DATA, "labels coded wrongly", "spam by words, labels of -1 and 1", "label.range loss.unbounded", 0.8)
def signed_labels(fixed: bool) -> Training:
    words, y = reviews()
    x = F.one_hot(words, 100).sum(dim=1).float()
    spam = (y + words[:, 0] // 50) // 2  # about every fourth
    model = nn.Sequential(nn.Linear(100, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0))
    opt = Adam(model.parameters(), lr=1e-2)
    batches = loader(x, spam.float() if fixed else 2.0 * spam - 1)
    return Training(model, nn.BCEWithLogitsLoss(), opt, batches, 10, binary_accuracy(x, spam, 0), plain_loop)


@program(
    DATA,
    "labels coded wrongly",
    "a table of pixels and labels, all divided by 255",
    "label.single_class",
    0.85,
)
def divided_labels(fixed: bool) -> Training:
    x, y = digits()
    rows = torch.cat([(x * 255).round(), column(y)], dim=1)  # as in the CSV files of MNIST
    pixels = rows[:, :-1] / 255
    labels = (rows[:, -1] if fixed else rows[:, -1] / 255).long()
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    opt = SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = loader(pixels, labels)
    return Training(model, nn.CrossEntropyLoss(), opt, batches, 8, accuracy(pixels, y))


@program(DATA, "inputs not scaled", "digits of 0 to 255 to sigmoids", "input.scale", 0.85)
def raw_pixels(fixed: bool) -> Training:
    x, y = digits()
    x = x if fixed else (x * 255).round()
    model = nn.Sequential(nn.Linear(64, 30), nn.Sigmoid(), nn.Linear(30, 10))
    opt = SGD(model.parameters(), lr=0.5, momentum=0.9)
    return Training(model, nn.CrossEntropyLoss(), opt, loader(x, y), 5, accuracy(x, y), plain_loop)


@program(
    DATA, "inputs not scaled", "rents by area, year and distance, the loss becomes NaN", "input.scale", 0.6
)
def rents(fixed: bool) -> Training:
    area, year = 30 + 120 * torch.rand(500), 1900 + 120 * torch.rand(500)
    distance = 8000 * torch.rand(500)
    x = torch.stack([area, year, distance], dim=1)
    y = standard(column(8 * area + 3 * (year - 1900) - 0.05 * distance + 50 * torch.randn(500)))
    x = standard(x) if fixed else x
    model = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 1))
    opt = SGD(model.parameters(), lr=0.01)
    return Training(model, nn.MSELoss(), opt, loader(x, y), 15, r_squared(x, y), plain_loop)


class Sensor(nn.Module):
    """GRU over the readings of a sensor."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(2, 20, batch_first=True)
        self.fc = nn.Linear(20, 1)

    def forward(self, x: Tensor) -> Tensor:
        _, hidden = self.gru(x)
        return self.fc(hidden[-1]).squeeze(-1)


@program(DATA, "inputs not scaled", "pressure and humidity to a GRU", "input.scale", 0.8)
def pressure(fixed: bool) -> Training:
    steps = torch.randn(400, 12, 2).cumsum(1)
    y = (steps[:, -1, 0] > steps[:, 0, 0]).float()  # does the pressure rise?
    x = steps if fixed else steps * torch.tensor([40.0, 5.0]) + torch.tensor([101_300.0, 60.0])
    model = Sensor()
    opt = Adam(model.parameters(), lr=5e-3)
    return Training(model, nn.BCEWithLogitsLoss(), opt, loader(x, y), 15, binary_accuracy(x, y, 0))


@program(DATA, "a column on another scale", "wines as they are in the table", "input.scale", 0.9)
def raw_wines(fixed: bool) -> Training:
    x, y = table("wine")
    x = standard(x) if fixed else x
    model = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 3))
    opt = Adam(model.parameters(), lr=1e-3)
    return Training(model, nn.CrossEntropyLoss(), opt, loader(x, y, size=16), 30, accuracy(x, y))


@program(
    DATA, "a column on another scale", "customers, the income among standardized columns", "input.scale", 0.85
)
def customers(fixed: bool) -> Training:
    x = torch.randn(800, 8)
    y = column((x[:, 0] + x[:, 3] - x[:, 5] + 0.5 * x[:, 7] > 0).long())
    income = 52_000 + 18_000 * x[:, 7:]
    x = torch.cat([x[:, :7], standard(income) if fixed else income], dim=1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    opt = Adam(model.parameters(), lr=5e-3)
    batches = loader(x, y)
    return Training(model, nn.BCEWithLogitsLoss(), opt, batches, 15, binary_accuracy(x, y, 0), plain_loop)


class SmallConv(nn.Module):
    """A convolution with batch norm, pooled over all pixels."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.classifier = nn.Linear(24 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).view(x.size(0), -1))


@program(DATA, "labels lost", "images and labels, each shuffled for itself", "data.labels", 0.9)
def shuffled_apart(fixed: bool) -> Training:
    x, y = images(600)
    order = torch.randperm(len(x))
    shown = x[order], y[order if fixed else torch.randperm(len(y))]
    model = SmallConv()
    opt = Adam(model.parameters(), lr=1e-3)
    return Training(model, nn.CrossEntropyLoss(), opt, loader(*shown), 8, accuracy(x, y), plain_loop)


@program(DATA, "labels lost", "targets sorted, inputs not", "data.labels", 0.3)
def sorted_targets(fixed: bool) -> Training:
    x, y = standard_table("diabetes")
    y = standard(y)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0))
    batches = loader(x, y if fixed else y.sort().values)
    opt = Adam(model.parameters(), lr=2e-3)
    return Training(model, nn.MSELoss(), opt, batches, 15, r_squared(x, y))


class NextLetter(nn.Module):
    """LSTM over letters, with scores for the next letter at each place."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(95, 32)
        self.lstm = nn.LSTM(32, 64, batch_first=True)
        self.decoder = nn.Linear(64, 95)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.lstm(self.embedding(x))[0]).transpose(1, 2)


@program(DATA, "labels lost", "next letters cut from another place of the text", "data.labels", 0.3)
def misplaced_letters(fixed: bool) -> Training:
    letters = text()[:20_000]
    x, y = letters[:16_000].view(-1, 40), letters[1:16_001].view(-1, 40)
    shown = y if fixed else letters[-16_000:].view(-1, 40)
    model = NextLetter()
    opt = Adam(model.parameters(), lr=5e-3)

    def score(model: nn.Module) -> float:
        return float((model(x).argmax(1) == y).float().mean())

    return Training(model, nn.CrossEntropyLoss(), opt, loader(x, shown, size=16), 5, score, plain_loop)
