"""Cross-entropy of constants and of perfect predictions, against torch's losses; test_targets.py searches."""

import math

import pytest
import torch
import torch.nn.functional as F

from hookcb.diagnosis.measurements.baselines import losses_of_bits, losses_of_classes
from hookcb.diagnosis.measurements.loss_graph import LossGraph

LABELS = [torch.tensor([0, 0, 1, 2]), torch.tensor([0, 1, 1, 1])]
SOFT = [F.one_hot(y, 3) * 0.7 + 0.1 for y in LABELS]
GRAPH = LossGraph("cross-entropy", True, 1.0, n_classes=3)
WEIGHTS = torch.tensor([1.0, 2.0, 0.5])


def own_loss(**how):
    """Smallest loss of predictions that know each label."""
    scores = torch.zeros(3, 3, requires_grad=True)
    opt = torch.optim.LBFGS([scores], max_iter=200, line_search_fn="strong_wolfe")

    def mean_loss():
        opt.zero_grad()
        loss = sum(F.cross_entropy(scores[y], y, **how) for y in LABELS) / len(LABELS)
        loss.backward()
        return loss

    opt.step(mean_loss)
    return mean_loss().item()


@pytest.mark.parametrize("smoothing", [0.1, 0.5])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_a_perfect_prediction_of_smoothed_labels_has_a_loss(weights, smoothing):
    graph = GRAPH._replace(class_weights=weights, has_weights=weights is not None, smoothing=smoothing)
    expected = own_loss(weight=weights, label_smoothing=smoothing)
    assert losses_of_classes(LABELS, graph).perfect == pytest.approx(expected, rel=1e-3)


def test_a_perfect_prediction_of_hard_labels_has_none():
    assert losses_of_classes(LABELS, GRAPH).perfect == pytest.approx(0, abs=1e-6)
    assert losses_of_bits([torch.tensor([0.0, 1.0])], LossGraph()).perfect == 0


def test_soft_targets_have_their_own_entropy():
    found = losses_of_classes(SOFT, GRAPH)
    assert found.perfect == pytest.approx(-(0.8 * math.log(0.8) + 2 * 0.1 * math.log(0.1)), rel=1e-5)
    assert found.perfect < found.constant < math.log(3)
    bits = losses_of_bits([torch.tensor([[0.25], [0.75]])], LossGraph())
    assert bits.constant == pytest.approx(math.log(2))
    assert bits.perfect == pytest.approx(
        F.binary_cross_entropy(torch.tensor(0.25), torch.tensor(0.25)).item()
    )


def test_the_noise_is_that_of_a_constant_from_batch_to_batch():
    found = losses_of_classes(LABELS, GRAPH)
    p = torch.tensor([3 / 8, 4 / 8, 1 / 8]).log()
    each = torch.stack([F.nll_loss(p.expand(4, 3), y) for y in LABELS])
    assert found.constant == pytest.approx(each.mean().item())
    assert found.noise == pytest.approx(each.std(correction=0).item())
    assert losses_of_classes([LABELS[0]] * 3, GRAPH).noise == pytest.approx(0, abs=1e-6)


def test_what_does_not_fit_is_unknown():
    weighted = GRAPH._replace(has_weights=True, class_weights=WEIGHTS)
    assert math.isnan(losses_of_classes(SOFT, weighted).constant)
    assert math.isnan(losses_of_classes([torch.tensor([5])], weighted).constant)
    assert math.isnan(losses_of_classes([torch.tensor([-100])], GRAPH).constant)
