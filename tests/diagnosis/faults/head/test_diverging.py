"""head.logits: the log-sum-exp of scores that a cross-entropy gets, and when it drifts away."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb.diagnosis.faults.head.diverging import DivergingLogits, scores_of
from hookcb.diagnosis.run import Passed, Skipped
from tests.diagnosis.faults.support import numbers
from tests.diagnosis.support import evidence

N, T, C = 6, 5, 7
LABELS = torch.arange(N * T).view(N, T) % C


def output(*shape):
    torch.manual_seed(0)
    return nn.Linear(4, shape[-1])(numbers(*shape[:-1], 4))


@pytest.mark.parametrize("form", ["flat", "tokens", "dict", "by hand", "channels", "smoothed"])
def test_scores_are_found_in_each_way_to_give_them_to_the_loss(form):
    pred = output(N, T, C)
    if form == "tokens":
        loss = F.cross_entropy(pred.flatten(0, -2).float(), LABELS.flatten())
    elif form == "by hand":
        loss = -pred.log_softmax(-1).gather(-1, LABELS[..., None]).mean()
    elif form == "channels":
        pred = nn.Conv1d(4, C, 1)(numbers(N, 4, T))
        loss = F.cross_entropy(pred, LABELS)
    elif form == "flat":
        pred = output(N, C)
        loss = F.cross_entropy(pred, LABELS[:, 0])
    else:
        loss = F.cross_entropy(pred.mT, LABELS, label_smoothing=0.1 if form == "smoothed" else 0.0)
    given = {"logits": pred, "hidden": output(N, T, 3)} if form == "dict" else pred
    scores = scores_of(loss.grad_fn, given)
    if form == "by hand":
        assert scores is None or scores is pred  # its graph does not say how many classes there are
    else:
        assert scores is not None
        assert torch.equal(scores, pred.mT if form == "channels" else pred)


def test_other_losses_have_no_scores():
    pred = output(N, 1)
    for loss in (
        F.mse_loss(pred, torch.zeros(N, 1)),
        F.binary_cross_entropy_with_logits(pred, torch.ones(N, 1)),
    ):
        assert scores_of(loss.grad_fn, pred) is None
    assert scores_of(F.cross_entropy(output(N, C), LABELS[:, 0]).grad_fn, None) is None


def test_z_is_the_mean_log_sum_exp_of_the_scores():
    fault, run = DivergingLogits(), evidence()
    pred = output(N, C) + 50
    loss = F.cross_entropy(pred, LABELS[:, 0])
    run.loop = SimpleNamespace(loss_node=loss.grad_fn, pred=pred, train_iter=3)
    fault.on_loss(run)
    fault.tell(run)
    by_hand = [math.log(sum(math.exp(x) for x in row)) for row in pred.double().tolist()]
    assert fault.z == [(3, pytest.approx(sum(by_hand) / N, rel=1e-5))]


# ---- findings

STEPS = [0, 1, 2, 5, 19, 38, 76, 152, 304]
GROWING = [4.6, 4.7, 4.8, 5.0, 8.0, 20.0, -45.0, -110.0, -240.0]


def judged(z, dtype=torch.float32, loss=(3.0,) * 400):
    run = evidence(loss=loss, loss_kind="cross-entropy")
    fault = run.measured(DivergingLogits)
    fault.z, fault._dtype = list(zip(STEPS, z, strict=False)), dtype
    (found,) = fault.findings(run)
    if isinstance(found, Passed | Skipped):
        return type(found)
    return found.code, found.severity, found.value, found.limit


def test_scores_that_drift_are_a_note_in_float32_and_a_warning_where_they_lose_digits():
    assert judged(GROWING) == ("head.logits", "info", 240, 100)
    assert judged(GROWING, torch.bfloat16) == ("head.logits", "warning", 240, 100)
    assert judged([10 * z for z in GROWING]) == ("head.logits", "warning", 2400, 1000)


def test_scores_that_stay_or_grow_after_convergence_are_no_finding():
    assert judged([300.0] * 9, torch.bfloat16) is Passed
    assert judged([z / 3 for z in GROWING], torch.bfloat16) is Passed
    assert judged(GROWING, loss=[3.0] * 60 + [0.01] * 340) is Passed
    assert judged(GROWING[:4]) is Skipped


def test_scores_that_lose_digits_are_told_after_convergence_too():
    assert judged(GROWING, torch.bfloat16, loss=[3.0] * 60 + [0.01] * 340)[:2] == ("head.logits", "warning")


def test_ranks_that_have_the_head_are_judged_by_their_mean():
    run = evidence(loss=(3.0,) * 400, loss_kind="cross-entropy")
    fault, first, others = run.measured(DivergingLogits), DivergingLogits(), [DivergingLogits() for _ in "ab"]
    for other, sign in zip(others, (1.5, 0.5), strict=True):
        other.z, other._layer = [(step, sign * z) for step, z in zip(STEPS, GROWING, strict=True)], "head"
    fault.merge(run, [x.state(run) for x in (first, *others)], 0)  # the first has another part of a pipeline
    (found,) = fault.findings(run)
    assert (found.layer, found.value) == ("head", 240)
