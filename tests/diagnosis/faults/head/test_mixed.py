"""A softmax over the samples of a batch, and views that cut across them; and what only looks like it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, Learner, watch
from hookcb.diagnosis.fault import FAULTS
from hookcb.diagnosis.run import Run, Skipped
from tests.support import along, first, fit, in_turn

N, T, D, C = 12, 5, 7, 3


def found(forward, loss_func=F.cross_entropy, x=None, y=None, how="watch"):
    """Severities of what is said of a model with two layers between which `forward` does something."""
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head, self.flat = nn.Linear(D, D), nn.Linear(D, C), nn.Linear(T * D, C)
            self.rnn = nn.LSTM(D, D)

        def forward(self, x):
            return forward(self, x)

    model = Net()
    x = torch.randn(N, T, D) if x is None else x
    y = torch.arange(N) % C if y is None else y
    if how == "learner":
        learn = Learner([(x, y)] * 3, model, loss_func, torch.optim.SGD, lr=0.01)
        verdict = fit(learn, 1, cbs=[Diagnose("ignore", show=False)]).diagnose()
    else:
        opt = torch.optim.SGD(model.parameters(), 0.01)
        with watch(model, opt, Diagnose("ignore", show=False)) as w:
            for _ in range(3):
                w.report_loss(loss_func(model(x), y)).backward()
                opt.step()
                opt.zero_grad()
        verdict = w.diagnose()
    assert not [note for note in verdict.coverage if "a part of Diagnose" in note]
    return [(x.severity, x.code) for x in verdict.findings if x.code == "samples.mixed"]


def pooled(model, x, dim):
    h = model.body(x).tanh()
    weights = h.mean(-1).softmax(dim)
    return model.head((weights[..., None] * h).sum(1))


@pytest.mark.parametrize(("how", "dim"), first(along(["watch", "learner"], [0, -2])))
def test_attention_over_the_samples_is_found(dim, how):
    assert found(lambda model, x: pooled(model, x, dim), how=how) == [("error", "samples.mixed")]
    assert found(lambda model, x: pooled(model, x, 1), how=how) == []


def test_a_softmax_over_the_samples_in_the_loss_is_found():
    def distill(pred, y, dim=0):
        soft = F.one_hot(y, C).float()
        return F.cross_entropy(pred, y) + (soft - pred.softmax(dim)).square().mean()

    assert found(lambda model, x: model.head(x.mean(1)), distill)
    assert not found(lambda model, x: model.head(x.mean(1)), lambda pred, y: distill(pred, y, 1))


def test_the_output_may_not_be_a_softmax_over_the_samples():
    assert found(lambda model, x: model.head(x.mean(1)).softmax(0))


@pytest.mark.slow
def test_a_view_in_place_of_a_transpose_is_found():
    warned = [("warning", "samples.mixed")]

    def swapped(model, x, move):
        h = model.body(x)
        h, _ = model.rnn(h.view(T, N, D) if move == "view" else h.transpose(0, 1))
        return model.head(h[-1])

    def flattened(model, x, moves):
        h, _ = model.rnn(x.transpose(0, 1))
        return model.flat((h.transpose(0, 1) if moves else h).reshape(N, T * D))

    assert found(lambda model, x: swapped(model, x, "view")) == warned
    assert found(lambda model, x: swapped(model, x, "transpose")) == []
    assert found(lambda model, x: flattened(model, x, False)) == warned
    assert found(lambda model, x: flattened(model, x, True)) == []


def contrastive(pred, y):
    z = F.normalize(pred, dim=1)
    scores = z @ z.T
    both = scores.softmax(0) * scores.softmax(1)
    return F.cross_entropy(scores, torch.arange(len(z))) - both.diagonal().mean() + 0 * y.sum()


def weighted(pred, y):
    """Hard samples count more, by a softmax over their losses."""
    each = F.cross_entropy(pred, y, reduction="none")
    return (each * each.detach().softmax(0)).sum() + (each.softmax(0) * each).sum()


def decorrelated(pred, y):
    z = F.normalize(pred, dim=0)
    return F.cross_entropy(pred, y) + (z.T @ z).square().mean()


def batch_dice(pred, y):
    p, truth = pred.softmax(1), F.one_hot(y, C)
    return 1 - (2 * (p * truth).sum(0) / (p.sum(0) + truth.sum(0))).mean()


@in_turn("loss_func", [contrastive, weighted, decorrelated, batch_dice])
def test_losses_that_compare_samples_on_purpose_are_left_alone(loss_func):
    assert found(lambda model, x: model.head(x.mean(1)), loss_func) == []


def test_attention_of_each_sample_to_all_others_is_left_alone():
    def over_batch(model, x):
        h = model.body(x.mean(1))
        return model.head((h @ h.T).softmax(0) @ h)

    assert found(over_batch) == []


def test_steps_that_come_first_are_no_samples():
    """One sequence with a label for each step, and sequences with the steps first."""
    of_sequence = found(
        lambda model, x: model.head((model.body(x).tanh() * x.mean(-1, keepdim=True).softmax(0)).sum(1)),
        x=torch.randn(N, T, D),
    )
    assert of_sequence == []

    def first(model, x):
        h, _ = model.rnn(x)
        return model.head((h.mean(-1).softmax(0)[..., None] * h).sum(0))

    assert found(first, x=torch.randn(T, N, D)) == []


def test_a_run_without_events_is_not_ruled_out():
    assert [type(x) for x in FAULTS["samples.mixed"]().findings(Run())] == [Skipped]
