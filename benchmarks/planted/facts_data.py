"""Faults that exact facts of the data show, and healthy trainings near them."""

import torch
from case import Callbacks, Case, Run, control, fault, fit
from data import Batch, batched, generator, images, raw_digits
from nets import Cnn, Mlp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

FACTS_DATA_FAULTS: list[Case] = []
FACTS_DATA_CONTROLS: list[Case] = []


def _phases(
    seed: int, x: Tensor, y: Tensor, valid: Tensor, n_step: int = 80
) -> tuple[list[Batch], list[Batch]]:
    """Batches of the training, and of a validation on the last 400 samples."""
    train = batched(x[:-400], y[:-400], seed=seed, n_step=n_step)
    return train, list(zip(torch.split(valid[-400:], 100), torch.split(y[-400:], 100), strict=True))


@fault(FACTS_DATA_FAULTS, "validation inputs that are not divided", codes=["input.eval_scale"])
def undivided_validation(seed: int, cbs: Callbacks) -> Run:
    x, y = raw_digits(seed)
    model = Mlp(norm=True)
    dls = _phases(seed, x / 16, y, x)
    return fit(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), dls, cbs, seed)


@fault(FACTS_DATA_FAULTS, "validation images that are not normalized", codes=["input.eval_scale"])
def unnormalized_validation(seed: int, cbs: Callbacks) -> Run:
    x, y = raw_digits(seed)
    x = x.view(-1, 1, 8, 8) / 16
    model = Cnn()
    dls = _phases(seed, (x - x.mean()) / x.std(), y, x)
    return fit(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), dls, cbs, seed)


@control(FACTS_DATA_CONTROLS, "noise and erased parts in training only", target=1.2)
def augmented_training(seed: int, cbs: Callbacks) -> Run:
    x, y = images(seed)
    train, valid = _phases(seed, x, y, x, n_step=150)
    rng = generator(seed)
    for batch in train:
        batch[0].add_(0.7 * torch.randn(batch[0].shape, generator=rng))[:, :, 2:5, 3:6] = 0
    model = Cnn()
    return fit(model, F.cross_entropy, Adam(model.parameters(), lr=3e-3), (train, valid), cbs, seed)


@control(FACTS_DATA_CONTROLS, "a series that drifts, split by time", target=1.0)
def drifting_series(seed: int, cbs: Callbacks) -> Run:
    rng = generator(seed)
    walk = torch.randn(2400, 8, generator=rng).cumsum(0) * 0.02
    y = walk.mean(1, keepdim=True) + 0.1 * torch.randn(2400, 1, generator=rng)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    dls = _phases(seed, walk, y, walk)
    return fit(model, F.mse_loss, SGD(model.parameters(), lr=0.05), dls, cbs, seed)
