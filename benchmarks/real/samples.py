"""Data without a network: tables of scikit-learn, text of the documentation of Python, and made data."""

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


@cache
def table(name: str) -> tuple[Tensor, Tensor]:
    """A table of scikit-learn as it is: columns as floats, and classes as integers or targets as floats."""
    from sklearn import datasets

    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    target = torch.from_numpy(y)
    return torch.from_numpy(x).float(), target.float() if target.is_floating_point() else target.long()


def standard_table(name: str) -> tuple[Tensor, Tensor]:
    """A table whose columns have mean 0 and standard deviation 1."""
    x, y = table(name)
    return standard(x), y


def standard(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / x.std(0).clamp_min(1e-6)


def digits(n: int = 1797) -> tuple[Tensor, Tensor]:
    """Handwritten digits of 8×8 pixels in 0..1, flat."""
    x, y = table("digits")
    return x[:n] / 16, y[:n]


def images(n: int = 1797) -> tuple[Tensor, Tensor]:
    """Handwritten digits as images, `(N, 1, 8, 8)`."""
    x, y = digits(n)
    return x.view(-1, 1, 8, 8), y


def column(y: Tensor) -> Tensor:
    """Targets as a column of floats."""
    return y.float().unsqueeze(1)


def reviews(n: int = 600, length: int = 20, n_words: int = 100) -> tuple[Tensor, Tensor]:
    """Token sequences and sentiments: words below 20 are more frequent in positive ones."""
    y = (torch.rand(n) < 0.5).long()
    words = torch.randint(20, n_words, (n, length))
    told = torch.rand(n, length) < 0.3
    words = torch.where(told, torch.randint(0, 10, (n, length)) + 10 * (1 - y).unsqueeze(1), words)
    return words, y


def temperatures(n: int = 600, length: int = 14) -> tuple[Tensor, Tensor]:
    """Two weeks of scaled temperatures, `(N, length, 1)`, and the next day in degrees, 3 to 27."""
    day = torch.arange(n + length).float()
    degrees = 15 + 10 * torch.sin(day * 2 * math.pi / 90) + torch.randn(n + length).clamp(-2, 2)
    windows = ((degrees - 15) / 10).unfold(0, length, 1)[:n]
    return windows.unsqueeze(-1), degrees[length:].unsqueeze(1)


@cache
def text() -> Tensor:
    """Codes 0..95 of the printable characters in the topics of Python's help, up to 40,000."""
    from pydoc_data.topics import topics

    letters = "".join(topics[key] for key in sorted(topics)).replace("\n", " ")
    return torch.tensor([ord(c) - 32 for c in letters[:60_000] if 32 <= ord(c) < 127][:40_000])


def loader(*tensors: Tensor, size: int = 32) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(*tensors), batch_size=size, shuffle=True)


# ---- scores


def accuracy(x: Tensor, y: Tensor) -> Callable[[nn.Module], float]:
    """Score of a model with one output per class."""
    return lambda model: float((model(x).flatten(1).argmax(1) == y).float().mean())


def binary_accuracy(x: Tensor, y: Tensor, cut: float) -> Callable[[nn.Module], float]:
    """Balanced accuracy of a model with one output, above `cut` for positives; 0.5 is guessing."""

    def score(model: nn.Module) -> float:
        guess, truth = model(x).flatten() > cut, y.flatten() > 0
        return float((guess[truth].float().mean() + (~guess)[~truth].float().mean()) / 2)

    return score


def r_squared(x: Tensor, y: Tensor) -> Callable[[nn.Module], float]:
    """Share of the variance of `y` that a regression explains; no NaN, -1 at least."""

    def score(model: nn.Module) -> float:
        share = 1 - F.mse_loss(model(x).view_as(y), y) / y.var(unbiased=False)
        return max(-1.0, float(share.nan_to_num(-1.0)))

    return score
