"""adam.eps: gradients as small as Adam's eps, and those that are not."""

import math

import pytest
import torch
from torch import nn

from hookcb.diagnosis.faults.steps.damped_steps import DampedSteps
from hookcb.diagnosis.frame import Frame
from hookcb.diagnosis.run import Absent, Passed, Skipped
from tests.diagnosis.support import evidence, weight

FLAT, FALLING = [2.0] * 40, [2.0 - i / 30 for i in range(40)]


def of_size(rms, name="body", eps=1e-8, n=20, **stats):
    """A weight of 16×16 whose gradients have this RMS."""
    return weight(name, eps=eps, **{"clipped_norm": [16 * rms] * n} | stats)


def judged(*params, loss=FLAT):
    (found,) = DampedSteps().findings(evidence(*params, loss=loss))
    if isinstance(found, Passed | Skipped | Absent):
        return type(found)
    return found.code, found.severity, found.param, found.value


def test_gradients_below_eps_are_told_with_the_smallest():
    found = judged(of_size(5e-10), of_size(3e-10, "head"), of_size(1e-3, "in"))
    assert found == ("adam.eps", "warning", "head.weight", pytest.approx(2 / 3))


def test_it_is_a_note_if_the_loss_falls_or_steps_are_little_smaller():
    assert judged(of_size(5e-10), loss=FALLING)[1] == "info"
    assert judged(of_size(5e-9))[1] == "info"


@pytest.mark.parametrize(
    "params",
    [
        [of_size(2e-8)],
        [of_size(1e-9, eps=1e-15)],
        [of_size(1e-9), of_size(1e-3, "a"), of_size(1e-3, "b")],
        [of_size(1e-3, clipped_norm=[0.0] * 10 + [1.0] * 10)],  # zeros are of experts without tokens
    ],
)
def test_larger_gradients_or_those_of_few_weights_are_no_finding(params):
    assert judged(*params) is Passed


def test_other_optimizers_and_few_records_are_not_judged():
    assert judged(of_size(1e-9, eps=math.nan)) is Absent
    assert judged(of_size(1e-9, n=4)) is Skipped
    assert judged(of_size(0.0)) is Skipped


@pytest.mark.parametrize(
    ("opt", "eps"),
    [
        (lambda p: torch.optim.AdamW([{"params": p, "eps": 1e-6}]), 1e-6),
        (torch.optim.Adam, 1e-8),
        (lambda p: torch.optim.SGD(p, lr=0.1), math.nan),
        (torch.optim.Adafactor, math.nan),  # two of them, for other things
    ],
)
def test_eps_is_that_of_the_group(opt, eps):
    net = nn.Linear(2, 2)
    frame = Frame.of(net, [opt(list(net.parameters()))])
    assert frame.params["weight"].eps == pytest.approx(eps, nan_ok=True)
