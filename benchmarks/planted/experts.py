"""A language model with experts, as in the Switch Transformer, over the text of Python's documentation."""

import torch
from case import Callbacks, Run, follow
from language import LanguageModel, character_batches, warm_up
from nets import token_loss
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW


class Experts(nn.Module):
    """Sends each token to `k` of `n` MLPs, weighted by their probabilities.

    `balance` is the load-balancing loss of the last forward: 1 if all experts get as many tokens.

    Source: Fedus et al., "Switch Transformers", 2021.
    """

    def __init__(self, width: int, n: int = 8, k: int = 1) -> None:
        super().__init__()
        self.router, self.k, self.balance = nn.Linear(width, n), k, torch.zeros(())
        mlps = (
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(n)
        )
        self.experts = nn.ModuleList(mlps)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        p = self.router(tokens).softmax(-1)
        weights, places = p.topk(self.k, dim=-1)
        out = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            rows, choice = torch.where(places == i)
            if len(rows):
                out = out.index_add(0, rows, weights[rows, choice, None] * expert(tokens[rows]))
        load = F.one_hot(places, p.shape[-1]).float().sum(1).mean(0) / self.k
        self.balance = p.shape[-1] * (load * p.mean(0)).sum()
        return out.view_as(x)


class MixtureModel(LanguageModel):
    """A language model whose MLPs are `Experts`."""

    def __init__(self, n: int = 8, k: int = 1) -> None:
        super().__init__()
        for block in self.blocks:
            block.mlp = Experts(64, n, k)
        self.apply(lambda m: isinstance(m, nn.Linear) and nn.init.normal_(m.weight, std=0.02))

    @property
    def mixtures(self) -> list[Experts]:
        """The `Experts` of all blocks."""
        return [block.mlp for block in self.blocks]


def train_experts(
    model: MixtureModel, seed: int, cbs: Callbacks, coefficient: float, lr: float = 1e-2, n_step: int = 220
) -> Run:
    """Train with a load-balancing loss of this coefficient."""

    def loss_func(pred: Tensor, y: Tensor) -> Tensor:
        balance = torch.stack([mixture.balance for mixture in model.mixtures]).sum()
        return token_loss(pred, y) + coefficient * balance

    opt = AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    batches, schedule = character_batches(seed, n_step), warm_up(opt, n_step=n_step)
    return follow(model, loss_func, opt, batches, cbs, seed, clip=1.0, schedule=schedule)
