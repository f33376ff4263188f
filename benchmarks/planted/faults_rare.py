"""Faults that few programs have, one case for each that no other file plants."""

import torch
from case import Callbacks, Case, Run, fault, fit, follow
from data import digit_batches
from nets import Mlp, stack
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

RARE_FAULTS: list[Case] = []


@fault(RARE_FAULTS, "dropout of 0.95 after a hidden layer", codes=["dropout.extreme"], layers=["2"])
def extreme_dropout(seed: int, cbs: Callbacks) -> Run:
    model = nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.95), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    return fit(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), digit_batches(seed), cbs, seed)


@fault(RARE_FAULTS, "a hidden layer of zeros", codes=["init.zero"], layers=["2"])
def zero_layer(seed: int, cbs: Callbacks) -> Run:
    model = stack(64, 64, 64, 10)
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    return fit(model, F.cross_entropy, SGD(model.parameters(), lr=0.1), digit_batches(seed), cbs, seed)


@fault(RARE_FAULTS, "a loss of predictions that are detached", codes=["loss.detached"])
def detached_loss(seed: int, cbs: Callbacks) -> Run:
    model = stack(64, 64, 10)

    def loss_func(scores: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(scores.detach(), y)

    given = model, loss_func, SGD(model.parameters(), lr=0.1), digit_batches(seed), cbs, seed
    return fit(*given, raises=RuntimeError)  # by backward


@fault(RARE_FAULTS, "a weight that is put back after each step", codes=["param.restored"], layers=["2"])
def restored_weight(seed: int, cbs: Callbacks) -> Run:
    model = stack(64, 64, 64, 10)
    kept = model[2].weight.detach().clone()

    def put_back(i: int) -> None:
        with torch.no_grad():
            model[2].weight.copy_(kept)

    opt = SGD(model.parameters(), lr=0.1)
    return follow(model, F.cross_entropy, opt, digit_batches(seed), cbs, seed, after_step=put_back)


class _Skipping(nn.Module):
    """Never calls its layer `extra`."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.extra, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(F.relu(self.body(x)))
        return scores


@fault(
    RARE_FAULTS,
    "a layer that the forward skips",
    codes=["hook.silent", "param.unreachable"],
    layers=["extra"],
    note_suffices=True,
)
def skipped_layer(seed: int, cbs: Callbacks) -> Run:
    model = _Skipping()
    return fit(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), digit_batches(seed), cbs, seed)


@fault(
    RARE_FAULTS,
    "two linear layers without a nonlinearity between them",
    codes=["model.linear_stack"],
    note_suffices=True,
)
def linear_stack(seed: int, cbs: Callbacks) -> Run:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return fit(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), digit_batches(seed), cbs, seed)


@fault(
    RARE_FAULTS,
    "a frozen layer between trained ones",
    codes=["param.frozen_between"],
    layers=["blocks.1.linear"],
    note_suffices=True,
)
def frozen_between(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU, depth=4)
    model.blocks[1].linear.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    return fit(model, F.cross_entropy, Adam(trained, lr=2e-3), digit_batches(seed), cbs, seed)
