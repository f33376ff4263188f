"""head.stuck: shares of the error from outputs that a ReLU holds at 0."""

import pytest
import torch
import torch.nn.functional as F

from hookcb.diagnosis.faults.head.stuck import StuckHead, stuck_share
from hookcb.diagnosis.measurements.loss_graph import read_loss
from hookcb.diagnosis.run import Absent, Passed, Series
from tests.diagnosis.faults.loss.support import flat
from tests.diagnosis.support import evidence, measured, only


def stuck(*shares, n=100):
    steps = list(range(len(shares)))
    given = measured(evidence(loss=flat(1.0, n)), StuckHead, shares=Series(steps, list(shares)))
    (found,) = given.measured(StuckHead).findings(given)
    return found


def test_outputs_that_a_relu_holds_at_0_are_named():
    found = stuck(0.2, 0.6, 0.9, 0.7)
    assert (found.code, found.severity, found.value) == ("head.stuck", "warning", 0.6)
    assert "60% of the error" in found.message


@pytest.mark.parametrize("shares", [(0.7, 0.3, 0.0, 0.0), (0.9, 0.9, 0.2), (1.0, 1.0, 0.39)])
def test_few_of_them_or_for_a_while_are_fine(shares):
    assert isinstance(stuck(*shares), Passed)


def test_before_50_batches_only_a_head_that_is_dead_counts():
    assert isinstance(stuck(0.7, 0.9, n=5), Passed)
    assert stuck(1.0, 1.0, n=5).code == "head.stuck"


def test_without_a_relu_as_the_head_there_is_nothing_to_check():
    assert isinstance(only(StuckHead, evidence(loss=flat(1.0))), Absent)


def scores():
    return torch.linspace(-1, 1, 8)[:, None] @ torch.ones(1, 1, requires_grad=True)


@pytest.mark.parametrize("loss", [F.mse_loss, lambda p, y: ((p - y) ** 2).mean()])
def test_the_share_of_the_error_from_outputs_that_a_relu_holds_at_0(loss):
    layer = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    out, y = F.relu(torch.eye(2) @ layer), torch.tensor([[2.0], [3.0]])
    node = loss(out, y).grad_fn
    assert stuck_share(read_loss(node), node, out, (y,)).item() == pytest.approx(9 / 10)
    assert stuck_share(read_loss(node), node, out, (-y,)).item() == pytest.approx(
        0.9 if loss is F.mse_loss else 0  # torch's loss has saved its own targets
    )


def test_it_is_unknown_for_other_heads_and_losses():
    out, y = F.relu(scores()), torch.ones(8, 1)
    for head, loss in ((out, F.l1_loss), (scores(), F.mse_loss), (scores().sigmoid(), F.mse_loss)):
        node = loss(head, y).grad_fn
        assert stuck_share(read_loss(node), node, head, (y,)) is None
