"""Weights of zeros that stay so."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, watch
from hookcb.diagnosis.faults.model.zero_layer import ZeroLayer
from hookcb.diagnosis.run import Passed, Run, Skipped
from tests.diagnosis.faults.support import found_by, plain_weight, trained


def evidence(*params, n_steps=40):
    return Run(params={p.name: p for p in params}, n_steps=n_steps)


ZERO, SOME = [0.0] * 6, [1.0] * 6


@pytest.mark.parametrize(
    ("body", "is_found"),
    [
        ({"weight_norm": ZERO, "norm": ZERO}, True),
        ({"weight_norm": ZERO, "norm": [0.0, 0.0, 1e-9, 0.0, 0.0, 0.0]}, False),  # a gate that opens later
        ({"weight_norm": SOME, "norm": ZERO}, False),
    ],
)
def test_a_layer_of_zeros_without_a_gradient_is_found(body, is_found):
    head = plain_weight("head", weight_norm=SOME, norm=SOME)
    (found,) = found_by(ZeroLayer, evidence(plain_weight("body", **body), head))
    if is_found:
        assert (found.code, found.layer, found.severity) == ("init.zero", "body", "error")
    else:
        assert isinstance(found, Passed)


def test_the_last_weight_may_be_zero_and_few_steps_tell_nothing():
    body, head = (
        plain_weight("body", weight_norm=SOME, norm=SOME),
        plain_weight("head", weight_norm=ZERO, norm=ZERO),
    )
    (found,) = found_by(ZeroLayer, evidence(body, head))
    assert isinstance(found, Passed)
    (found,) = found_by(ZeroLayer, evidence(plain_weight("body", weight_norm=ZERO[:4], norm=ZERO[:4]), head))
    assert isinstance(found, Passed)  # as the other was looked at often enough
    (found,) = found_by(ZeroLayer, evidence(plain_weight("body", weight_norm=ZERO[:4], norm=ZERO[:4])))
    assert isinstance(found, Skipped)


def test_a_branch_that_is_masked_to_zero_is_a_note_where_the_model_learns():
    """As the symbolic part of a KAN, whose weights begin at zero and whose mask is zero."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.symbolic, self.head = (
                nn.Linear(4, 8),
                nn.Linear(4, 8, bias=False),
                nn.Linear(8, 1),
            )
            nn.init.zeros_(self.symbolic.weight)

        def forward(self, x):
            return self.head(F.relu(self.body(x)) + 0 * self.symbolic(x))

    torch.manual_seed(0)
    verdict = trained(Masked())
    assert verdict.status == "healthy"
    assert {x.code: x.severity for x in verdict.findings}["init.zero"] == "info"


class WithExtra(nn.Module):
    """A net with a layer for further features, of which there are none."""

    def __init__(self):
        super().__init__()
        self.first, self.extra, self.last = nn.Linear(6, 8), nn.Linear(1, 8), nn.Linear(8, 3)
        self.extra.weight = nn.Parameter(torch.zeros(8, 0))

    def forward(self, x):
        return self.last((self.first(x) + self.extra(x[:, :0])).tanh())


def test_a_parameter_without_elements_is_no_layer_of_zeros():
    torch.manual_seed(0)
    model = WithExtra()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, Diagnose("ignore", show=False)) as w:
        for _ in range(30):
            nn.functional.cross_entropy(model(torch.randn(32, 6)), torch.randint(3, (32,))).backward()
            opt.step()
            opt.zero_grad()
    assert "init.zero" not in [x.code for x in w.diagnose().findings]
