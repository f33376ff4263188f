"""The operation of a loss that gives NaN or infinity, read from its graph."""

import pytest
import torch
from torch.nn.functional import mse_loss

from hookcb.nans.loss_operation import operation_in_loss
from tests.support import in_turn

BAD = torch.tensor([0.0, 1.0, -2.0, 1e30])

LOSSES = {
    "log": lambda x: (x.relu().log() * 2).mean(),
    "log1p": lambda x: x.log1p().mean(),
    "sqrt": lambda x: x.sqrt().mean(),
    "exp": lambda x: (x.exp() + 1).mean(),
    "div": lambda x: (x / x).mean(),
    "pow": lambda x: (x**-1).mean(),
    "rsqrt": lambda x: x.relu().rsqrt().log().mean(),  # log(inf) is a consequence
    "reciprocal": lambda x: (1 / x).mean(),
    "std": lambda x: x[:1].std(),
    "": lambda x: (x * float("nan")).mean(),  # what it is multiplied by is not seen
}


@in_turn("operation", LOSSES)
@pytest.mark.filterwarnings("ignore:std():UserWarning")
def test_it_is_the_first_of_the_graph(operation):
    pred = BAD.clone().requires_grad_() * 1.0
    loss = LOSSES[operation](pred)
    assert not loss.isfinite()
    assert operation_in_loss(loss.grad_fn, {pred.grad_fn}) == operation


def test_a_division_by_zero_shows_without_the_dividend():
    pred = torch.ones(3, requires_grad=True) * 1.0
    assert operation_in_loss((pred / torch.zeros(3)).mean().grad_fn, {pred.grad_fn}) == "div"


def test_nothing_is_found_in_a_finite_loss_behind_the_model_or_after_the_backward():
    pred = BAD.clone().requires_grad_() * 1.0
    inside = pred.log()  # by the model
    for loss, outputs in (mse_loss(pred, BAD), {pred.grad_fn}), (inside.mean(), {inside.grad_fn}):
        assert operation_in_loss(loss.grad_fn, outputs) == ""
    loss = pred.log().mean()
    loss.backward()
    assert operation_in_loss(loss.grad_fn, {pred.grad_fn}) == ""
    assert operation_in_loss(None, {pred.grad_fn}) == ""
    assert operation_in_loss(pred.log().mean().grad_fn, set()) == ""  # the output is not known


def test_what_was_changed_in_place_is_left_out():
    pred = BAD.clone().requires_grad_() * 1.0
    squared = pred * 1.0
    loss = squared.log().mean()
    squared.detach().fill_(1.0)
    assert operation_in_loss(loss.grad_fn, {pred.grad_fn}) == ""


def test_a_masked_score_is_not_to_blame():
    pred = torch.tensor([[1.0, -torch.inf]], requires_grad=True) * 1.0
    loss = pred.log_softmax(1)[:, 0].mean().log().sqrt()
    assert operation_in_loss(loss.grad_fn, {pred.grad_fn}) == "log"
