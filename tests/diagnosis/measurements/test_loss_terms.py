"""Terms of a loss, read from its graph: torch's losses, hand-written ones, and sums with penalties."""

import math

import pytest
import torch
import torch.nn.functional as F

from hookcb.core import graph
from hookcb.diagnosis.measurements.loss_terms import read_terms
from tests.support import in_turn

N, C = 6, 3
G = torch.Generator().manual_seed(0)
INPUT, WEIGHT = torch.randn(N, 4, generator=G), torch.randn(4, C, generator=G).requires_grad_()
Y, SOFT = torch.arange(N) % C, torch.rand(N, C, generator=G).softmax(-1)
BITS = (torch.rand(N, C, generator=G) > 0.5).float()


def scores():
    return INPUT @ WEIGHT


def probabilities():
    return scores().softmax(-1)


def logsigmoid(sign=1):
    return F.logsigmoid(sign * scores())


def bits_by_hand(p):
    return -(BITS * p.log() + (1 - BITS) * (1 - p).log()).mean()


def bits_by_logsigmoid(x):
    return -(BITS * F.logsigmoid(x) + (1 - BITS) * F.logsigmoid(-x)).mean()


def gaussian_nll(var):
    return 0.5 * (var.log() + (SOFT - scores()) ** 2 / var)


def terms(loss):
    return [(term.kind, term.takes, graph.name(term.given)) for term in read_terms(loss.grad_fn)]


CE, BCE, MSE, MAE = "cross-entropy", "binary cross-entropy", "mse", "mae"
HAND_WRITTEN = {
    "-log p of the label": (lambda: -torch.log(probabilities()[range(N), Y]).mean(), CE, "probabilities"),
    "-(y log p)": (lambda: -(SOFT * torch.log(probabilities() + 1e-9)).sum(1).mean(), CE, "probabilities"),
    "nll of log(p)": (lambda: F.nll_loss(probabilities().clamp_min(1e-7).log(), Y), CE, "probabilities"),
    "log_softmax, gathered": (lambda: -F.log_softmax(scores(), 1).gather(1, Y[:, None]).mean(), CE, "scores"),
    "bits": (lambda: bits_by_hand(scores().sigmoid()), BCE, "probabilities"),
    "bits, logsigmoid": (lambda: bits_by_logsigmoid(scores()), BCE, "scores"),
    "squares": (lambda: ((scores() - SOFT) ** 2).mean(), MSE, "values"),
    "squares of the reverse": (lambda: (SOFT - scores()).pow(2).sum(), MSE, "values"),
    "absolute values": (lambda: (scores() - SOFT).abs().mean(), MAE, "values"),
    "l1_loss": (lambda: F.l1_loss(scores(), SOFT), MAE, "values"),
}  # fmt: skip


@in_turn("name", HAND_WRITTEN)
def test_a_hand_written_loss_is_one_exact_term(name):
    make, kind, takes = HAND_WRITTEN[name]
    (term,) = read_terms(make().grad_fn)
    assert (term.kind, term.takes, term.is_exact) == (kind, takes, True)


@pytest.mark.parametrize("scale", [1.0, -1.0, 0.25])
def test_the_factor_of_a_mean_is_known(scale):
    for loss in (F.cross_entropy(scores(), Y), F.mse_loss(scores(), SOFT), F.l1_loss(scores(), SOFT)):
        assert read_terms((scale * loss).grad_fn)[0].scale == scale
    assert math.isnan(read_terms(F.mse_loss(scores(), SOFT, reduction="sum").grad_fn)[0].scale)


def test_a_hand_written_cross_entropy_is_positive():
    assert read_terms((-torch.log(probabilities()[range(N), Y]).mean()).grad_fn)[0].scale == 1.0
    assert read_terms((-F.log_softmax(scores(), 1).gather(1, Y[:, None]).mean()).grad_fn)[0].scale == 1.0


def test_a_penalty_on_weights_is_a_term_of_its_own():
    for penalty in (0.1 * WEIGHT.pow(2).sum(), 1e-3 * WEIGHT.norm(), WEIGHT.abs().sum() * 0.01):
        loss = F.cross_entropy(scores(), Y) + penalty
        assert [kind for kind, *_ in terms(loss)] == [CE, "penalty"]


def test_a_penalty_on_an_output_is_no_penalty_on_weights():
    loss = F.cross_entropy(scores(), Y) + 0.1 * scores().pow(2).mean()
    assert [kind for kind, *_ in terms(loss)] == [CE, ""]


def test_a_weighted_sum_of_losses_has_a_term_for_each():
    loss = F.mse_loss(scores(), SOFT) + 0.5 * F.cross_entropy(scores(), Y)
    assert [(term.kind, term.scale) for term in read_terms(loss.grad_fn)] == [(MSE, 1.0), (CE, 0.5)]
    assert [
        (t.kind, t.scale)
        for t in read_terms((F.mse_loss(scores(), SOFT) - F.l1_loss(scores(), SOFT)).grad_fn)
    ] == [
        (MSE, 1.0),
        (MAE, -1.0),
    ]


@in_turn(
    "make",
    [
        lambda: (torch.rand(N) * F.cross_entropy(scores(), Y, reduction="none")).mean(),
        lambda: F.mse_loss(scores(), SOFT).sqrt(),
        lambda: F.cross_entropy(scores(), Y) * scores().mean(),
        lambda: F.kl_div(F.log_softmax(scores(), 1), SOFT, reduction="batchmean"),
    ],
)
def test_a_function_of_a_loss_or_a_weighted_one_is_not_exact(make):
    found = read_terms(make().grad_fn)
    assert found
    assert not any(term.is_exact and term.kind not in ("", "penalty") for term in found)


@in_turn(
    "make",
    [
        lambda: scores().mean(),
        lambda: scores().norm(dim=1).mean(),
        lambda: (scores() - scores().roll(1, 0)).pow(2).mean(),  # two parts of the model
        lambda: F.cosine_similarity(scores(), SOFT).mean(),
        lambda: -logsigmoid().mean(),  # one side of a game
        lambda: -scores()[:, :1].sigmoid().log().mean(),
        lambda: gaussian_nll(scores().clamp_min(1e-6)).sum(),
        lambda: gaussian_nll(scores().clamp_min(1e-6)).mean(),
        lambda: (1 - scores().sigmoid()).log().mean(),
        lambda: -F.logsigmoid(scores()[:3]).mean() - F.logsigmoid(-(2 * scores())[3:]).mean(),
    ],
)
def test_anything_else_has_no_kind(make):
    assert {kind for kind, *_ in terms(make())} == {""}


def test_what_a_normalized_and_bounded_probability_comes_from_is_found():
    p = F.relu(scores())
    loss = F.nll_loss(torch.log((p / p.sum(-1, keepdim=True)).clamp(1e-7, 1)), Y)
    assert terms(loss) == [(CE, "probabilities", "Relu")]


def test_targets_that_torch_has_saved_are_given_until_the_backward():
    loss = F.mse_loss(scores(), SOFT)
    assert torch.equal(read_terms(loss.grad_fn)[0].target, SOFT)
    loss.backward()
    assert read_terms(loss.grad_fn)[0].target is None
    WEIGHT.grad = None


def test_without_a_graph_there_are_no_terms():
    assert read_terms(None) == []
