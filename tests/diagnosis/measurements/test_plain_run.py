"""The loss of a compiled model is read from a run of its original, of which nothing is left."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, Learner
from hookcb.diagnosis.measurements.loss import Loss
from tests.support import fit


def graph_of(model, monkeypatch):
    """Loss graph that was read, the loss of guessing, and the trained learner."""
    seen = []

    freeze = Loss.freeze
    monkeypatch.setattr(Loss, "freeze", lambda self: (seen.append((self.graph, self.guess)), freeze(self)))
    torch.manual_seed(0)
    x = torch.randn(48, 6)
    batches = list(zip(x.split(16), x[:, :3].argmax(1).split(16), strict=True))
    learn = fit(
        Learner(batches, model, F.cross_entropy, torch.optim.SGD, lr=0.1), 1, cbs=Diagnose(show=False)
    )
    return *seen[0], learn


def net(*last):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3), *last)


@pytest.mark.slow
def test_the_original_of_a_compiled_model_tells_what_the_graph_hides(monkeypatch):
    plain = graph_of(net(nn.Softmax(1)), monkeypatch)
    compiled = graph_of(torch.compile(net(nn.Softmax(1)), backend="aot_eager"), monkeypatch)
    assert (compiled[0].kind, compiled[0].head) == (plain[0].kind, plain[0].head)
    assert compiled[0].head
    assert compiled[1] == plain[1]


@pytest.mark.slow
def test_the_run_leaves_no_trace_in_the_training(monkeypatch):
    weights = []
    for model in (net(), torch.compile(net(), backend="aot_eager")):
        torch.manual_seed(5)
        _, _, learn = graph_of(model, monkeypatch)
        weights.append([p.detach().clone() for p in learn.model.parameters()])
    assert all(map(torch.equal, *weights))
