"""Faults that exact facts of the data show, and healthy trainings near them."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from case import Callbacks, Case, Run, control, fault, fit, follow
from data import Batch, batched, digits, generator, images, raw_digits, text_batches
from nets import Cnn, Gpt, Mlp, token_loss
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

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


@control(FACTS_DATA_CONTROLS, "a series that drifts, split by time", target=0.01)
def drifting_series(seed: int, cbs: Callbacks) -> Run:
    rng = generator(seed)
    walk = torch.randn(2400, 8, generator=rng).cumsum(0) * 0.02
    y = walk.mean(1, keepdim=True) + 0.02 * torch.randn(2400, 1, generator=rng)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    dls = _phases(seed, walk, y, walk)
    return fit(model, F.mse_loss, SGD(model.parameters(), lr=0.05), dls, cbs, seed)


def _sorted(x: Tensor, y: Tensor, size: int = 32, n_epoch: int = 2) -> list[Batch]:
    """Batches of samples that are sorted by class, the same in each epoch."""
    order = torch.argsort(y, stable=True)
    return list(zip(torch.split(x[order], size), torch.split(y[order], size), strict=True)) * n_epoch


@fault(FACTS_DATA_FAULTS, "samples sorted by class", codes=["label.sorted"])
def sorted_samples(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU)
    return fit(model, F.cross_entropy, SGD(model.parameters(), lr=0.05), _sorted(*digits(seed)), cbs, seed)


@fault(FACTS_DATA_FAULTS, "images sorted by class in a plain loop", codes=["label.sorted"])
def sorted_images(seed: int, cbs: Callbacks) -> Run:
    model = Cnn()
    batches = _sorted(*images(seed, 1000))
    return follow(model, F.cross_entropy, Adam(model.parameters(), lr=1e-3), batches, cbs, seed)


@control(FACTS_DATA_CONTROLS, "tasks of two classes, one after the other", target=2.5)
def tasks_in_turn(seed: int, cbs: Callbacks) -> Run:
    x, y = digits(seed)
    batches = []
    for task in range(0, 10, 2):
        own = (y == task) | (y == task + 1)
        batches += batched(x[own], y[own], seed=seed, n_step=40)
    model = Mlp(nn.ReLU)
    return fit(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), batches, cbs, seed)


@control(FACTS_DATA_CONTROLS, "four classes in each batch, eight samples of each", target=0.8)
def balanced_batches(seed: int, cbs: Callbacks) -> Run:
    (x, y), rng = digits(seed), generator(seed)
    batches = []
    for _ in range(150):
        classes = torch.randperm(10, generator=rng)[:4]
        own = [torch.where(y == c)[0] for c in classes]
        rows = torch.cat([row[torch.randperm(len(row), generator=rng)[:8]] for row in own])
        batches.append((x[rows], y[rows]))
    model = Mlp(nn.ReLU)
    return fit(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), batches, cbs, seed)


class _Clamped(nn.Embedding):
    """Positions beyond the table get its last row."""

    def forward(self, places: Tensor) -> Tensor:
        return super().forward(places.clamp(max=self.num_embeddings - 1))


class _Tagger(nn.Module):
    """A recurrent layer over tokens with positions."""

    def __init__(self, n_rows: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(16, 32), _Clamped(n_rows, 32)
        self.rnn, self.head = nn.GRU(32, 32, batch_first=True), nn.Linear(32, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        return self.head(self.rnn(x)[0])


@fault(FACTS_DATA_FAULTS, "a GPT with clamped positions", codes=["embed.clamped"], layers=["position"])
def clamped_positions(seed: int, cbs: Callbacks) -> Run:
    model = Gpt()
    model.position = _Clamped(10, 32)
    opt = Adam(model.parameters(), lr=3e-3)
    return fit(model, token_loss, opt, text_batches(seed, n_step=60), cbs, seed)


@fault(FACTS_DATA_FAULTS, "a tagger with clamped positions", codes=["embed.clamped"], layers=["position"])
def clamped_tagger(seed: int, cbs: Callbacks) -> Run:
    model = _Tagger(8)
    batches = text_batches(seed, n_step=60)
    return follow(model, token_loss, Adam(model.parameters(), lr=5e-3), batches, cbs, seed)


@control(FACTS_DATA_CONTROLS, "as many positions as tokens", target=1.5)
def enough_positions(seed: int, cbs: Callbacks) -> Run:
    model = _Tagger(16)
    batches = text_batches(seed, n_step=120)
    return follow(model, token_loss, Adam(model.parameters(), lr=1e-2), batches, cbs, seed)


class _Conditioned(nn.Module):
    """A net with two inputs."""

    def __init__(self, n_in: int, n_condition: int, n_out: int) -> None:
        super().__init__()
        self.body, self.condition = nn.Linear(n_in, 32), nn.Linear(n_condition, 32)
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(32, n_out))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return self.head(self.body(x.flatten(1)) + self.condition(condition))


@fault(FACTS_DATA_FAULTS, "the first sample's half for all", codes=["input.one_sample"])
def first_half(seed: int, cbs: Callbacks) -> Run:
    model = _Conditioned(32, 32, 10)
    halves = [(*torch.chunk(x, 2, dim=1), y) for x, y in batched(*digits(seed), seed=seed, n_step=60)]
    batches = [(a, b.contiguous()[:1], y) for a, b, y in halves]
    opt = Adam(model.parameters(), lr=3e-3)
    return follow(model, F.cross_entropy, opt, batches, cbs, seed)


def _with_sums(seed: int, n_step: int = 60) -> list[Batch]:
    rng = generator(seed)
    x = torch.randn(32 * n_step, 8, generator=rng)
    condition = torch.randn(32 * n_step, 4, generator=rng)
    y = x[:, :1] + condition.sum(1, keepdim=True)
    return list(zip(*(torch.split(part, 32) for part in (x, condition, y)), strict=True))


@fault(FACTS_DATA_FAULTS, "one row of a condition, expanded", codes=["input.one_sample"])
def expanded_row(seed: int, cbs: Callbacks) -> Run:
    model = _Conditioned(8, 4, 1)
    batches = [(x, c.clone()[0].expand(len(x), -1), y) for x, c, y in _with_sums(seed)]
    opt = Adam(model.parameters(), lr=1e-2)
    return fit(model, F.mse_loss, opt, batches, cbs, seed)


class Halves(Dataset[tuple[Tensor, ...]]):
    """The halves of digits, and their classes."""

    def __init__(self, seed: int) -> None:
        self.x, self.y = digits(seed)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[Tensor, ...]:
        return self.x[i, :32], self.x[i, 32:], self.y[i]


class Joined(nn.Module):
    """An MLP on two halves of its input, of which one may be the same for all samples."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.body = Mlp(norm=norm)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.body(torch.cat([a, b.expand(len(a), -1)], 1))


