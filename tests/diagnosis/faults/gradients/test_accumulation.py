"""Losses of several backwards that are summed to one step."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hookcb import Diagnose, watch
from hookcb.diagnosis.faults.gradients.accumulation import Accumulation
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.loss_graph import LossGraph
from tests.diagnosis.faults.support import followed
from tests.support import each, first, in_turn, pairs


@pytest.mark.parametrize(
    ("n", "divide", "reports", "opt_class"),
    first(pairs([4, 1], [False, True], [True, False], [torch.optim.SGD, torch.optim.Adam])),
)
def test_losses_that_are_summed_over_batches_get_a_note_if_their_scale_matters(n, divide, reports, opt_class):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    opt = opt_class(model.parameters(), 0.01)
    with watch(model, opt, Diagnose("ignore", show=False)) as w:
        for i in range(41):
            loss = nn.functional.cross_entropy(model(torch.randn(16, 4)), torch.randint(3, (16,)))
            if reports:
                w.report_loss(loss)
            (loss / n if divide else loss).backward()
            if i % n == n - 1:
                opt.step()
                opt.zero_grad()
    noted = [(x.severity, x.value) for x in w.diagnose().findings if x.code == "accum.divisor"]
    is_summed = n == 4 and not divide and opt_class is torch.optim.SGD
    assert noted == ([("info", 4.0)] if is_summed else [])
    assert not [note for note in w.diagnose().coverage if "a part of Diagnose" in note]


@in_turn("n_backward", [set(), {1}, {2, 4}, {1, 4}])
def test_a_varying_number_of_backwards_gets_no_note(n_backward):
    fault, run = followed(Accumulation, nn.Linear(2, 2))
    run.loop.is_external = fault._is_external = True
    run.loop.scaler, run.loop.facts = None, SimpleNamespace(n_losses_reported=0)
    run.measured(Loss).graph, run.n_steps = LossGraph(scale=1.0), 12
    fault._counts = n_backward
    fault.on_end(run)
    assert fault.seen == []
    fault._counts = {2}
    fault.on_end(run)
    assert [x.value for x in fault.seen] == [2.0]


@pytest.mark.slow
@pytest.mark.parametrize("change", each(2, ["none", "zero", "scale", "other", "after"]))
def test_gradients_that_do_not_add_up_are_not_said_to_be_summed(change):
    """As in sharpness-aware minimization, and in gradient surgery."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, Diagnose("ignore", show=False)) as w:
        for i in range(60):
            nn.functional.cross_entropy(model(torch.randn(16, 4)), torch.randint(3, (16,))).backward()
            if change == "after" and i % 2:
                for p in model.parameters():
                    p.grad /= 2
            if i % 2:
                opt.step()
            if i % 2 or change in ("none", "zero"):
                opt.zero_grad(set_to_none=change != "zero")
            elif change == "scale":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            elif change == "other":
                for p in model.parameters():
                    p.grad = p.grad / 2
    assert not [x for x in w.diagnose().findings if x.code == "accum.divisor"]
