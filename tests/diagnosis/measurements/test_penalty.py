"""Part of a loss that is a penalty, against the penalty that was added."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb.diagnosis.measurements.penalty import penalty_of

G = torch.Generator().manual_seed(0)
X, Y = torch.randn(16, 5, generator=G), torch.randint(3, (16,), generator=G)
VALUES, BITS = torch.randn(16, 3, generator=G), (torch.rand(16, 3, generator=G) < 0.5).float()
LOSSES = {
    "classes": lambda p: F.cross_entropy(p, Y),
    "weights": lambda p: F.cross_entropy(p, Y, weight=torch.tensor([1.0, 2.0, 3.0]), ignore_index=1),
    "smoothing": lambda p: F.cross_entropy(p, Y, label_smoothing=0.2),
    "bits": lambda p: F.binary_cross_entropy_with_logits(p, BITS, pos_weight=torch.tensor(3.0)),
    "probabilities": lambda p: F.binary_cross_entropy(p.sigmoid(), BITS),
    "half of squares": lambda p: 0.5 * F.mse_loss(p, VALUES),
    "squares by hand": lambda p: ((p - VALUES) ** 2).mean(),
    "a product by hand": lambda p: (p - VALUES).square().mean(),
    "absolute errors": lambda p: F.l1_loss(p, VALUES),
}
PENALTIES = {
    "squares": lambda net: sum(p.square().sum() for p in net.parameters()),
    "absolute values": lambda net: 0.1 * sum(p.abs().mean() for p in net.parameters()),
    "norm": lambda net: 3 * net.weight.norm(),
}


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("loss", LOSSES)
def test_it_is_what_was_added_to_the_loss(loss, penalty):
    torch.manual_seed(0)
    net = nn.Linear(5, 3)
    added = PENALTIES[penalty](net)
    found = penalty_of(LOSSES[loss](net(X)) + added)
    assert not found.requires_grad
    assert found.item() == pytest.approx(added.item(), rel=1e-4)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_without_a_penalty_has_none(loss):
    torch.manual_seed(0)
    assert penalty_of(LOSSES[loss](nn.Linear(5, 3)(X))).item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    "loss",
    [
        lambda p: F.cross_entropy(p, Y, reduction="sum"),
        lambda p: F.huber_loss(p, VALUES),
        lambda p: p.tanh().mean(),
        lambda p: p.detach().mean(),
    ],
    ids=["a sum", "Huber", "of no known kind", "detached"],
)
def test_of_other_losses_it_is_unknown(loss):
    assert penalty_of(loss(nn.Linear(5, 3)(X)) + 0.0) is None


def test_after_the_backward_it_is_unknown():
    loss = F.mse_loss(nn.Linear(5, 3)(X), VALUES)
    loss.backward()
    assert penalty_of(loss) is None
