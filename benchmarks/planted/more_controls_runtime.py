"""Healthy training runs of other people that spend their time on things other than waiting for data."""

import tempfile
import time
from pathlib import Path

import torch
from case import Callbacks, Case, Run, control, fit, follow
from data import digit_batches, digits, generator
from nets import Mlp
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional as F
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, TensorDataset

from hookcb import Callback, watch

RUNTIME_CONTROLS: list[Case] = []
OWN_WORK = 5e-3  # seconds after each step


class ActorCritic(nn.Module):
    """Model of which a script calls the two parts, but never the whole."""

    def __init__(self, n_in: int = 8, n_action: int = 4) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(n_in, 64), nn.Tanh(), nn.Linear(64, n_action))
        self.critic = nn.Sequential(nn.Linear(n_in, 64), nn.Tanh(), nn.Linear(64, 1))


def ppo_loss(net: ActorCritic, state: Tensor, action: Tensor, log_prob: Tensor, reward: Tensor) -> Tensor:
    """Clipped objective, with the critic's error and an entropy bonus."""
    policy, value = Categorical(logits=net.actor(state)), net.critic(state).squeeze(1)
    ratio, advantage = (policy.log_prob(action) - log_prob).exp(), reward - value.detach()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    return 0.5 * F.mse_loss(value, reward) - gain - 0.01 * policy.entropy().mean()


@control(RUNTIME_CONTROLS, "PPO, which calls parts of its model", target=0.4)
def ppo(seed: int, cbs: Callbacks) -> Run:
    """A simulator that takes 4 ms, with one right action out of four; the loss is the share of wrong ones."""
    rng, net = generator(seed), ActorCritic()
    opt, right = Adam(net.parameters(), lr=3e-3, eps=1e-5), torch.randn(8, 4, generator=rng)
    with watch(net, opt, *cbs) as w:
        run = Run(w, [], model=net)
        for _ in range(40):
            time.sleep(4e-3)
            state = torch.randn(256, 8, generator=rng)
            with torch.no_grad():
                policy = Categorical(logits=net.actor(state))
                action = policy.sample()
            reward = (action == (state @ right).argmax(1)).float()
            run.losses.append(1 - reward.mean().item())
            rollout = state, action, policy.log_prob(action), reward
            for part in torch.randperm(256, generator=rng).split(64):
                loss = ppo_loss(net, *(x[part] for x in rollout))
                opt.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                opt.step()
                time.sleep(1e-3)
    return run


@control(RUNTIME_CONTROLS, "a loop that does 5 ms of its own work after each step", target=0.9)
def own_work(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.Tanh)
    opt = SGD(model.parameters(), lr=0.1)
    batches = digit_batches(seed)
    return follow(
        model, F.cross_entropy, opt, batches, cbs, seed, after_step=lambda step: time.sleep(OWN_WORK)
    )


@control(RUNTIME_CONTROLS, "a loop that writes a checkpoint after each step", target=0.9)
def checkpoints(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU, width=256)
    opt = Adam(model.parameters(), lr=2e-3)
    data = DataLoader(TensorDataset(*digits(seed)), batch_size=32, shuffle=True, generator=generator(seed))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "last.pt"

        def write(step: int) -> None:
            torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "step": step}, file)

        return follow(model, F.cross_entropy, opt, data, cbs, seed, after_step=write)


@control(RUNTIME_CONTROLS, "a callback that works for 5 ms after each batch", target=0.9)
def working_callback(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.Tanh)
    opt = SGD(model.parameters(), lr=0.1)
    works = Callback(name="works", after_batch=lambda cb: time.sleep(OWN_WORK))
    return fit(model, F.cross_entropy, opt, digit_batches(seed), [*cbs, works], seed)
