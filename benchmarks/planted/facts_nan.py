"""NaN that begins between the layers of a model or in a loss of its own, and -inf that is meant."""

import torch
from case import Callbacks, Case, Run, control, fault, follow
from data import batched, digit_batches, digits, image_batches
from nets import Cnn, Mlp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

FACTS_NAN_FAULTS: list[Case] = []
FACTS_NAN_CONTROLS: list[Case] = []


class LogBetween(nn.Module):
    """Logarithm of features between a body and its head, as of energies."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu().log())


def log_of_share(scores: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy as a beginner writes it: the logarithm of a probability that may be 0."""
    return -scores.softmax(1)[torch.arange(len(y)), y].log().mean()


@fault(FACTS_NAN_FAULTS, "log(0) between body and head of an MLP", codes=["nonfinite.first"])
def log_in_mlp(seed: int, cbs: Callbacks) -> Run:
    model = LogBetween(nn.Linear(64, 32), nn.Linear(32, 10))
    opt = SGD(model.parameters(), lr=1e-2)
    return follow(model, F.cross_entropy, opt, digit_batches(seed, n_step=60), cbs, seed)


@fault(FACTS_NAN_FAULTS, "log(0) between body and head of a CNN", codes=["nonfinite.first"])
def log_in_cnn(seed: int, cbs: Callbacks) -> Run:
    model = LogBetween(Cnn(), nn.Linear(10, 10))
    opt = Adam(model.parameters(), lr=1e-3)
    return follow(model, F.cross_entropy, opt, image_batches(seed, n_step=30), cbs, seed)


def with_outliers(batches: list[tuple[Tensor, ...]], at: int) -> list[tuple[Tensor, ...]]:
    """Batches of which one has inputs on a scale that is 10,000 times as large."""
    x, y = batches[at]
    batches[at] = x * 1e4, y
    return batches


@fault(FACTS_NAN_FAULTS, "log of a probability of 0, MLP", codes=["nonfinite.first"], planted_at=30)
def log_of_probability_mlp(seed: int, cbs: Callbacks) -> Run:
    model = Mlp()
    opt = Adam(model.parameters(), lr=2e-3)
    return follow(model, log_of_share, opt, with_outliers(digit_batches(seed, n_step=60), 30), cbs, seed)


@fault(FACTS_NAN_FAULTS, "log of a probability of 0, convolution", codes=["nonfinite.first"], planted_at=15)
def log_of_probability_conv(seed: int, cbs: Callbacks) -> Run:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    opt = Adam(model.parameters(), lr=2e-3)
    return follow(model, log_of_share, opt, with_outliers(image_batches(seed, n_step=30), 15), cbs, seed)


class Allowed(nn.Module):
    """Scores of classes, of which each sample allows some; those of the others are -inf."""

    def __init__(self, by_log: bool) -> None:
        super().__init__()
        self.body, self.by_log = Mlp(), by_log

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        scores = self.body(x)
        return scores + allowed.log() if self.by_log else scores.masked_fill(allowed == 0, -torch.inf)


def masked_batches(seed: int) -> list[tuple[Tensor, ...]]:
    """Digits, and for each the half of the classes among which the right one is."""
    x, y = digits(seed)
    allowed = ((torch.arange(10) % 2)[None] == (y % 2)[:, None]).float()
    return batched(x, allowed, y, seed=seed)


@control(FACTS_NAN_CONTROLS, "scores masked with -inf", target=0.6)
def masked_scores(seed: int, cbs: Callbacks) -> Run:
    model = Allowed(by_log=False)
    return follow(model, F.cross_entropy, Adam(model.parameters(), lr=3e-3), masked_batches(seed), cbs, seed)


@control(FACTS_NAN_CONTROLS, "scores masked by the log of 0 and 1", target=0.6)
def scores_masked_by_log(seed: int, cbs: Callbacks) -> Run:
    model = Allowed(by_log=True)
    return follow(model, F.cross_entropy, Adam(model.parameters(), lr=3e-3), masked_batches(seed), cbs, seed)


class LogWherePositive(nn.Module):
    """Logarithm of pixels that are not 0; that of the others is -inf, and is left out."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x.log(), torch.zeros_like(x))


@control(FACTS_NAN_CONTROLS, "log(0) of inputs that is left out", target=1.2)
def log_left_out(seed: int, cbs: Callbacks) -> Run:
    x, y = digits(seed)
    batches = batched((x - x.min()) / (x.max() - x.min()), y, seed=seed)
    model = nn.Sequential(LogWherePositive(), Mlp())
    return follow(model, F.cross_entropy, Adam(model.parameters(), lr=3e-3), batches, cbs, seed)
