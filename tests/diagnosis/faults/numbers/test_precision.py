"""precision.underflow and precision.overflow: float16 at the ends of its range."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hookcb import Diagnose, watch
from hookcb.diagnosis.faults.numbers.precision import Overflow, Underflow
from hookcb.diagnosis.run import Absent, Layer, Passed, Run, Skipped
from tests.diagnosis.support import evidence, only, series, weight

HALF, BRAIN = torch.finfo(torch.float16), torch.finfo(torch.bfloat16)


def small(rms, resolution=HALF.eps, loss=(1.0,) * 40):
    return evidence(weight("body", rms=rms, resolution=resolution), loss=loss, sources={"gradients"})


def test_gradients_below_the_smallest_normal_number_are_told():
    found = only(Underflow, small([1e-3] * 3 + [1e-7, 3e-7, 2e-7]))
    assert (found.code, found.severity, found.param) == ("precision.underflow", "warning", "body.weight")
    assert (found.value, found.limit, found.step) == (3e-7, HALF.smallest_normal / 32, 3)
    assert "is 3e-07 or less in float16, where half of the digits are lost below 1.9e-06" in found.message


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (small([1e-6, 1e-6, 1e-3]), Passed),  # one of the last is large enough
        (small([0.0] * 5), Passed),  # others say why there is none
        (small([1e-6] * 2), Skipped),
        (small([1e-3] * 30 + [1e-6] * 10, loss=[1.0] * 10 + [0.001] * 30), Passed),  # after convergence
        (small([1e-6] * 9, BRAIN.eps), Absent),
        (small([1e-6] * 9, 2.0**-23), Absent),
    ],
)
def test_other_gradients_are_not(given, kind):
    assert isinstance(only(Underflow, given), kind)


def large(abs_max, largest=HALF.max):
    layer = Layer("body", "Linear", "Linear 4→4", 0, {"abs_max": series(abs_max)}, largest)
    return Run(layers={"body": layer})


def test_outputs_near_the_largest_number_are_told():
    found = only(Overflow, large([100.0, 40_000.0, 50_000.0, 60_000.0]))
    assert (found.code, found.severity, found.layer) == ("precision.overflow", "warning", "body")
    assert (found.value, found.limit, found.step) == (40_000.0, 32_752.0, 1)
    assert only(Overflow, large([300.0] * 3, torch.finfo(torch.float8_e4m3fn).max)).limit == 224


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (large([40_000.0, 40_000.0, 30_000.0]), Passed),
        (large([40_000.0] * 2), Skipped),
        (large([40_000.0] * 9, BRAIN.max), Absent),
    ],
)
def test_other_outputs_are_not(given, kind):
    assert isinstance(only(Overflow, given), kind)


@pytest.mark.parametrize(("scale", "code"), [(1.0, ""), (1e-4, "precision.underflow")])
def test_a_model_in_float16_needs_a_loss_that_is_large_enough(scale, code):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 3)).half()
    opt = torch.optim.SGD(model.parameters(), lr=0.1 / scale)
    with watch(model, opt, Diagnose(show=False)) as w:
        for _ in range(40):
            y = torch.randint(3, (32,))
            x = (F.one_hot(y, 16).float() + torch.randn(32, 16) / 2).half()
            opt.zero_grad()
            (F.cross_entropy(model(x).float(), y) * scale).backward()
            opt.step()
    told = [finding.code for finding in w.diagnose().findings if finding.code.startswith("precision")]
    assert told == ([code] if code else [])
