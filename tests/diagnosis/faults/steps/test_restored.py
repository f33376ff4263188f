"""Weights that are put back after each step."""

import pytest
import torch

from hookcb import Callback
from hookcb.diagnosis.faults.steps.not_stepped import Restored
from hookcb.diagnosis.run import Passed, Run, Skipped
from tests.diagnosis.faults.support import found_by, plain_weight, small_net, trained


def evidence(*params, n_steps=40):
    return Run(params={p.name: p for p in params}, n_steps=n_steps)


@pytest.mark.parametrize(
    ("ratios", "has_moved", "n_steps", "kind"),
    [
        ([1e-3] * 6, True, 40, Passed),
        ([1e-3] * 6, False, 19, Skipped),
        ([1e-9] * 6, False, 40, Skipped),
        ([1e-3] * 4, False, 40, Skipped),
    ],
)
def test_weights_that_moved_or_were_barely_inspected_are_not_found(ratios, has_moved, n_steps, kind):
    param = plain_weight("body", update_ratio=ratios)
    param.has_moved = has_moved
    (found,) = found_by(Restored, evidence(param, n_steps=n_steps))
    assert isinstance(found, kind)


def test_weights_that_are_put_back_after_each_step_are_found():
    kept = {}

    def keep(cb):
        kept["weight"] = cb.model[2].weight.detach().clone()

    def put(cb):
        with torch.no_grad():
            cb.model[2].weight.copy_(kept["weight"])

    verdict = trained(small_net(), [Callback(name="putter", before_fit=keep, after_batch=put)])
    (found,) = [f for f in verdict.findings if f.code == "param.restored"]
    assert (found.layer, found.param) == ("2", "2.weight")
    assert "bit-identical" in found.message
    assert "param.restored" not in [f.code for f in trained(small_net()).findings]
