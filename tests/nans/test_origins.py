"""Each NaN is followed back to the operation that made it."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hookcb.nans.origins import Origins, shown_line
from tests.support import in_turn


@pytest.fixture(autouse=True)
def with_lines():
    """Nodes of the graph keep the lines that made them."""
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        yield


def made_in(act):
    """What has made the NaN in the tensor that `act` returns."""
    origins = Origins()
    with origins:
        bad = act()
    assert origins.failure is None
    return origins.origin([bad])


def code_of(made):
    return shown_line(made.line)[1]


ZERO = torch.zeros(3)


def log_of_zero():
    x = ZERO.log()  # here
    return (x + 1) * 0


def overflow():
    x = (ZERO + 100).exp()  # here
    return x / x


def in_place():
    x = torch.empty(3)
    x.copy_(ZERO)
    x.div_(0.0)  # here
    return x.clamp(min=1)


def a_part():
    x = torch.ones(6)
    x[2:4].sub_(1).log_()  # here
    return x.sum()


def into_out():
    out = torch.empty(3)
    torch.log(ZERO, out=out)  # here
    return out


@in_turn(
    ("act", "op"),
    [(log_of_zero, "log"), (overflow, "exp"), (in_place, "div_"), (a_part, "log_"), (into_out, "log")],
)
def test_in_a_forward_it_is_the_operation_and_its_line(act, op):
    made = made_in(act)
    assert (made.op, made.how, made.in_backward) == (op, "made", False)
    assert code_of(made).endswith("# here")


def root_at_zero():
    x = torch.zeros(3, requires_grad=True)
    (x * 2).sqrt().sum().backward()
    return x.grad


def hidden_by_where():
    x = torch.zeros(3, requires_grad=True)
    torch.where(x > 0, (x * 1).log(), x).sum().backward()
    return x.grad


class Divides(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad / 0


def own_function():
    x = torch.zeros(3, requires_grad=True)
    Divides.apply(x).sum().backward()
    return x.grad


def own_hook():
    x = torch.zeros(3, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: grad * 1e30 * 1e30)
    y.sum().backward()
    return x.grad


@in_turn(
    ("act", "op", "code"),
    [
        (root_at_zero, "SqrtBackward0", "(x * 2).sqrt().sum().backward()"),
        (hidden_by_where, "LogBackward0", "torch.where(x > 0, (x * 1).log(), x).sum().backward()"),
        (own_function, "div", "return grad / 0"),
        (own_hook, "mul", "y.register_hook(lambda grad: grad * 1e30 * 1e30)"),
    ],
)
def test_in_a_backward_it_is_the_node_and_the_line_that_made_it(act, op, code):
    made = made_in(act)
    assert (made.op, made.in_backward, code_of(made)) == (op, True, code)


def test_a_mask_is_not_to_blame_but_the_softmax_of_a_row_that_has_nothing_else():
    def act():
        scores = torch.zeros(2, 3).masked_fill(torch.tensor([[True] * 3, [False] * 3]), -math.inf)
        return scores.softmax(1)

    made = made_in(act)
    assert (made.op, made.how) == ("masked_fill", "given")
    assert made.to_blame.op == "_softmax"
    assert code_of(made.to_blame) == "return scores.softmax(1)"


def test_minus_inf_that_was_no_mask_stays_to_blame():
    made = made_in(lambda: ZERO.log() @ torch.zeros(3))
    assert (made.op, made.to_blame) == ("log", made)
    assert made.then.op == "dot"


def test_a_mask_from_before_is_no_origin():
    mask = torch.full((1, 3), -math.inf)
    made = made_in(lambda: (torch.zeros(1, 3) + mask).softmax(1))
    assert (made.op, made.how, made.to_blame.op) == ("add", "came", "_softmax")


def test_what_no_operation_made_came():
    data = np.array([1.0, np.nan])
    made = made_in(lambda: torch.from_numpy(data).float() * 2)
    assert (made.op, made.how) == ("lift_fresh", "came")


def test_a_number_that_is_nan_was_given():
    made = made_in(lambda: ZERO * math.nan)
    assert (made.op, made.how, made.to_blame) == ("mul", "given", made)


def test_what_is_masked_out_is_not_followed_and_memory_is_no_origin():
    origins = Origins()
    with origins:
        x = torch.where(torch.tensor([True, True]), ZERO[:2], ZERO[:2].log())
        y = torch.empty(1000).fill_(1)
        y = y * x.sum()
    assert origins.origin([x, y]) is None
    with origins:
        x += 1
        x /= 0  # the first one, of the same memory
        x.log_()
    assert origins.origin([x]).op == "div_"
    with origins:
        x.fill_(1)
    assert origins.origin([x]) is None


def test_a_step_that_makes_it_is_the_users_line():
    layer = nn.Linear(2, 1, bias=False)
    opt = torch.optim.Adam(layer.parameters(), eps=0)
    origins = Origins()
    with origins:
        F.mse_loss(layer(torch.zeros(4, 2)), torch.zeros(4, 1)).backward()
        opt.step()
    made = origins.origin(layer.parameters())
    assert code_of(made) == "opt.step()"
    assert "div" in made.op


def test_the_earliest_of_several_is_told():
    origins = Origins()
    with origins:
        first, second = ZERO.log(), ZERO.reciprocal()
    assert origins.origin([second, first]).op == "log"
    assert origins.origin([ZERO]) is None


def test_results_are_to_the_bit_the_same():
    def act():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.LSTM(8, 3))
        out, _ = model(torch.randn(5, 4))
        out.sum().backward()
        return [*(p.grad for p in model.parameters()), torch.rand(1)]

    with Origins() as origins:
        followed = act()
    assert origins.failure is None
    assert all(torch.equal(x, y) for x, y in zip(act(), followed, strict=True))
