"""Data of the planted cases: real digits, and sequences and tables generated from the seed."""

from functools import cache

import torch
from torch import Tensor

Batch = tuple[Tensor, ...]


def generator(seed: int) -> torch.Generator:
    """Random number generator for data, separate from that for weights."""
    return torch.Generator().manual_seed(seed + 1000)


@cache
def _all_digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits  # takes two seconds to import, and most tests need no digits

    x, y = load_digits(return_X_y=True)
    return torch.from_numpy(x).float(), torch.from_numpy(y).long()


def raw_digits(seed: int, n: int | None = None) -> tuple[Tensor, Tensor]:
    """The first `n` of 1797 handwritten digits, 8×8 gray values in 0..16, `(N, 64)`, shuffled by the seed."""
    x, y = _all_digits()
    order = torch.randperm(len(x), generator=generator(seed))[:n]
    return x[order], y[order]


def digits(seed: int, n: int | None = None) -> tuple[Tensor, Tensor]:
    """Digits with mean 0 and standard deviation 1."""
    x, y = raw_digits(seed, n)
    return (x - x.mean()) / x.std(), y


def images(seed: int, n: int | None = None) -> tuple[Tensor, Tensor]:
    """Digits as images, `(N, 1, 8, 8)`."""
    x, y = digits(seed, n)
    return x.view(-1, 1, 8, 8), y


def batched(*tensors: Tensor, seed: int, size: int = 32, n_step: int = 150) -> list[Batch]:
    """`n_step` batches, epoch after epoch, shuffled anew in each."""
    rng, n = generator(seed), len(tensors[0])
    per_epoch = n // min(size, n)
    epochs = [torch.randperm(n, generator=rng) for _ in range(-(-n_step // per_epoch))]
    rows = [order[i * size : (i + 1) * size] for order in epochs for i in range(per_epoch)]
    return [tuple(t[i] for t in tensors) for i in rows[:n_step]]


def digit_batches(seed: int, size: int = 32, n_step: int = 150) -> list[Batch]:
    """Batches of digits, `(N, 64)`, and their labels."""
    return batched(*digits(seed), seed=seed, size=size, n_step=n_step)


def image_batches(seed: int, size: int = 32, n_step: int = 120) -> list[Batch]:
    """Batches of images, `(N, 1, 8, 8)`, and their labels."""
    return batched(*images(seed), seed=seed, size=size, n_step=n_step)


def text_batches(
    seed: int, size: int = 16, length: int = 16, n_step: int = 120, n_token: int = 16
) -> list[Batch]:
    """Sequences of a Markov chain that mostly follows a permutation, and the next tokens as targets."""
    rng = generator(seed)
    follows = torch.randperm(n_token, generator=rng)
    n = size * n_step
    tokens = [torch.randint(n_token, (n,), generator=rng)]
    for _ in range(length):
        strays = torch.rand(n, generator=rng) < 0.05
        random = torch.randint(n_token, (n,), generator=rng)
        tokens.append(torch.where(strays, random, follows[tokens[-1]]))
    text = torch.stack(tokens, dim=1)
    return list(zip(text[:, :-1].split(size), text[:, 1:].split(size), strict=True))


def recall_batches(seed: int, size: int = 32, length: int = 16, n_step: int = 150) -> list[Batch]:
    """Sequences of noise `(N, T, 5)`; only the first item reveals the class, one of 4."""
    rng, n = generator(seed), size * n_step
    x = 0.1 * torch.randn(n, length, 5, generator=rng)
    y = torch.randint(4, (n,), generator=rng)
    x[torch.arange(n), 0, y] += 1
    x[:, 0, 4] += 1
    return list(zip(x.split(size), y.split(size), strict=True))


def table(seed: int, n: int = 1024, n_in: int = 16) -> tuple[Tensor, Tensor]:
    """Standard normal features `(N, n_in)` and a nonlinear target `(N, 1)`."""
    rng = generator(seed)
    x = torch.randn(n, n_in, generator=rng)
    w = torch.randn(n_in, 1, generator=rng) / n_in**0.5
    y = x @ w + 0.5 * (x[:, :1] * x[:, 1:2]) + 0.05 * torch.randn(n, 1, generator=rng)
    return x, y


def table_batches(seed: int, size: int = 32, n_step: int = 150) -> list[Batch]:
    """Batches of the table."""
    return batched(*table(seed), seed=seed, size=size, n_step=n_step)


def padded_batches(seed: int, size: int = 32, length: int = 10, n_step: int = 100) -> list[Batch]:
    """Sequences of 2 to `length` tokens, padded with 0; one token from 1 to 4 is the class."""
    rng, n = generator(seed), n_step * size
    y = torch.randint(4, (n,), generator=rng)
    tokens = torch.randint(5, 20, (n, length), generator=rng)
    lengths = torch.randint(2, length + 1, (n,), generator=rng)
    tokens[torch.arange(length) >= lengths[:, None]] = 0
    tokens[torch.arange(n), (torch.rand(n, generator=rng) * lengths).long()] = y + 1
    return list(zip(tokens.split(size), y.split(size), strict=True))
