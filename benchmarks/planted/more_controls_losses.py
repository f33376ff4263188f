"""Further healthy training runs: losses, targets, and data."""

from collections import OrderedDict

import torch
from case import Callbacks, Case, Run, control, fit, follow
from data import (
    batched,
    digit_batches,
    digits,
    generator,
    image_batches,
    raw_digits,
    table,
    table_batches,
)
from gan import Gan, cloud, train_gan
from more_nets import Byol, Gaussian, Shared, Vae
from nets import Cnn, Mlp, Siamese, contrastive_loss, stack
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW

from hookcb import watch

LOSS_CONTROLS: list[Case] = []


@control(LOSS_CONTROLS, "class imbalance, 5 % positive", target=0.15)
def imbalance(seed: int, cbs: Callbacks) -> Run:
    x, y = table(seed, n=4096)
    y = (y > y.quantile(0.95)).float()
    model = Mlp(n_in=16, n_out=1)
    opt = Adam(model.parameters(), lr=5e-3)
    batches = batched(x, y, seed=seed, size=64, n_step=200)
    return fit(model, F.binary_cross_entropy_with_logits, opt, batches, cbs, seed)


@control(LOSS_CONTROLS, "regression on targets around 50", target=60.0)
def unscaled_targets(seed: int, cbs: Callbacks) -> Run:
    x, y = table(seed)
    model = Mlp(n_in=16, n_out=1)
    batches = batched(x, 50 + 10 * y, seed=seed, n_step=250)
    return fit(model, F.mse_loss, Adam(model.parameters(), lr=1e-2), batches, cbs, seed)


@control(LOSS_CONTROLS, "Huber loss and outliers", target=0.3)
def huber(seed: int, cbs: Callbacks) -> Run:
    x, y = table(seed)
    y[::50] += 5
    model = Mlp(nn.SiLU, n_in=16, n_out=1)
    opt = SGD(model.parameters(), lr=0.1, momentum=0.9)
    return follow(model, F.huber_loss, opt, batched(x, y, seed=seed), cbs, seed)


@control(LOSS_CONTROLS, "regression of a linear target", target=0.1)
def linear_regression(seed: int, cbs: Callbacks) -> Run:
    x, _ = table(seed)
    y = x @ torch.randn(16, 1, generator=generator(seed)) / 4 + 0.1 * torch.randn(len(x), 1)
    model = nn.Sequential(OrderedDict(linear=nn.Linear(16, 1)))
    return fit(model, F.mse_loss, SGD(model.parameters(), lr=0.05), batched(x, y, seed=seed), cbs, seed)


@control(LOSS_CONTROLS, "multi-label", target=0.25)
def multi_label(seed: int, cbs: Callbacks) -> Run:
    """Even, above 4, prime, divisible by 3."""
    x, y = digits(seed)
    primes = torch.isin(y, torch.tensor([2, 3, 5, 7]))
    labels = torch.stack([y % 2 == 0, y > 4, primes, y % 3 == 0], dim=1).float()
    model = Mlp(n_out=4)
    opt = Adam(model.parameters(), lr=5e-3)
    batches = batched(x, labels, seed=seed)
    return fit(model, F.binary_cross_entropy_with_logits, opt, batches, cbs, seed)


def vae_loss(pred: tuple[Tensor, Tensor, Tensor], x: Tensor) -> Tensor:
    """Squared reconstruction error plus the divergence of the code from a standard normal."""
    out, mean, log_var = pred
    divergence = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(1)
    return ((out - x).square().sum(1) + divergence).mean() / x.shape[1]


@control(LOSS_CONTROLS, "variational autoencoder", target=0.45)
def vae(seed: int, cbs: Callbacks) -> Run:
    x, _ = digits(seed)
    model = Vae()
    batches = batched(x, x, seed=seed, n_step=200)
    return fit(model, vae_loss, Adam(model.parameters(), lr=5e-3), batches, cbs, seed)


