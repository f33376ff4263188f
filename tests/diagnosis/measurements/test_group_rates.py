"""Rates of parameter groups, and jumps of one of them."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hookcb.diagnosis.measurements.group_rates import GroupRates
from hookcb.diagnosis.run import Run


def followed(rates):
    """What is measured of steps with these rates, one tuple of all groups for each, and their optimizer."""
    model = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in rates[0]])
    opt = torch.optim.Adam([{"params": [p]} for p in model.parameters()], lr=0.01)
    measured, run = GroupRates(), Run()
    for step, now in enumerate(rates):
        for group, rate in zip(opt.param_groups, now, strict=True):
            group["lr"] = rate
        run.loop = SimpleNamespace(model=model, opt=opt, train_iter=step)
        measured.on_between(run)
    return measured, opt


def test_a_jump_of_one_group_is_told_with_its_group_and_its_parameters():
    measured, _opt = followed([(0.01, 0.01)] * 40 + [(0.01, 0.3)] * 10)
    (jump,) = measured.jumps
    assert (jump.step, jump.before, jump.after) == (40, 0.01, 0.3)
    assert (
        jump.text == "the learning rate of parameter group 1 (1.weight) had risen from 0.01 to 0.3 at step 40"
    )
    assert measured.before(45, 64) == jump
    assert measured.before(40, 64) is None


def test_a_group_that_creeps_up_alone_is_told_with_its_first_rate():
    measured, _opt = followed([(0.01, 0.01 * 1.02**i) for i in range(100)])
    assert not measured.jumps
    rise = measured.before(100, 64)
    assert (rise.group, rise.since, rise.step) == (1, 36, 99)
    assert rise.after / rise.before == pytest.approx(1.02**63)
    assert "from 0.0204 at step 36 to 0.071, and of no other group as much" in rise.text


def rises(rates):
    measured, _opt = followed(rates)
    measured.tell(Run())
    return measured.rises


def test_a_group_that_leaves_the_others_in_mid_run_is_told_with_the_rate_before():
    warmup = [(0.001 * min(10, i + 1),) * 3 for i in range(200)]
    (rise,) = rises([*warmup, *((0.01, 0.01 * 1.01**i, 0.01) for i in range(1, 400))])
    assert (rise.group, rise.step, rise.after) == (1, 598, pytest.approx(0.01 * 1.01**399))
    assert 200 <= rise.since < 210
    assert 0.01 <= rise.before < 0.011


@pytest.mark.parametrize(
    "later",
    [
        lambda i: (0.01, 0.01 * 1.001**i),  # not far
        lambda i: (0.01 * 0.98**i, 0.01),  # the other one falls
        lambda i: (0.0, 0.01 * 1.01**i),
        lambda i: (0.01, 0.01 * (1 + min(i, 300 - i) / 10)),  # and comes back
        lambda i: (0.01 * 1.01**i,) * 2,
    ],
)
def test_groups_that_go_along_fall_or_come_back_do_not_rise_alone(later):
    assert not rises([*[(0.01, 0.01)] * 100, *map(later, range(1, 301))])


@pytest.mark.parametrize(
    "rates",
    [
        [(0.01, 0.1)] * 40 + [(0.03, 0.3)] * 10,  # all alike
        [(0.01 * 1.02**i,) * 2 for i in range(100)],
        [(0.0, 0.0), (0.01, 0.01)],
        [(0.01, 0.01)] * 3,
        [(0.1, 0.1), (0.01, 0.01)],
        [(0.01,)] * 9 + [(1.0,)] * 9,  # one group
        [(torch.tensor(0.01, device="meta"), 0.01), (torch.tensor(1.0, device="meta"), 0.01)],  # not read
    ],
)
def test_rates_that_rise_in_all_groups_begin_at_zero_or_fall_are_not_of_one_group(rates):
    measured, _opt = followed(rates)
    assert measured.before(len(rates), 64) is None
