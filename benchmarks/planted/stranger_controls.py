"""Small versions of healthy training runs from other people's scripts that a diagnosis once called sick."""

import math
from copy import deepcopy

import torch
from case import Callbacks, Case, Run, control, fit, follow
from data import batched, generator, image_batches, images
from games import CartPole
from nets import Mlp
from stranger_nets import ActorCritic, TokenVit, Unet
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import LambdaLR

from hookcb import watch

STRANGER_CONTROLS: list[Case] = []


# ---- a token initialized to almost zero


@control(STRANGER_CONTROLS, "ViT whose token begins at 1e-6, AdamW", target=2.0)
def token_vit(seed: int, cbs: Callbacks) -> Run:
    model = TokenVit()
    opt = AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    return follow(model, F.cross_entropy, opt, image_batches(seed), cbs, seed)


@control(STRANGER_CONTROLS, "ViT whose token begins at 1e-6, few steps and a warm-up", target=2.25)
def token_vit_early(seed: int, cbs: Callbacks) -> Run:
    """A run so short that the loss has only begun to fall."""
    model = TokenVit(depth=4)
    opt = AdamW(model.parameters(), lr=5e-4)
    warm_up = LambdaLR(opt, lambda step: min(1.0, (step + 1) / 10))
    return follow(
        model, F.cross_entropy, opt, image_batches(seed, n_step=100), cbs, seed, clip=1.0, schedule=warm_up
    )


@control(STRANGER_CONTROLS, "ViT whose token begins at zero, Adam, a fifth of the labels wrong", target=2.2)
def token_vit_noisy(seed: int, cbs: Callbacks) -> Run:
    x, y = images(seed)
    rng = generator(seed)
    drawn = torch.randint(10, y.shape, generator=rng)
    y = torch.where(torch.rand(len(y), generator=rng) < 0.2, drawn, y)
    model = TokenVit(width=32, token_std=0.0)
    opt = Adam(model.parameters(), lr=2e-3)
    return follow(model, F.cross_entropy, opt, batched(x, y, seed=seed, n_step=130), cbs, seed, clip=1.0)


# ---- targets that grow as the model learns


def train_dqn(
    model: nn.Module,
    opt: Optimizer,
    cbs: Callbacks,
    seed: int,
    loss_func: type[nn.Module] = nn.MSELoss,
    every: int = 20,
    soft: float = 0.0,
    n_step: int = 700,
) -> Run:
    """Q-learning with a replay buffer and a target network; `losses` has the negative episode length.

    Source: Mnih et al., "Human-level control through deep reinforcement learning", 2015.

    Args:
        model: maps states `(N, 4)` to values of both actions `(N, 2)`.
        opt: the model's optimizer.
        cbs: callbacks.
        seed: seed of the games and of random numbers drawn during training.
        loss_func: type of the loss between values and targets.
        every: number of steps after which the model is copied to the target network.
        soft: instead, the fraction by which each step moves the target network to the model.
        n_step: number of steps.
    """
    target = deepcopy(model)
    rng = generator(seed)
    game, loss_of = CartPole(8, rng), loss_func()
    seen: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    torch.manual_seed(seed)
    with watch(model, opt, *cbs) as w:
        run = Run(w, [], model=model)
        for step in range(n_step):
            x = game.state
            with torch.no_grad():
                best = model(x).argmax(1)
            chance = max(0.05, 1 - step / (n_step / 3))
            lot = torch.randint(2, best.shape, generator=rng)
            action = torch.where(torch.rand(len(best), generator=rng) < chance, lot, best)
            seen.append((x, action, *game.step(action)))
            if step < 20:
                continue
            old, did, new, failed = (torch.cat(of) for of in zip(*_some(seen, 16, rng), strict=True))
            with torch.no_grad():
                goal = 1 + 0.99 * target(new).amax(1) * ~failed
            loss = w.report_loss(loss_of(model(old).gather(1, did[:, None]).squeeze(1), goal))
            run.losses.append(-game.recent())
            loss.backward()
            opt.step()
            opt.zero_grad()
            _follow(target, model, 1.0 if not soft and step % every == 0 else soft)
    return run


def _some(seen: list[tuple[Tensor, ...]], n: int, rng: torch.Generator) -> list[tuple[Tensor, ...]]:
    return [seen[i] for i in torch.randint(len(seen), (n,), generator=rng).tolist()]


def _follow(target: nn.Module, model: nn.Module, part: float) -> None:
    with torch.no_grad():
        for old, new in zip(target.parameters(), model.parameters(), strict=True):
            old.lerp_(new, part)


