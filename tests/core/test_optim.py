"""Learning rates are given for all parameter groups, for each, or as a range."""

import pytest
import torch
from torch.optim import SGD, Adam

from hookcb.core.optim import check_rates, rates_of, set_rates
from tests.support import in_turn


def groups(n):
    return [{"params": [torch.zeros(1, requires_grad=True)]} for _ in range(n)]


@in_turn(
    ("lr", "n", "expected"),
    [
        (0.1, 3, [0.1, 0.1, 0.1]),
        ([0.1, 0.2], 2, [0.1, 0.2]),
        ((0.3,), 1, [0.3]),
        (slice(1e-4, 1e-2), 3, [1e-4, 1e-3, 1e-2]),
        (slice(1e-4, 1e-2), 2, [1e-4, 1e-2]),
        (slice(1e-4, 1e-2), 1, [1e-2]),
        (slice(1e-2), 3, [1e-3, 1e-3, 1e-2]),
        (slice(1e-2), 1, [1e-2]),
    ],
)
def test_each_group_gets_a_rate(lr, n, expected):
    check_rates("lr", lr)
    assert rates_of(lr, n) == pytest.approx(expected)
    opt = SGD(groups(n), lr=1.0)
    set_rates(opt, lr)
    assert [group["lr"] for group in opt.param_groups] == pytest.approx(expected)


def test_a_rate_that_is_a_tensor_stays_that_tensor():
    opt = Adam(groups(2), lr=torch.tensor(1.0), capturable=True)
    before = [group["lr"] for group in opt.param_groups]
    set_rates(opt, [0.5, 0.5])
    assert all(group["lr"] is lr for group, lr in zip(opt.param_groups, before, strict=True))
    assert {float(lr) for lr in before} == {0.5}


def test_there_must_be_as_many_rates_as_groups():
    with pytest.raises(ValueError, match="lr_max has 3 rates, but the optimizer has 2 parameter groups"):
        rates_of([0.1, 0.2, 0.3], 2, "lr_max")


@in_turn(
    ("lr", "error", "told"),
    [
        ("0.1", TypeError, r"lr must be a number.*slice\(lowest, highest\), got '0.1'"),
        (-0.1, ValueError, "lr must be a number"),
        ([0.1, -1], ValueError, r"lr\[1\] must be a number"),
        (slice(0, 0.1), ValueError, r"each rate of lr=slice\(0, 0.1, None\) must be a number above 0"),
        (slice(None), TypeError, "each rate of lr"),
        (slice(0.1, 0.2, 3), ValueError, r"lr must be slice\(lowest, highest\) or slice\(highest\)"),
    ],
)
def test_rates_that_cannot_be_are_told(lr, error, told):
    with pytest.raises(error, match=told):
        check_rates("lr", lr)


def test_zero_is_a_rate_where_that_is_said():
    check_rates("lr", 0.0, closed=True)
    check_rates("lr", [0.0, 0.1], closed=True)
    with pytest.raises(ValueError, match="above 0"):
        check_rates("lr", 0.0)
