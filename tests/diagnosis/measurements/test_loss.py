"""The loss of guessing, against that of scores that are all alike."""

import math

import pytest
import torch
import torch.nn.functional as F

from hookcb.diagnosis.measurements.loss import guess_of
from hookcb.diagnosis.measurements.loss_graph import LossGraph, read_loss
from tests.support import in_turn

N, C, T = 6, 5, 3


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def of(n, *shape):
    """Labels from 0 to n - 1."""
    return torch.arange(math.prod(shape)).view(shape) % n


def zeros(*shape):
    return torch.zeros(*shape, requires_grad=True)


TOKENS, BITS = of(C, N, T), (numbers(N, C) > 0).float()
GUESSES = {
    "cross-entropy": (zeros(N, C), of(C, N), F.cross_entropy),
    "weighted": (zeros(N, C), of(C, N), lambda p, y: F.cross_entropy(p, y, torch.arange(1.0, C + 1))),
    "of sequences": (zeros(N, C, T), TOKENS, F.cross_entropy),
    "of flattened ones": (zeros(N, T, C), TOKENS, lambda p, y: F.cross_entropy(p.view(-1, C), y.view(-1))),
    "of images": (zeros(N, C, 2, 2), of(C, N, 2, 2), F.cross_entropy),
    "ignored": (zeros(N, C), of(C, N), lambda p, y: F.cross_entropy(p, y, ignore_index=1)),
    "soft": (zeros(N, C), numbers(N, C).softmax(1), F.cross_entropy),
    "smoothed": (zeros(N, C), of(C, N), lambda p, y: F.cross_entropy(p, y, label_smoothing=0.1)),
    "summed": (zeros(N, C), of(C, N), lambda p, y: F.cross_entropy(p, y, reduction="sum")),
    "scaled": (zeros(N, C), of(C, N), lambda p, y: 0.25 * F.cross_entropy(p, y)),
    "by hand": (zeros(N, C), of(C, N), lambda p, y: F.cross_entropy(p, y, reduction="none").mean()),
    "two of them": (zeros(N, C), of(C, N), lambda p, y: F.cross_entropy(p, y) + F.cross_entropy(p, y)),
    "binary": (zeros(N, C), BITS, F.binary_cross_entropy_with_logits),
    "binary, positives weigh": (
        zeros(N, C),
        BITS,
        lambda p, y: F.binary_cross_entropy_with_logits(p, y, pos_weight=torch.tensor(10.0)),
    ),
    "binary, samples weigh": (
        zeros(N, C),
        BITS,
        lambda p, y: F.binary_cross_entropy_with_logits(p, y, weight=torch.full((N, 1), 5.0)),
    ),
    "binary of chances": (zeros(N, C), BITS, lambda p, y: F.binary_cross_entropy(p.sigmoid(), y)),
    "binary of chances, samples weigh": (
        zeros(N, C),
        BITS,
        lambda p, y: F.binary_cross_entropy(p.sigmoid(), y, weight=torch.full((N, 1), 5.0)),
    ),
    "mse": (zeros(N, 2), numbers(N, 2) + 3, F.mse_loss),
    "mse, summed": (zeros(N, 2), numbers(N, 2), lambda p, y: F.mse_loss(p, y, reduction="sum")),
    "mse, doubled": (zeros(N, 2), numbers(N, 2), lambda p, y: 2 * F.mse_loss(p, y)),
    "l1": (zeros(N, 2), numbers(N, 2), F.l1_loss),
    "of something else": (zeros(N, C), of(C, N), lambda p, y: p.square().mean() + 1),
}


@in_turn("name", GUESSES)
def test_the_loss_of_guessing_is_that_of_scores_that_are_all_alike_or_not_known(name):
    pred, y, loss_func = GUESSES[name]
    loss = loss_func(pred, y)
    guess = guess_of(read_loss(loss.grad_fn), pred, (y,))
    assert math.isnan(guess) or guess == pytest.approx(loss.item())


KNOWN = ["cross-entropy", "weighted", "of sequences", "of flattened ones", "of images", "binary", "mse"]


@in_turn("name", KNOWN)
def test_of_usual_losses_it_is_known(name):
    pred, y, loss_func = GUESSES[name]
    assert guess_of(read_loss(loss_func(pred, y).grad_fn), pred, (y,)) > 0


def test_without_labels_it_is_known_where_scores_are_of_classes():
    graph = LossGraph("cross-entropy", True, 1.0, "softmax", "")
    assert guess_of(graph, zeros(N, C), ()) == pytest.approx(math.log(C))
    assert math.isnan(guess_of(graph, zeros(N, T, C), ()))
    assert math.isnan(guess_of(graph, None, ()))
    assert math.isnan(guess_of(LossGraph("mse", True, 1.0), zeros(N, C), ()))


def test_guessing_counts_the_weights_of_ones():
    x, y = torch.zeros(4, 1, requires_grad=True), torch.tensor([[1.0], [0.0], [0.0], [0.0]])
    loss = F.binary_cross_entropy_with_logits(x, y, pos_weight=torch.tensor([9.0]))
    assert guess_of(read_loss(loss.grad_fn), x, (y,)) == pytest.approx(loss.item())
