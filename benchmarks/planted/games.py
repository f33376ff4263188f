"""A game for reinforcement learning: balancing a pole on a cart, with many carts at a time."""

import math

import torch
from torch import Tensor

LONGEST = 200  # steps of an episode
FAR, STEEP = 2.4, 0.21  # a cart or a pole beyond these ends its episode
TICK = 0.02  # seconds


class CartPole:
    """Carts that are pushed left or right to keep a pole upright, with a reward of 1 per step.

    Source: Barto, Sutton & Anderson, "Neuronlike adaptive elements that can solve difficult learning control
    problems", 1983.

    Attributes:
        state: position, speed, angle, and angular speed of each cart, `(N, 4)`.
        lengths: lengths of the finished episodes, in steps.
    """

    def __init__(self, n: int, rng: torch.Generator) -> None:
        self.rng = rng
        self.state, self.age = self._start(n), torch.zeros(n)
        self.lengths: list[float] = []

    def step(self, action: Tensor) -> tuple[Tensor, Tensor]:
        """Push all carts, `(N,)` of 0 and 1; return the next states and whether each episode has failed.

        Episodes that have ended are restarted in `state`.
        """
        x, v, angle, spin = self.state.unbind(1)
        force, sin, cos = 20.0 * action - 10.0, angle.sin(), angle.cos()
        pull = (force + 0.05 * spin**2 * sin) / 1.1
        turn = (9.8 * sin - cos * pull) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        speed = pull - 0.05 * turn * cos / 1.1
        after = torch.stack([x + TICK * v, v + TICK * speed, angle + TICK * spin, spin + TICK * turn], dim=1)
        self.age += 1
        failed = (after[:, 0].abs() > FAR) | (after[:, 2].abs() > STEEP)
        ended = failed | (self.age >= LONGEST)
        self.lengths += self.age[ended].tolist()
        self.state = torch.where(ended[:, None], self._start(len(ended)), after)
        self.age[ended] = 0
        return after, failed

    def recent(self) -> float:
        """Mean length of the last twenty episodes; NaN before the first one ends."""
        last = self.lengths[-20:]
        return sum(last) / len(last) if last else math.nan

    def _start(self, n: int) -> Tensor:
        return 0.1 * torch.rand(n, 4, generator=self.rng) - 0.05