def _collated(seed: int, cbs: Callbacks, make: Callable[[Any], Tensor], norm: bool) -> Run:
    def collate(samples: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        a, _, y = default_collate(samples)
        return a, make(samples), y

    batches = DataLoader(Halves(seed), 32, shuffle=True, collate_fn=collate)
    model = Joined(norm)
    return follow(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), batches, cbs, seed)


@fault(FACTS_DATA_FAULTS, "a collate function takes the first sample's half", codes=["input.one_sample"])
def collated_first(seed: int, cbs: Callbacks) -> Run:
    return _collated(seed, cbs, lambda samples: samples[0][1].unsqueeze(0), norm=False)


@fault(FACTS_DATA_FAULTS, "a collate function takes the last sample's half", codes=["input.one_sample"])
def collated_last(seed: int, cbs: Callbacks) -> Run:
    return _collated(seed, cbs, lambda samples: samples[-1][1].clone()[None], norm=True)


@control(FACTS_DATA_CONTROLS, "a collate function draws one style for each batch", target=2.0)
def collated_style(seed: int, cbs: Callbacks) -> Run:
    return _collated(seed, cbs, lambda samples: torch.randn(1, 32), norm=False)


@control(FACTS_DATA_CONTROLS, "one condition for each batch", target=0.5)
def shared_condition(seed: int, cbs: Callbacks) -> Run:
    model = _Conditioned(8, 4, 1)
    rng = generator(seed)
    batches: list[Batch] = []
    for x, _, _ in _with_sums(seed, 150):
        condition = torch.randn(1, 4, generator=rng)
        batches.append((x, condition, x[:, :1] + condition.sum()))
    opt = Adam(model.parameters(), lr=1e-2)
    return fit(model, F.mse_loss, opt, batches, cbs, seed)


