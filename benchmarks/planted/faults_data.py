"""Faults of inputs, labels and the loader."""

import time

import torch
from case import Callbacks, Case, Run, fault, fit, follow
from data import batched, digit_batches, digits, generator, image_batches, raw_digits, table
from nets import Cnn, Mlp
from torch import Tensor
from torch.nn import functional as F
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, Dataset

DATA_FAULTS: list[Case] = []


@fault(DATA_FAULTS, "inputs ×1000", codes=["input.scale", "loss.init"])
def large_inputs(seed: int, cbs: Callbacks) -> Run:
    batches = [(1000 * x, y) for x, y in digit_batches(seed)]
    model = Mlp()
    return fit(model, F.cross_entropy, SGD(model.parameters(), lr=0.05), batches, cbs, seed)


@fault(DATA_FAULTS, "shuffled labels", codes=["data.labels", "loss.flat"])
def shuffled_labels(seed: int, cbs: Callbacks) -> Run:
    """Inputs and labels are shuffled in different orders."""
    x, y = digits(seed)
    y = y[torch.randperm(len(y), generator=generator(seed))]
    model = Mlp()
    opt = Adam(model.parameters(), lr=1e-3)
    return fit(model, F.cross_entropy, opt, batched(x, y, seed=seed), cbs, seed)


@fault(DATA_FAULTS, "constant input", codes=["input.constant"])
def constant_input(seed: int, cbs: Callbacks) -> Run:
    """A dataset that returns its first image for every index."""
    batches = image_batches(seed)
    first = batches[0][0][:1]
    batches = [(first.expand_as(x).clone(), y) for x, y in batches]
    model = Cnn(norm=None)
    return follow(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), batches, cbs, seed)


@fault(DATA_FAULTS, "label out of range", codes=["label.out_of_range"])
def label_out_of_range(seed: int, cbs: Callbacks) -> Run:
    """Labels from 1 to 10 for ten classes."""
    batches = [(x, y + 1) for x, y in digit_batches(seed)]
    model = Mlp()
    opt = Adam(model.parameters(), lr=2e-3)
    return fit(model, F.cross_entropy, opt, batches, cbs, seed, raises=IndexError)


@fault(DATA_FAULTS, "NaN in one input column at step 13", codes=["input.nonfinite"], planted_at=13)
def nan_column(seed: int, cbs: Callbacks) -> Run:
    x, y = table(seed)
    batches = batched(x, y, seed=seed)
    batches[13][0][:, 7] = torch.nan
    model = Mlp(n_in=16, n_out=1)
    return follow(model, F.mse_loss, Adam(model.parameters(), lr=3e-3), batches, cbs, seed)


class SlowDigits(Dataset[tuple[Tensor, Tensor]]):
    """Digits that take 0.8 ms each to read."""

    def __init__(self, seed: int, n: int) -> None:
        x, self.y = raw_digits(seed, n)
        self.x = x / 16

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        time.sleep(8e-4)
        return self.x[i], self.y[i]


@fault(DATA_FAULTS, "sleep in the dataset", codes=["time.data_bound"])
def slow_dataset(seed: int, cbs: Callbacks) -> Run:
    model = Mlp()
    batches = DataLoader(SlowDigits(seed, 16 * 50), batch_size=16, shuffle=True)
    return fit(model, F.cross_entropy, Adam(model.parameters(), lr=3e-3), batches, cbs, seed)


@fault(DATA_FAULTS, "one column of a table in dollars", codes=["input.scale"])
def large_column(seed: int, cbs: Callbacks) -> Run:
    """One of 16 columns is near 190,000, the others near 1."""
    x, y = table(seed)
    scale = torch.ones(16)
    scale[5] = 190_000.0
    model = Mlp(n_in=16, n_out=1)
    batches = batched(x * scale, y, seed=seed, n_step=100)
    return fit(model, F.mse_loss, Adam(model.parameters(), lr=2e-3), batches, cbs, seed)


