"""loss.detached: losses without a graph."""

import torch
from torch import nn

from hookcb import diagnose
from hookcb.diagnosis.faults.loss.detached import DetachedLoss
from hookcb.diagnosis.run import Absent, Run, Skipped


def test_a_loss_without_a_graph_says_what_to_do():
    batch = torch.randn(4, 3), torch.randn(4, 2)
    verdict = diagnose(nn.Linear(3, 2), batch, lambda p, y: (p.detach() - y).square().mean())
    (found,) = (x for x in verdict.findings if x.code == "loss.detached")
    assert (found.severity, found.step) == ("error", 0)
    assert found.causes
    assert found.next_steps


def test_without_a_loss_nothing_is_said():
    (skipped,) = DetachedLoss().findings(Run())
    assert skipped == Skipped("too little was seen of the loss")
    of_others = "each loss is that of another model"
    (absent,) = DetachedLoss().findings(Run(reasons={"loss": Absent(of_others)}))
    assert absent == Absent(of_others)
