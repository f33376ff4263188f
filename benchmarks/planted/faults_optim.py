"""Faults of the optimizer, of its schedule, and of the steps between gradients and weights."""

import torch
from case import Callbacks, Case, Run, fault, fit, follow
from data import digit_batches, generator, text_batches
from gan import Gan, cloud, train_gan
from nets import Encoded, Gpt, Mlp, stack, token_loss
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import ExponentialLR, LinearLR

from hookcb import GradientClip, Schedule, watch

OPTIM_FAULTS: list[Case] = []


@fault(OPTIM_FAULTS, "Adam lr 1.0", codes=["update.too_large", "loss.diverging"])
def adam_lr_one(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU, depth=3)
    return fit(model, F.cross_entropy, Adam(model.parameters(), lr=1.0), digit_batches(seed), cbs, seed)


@fault(OPTIM_FAULTS, "lr 1e-7", codes=["update.too_small"])
def tiny_lr(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU)
    return follow(model, F.cross_entropy, Adam(model.parameters(), lr=1e-7), digit_batches(seed), cbs, seed)


@fault(OPTIM_FAULTS, "SGD lr 10", codes=["update.too_large", "loss.diverging"])
def sgd_lr_ten(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.Tanh)
    return follow(model, F.cross_entropy, SGD(model.parameters(), lr=10.0), digit_batches(seed), cbs, seed)


@fault(OPTIM_FAULTS, "no zero_grad", codes=["grad.stale"])
def no_zero_grad(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU)
    opt = SGD(model.parameters(), lr=0.05)
    with watch(model, opt, *cbs) as w:
        run = Run(w, [], model=model)
        for x, y in digit_batches(seed):
            loss = w.report_loss(F.cross_entropy(model(x), y))
            run.losses.append(loss.item())
            loss.backward()
            opt.step()
    return run


@fault(
    OPTIM_FAULTS,
    "half the parameters not in the optimizer",
    codes=["param.not_in_optimizer"],
    layers=["trunk", "trunk.0", "trunk.2"],
)
def half_in_optimizer(seed: int, cbs: Callbacks) -> Run:
    model = Encoded(
        stack(64, 64, 64), nn.Sequential(nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    )
    opt = Adam(model.head.parameters(), lr=2e-3)
    return fit(model, F.cross_entropy, opt, digit_batches(seed), cbs, seed)


@fault(OPTIM_FAULTS, "weight decay 100", codes=["wd.dominates"])
def weight_decay(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU)
    opt = AdamW(model.parameters(), lr=1e-3, weight_decay=100)
    return fit(model, F.cross_entropy, opt, digit_batches(seed), cbs, seed)


@fault(OPTIM_FAULTS, "clip 1e-6", codes=["clip.always", "update.too_small"])
def tiny_clip(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU)
    opt = SGD(model.parameters(), lr=0.05, momentum=0.9)
    return fit(model, F.cross_entropy, opt, digit_batches(seed), [*cbs, GradientClip(1e-6)], seed)


@fault(
    OPTIM_FAULTS,
    "scheduler drives lr to 0 at step 50",
    codes=["param.not_stepped", "update.too_small"],
    planted_at=50,
)
def lr_to_zero(seed: int, cbs: Callbacks) -> Run:
    """A linear decay with its length in epochs, which is stepped after each batch."""
    model = Mlp(nn.Tanh, depth=3)
    decay = Schedule(lambda opt: LinearLR(opt, 1.0, 0.0, total_iters=50))
    opt = SGD(model.parameters(), lr=0.05)
    return fit(model, F.cross_entropy, opt, digit_batches(seed), [*cbs, decay], seed)


@fault(OPTIM_FAULTS, "exponential decay stepped per batch", codes=["lr.vanished"])
def decay_per_batch(seed: int, cbs: Callbacks) -> Run:
    """A decay by a tenth that is meant for epochs."""
    model = Mlp(nn.Tanh, depth=3)
    opt = SGD(model.parameters(), lr=1e-3)
    decay = ExponentialLR(opt, 0.9)
    return follow(model, F.cross_entropy, opt, digit_batches(seed), cbs, seed, schedule=decay)


@fault(OPTIM_FAULTS, "negated loss", codes=["loss.unbounded", "loss.diverging"])
def negated_loss(seed: int, cbs: Callbacks) -> Run:
    def loss_func(pred: Tensor, y: Tensor) -> Tensor:
        return pred.log_softmax(-1)[torch.arange(len(y)), y].mean()

    model = Mlp(nn.ReLU)
    return fit(model, loss_func, Adam(model.parameters(), lr=2e-3), digit_batches(seed), cbs, seed)


@fault(OPTIM_FAULTS, "tied weights in two groups", codes=["param.duplicated"], layers=["embed", "head"])
def tied_twice(seed: int, cbs: Callbacks) -> Run:
    """Groups with and without weight decay; the shared weight gets into the second one unnoticed by torch."""
    model = Gpt(tied=True)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    opt = AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=3e-3)
    opt.param_groups[1]["params"].append(model.head.weight)
    return follow(model, token_loss, opt, text_batches(seed, n_step=100), cbs, seed, clip=1.0)


@fault(OPTIM_FAULTS, "discriminator too strong", codes=["gan.balance"])
def strong_discriminator(seed: int, cbs: Callbacks) -> Run:
    """The minimax loss, which has no gradient once no generated point deceives the discriminator."""
    gan, rng = Gan(), generator(seed)
    opt_d = Adam(gan.discriminator.parameters(), lr=1e-2, betas=(0.5, 0.99))
    opt_g = Adam(gan.generator.parameters(), lr=1e-4, betas=(0.5, 0.99))
    real = [cloud(32, rng) for _ in range(200)]
    return train_gan(gan, (opt_d, opt_g), real, cbs, seed, minimax=True)
