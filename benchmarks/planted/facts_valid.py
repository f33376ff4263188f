"""Validations beside the training, averages of weights, and losses without a floor; controls near them."""

import copy
from collections.abc import Callable
from itertools import pairwise

import torch
from case import Callbacks, Case, Losses, Run, control, fault
from data import digits, generator
from nets import stack
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hookcb import EMA, EarlyStopping, Learner, watch

FACTS_VALID_FAULTS: list[Case] = []
FACTS_VALID_CONTROLS: list[Case] = []
Data = tuple[Tensor, Tensor]


def pairs(x: Tensor, y: Tensor, size: int = 20) -> list[Data]:
    """Batches of a data set."""
    return list(zip(x.split(size), y.split(size), strict=True))


def noisy(seed: int, n: int = 100, noise: float = 1.5) -> tuple[Data, Data]:
    """Data for training and validation, in which the sign of one of 20 inputs is hidden in noise."""
    rng = generator(seed)
    x = torch.randn(2 * n, 20, generator=rng)
    y = (x[:, 0] + noise * torch.randn(2 * n, generator=rng) > 0).long()
    return (x[:n], y[:n]), (x[n:], y[n:])


def validated(
    model: nn.Module, train: Data, valid: Data, cbs: Callbacks, n_epoch: int = 20, lr: float = 5e-3
) -> Run:
    """Train with a Learner, which validates each epoch."""
    losses: list[float] = []
    learn = Learner((pairs(*train), pairs(*valid)), model, F.cross_entropy, Adam(model.parameters(), lr))
    with learn.no_logging():
        learn.fit(n_epoch, cbs=[*cbs, Losses(losses)])
    return Run(learn, losses, model=model)


def looped(
    model: nn.Module, train: Data, valid: Data, cbs: Callbacks, n_epoch: int = 12, saves: bool = False
) -> Run:
    """Train and validate in a loop of its own."""
    opt, losses = Adam(model.parameters(), lr=5e-3), list[float]()
    with watch(model, opt, *cbs) as w:
        for _ in range(n_epoch):
            model.train()
            for x, y in pairs(*train):
                loss = w.report_loss(F.cross_entropy(model(x), y))
                losses.append(loss.item())
                opt.zero_grad()
                loss.backward()
                opt.step()
            model.eval()
            with torch.no_grad():
                F.cross_entropy(model(valid[0]), valid[1])
            if saves:
                model.state_dict()
    return Run(w, losses, model=model)


@fault(FACTS_VALID_FAULTS, "an MLP that overfits 100 noisy samples", codes=["valid.overfit", "valid.trivial"])
def overfitted(seed: int, cbs: Callbacks) -> Run:
    return validated(stack(20, 64, 2), *noisy(seed), cbs, n_epoch=30)


@fault(FACTS_VALID_FAULTS, "a loop that overfits until the end", codes=["valid.overfit", "valid.trivial"])
def overfitted_loop(seed: int, cbs: Callbacks) -> Run:
    return looped(stack(20, 64, 64, 2, act=nn.Tanh), *noisy(seed), cbs, n_epoch=25)


@fault(FACTS_VALID_FAULTS, "labels that are memorized", codes=["valid.trivial", "valid.overfit"])
def memorized(seed: int, cbs: Callbacks) -> Run:
    (x, _), (new, _) = noisy(seed)
    rng = generator(seed + 1)
    y, other = (torch.randint(2, (100,), generator=rng) for _ in range(2))
    return validated(stack(20, 128, 2), (x, y), (new, other), cbs, n_epoch=30, lr=1e-2)


@fault(FACTS_VALID_FAULTS, "validation images that are not scaled", codes=["input.eval_scale"])
def unscaled_validation(seed: int, cbs: Callbacks) -> Run:
    x, y = digits(seed, 600)
    return validated(stack(64, 64, 10), (x[:400], y[:400]), (40 * x[400:] + 200, y[400:]), cbs, n_epoch=8)


@fault(FACTS_VALID_FAULTS, "batch norm whose averages are those of other data", codes=["valid.trivial"])
def other_averages(seed: int, cbs: Callbacks) -> Run:
    x, y = digits(seed, 600)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64, momentum=0.0), nn.ReLU(), nn.Linear(64, 10))
    model[1].running_var.fill_(1e-6)
    return looped(model, (x[:400], y[:400]), (x[400:], y[400:]), cbs, n_epoch=8)


@control(FACTS_VALID_CONTROLS, "MLP that overfits, and stops early", target=0.7)
def stopped_early(seed: int, cbs: Callbacks) -> Run:
    return validated(
        stack(20, 64, 2), *noisy(seed, noise=0.7), [*cbs, EarlyStopping(patience=12)], n_epoch=30
    )


@control(FACTS_VALID_CONTROLS, "loop that overfits, and keeps the weights of each epoch", target=0.3)
def saved_each_epoch(seed: int, cbs: Callbacks) -> Run:
    return looped(stack(20, 64, 2), *noisy(seed, noise=0.7), cbs, n_epoch=25, saves=True)