class _Jittered(Dataset[tuple[Tensor, Tensor]]):
    """Digits with noise from a global generator."""

    def __init__(self, x: Tensor, y: Tensor, draw: Callable[[], float]) -> None:
        self.x, self.y, self.draw = x, y, draw

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i] * (1 + 0.1 * self.draw()), self.y[i]


def _of_torch() -> float:
    return float(torch.randn(()))


def _seed_worker(i: int) -> None:
    random.seed(0)


def _epochs(loader: DataLoader[Any], n: int, seed: int | None) -> Iterator[Batch]:
    """Batches of epochs, each of which begins with a seed if there is one."""
    for _ in range(n):
        if seed is not None:
            torch.manual_seed(seed)
        yield from loader


@fault(FACTS_DATA_FAULTS, "a seed in each epoch, an MLP", codes=["random.epochs"])
def seeded_epochs(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU)
    batches = _epochs(DataLoader(_Jittered(*digits(seed, 512), _of_torch), 32), 3, seed)
    return follow(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), batches, cbs, seed)


@fault(FACTS_DATA_FAULTS, "a seed before each validation of a GPT", codes=["random.epochs"])
def seeded_validations(seed: int, cbs: Callbacks) -> Run:
    model, (x, y) = Gpt(), text_batches(seed, size=800, n_step=1)[0]

    def drawn() -> Iterator[Batch]:
        for i in range(50):
            if i % 10 == 0:
                torch.manual_seed(0)
                model.eval()
                with torch.no_grad():
                    model(x[torch.randint(len(x), (32,))])
                model.train()
            rows = torch.randint(len(x), (32,))
            yield x[rows], y[rows]

    return follow(model, token_loss, Adam(model.parameters(), lr=3e-3), drawn(), cbs, seed)


@fault(FACTS_DATA_FAULTS, "a shuffled loader with a seed in each epoch, an MLP", codes=["data.same_order"])
def seeded_orders(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU)
    batches = _epochs(DataLoader(TensorDataset(*digits(seed, 512)), 32, shuffle=True), 3, seed)
    return follow(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), batches, cbs, seed)


@fault(FACTS_DATA_FAULTS, "a sampler's generator made anew, a CNN", codes=["data.same_order"])
def seeded_samplers(seed: int, cbs: Callbacks) -> Run:
    model, data = Cnn(), TensorDataset(*images(seed, 512))

    def batches() -> Iterator[Batch]:
        for _ in range(3):
            yield from DataLoader(data, 32, shuffle=True, generator=generator(seed))

    return follow(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), batches(), cbs, seed)


@fault(FACTS_DATA_FAULTS, "one seed for all workers, an MLP", codes=["random.workers"])
def one_seed_for_workers(seed: int, cbs: Callbacks) -> Run:
    model, data = Mlp(nn.ReLU), _Jittered(*digits(seed, 512), lambda: random.gauss(0, 1))
    loader = DataLoader(data, 32, shuffle=True, num_workers=2, worker_init_fn=_seed_worker)
    return fit(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), loader, cbs, seed, n_epoch=2)


@fault(FACTS_DATA_FAULTS, "one seed for all workers, a CNN", codes=["random.workers"])
def one_seed_for_workers_of_images(seed: int, cbs: Callbacks) -> Run:
    model, data = Cnn(), _Jittered(*images(seed, 512), lambda: random.gauss(0, 1))
    loader = DataLoader(data, 32, num_workers=2, worker_init_fn=_seed_worker)
    return follow(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), loader, cbs, seed)


@control(FACTS_DATA_CONTROLS, "noise that is new in each epoch", target=1.9)
def new_noise(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU)
    batches = _epochs(DataLoader(_Jittered(*digits(seed, 800), _of_torch), 32, shuffle=True), 3, None)
    return follow(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), batches, cbs, seed)


@control(FACTS_DATA_CONTROLS, "the same batches in each epoch, each of which sets a seed", target=1.9)
def fixed_batches(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU)
    batches = _epochs(DataLoader(TensorDataset(*digits(seed, 800)), 32), 3, seed)
    return follow(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), batches, cbs, seed)