@control(LOSS_CONTROLS, "GAN in balance", target=1.9)
def gan(seed: int, cbs: Callbacks) -> Run:
    model, rng = Gan(), generator(seed)
    opt_d = Adam(model.discriminator.parameters(), lr=2e-3, betas=(0.5, 0.99))
    opt_g = Adam(model.generator.parameters(), lr=2e-3, betas=(0.5, 0.99))
    return train_gan(model, (opt_d, opt_g), [cloud(64, rng) for _ in range(250)], cbs, seed)


@control(LOSS_CONTROLS, "siamese encoder and contrastive loss", target=0.5)
def siamese(seed: int, cbs: Callbacks) -> Run:
    """Half of the pairs are of the same digit."""
    x, y = digits(seed)
    by_class = torch.argsort(y, stable=True)
    other = torch.randperm(len(x), generator=generator(seed))
    other[by_class[::2]] = by_class.roll(1)[::2]
    batches = batched(x, x[other], (y == y[other]).float(), seed=seed, n_step=200)
    model = Siamese(stack(64, 64, 8), eps=1e-6)
    return fit(model, contrastive_loss, Adam(model.parameters(), lr=3e-3), batches, cbs, seed)


def triplet_loss(pred: tuple[Tensor, Tensor, Tensor], y: Tensor) -> Tensor:
    """Hinge on how much closer an anchor is to its own class than to another."""
    return F.triplet_margin_loss(*pred, margin=1.0)