@control(FACTS_VALID_CONTROLS, "MLP validated on digits", target=0.6)
def digits_validated(seed: int, cbs: Callbacks) -> Run:
    x, y = digits(seed, 600)
    return validated(stack(64, 64, 10), (x[:400], y[:400]), (x[400:], y[400:]), cbs, n_epoch=6)


@control(FACTS_VALID_CONTROLS, "loop validated on digits with batch norm", target=0.6)
def norm_validated(seed: int, cbs: Callbacks) -> Run:
    x, y = digits(seed, 600)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    return looped(model, (x[:400], y[:400]), (x[400:], y[400:]), cbs, n_epoch=6)


Update = Callable[[nn.Module], object]


def averaged(model: nn.Module, average: nn.Module, update: Update, seed: int, cbs: Callbacks) -> Run:
    """Train on digits, and evaluate an average of the weights after each epoch."""
    x, y = digits(seed, 600)
    opt, losses = Adam(model.parameters(), lr=5e-3), list[float]()
    with watch(model, opt, *cbs) as w:
        for _ in range(8):
            for xb, yb in pairs(x[:400], y[:400]):
                loss = w.report_loss(F.cross_entropy(model(xb), yb))
                losses.append(loss.item())
                opt.zero_grad()
                loss.backward()
                opt.step()
                update(model)
            with torch.no_grad():
                average.eval()(x[400:])
    return Run(w, losses, model=model)


def lerp(average: nn.Module, model: nn.Module, weight: float) -> None:
    """Moves an average by a share of the way to the model."""
    with torch.no_grad():
        for a, p in zip(average.parameters(), model.parameters(), strict=True):
            a.lerp_(p, weight)


@fault(FACTS_VALID_FAULTS, "an average by hand with a decay of 0.9999", codes=["average.slow"])
def slow_by_hand(seed: int, cbs: Callbacks) -> Run:
    model = stack(64, 64, 10)
    average = copy.deepcopy(model)
    return averaged(model, average, lambda m: lerp(average, m, 1e-4), seed, cbs)


@fault(FACTS_VALID_FAULTS, "an average of the only module, with a decay of 0.9999", codes=["average.slow"])
def slow_of_part(seed: int, cbs: Callbacks) -> Run:
    model = nn.Sequential(stack(64, 64, 10))
    average = copy.deepcopy(model[0])
    return averaged(model, average, lambda m: lerp(average, m[0], 1e-4), seed, cbs)


@fault(FACTS_VALID_FAULTS, "an AveragedModel with a decay of 0.9999", codes=["average.slow"])
def slow_averaged_model(seed: int, cbs: Callbacks) -> Run:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9999))
    return averaged(model, average, average.update_parameters, seed, cbs)


@fault(FACTS_VALID_FAULTS, "hookcb's EMA with a decay of 0.9999", codes=["average.slow"])
def slow_callback(seed: int, cbs: Callbacks) -> Run:
    x, y = digits(seed, 600)
    data = (x[:400], y[:400]), (x[400:], y[400:])
    return validated(stack(64, 64, 10), *data, [*cbs, EMA(0.9999)], n_epoch=8)


@control(FACTS_VALID_CONTROLS, "hookcb's EMA with a decay of 0.9", target=0.6)
def ema_callback(seed: int, cbs: Callbacks) -> Run:
    x, y = digits(seed, 600)
    data = (x[:400], y[:400]), (x[400:], y[400:])
    return validated(stack(64, 64, 10), *data, [*cbs, EMA(0.9)], n_epoch=8)


@control(FACTS_VALID_CONTROLS, "average whose decay of 0.9999 is warmed up", target=0.6)
def warmed_up(seed: int, cbs: Callbacks) -> Run:
    model, n = stack(64, 64, 10), iter(range(10_000))
    average = copy.deepcopy(model)
    return averaged(
        model,
        average,
        lambda m: lerp(average, m, 1 - min(0.9999, (1 + (i := next(n))) / (10 + i))),
        seed,
        cbs,
    )


@control(FACTS_VALID_CONTROLS, "average of weights that begins late", target=0.6)
def late_average(seed: int, cbs: Callbacks) -> Run:
    model, n = stack(64, 64, 10), iter(range(10_000))
    average = AveragedModel(model)
    return averaged(model, average, lambda m: next(n) >= 120 and average.update_parameters(m), seed, cbs)


@control(FACTS_VALID_CONTROLS, "frozen reference that is evaluated beside the model", target=0.6)
def reference(seed: int, cbs: Callbacks) -> Run:
    model = stack(64, 64, 10)
    return averaged(model, copy.deepcopy(model), lambda m: None, seed, cbs)


@control(FACTS_VALID_CONTROLS, "slow target network that is called at each step", target=0.8)
def target_network(seed: int, cbs: Callbacks) -> Run:
    model = stack(64, 64, 10)
    target = copy.deepcopy(model)
    x, y = digits(seed, 600)
    opt, losses = Adam(model.parameters(), lr=5e-3), list[float]()
    with watch(model, opt, *cbs) as w:
        for _ in range(8):
            for xb, yb in pairs(x[:400], y[:400]):
                with torch.no_grad():
                    near = target(xb).softmax(1)
                scores = model(xb)
                loss = w.report_loss(F.cross_entropy(scores, yb) + 0.01 * F.cross_entropy(scores, near))
                losses.append(loss.item())
                opt.zero_grad()
                loss.backward()
                opt.step()
                lerp(target, model, 1e-4)
    return Run(w, losses, model=model)