@control(STRANGER_CONTROLS, "DQN, MSE of values that grow", target=-40.0)
def dqn(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(n_in=4, n_out=2)
    return train_dqn(model, Adam(model.parameters(), lr=1e-3), cbs, seed, every=20)


@control(STRANGER_CONTROLS, "DQN, Huber loss and a target that follows softly", target=-40.0)
def dqn_soft(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(n_in=4, n_out=2)
    opt = AdamW(model.parameters(), lr=3e-3, amsgrad=True)
    return train_dqn(model, opt, cbs, seed, nn.SmoothL1Loss, soft=0.1)


@control(STRANGER_CONTROLS, "DQN, RMSprop and a wide network", target=-40.0)
def dqn_rmsprop(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(n_in=4, n_out=2, width=96)
    return train_dqn(model, RMSprop(model.parameters(), lr=5e-4), cbs, seed, every=30)


def train_ppo(
    model: ActorCritic,
    opt: Optimizer,
    cbs: Callbacks,
    seed: int,
    clip: float = 0.5,
    n_update: int = 25,
    scale: float = 1.0,
    reports: bool = True,
) -> Run:
    """Proximal policy optimization in a watch; `losses` has the negative episode length.

    Source: Schulman et al., "Proximal Policy Optimization Algorithms", 2017, and cleanrl/ppo.py.

    Args:
        model: policy and value.
        opt: the model's optimizer.
        cbs: callbacks.
        seed: seed of the games and of random numbers drawn during training.
        clip: norm to which gradients are clipped.
        n_update: number of rounds of playing and learning.
        scale: factor of the rewards.
        reports: whether the loop reports its step before it clips.
    """
    game = CartPole(16, generator(seed))
    torch.manual_seed(seed)
    with watch(model, opt, *cbs) as w:
        run = Run(w, [], model=model)
        for _ in range(n_update):
            batch = _play(model, game, 64, scale)
            for rows in torch.cat([torch.randperm(1024) for _ in range(4)]).split(256):
                loss = w.report_loss(_ppo_loss(model, *(x[rows] for x in batch)))
                run.losses.append(-game.recent())
                opt.zero_grad()
                loss.backward()
                if reports:
                    w.begin_step(opt)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
                opt.step()
    return run


@torch.no_grad()
def _play(model: ActorCritic, game: CartPole, n: int, scale: float) -> tuple[Tensor, ...]:
    """States, actions, log-probabilities, advantages, and returns of `n` steps of all carts."""
    played = []
    for _ in range(n):
        x = game.state
        policy = model.policy(x)
        action = policy.sample()
        age = game.age.clone()
        _, failed = game.step(action)
        played.append((x, action, policy.log_prob(action), model.value(x), failed | (game.age <= age)))
    x, action, log_prob, value, ended = (torch.stack(of) for of in zip(*played, strict=True))
    after, gain, gains = model.value(game.state), torch.zeros(len(x[0])), []
    for now, over in zip(value.flip(0), ended.flip(0), strict=True):
        gain = scale + 0.99 * after * ~over - now + 0.99 * 0.95 * gain * ~over
        after = now
        gains.append(gain)
    gained = torch.stack(gains[::-1])
    return tuple(of.flatten(0, 1) for of in (x, action, log_prob, gained, gained + value))


def _ppo_loss(
    model: ActorCritic, x: Tensor, action: Tensor, log_prob: Tensor, gain: Tensor, total: Tensor
) -> Tensor:
    policy = model.policy(x)
    ratio = (policy.log_prob(action) - log_prob).exp()
    gain = (gain - gain.mean()) / (gain.std() + 1e-8)
    of_policy = torch.max(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)).mean()
    of_value = 0.5 * (model.value(x) - total).square().mean()
    return of_policy + 0.5 * of_value - 0.01 * policy.entropy().mean()


@control(STRANGER_CONTROLS, "PPO, value and policy in one loss", target=-60.0)
def ppo(seed: int, cbs: Callbacks) -> Run:
    model = ActorCritic()
    return train_ppo(model, Adam(model.parameters(), lr=2.5e-3, eps=1e-5), cbs, seed)


@control(STRANGER_CONTROLS, "PPO that clips each gradient, before they are read", target=-60.0)
def ppo_clipped(seed: int, cbs: Callbacks) -> Run:
    """An objective that need not fall, with norms of which each is clipped to 0.5."""
    model = ActorCritic()
    return train_ppo(model, Adam(model.parameters(), lr=2.5e-3, eps=1e-5), cbs, seed, reports=False)


@control(STRANGER_CONTROLS, "PPO, small rewards and RMSprop", target=-50.0)
def ppo_small(seed: int, cbs: Callbacks) -> Run:
    model = ActorCritic(width=32)
    return train_ppo(model, RMSprop(model.parameters(), lr=1e-3), cbs, seed, clip=1.0, scale=0.1)


@control(STRANGER_CONTROLS, "PPO, a rate for the policy and one for the value", target=-50.0)
def ppo_two_rates(seed: int, cbs: Callbacks) -> Run:
    model = ActorCritic()
    groups = [
        {"params": list(model.actor.parameters()), "lr": 1e-3},
        {"params": list(model.critic.parameters()), "lr": 5e-3},
    ]
    return train_ppo(model, AdamW(groups), cbs, seed, clip=5.0)


# ---- learned keys and values


def train_diffusion(model: Unet, opt: Optimizer, cbs: Callbacks, seed: int, n_step: int = 150) -> Run:
    """Train a model to predict the noise that was added to images.

    Source: Ho, Jain & Abbeel, "Denoising Diffusion Probabilistic Models", 2020.
    """
    rng, noisy = generator(seed), []
    for x, _ in image_batches(seed, n_step=n_step):
        noise, t = torch.randn(x.shape, generator=rng), torch.randint(1000, (len(x),), generator=rng)
        left = (t[:, None, None, None] / 1000 * math.pi / 2).cos()
        noisy.append((left * x + (1 - left**2).sqrt() * noise, t.float(), noise))
    return follow(model, F.mse_loss, opt, noisy, cbs, seed)


@control(STRANGER_CONTROLS, "diffusion U-Net with learned keys", target=0.5)
def diffusion(seed: int, cbs: Callbacks) -> Run:
    model = Unet()
    return train_diffusion(model, Adam(model.parameters(), lr=2e-3, betas=(0.9, 0.99)), cbs, seed)


@control(STRANGER_CONTROLS, "wider diffusion U-Net, AdamW", target=0.6)
def wide_diffusion(seed: int, cbs: Callbacks) -> Run:
    model = Unet(width=24)
    return train_diffusion(model, AdamW(model.parameters(), lr=5e-4), cbs, seed)


@control(STRANGER_CONTROLS, "diffusion U-Net whose output begins at zero", target=0.7)
def zero_diffusion(seed: int, cbs: Callbacks) -> Run:
    model = Unet()
    for layer in (model.head, model.mid_attn.to_out):
        nn.init.zeros_(layer.weight)
    return train_diffusion(model, Adam(model.parameters(), lr=1e-3), cbs, seed)


# ---- repaired programs from StackOverflow


def wave(seed: int, cbs: Callbacks, opt: type[Optimizer], width: int, lr: float, n_step: int) -> Run:
    """A sine that a first layer with large weights learns well, although most of its units are saturated.

    Source: StackOverflow 49583466, as collected by deepmufl (ASE 2023), repaired.
    """
    x = torch.rand(5000, 1, generator=generator(seed))
    y = ((20 * x - 10).sin() + 1) / 2
    layers: list[nn.Module] = [nn.Linear(1, width), nn.Tanh()]
    for _ in range(2):
        layers += [nn.Linear(width, width), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(width, 1))
    for p in model[0].parameters():
        nn.init.uniform_(p, -20, 20)
    batches = batched(x, y, seed=seed, n_step=n_step)
    return fit(model, F.mse_loss, opt(model.parameters(), lr=lr), batches, cbs, seed)  # type: ignore[call-arg]


@control(STRANGER_CONTROLS, "a sine by saturated tanh layers, Adam", target=0.015)
def sine(seed: int, cbs: Callbacks) -> Run:
    return wave(seed, cbs, Adam, width=40, lr=1e-3, n_step=700)


@control(STRANGER_CONTROLS, "a sine by wider saturated tanh layers, AdamW", target=0.02)
def wide_sine(seed: int, cbs: Callbacks) -> Run:
    return wave(seed, cbs, AdamW, width=64, lr=7e-4, n_step=700)


def line(seed: int, cbs: Callbacks, opt: Optimizer, model: nn.Module, n: int, n_step: int) -> Run:
    """Half of the input, with few samples up to 25 and no scaling: it starts far worse than guessing.

    Source: StackOverflow 56452176, as collected by deepmufl (ASE 2023), repaired.
    """
    x = 25 * torch.rand(n, 1, generator=generator(seed)) ** 3
    return fit(model, F.mse_loss, opt, [(x, 0.5 * x)] * n_step, cbs, seed)


@control(STRANGER_CONTROLS, "a line through five points that begins far off, Adam", target=0.3)
def five_points(seed: int, cbs: Callbacks) -> Run:
    model = nn.Sequential(nn.Linear(1, 1))
    nn.init.constant_(model[0].weight, -0.9)  # as with half of all seeds
    return line(seed, cbs, Adam(model.parameters(), lr=1e-2), model, n=5, n_step=500)


@control(STRANGER_CONTROLS, "a line through many points that begins far off, SGD", target=0.3)
def many_points(seed: int, cbs: Callbacks) -> Run:
    model = nn.Sequential(nn.Linear(1, 8), nn.Linear(8, 1))
    with torch.no_grad():
        model[0].weight.fill_(-1.0)
        model[1].weight.fill_(0.25)
        model[1].weight[0, 0] = 0.2
    return line(seed, cbs, SGD(model.parameters(), lr=1e-4), model, n=64, n_step=250)


# ---- inputs on a large scale that a normalization takes away


@control(STRANGER_CONTROLS, "pixels of 0 to 255 before a convolution and its batch norm", target=1.5)
def raw_pixels(seed: int, cbs: Callbacks) -> Run:
    """Steps that are large in the head, and have nothing to do with the inputs."""
    batches = [((255 * (x - x.min()) / (x.max() - x.min())), y) for x, y in image_batches(seed)]
    n_in = batches[0][0].shape[1]
    body = [nn.Conv2d(n_in, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()]
    model = nn.Sequential(*body, nn.Linear(256, 10))
    return follow(model, F.cross_entropy, Adam(model.parameters(), lr=2e-2), batches, cbs, seed)