@control(LOSS_CONTROLS, "triplet loss", target=0.4)
def triplet(seed: int, cbs: Callbacks) -> Run:
    x, y = digits(seed)
    order = torch.argsort(y, stable=True)
    anchor, like = x[order[1:]], x[order[:-1]]
    unlike = x[order.roll(len(x) // 2)[1:]]
    batches = batched(anchor, like, unlike, y[order[1:]], seed=seed)
    model = Shared(stack(64, 64, 16))
    return fit(model, triplet_loss, Adam(model.parameters(), lr=2e-3), batches, cbs, seed)


def info_nce(pred: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    """Cross-entropy of identifying the other view within the batch, at temperature 0.1."""
    a, b = (F.normalize(x, dim=1) for x in pred)
    return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))


@control(LOSS_CONTROLS, "contrastive learning on two views", target=1.0)
def contrastive(seed: int, cbs: Callbacks) -> Run:
    x, y = digits(seed)
    rng = generator(seed)
    a, b = (x + 0.5 * torch.randn(x.shape, generator=rng) for _ in range(2))
    model = Shared(stack(64, 64, 16))
    opt = Adam(model.parameters(), lr=3e-3)
    return fit(model, info_nce, opt, batched(a, b, y, seed=seed), cbs, seed)


def byol_loss(pred: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    """Negative cosine between the prediction and the other view's target."""
    return -F.cosine_similarity(*pred).mean()


@control(LOSS_CONTROLS, "a target network that follows slowly", target=-0.6)
def byol(seed: int, cbs: Callbacks) -> Run:
    x, y = digits(seed)
    rng = generator(seed)
    a, b = (x + 0.3 * torch.randn(x.shape, generator=rng) for _ in range(2))
    model = Byol()
    opt = Adam([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    batches = batched(a, b, y, seed=seed)
    return follow(model, byol_loss, opt, batches, cbs, seed, after_step=model.follow)


@control(LOSS_CONTROLS, "uint8 images of three channels, divided by 255", target=1.0)
def color_images(seed: int, cbs: Callbacks) -> Run:
    x, y = raw_digits(seed)
    tint = torch.randint(128, 256, (len(x), 3, 1), generator=generator(seed))
    x = (x[:, None] * tint / 16).to(torch.uint8).view(-1, 3, 8, 8)
    batches = [(xb / 255, yb) for xb, yb in batched(x, y, seed=seed, n_step=120)]
    model = Cnn(n_in=3)
    return fit(model, F.cross_entropy, Adam(model.parameters(), lr=3e-3), batches, cbs, seed)


@control(LOSS_CONTROLS, "mixup", target=1.5)
def mixup(seed: int, cbs: Callbacks) -> Run:
    """Each input and its soft label is a randomly weighted mean of two."""
    rng, batches = generator(seed), []
    for x, y in digit_batches(seed):
        weight = torch.rand(len(x), 1, generator=rng)
        other, soft = torch.randperm(len(x), generator=rng), F.one_hot(y, 10).float()
        batches.append((x.lerp(x[other], weight), soft.lerp(soft[other], weight)))
    model = Mlp(width=128)
    return fit(model, F.cross_entropy, Adam(model.parameters(), lr=3e-3), batches, cbs, seed)


@control(LOSS_CONTROLS, "a fifth of the labels wrong", target=1.8)
def noisy_labels(seed: int, cbs: Callbacks) -> Run:
    x, y = digits(seed)
    rng = generator(seed)
    wrong = torch.rand(len(y), generator=rng) < 0.2
    y = torch.where(wrong, torch.randint(10, y.shape, generator=rng), y)
    model = Mlp()
    opt = Adam(model.parameters(), lr=2e-3)
    return fit(model, F.cross_entropy, opt, batched(x, y, seed=seed), cbs, seed)


def distillation_loss(pred: Tensor, teacher: Tensor) -> Tensor:
    """Divergence between the student's and the teacher's distribution, both at temperature 2."""
    aim = (teacher / 2).log_softmax(-1)
    return 4 * F.kl_div((pred / 2).log_softmax(-1), aim, log_target=True, reduction="batchmean")


@control(LOSS_CONTROLS, "distillation", target=1.0)
def distillation(seed: int, cbs: Callbacks) -> Run:
    x, y = digits(seed)
    teacher = Mlp(width=128)
    opt = Adam(teacher.parameters(), lr=3e-3)
    for xb, yb in batched(x, y, seed=seed, n_step=80):
        F.cross_entropy(teacher(xb), yb).backward()
        opt.step()
        opt.zero_grad()
    with torch.no_grad():
        batches = batched(x, teacher(x), seed=seed)
    model = Mlp(width=32, depth=1)
    return fit(model, distillation_loss, Adam(model.parameters(), lr=1e-2), batches, cbs, seed)


@control(LOSS_CONTROLS, "sigmoid output and BCELoss", target=0.35)
def bce(seed: int, cbs: Callbacks) -> Run:
    x, y = digits(seed)
    layers = {
        "hidden": nn.Linear(64, 32),
        "act": nn.ReLU(),
        "head": nn.Linear(32, 1),
        "sigmoid": nn.Sigmoid(),
    }
    model = nn.Sequential(OrderedDict(layers))
    batches = batched(x, (y % 2)[:, None].float(), seed=seed)
    return fit(model, nn.BCELoss(), Adam(model.parameters(), lr=5e-3), batches, cbs, seed)


@control(LOSS_CONTROLS, "softmax output and the logarithm of it in the loss", target=0.8)
def softmax_nll(seed: int, cbs: Callbacks) -> Run:
    """Probabilities as output are right if the loss does not apply a softmax itself."""

    def loss_func(pred: Tensor, y: Tensor) -> Tensor:
        return F.nll_loss(pred.clamp(min=1e-7).log(), y)

    model = nn.Sequential(OrderedDict(net=Mlp(), softmax=nn.Softmax(dim=1)))
    return fit(model, loss_func, Adam(model.parameters(), lr=2e-3), digit_batches(seed), cbs, seed)


@control(LOSS_CONTROLS, "ReLU output for a target that is never negative", target=0.12)
def relu_output(seed: int, cbs: Callbacks) -> Run:
    x, y = table(seed)
    layers = {"net": Mlp(n_in=16, n_out=1), "relu": nn.ReLU()}
    model = nn.Sequential(OrderedDict(layers))
    nn.init.constant_(layers["net"].head.bias, 1.0)
    batches = batched(x, F.relu(y), seed=seed, n_step=200)
    return fit(model, F.mse_loss, Adam(model.parameters(), lr=3e-3), batches, cbs, seed)


@control(LOSS_CONTROLS, "sparse inputs, most of them zero", target=0.9)
def sparse_inputs(seed: int, cbs: Callbacks) -> Run:
    """Counts of 300 words; a text has 20 of them, and each class has its own words."""
    rng, n = generator(seed), 32 * 120
    y = torch.randint(4, (n,), generator=rng)
    words = torch.randint(300, (n, 20), generator=rng)
    words[:, :5] = 10 * y[:, None] + words[:, :5] % 10
    x = F.one_hot(words, 300).sum(1).float()
    model = stack(300, 32, 4)
    batches = list(zip(x.split(32), y.split(32), strict=True))
    return follow(model, F.cross_entropy, AdamW(model.parameters(), lr=5e-3), batches, cbs, seed)


@control(LOSS_CONTROLS, "columns on any scale, and a batch norm first", target=0.3)
def columns_of_any_scale(seed: int, cbs: Callbacks) -> Run:
    """Columns from a tenth to 190,000, with means of the same size."""
    x, y = table(seed)
    scale = torch.logspace(-1, 5.28, 16)
    model = nn.Sequential(nn.BatchNorm1d(16), Mlp(n_in=16, n_out=1))
    batches = batched((x + 1) * scale, y, seed=seed, n_step=200)
    return fit(model, F.mse_loss, Adam(model.parameters(), lr=3e-3), batches, cbs, seed)


def gaussian_loss(pred: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    """Negative log-likelihood of a normal distribution; negative if the distribution is narrow."""
    return F.gaussian_nll_loss(pred[0], y, pred[1])


@control(LOSS_CONTROLS, "Gaussian likelihood, a loss below zero", target=-1.0)
def gaussian(seed: int, cbs: Callbacks) -> Run:
    x, y = table(seed)
    model = Gaussian()
    batches = batched(x, 0.3 * y, seed=seed, n_step=200)
    return fit(model, gaussian_loss, Adam(model.parameters(), lr=5e-3), batches, cbs, seed)


def poisson_loss(pred: Tensor, y: Tensor) -> Tensor:
    """Negative log-likelihood of counts, up to a constant."""
    return F.poisson_nll_loss(pred, y)


@control(LOSS_CONTROLS, "Poisson regression of counts", target=0.7)
def counts(seed: int, cbs: Callbacks) -> Run:
    x, y = table(seed)
    y = torch.poisson((y - 0.5).exp(), generator=generator(seed))
    model = Mlp(n_in=16, n_out=1)
    batches = batched(x, y, seed=seed, n_step=200)
    return fit(model, poisson_loss, Adam(model.parameters(), lr=5e-3), batches, cbs, seed)


@control(LOSS_CONTROLS, "segmentation, a class for each pixel", target=0.3)
def segmentation(seed: int, cbs: Callbacks) -> Run:
    batches = [(x + 0.3 * torch.randn_like(x), (x[:, 0] > 0.3).long()) for x, _ in image_batches(seed)]
    layers = {
        "conv1": nn.Conv2d(1, 8, 3, padding=1),
        "norm1": nn.BatchNorm2d(8),
        "act1": nn.ReLU(),
        "head": nn.Conv2d(8, 2, 1),
    }
    model = nn.Sequential(OrderedDict(layers))
    return fit(model, F.cross_entropy, Adam(model.parameters(), lr=5e-3), batches, cbs, seed)


@control(LOSS_CONTROLS, "policy gradient", target=-0.75)
def policy_gradient(seed: int, cbs: Callbacks) -> Run:
    """A bandit that is rewarded for classifying a digit as odd or even; `losses` has the negative reward."""
    model = Mlp(n_out=2)
    opt = Adam(model.parameters(), lr=5e-3)
    torch.manual_seed(seed)
    with watch(model, opt, *cbs) as w:
        run = Run(w, [], model=model)
        for x, y in digit_batches(seed, n_step=200):
            policy = torch.distributions.Categorical(logits=model(x))
            action = policy.sample()
            reward = (action == y % 2).float()
            w.report_loss(-(policy.log_prob(action) * (reward - reward.mean())).mean()).backward()
            opt.step()
            opt.zero_grad()
            run.losses.append(-reward.mean().item())
    return run


@control(LOSS_CONTROLS, "L1 loss on a table", target=0.4)
def l1(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.GELU, n_in=16, n_out=1)
    return follow(model, F.l1_loss, Adam(model.parameters(), lr=5e-3), table_batches(seed), cbs, seed)


@control(LOSS_CONTROLS, "penalty on the squares of all weights", target=1.5)
def penalty(seed: int, cbs: Callbacks) -> Run:
    model = Mlp()

    def penalized(pred: Tensor, y: Tensor) -> Tensor:
        squares = torch.stack([p.square().sum() for p in model.parameters()])
        return F.cross_entropy(pred, y) + 0.01 * squares.sum()

    return fit(model, penalized, Adam(model.parameters(), lr=2e-3), digit_batches(seed), cbs, seed)


@control(LOSS_CONTROLS, "squared errors of a softmax", target=0.04)
def brier_score(seed: int, cbs: Callbacks) -> Run:
    model = nn.Sequential(stack(64, 64, 10), nn.Softmax(dim=1))
    batches = [(x, F.one_hot(y, 10).float()) for x, y in digit_batches(seed, n_step=200)]
    return follow(model, F.mse_loss, Adam(model.parameters(), lr=5e-3), batches, cbs, seed)


@control(LOSS_CONTROLS, "quantiles of which all pairs are compared", target=0.3)
def pairs_of_quantiles(seed: int, cbs: Callbacks) -> Run:
    """As in quantile regression of the distribution of rewards."""
    x, y = table(seed)
    model = Mlp(n_in=16, n_out=5)

    def pairs(pred: Tensor, y: Tensor) -> Tensor:
        return F.smooth_l1_loss(*torch.broadcast_tensors(pred.unsqueeze(-1), y.unsqueeze(1)))

    opt = Adam(model.parameters(), lr=5e-3)
    return fit(model, pairs, opt, batched(x, y.expand(-1, 5), seed=seed), cbs, seed)


@control(LOSS_CONTROLS, "rare classes with weights, and smoothed labels", target=1.6)
def weights_and_smoothing(seed: int, cbs: Callbacks) -> Run:
    x, y = digits(seed)
    y = y.clamp(max=3)
    weights = len(y) / (4 * y.bincount())
    loss = nn.CrossEntropyLoss(weight=weights, label_smoothing=0.2)
    model = Mlp(n_out=4)
    return fit(model, loss, Adam(model.parameters(), lr=3e-3), batched(x, y, seed=seed), cbs, seed)


@control(LOSS_CONTROLS, "soft labels of three annotators", target=0.66)
def soft_labels(seed: int, cbs: Callbacks) -> Run:
    """Labels of 1/3 and 2/3 mostly, so that even a perfect prediction has a large loss."""
    x, y = table(seed, n=4096)
    y = ((2 * y).sigmoid() * 3).round().clamp(1, 2) / 3
    model = Mlp(n_in=16, n_out=1)
    opt = Adam(model.parameters(), lr=5e-3)
    return fit(model, F.binary_cross_entropy_with_logits, opt, batched(x, y, seed=seed), cbs, seed)


@control(LOSS_CONTROLS, "mean brightness of an image, divided by 255", target=0.002)
def brightness(seed: int, cbs: Callbacks) -> Run:
    x, _ = raw_digits(seed)
    gray = (x / 16 * 255).round()
    y = gray.mean(1, keepdim=True) / 255
    model = Mlp(n_out=1)
    opt = Adam(model.parameters(), lr=2e-3)
    return follow(model, F.mse_loss, opt, batched(gray / 255, y, seed=seed), cbs, seed)