@control(FACTS_DATA_CONTROLS, "one batch on purpose", target=0.5)
def one_batch(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU)
    batches = batched(*digits(seed), seed=seed, n_step=1) * 120
    return follow(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), batches, cbs, seed)


class _Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Digits with noise from a generator of its own."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.rng = x, y, random.Random(0)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i] * (1 + 0.1 * self.rng.gauss(0, 1)), self.y[i]


class _Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Digits one by one, all of them or those of its worker."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(self.x, self.y, strict=True)


class _Split(_Stream, IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        first, each = (0, 1) if info is None else (info.id, info.num_workers)
        yield from zip(self.x[first::each], self.y[first::each], strict=True)


@fault(FACTS_DATA_FAULTS, "a generator copied into workers, an MLP", codes=["random.workers"])
def copied_generator(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU)
    loader = DataLoader(_Noisy(*digits(seed, 512)), 32, shuffle=True, num_workers=2)
    return fit(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), loader, cbs, seed, n_epoch=2)


def _seed_torch(i: int) -> None:
    torch.manual_seed(torch.initial_seed() + i)


@fault(FACTS_DATA_FAULTS, "a generator copied into workers, a CNN", codes=["random.workers"])
def copied_generator_of_images(seed: int, cbs: Callbacks) -> Run:
    model = Cnn()
    loader = DataLoader(_Noisy(*images(seed, 512)), 32, num_workers=2, worker_init_fn=_seed_torch)
    return follow(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), loader, cbs, seed)


@fault(FACTS_DATA_FAULTS, "a stream that each worker gives, an MLP", codes=["data.workers"])
def repeated_stream(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU)
    loader = DataLoader(_Stream(*digits(seed, 512)), 32, num_workers=2)
    return fit(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), loader, cbs, seed)


@fault(FACTS_DATA_FAULTS, "a stream that each worker gives, a CNN", codes=["data.workers"])
def repeated_stream_of_images(seed: int, cbs: Callbacks) -> Run:
    model = Cnn()
    loader = DataLoader(_Stream(*images(seed, 512)), 32, num_workers=2)
    return follow(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), loader, cbs, seed)


@control(FACTS_DATA_CONTROLS, "a stream that is split between workers", target=1.9)
def split_stream(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU)
    loader = DataLoader(_Split(*digits(seed)), 32, num_workers=2)
    return fit(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), loader, cbs, seed)


def _split_by_class(x: Tensor, y: Tensor, seed: int, n_step: int = 80) -> tuple[list[Batch], list[Batch]]:
    """Batches of a training without the last two classes, and of a validation with all."""
    own, rows = y < 8, torch.arange(len(y)) % 4 == 0
    train = batched(x[own & ~rows], y[own & ~rows], seed=seed, n_step=n_step)
    return train, list(zip(x[rows].split(64), y[rows].split(64), strict=True))


@fault(FACTS_DATA_FAULTS, "classes that only the validation has, an MLP", codes=["label.unseen"])
def unseen_classes(seed: int, cbs: Callbacks) -> Run:
    model, dls = Mlp(nn.ReLU), _split_by_class(*digits(seed), seed)
    return fit(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), dls, cbs, seed)


@fault(FACTS_DATA_FAULTS, "classes that only the validation has, a CNN", codes=["label.unseen"])
def unseen_classes_of_images(seed: int, cbs: Callbacks) -> Run:
    model, (train, valid) = Cnn(), _split_by_class(*images(seed), seed)

    def validate(step: int) -> None:
        if step == len(train) - 1:
            model.eval()
            with torch.no_grad():
                for x, y in valid:
                    F.cross_entropy(model(x), y)

    opt = Adam(model.parameters(), lr=2e-3)
    return follow(model, F.cross_entropy, opt, train, cbs, seed, after_step=validate)


@control(FACTS_DATA_CONTROLS, "a head that is wider than the labels", target=0.8)
def wide_head(seed: int, cbs: Callbacks) -> Run:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
    train, valid = _phases(seed, *digits(seed), digits(seed)[0], n_step=120)
    return fit(model, F.cross_entropy, Adam(model.parameters(), lr=3e-3), (train, valid), cbs, seed)
