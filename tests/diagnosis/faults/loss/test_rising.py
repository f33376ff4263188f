"""loss.rising: a loss that rises again without a known change, and what has moved since."""

import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, watch

AT, N_STEP = 200, 460
CODE = "loss.rising"


def trained(change):
    """The verdict of a regression by hand-written steps; `change(model, step, x, y)` gives the targets."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    with watch(model, Diagnose(show=False)) as w:
        for step in range(N_STEP):
            x = torch.randn(64, 4)
            y = change(model, step, x, x.sum(1, keepdim=True).sin())
            F.mse_loss(model(x), y).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
                    p.grad = None
    return w.diagnose()


def codes(verdict):
    return [x.code for x in verdict.findings]


def shrunk(model, step, x, y):
    with torch.no_grad():
        for p in model.parameters() if step > AT else ():
            p *= 0.96
    return y


def test_weights_that_shrink_by_hand_are_what_has_moved():
    verdict = trained(shrunk)
    (found,) = [x for x in verdict.findings if x.code == CODE]
    assert (found.severity, verdict.status) == ("info", "healthy")
    assert AT - 32 <= found.step <= AT + 64
    assert "Since then, as cause or effect: " in found.message
    assert "the norm of " in found.message
    assert " of what it was" in found.message


def test_without_a_rise_or_with_one_that_is_told_it_is_silent():
    assert CODE not in codes(trained(lambda model, step, x, y: y))
    told = codes(trained(lambda model, step, x, y: y + 3 * (step > AT)))  # other targets
    assert CODE not in told
    assert {"loss.spike", "loss.worse"} & {*told}
