"""The axis over which a loss takes the softmax, in heads as people write them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, watch
from hookcb.diagnosis.faults.head.axis import ClassAxis, class_scores
from hookcb.diagnosis.run import Run
from tests.support import first, in_turn

N, C, H, W, T = 4, 6, 8, 10, 7


def classes(*shape, n=C):
    return torch.randint(n, shape, generator=torch.Generator().manual_seed(0))


def image(n_out=C):
    return nn.Conv2d(3, n_out, 1)(torch.randn(N, 3, H, W))


def steps(n_out=C, t=T):
    return nn.Linear(5, n_out)(torch.randn(N, t, 5))


def rows(n_out=C):
    return nn.Linear(5, n_out)(torch.randn(N, 5))


RIGHT = {
    "rows": lambda: F.cross_entropy(rows(), classes(N)),
    "pixels": lambda: F.cross_entropy(image(), classes(N, H, W)),
    "pixels, permuted": lambda: F.cross_entropy(
        image().permute(0, 2, 3, 1).reshape(-1, C), classes(N * H * W)
    ),
    "steps": lambda: F.cross_entropy(steps().view(-1, C), classes(N * T)),
    "steps, transposed": lambda: F.cross_entropy(steps().transpose(1, -1), classes(N, T)),
    "steps, shifted": lambda: F.cross_entropy(
        steps()[..., :-1, :].contiguous().view(-1, C), classes(N * (T - 1))
    ),
    "steps, the last ones": lambda: F.cross_entropy(steps()[:, -3:].reshape(-1, C), classes(N * 3)),
    "anchors": lambda: F.cross_entropy(
        image(3 * C).permute(0, 2, 3, 1).reshape(-1, C), classes(N * H * W * 3)
    ),
    "anchors first": lambda: F.cross_entropy(
        image(3 * C).view(N, 3, C, H, W).permute(0, 1, 3, 4, 2).reshape(-1, C), classes(N * H * W * 3)
    ),
    "all steps at once": lambda: F.cross_entropy(rows(T * C).view(N, C, T), classes(N, T)),
    "all steps at once, steps first": lambda: F.cross_entropy(
        rows(T * C).view(N, T, C).transpose(1, 2), classes(N, T)
    ),
    "softmax over an image": lambda: F.cross_entropy(image(5).view(N * 5, H * W), classes(N * 5, n=H * W)),
    "moves on a board": lambda: F.cross_entropy(image(7).flatten(1), classes(N, n=7 * H * W)),
    "log-softmax": lambda: F.nll_loss(F.log_softmax(rows(), -1), classes(N)),
    "log-softmax of pixels": lambda: F.nll_loss(F.log_softmax(image(), 1), classes(N, H, W)),
    "half precision": lambda: F.cross_entropy(rows().bfloat16().float(), classes(N)),
}
WRONG = {
    "pixels, by view": lambda: F.cross_entropy(image().view(-1, C), classes(N * H * W)),
    "pixels, by reshape": lambda: F.cross_entropy(
        image().reshape(N, H * W, C).transpose(1, 2), classes(N, H * W)
    ),
    "steps, by view": lambda: F.cross_entropy(steps().view(N, C, T), classes(N, T)),
    "steps, as many as two per class": lambda: F.cross_entropy(steps(t=12).view(N, C, 12), classes(N, 12)),
    "anchors, by view": lambda: F.cross_entropy(image(3 * C).view(-1, C), classes(N * H * W * 3)),
}


class Loop:
    """A loop with this loss."""

    def __init__(self, loss):
        self.loss_node = loss.grad_fn


def told_of(loss):
    fault = ClassAxis()
    fault.on_first_graph(Run(loop=Loop(loss)))
    assert not fault.unless
    return fault.seen


@in_turn("loss", RIGHT.values(), ids=RIGHT)
def test_classes_on_their_own_axis_are_no_finding(loss):
    assert told_of(loss()) == []


@in_turn("loss", WRONG.values(), ids=WRONG)
def test_a_reshape_that_cuts_across_the_classes_is_found(loss):
    (found,) = told_of(loss())
    assert found.code == "head.axis"
    assert "6 classes on dimension 1" in found.message
    assert "permute" in found.next_steps[0]


def test_a_log_softmax_over_the_samples_is_found():
    (found,) = told_of(F.nll_loss(F.log_softmax(rows(), 0), classes(N)))
    assert f"log_softmax runs over dimension 0 of a {N}×{C} output" in found.message
    assert "dim=1" in found.next_steps[0]


@in_turn(
    "loss",
    [
        lambda: F.mse_loss(rows(), torch.randn(N, C)),
        lambda: F.cross_entropy(rows()[0], classes()),
        lambda: F.cross_entropy(rows() / 2, classes(N)),
        lambda: F.cross_entropy(torch.cat([rows(), rows()]), classes(2 * N)),
        lambda: F.cross_entropy(steps()[:, ::2].reshape(-1, C), classes(N * 4)),
    ],
)
def test_what_is_not_only_moved_is_unknown(loss):
    assert class_scores(loss().grad_fn) is None


def test_too_many_scores_are_not_followed(monkeypatch):
    monkeypatch.setattr("hookcb.diagnosis.faults.head.axis.MAX_ELEMENTS", N * C - 1)
    assert class_scores(RIGHT["rows"]().grad_fn) is None


@pytest.mark.parametrize("by_view", first([True, False]))
def test_a_training_is_judged_by_it(by_view):
    torch.manual_seed(0)
    model = nn.Conv2d(3, C, 3, padding=1)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    with watch(model, opt, cbs=Diagnose(on_sick="ignore")) as loop:
        for i in range(30):
            x = torch.randn(N, 3, H, W, generator=torch.Generator().manual_seed(i))
            scores, y = model(x), x[:, 0].gt(0).long().reshape(-1)
            flat = scores.view(-1, C) if by_view else scores.permute(0, 2, 3, 1).reshape(-1, C)
            loss = F.cross_entropy(flat, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
    verdict = loop.diagnose()
    assert (verdict.primary is not None and verdict.primary.code == "head.axis") == by_view
    assert ("classes on another axis" in verdict.ruled_out) != by_view