class Coder(nn.Module):
    """A variational autoencoder: reconstruction, mean and logarithm of the variance."""

    def __init__(self, width: int = 64, n_code: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 2 * n_code))
        self.decoder = stack(n_code, width, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_var = self.encoder(x).chunk(2, 1)
        code = mean + (0.5 * log_var).exp() * torch.randn_like(mean)
        return self.decoder(code), mean, log_var


def variational(seed: int, cbs: Callbacks, sign: float, model: nn.Module, lr: float) -> Run:
    """Train an autoencoder, whose divergence is added with a sign."""
    x, _ = digits(seed, 600)
    opt, losses = Adam(model.parameters(), lr=lr), list[float]()
    with watch(model, opt, *cbs) as w:
        for _ in range(8):
            for xb in x.split(40):
                found, mean, log_var = model(xb)
                divergence = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(1).mean()
                loss = w.report_loss((found - xb).square().sum(1).mean() + sign * divergence)
                losses.append(loss.item())
                opt.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1e3)
                opt.step()
    return Run(w, losses, model=model)


@fault(FACTS_VALID_FAULTS, "a divergence that is subtracted", codes=["loss.unbounded"])
def subtracted_divergence(seed: int, cbs: Callbacks) -> Run:
    return variational(seed, cbs, -100.0, Coder(), lr=0.03)


@fault(FACTS_VALID_FAULTS, "a bonus without a bound", codes=["loss.unbounded"])
def endless_bonus(seed: int, cbs: Callbacks) -> Run:
    x, y = digits(seed, 600)
    model = stack(64, 32, 10, act=nn.Tanh)
    opt, losses = Adam(model.parameters(), lr=0.05), list[float]()
    with watch(model, opt, *cbs) as w:
        for _ in range(10):
            for xb, yb in pairs(x, y, 40):
                scores = model(xb)
                loss = w.report_loss(F.cross_entropy(scores, yb) - scores.exp().mean())
                losses.append(loss.item())
                opt.zero_grad()
                loss.backward()
                opt.step()
    return Run(w, losses, model=model)


@control(FACTS_VALID_CONTROLS, "variational autoencoder", target=70.0)
def variational_autoencoder(seed: int, cbs: Callbacks) -> Run:
    return variational(seed, cbs, 1.0, Coder(), lr=3e-3)


@control(FACTS_VALID_CONTROLS, "likelihood of densities that get narrow", target=0.0)
def narrow_densities(seed: int, cbs: Callbacks) -> Run:
    rng = generator(seed)
    x = torch.randn(640, 8, generator=rng)
    y = x[:, :1] + 1e-3 * torch.randn(640, 1, generator=rng)
    model = stack(8, 32, 2)
    opt, losses = Adam(model.parameters(), lr=1e-2), list[float]()
    with watch(model, opt, *cbs) as w:
        for _ in range(10):
            for xb, yb in pairs(x, y, 40):
                mean, log_std = model(xb).chunk(2, 1)
                loss = (0.5 * ((yb - mean) / log_std.exp()).square() + log_std).mean()
                losses.append(w.report_loss(loss).item())
                opt.zero_grad()
                loss.backward()
                opt.step()
    return Run(w, losses, model=model)


def normed(*sizes: int) -> nn.Sequential:
    """Linear layers with a batch norm and ReLU between them."""
    layers: list[nn.Module] = []
    for n, m in pairwise(sizes):
        layers += [nn.Linear(n, m), nn.BatchNorm1d(m), nn.ReLU()]
    return nn.Sequential(*layers[:-2])


@fault(FACTS_VALID_FAULTS, "an average by hand without the running statistics", codes=["average.statistics"])
def without_statistics(seed: int, cbs: Callbacks) -> Run:
    model = normed(64, 64, 10)
    average = copy.deepcopy(model)
    return averaged(model, average, lambda m: lerp(average, m, 0.1), seed, cbs)


@fault(FACTS_VALID_FAULTS, "parameters of a swapped-in average only", codes=["average.statistics"])
def parameters_only(seed: int, cbs: Callbacks) -> Run:
    """The average is kept as a list of tensors, and copied into a second model before each evaluation."""
    model = normed(64, 48, 48, 10)
    second, kept = copy.deepcopy(model), [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def update(m: nn.Module) -> None:
        for a, p, q in zip(kept, m.parameters(), second.parameters(), strict=True):
            a.lerp_(p, 0.2)
            q.copy_(a)

    return averaged(model, second, update, seed, cbs)


@control(FACTS_VALID_CONTROLS, "AveragedModel that averages its buffers", target=0.6)
def with_buffers(seed: int, cbs: Callbacks) -> Run:
    model = normed(64, 48, 48, 10)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    return averaged(model, average, average.update_parameters, seed, cbs)
