"""Targets that are recovered from gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, Learner, watch
from hookcb.diagnosis.measurements.recovered import recovered_target

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
CLASSES, BITS, VALUES = (
    torch.tensor([0, 2, 1, 2, 0, 1]),
    torch.tensor([[0.0], [1.0]] * 3),
    X.sum(1, keepdim=True),
)


def recovered(loss_func, y, n_out, *last, scores=lambda x: x):
    """Targets as recovered when the gradient of the model's output arrives."""
    torch.manual_seed(0)
    pred = scores(nn.Sequential(nn.Linear(4, n_out), *last)(X))
    loss, found = loss_func(pred, y), []
    pred.register_hook(lambda grad: found.append(recovered_target(loss.grad_fn, pred, grad, loss.detach())))
    loss.backward()
    return found[0]


@pytest.mark.parametrize(
    ("loss_func", "y", "n_out", "last"),
    [
        (F.mse_loss, VALUES, 1, ()),
        (lambda p, y: ((p - y) ** 2).mean(), 40 + 3 * VALUES, 1, (nn.Tanh(),)),
        (F.cross_entropy, CLASSES, 3, ()),
        (lambda p, y: F.cross_entropy(p, y, ignore_index=2), CLASSES, 3, ()),
        (F.nll_loss, CLASSES, 3, (nn.LogSoftmax(-1),)),
        (F.binary_cross_entropy_with_logits, BITS, 1, ()),
        (F.binary_cross_entropy_with_logits, 2 * BITS - 1, 1, ()),
        (F.binary_cross_entropy, BITS, 1, (nn.Sigmoid(),)),
    ],
)
def test_targets_are_recovered_from_a_mean(loss_func, y, n_out, last):
    found = recovered(loss_func, y, n_out, *last)
    known = found != -100
    torch.testing.assert_close(found[known], y[known], rtol=1e-4, atol=1e-4)


def test_targets_of_a_sequence_are_recovered():
    y = torch.tensor([[0, 2, 1], [1, 1, 0]])

    def loss_func(pred, y):
        return F.cross_entropy(pred.flatten(0, 1), y.flatten())

    found = recovered(loss_func, y, 3, scores=lambda x: x.view(2, 3, 3))
    assert torch.equal(found, y)


@pytest.mark.parametrize(
    ("loss_func", "y", "n_out"),
    [
        (F.l1_loss, VALUES, 1),
        (lambda p, y: F.mse_loss(p, y, reduction="sum"), VALUES, 1),
        (lambda p, y: F.cross_entropy(p, y, weight=torch.tensor([1.0, 2.0, 5.0])), CLASSES, 3),
        (lambda p, y: F.cross_entropy(p, y, label_smoothing=0.2), CLASSES, 3),
        (lambda p, y: F.mse_loss(p, y) + p.mean(), VALUES, 1),
        (lambda p, y: F.mse_loss(p.sigmoid(), y), VALUES, 1),
    ],
)
def test_what_is_not_certain_is_unknown(loss_func, y, n_out):
    assert recovered(loss_func, y, n_out) is None


def test_a_plain_loop_is_judged_like_a_learner():
    torch.manual_seed(0)
    x = torch.randn(256, 4)
    batches = list(zip(x.split(32), (20 + 5 * x.sum(1, keepdim=True)).split(32), strict=True)) * 8
    codes = []
    for run in (by_learner, by_watch):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1), nn.Tanh())
        verdict = run(model, torch.optim.Adam(model.parameters()), batches)
        codes.append((verdict.status, verdict.primary.code, verdict.primary.message))
    assert codes[0] == codes[1]
    assert codes[0][:2] == ("sick", "head.range")


def by_learner(model, opt, batches):
    learn = Learner(batches, model, F.mse_loss, opt)
    with learn.no_logging():
        learn.fit(1, cbs=Diagnose(show=False, on_sick="ignore"))
    return learn.diagnose()


def by_watch(model, opt, batches):
    with watch(model, opt, Diagnose(show=False, on_sick="ignore")) as w:
        for x, y in batches:
            F.mse_loss(model(x), y).backward()
            opt.step()
            opt.zero_grad()
    return w.diagnose()