@fault(DATA_FAULTS, "class indices as targets of a binary cross-entropy", codes=["label.range"])
def indices_for_bits(seed: int, cbs: Callbacks) -> Run:
    """One output and BCEWithLogitsLoss for ten classes."""
    batches = [(x, y.float()[:, None]) for x, y in digit_batches(seed)]
    model = Mlp(n_out=1)
    opt = Adam(model.parameters(), lr=2e-3)
    return fit(model, F.binary_cross_entropy_with_logits, opt, batches, cbs, seed)


@fault(DATA_FAULTS, "a table that says nothing about its targets", codes=["loss.trivial"])
def unrelated_inputs(seed: int, cbs: Callbacks) -> Run:
    """Squared errors against noise, in batches so large that nothing can be memorized."""
    rng = generator(seed)
    x, y = torch.randn(4096, 8, generator=rng), torch.randn(4096, 1, generator=rng)
    model = Mlp(n_in=8, n_out=1)
    opt = SGD(model.parameters(), lr=0.02)
    return follow(model, F.mse_loss, opt, batched(x, y, seed=seed, size=256), cbs, seed)


@fault(DATA_FAULTS, "labels of one class", codes=["label.single_class"])
def one_class(seed: int, cbs: Callbacks) -> Run:
    """Labels that a conversion has set to 0."""
    batches = [(x, torch.zeros_like(y)) for x, y in digit_batches(seed, size=64)]
    model = Mlp()
    return fit(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), batches, cbs, seed)


@fault(DATA_FAULTS, "targets of shape (N) beside outputs of shape (N, 1)", codes=["label.broadcast"])
def broadcast_targets(seed: int, cbs: Callbacks) -> Run:
    """Squared errors by hand, of which torch does not warn."""
    x, y = table(seed)
    model = Mlp(n_in=16, n_out=1)
    opt = Adam(model.parameters(), lr=3e-3)

    def squares(pred: Tensor, y: Tensor) -> Tensor:
        return ((pred - y) ** 2).mean()

    return fit(model, squares, opt, batched(x, y[:, 0], seed=seed), cbs, seed)


@fault(DATA_FAULTS, "one-hot rows for a loss of class indices", codes=["label.form"])
def one_hot_rows(seed: int, cbs: Callbacks) -> Run:
    batches = [(x, F.one_hot(y, 10)) for x, y in digit_batches(seed)]
    model = Mlp()
    opt = Adam(model.parameters(), lr=2e-3)
    return fit(model, F.cross_entropy, opt, batches, cbs, seed, raises=RuntimeError)


@fault(DATA_FAULTS, "labels divided by 255 as the pixels", codes=["label.scaled"])
def scaled_labels(seed: int, cbs: Callbacks) -> Run:
    """Which digit it is, as a number, from gray values of 0 to 255."""
    x, y = raw_digits(seed)
    batches = batched((x / 16 * 255).round() / 255, y[:, None] / 255, seed=seed)
    model = Mlp(n_out=1)
    return fit(model, F.mse_loss, Adam(model.parameters(), lr=2e-3), batches, cbs, seed)


@fault(DATA_FAULTS, "absolute errors of a rare class", codes=["loss.of_values"])
def rare_class(seed: int, cbs: Callbacks) -> Run:
    """Nobody buys with a probability above a half, so the best guess of an absolute error is always 0."""
    x, y = table(seed, n=4096)
    y = (torch.rand(len(y), 1, generator=generator(seed)) < 0.4 * y.sigmoid()).float()
    model = Mlp(n_in=16, n_out=1)
    opt = Adam(model.parameters(), lr=2e-3)
    return fit(model, F.l1_loss, opt, batched(x, y, seed=seed, size=256), cbs, seed)


@fault(DATA_FAULTS, "a penalty of ten times the squares of all weights", codes=["loss.penalty"])
def large_penalty(seed: int, cbs: Callbacks) -> Run:
    model = Mlp()

    def penalized(pred: Tensor, y: Tensor) -> Tensor:
        squares = torch.stack([p.square().sum() for p in model.parameters()])
        return F.cross_entropy(pred, y) + 10 * squares.sum()

    return fit(model, penalized, Adam(model.parameters(), lr=2e-3), digit_batches(seed), cbs, seed)
