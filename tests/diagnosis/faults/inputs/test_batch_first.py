"""Recurrent and attention layers that take samples for steps, in trainings of both kinds."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, watch
from hookcb.diagnosis.faults.inputs.batch_first import BatchFirst
from hookcb.diagnosis.measurements.targets import Targets
from hookcb.diagnosis.run import Run
from hookcb.diagnosis.verdict import Finding
from tests.support import first, in_turn

N, T, D = 12, 5, 8
GRU = nn.GRU(D, D)
NAME = "samples taken for steps of a sequence"


class Net(nn.Module):
    """A layer for sequences, and a head on the last step; the input has samples or steps first."""

    def __init__(self, layer, steps_first=False, all_steps=False):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(D, 2)
        self.steps_first, self.all_steps = steps_first, all_steps

    def forward(self, x):
        is_attention = isinstance(self.layer, nn.MultiheadAttention)
        out = self.layer(x, x, x)[0] if is_attention else self.layer(x)
        out = out[0] if isinstance(out, tuple) else out
        if not self.all_steps:
            out = out[-1] if self.steps_first else out[:, -1]
        return self.head(out)


def train(model, shape=(N, T, D), targets=(N,), n=8, last=None):
    torch.manual_seed(0)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    with watch(model, opt, cbs=Diagnose(on_sick="ignore")) as loop:
        for i in range(n):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(i))
            y = torch.randint(2, targets, generator=torch.Generator().manual_seed(i))
            loss = F.cross_entropy(model(x).reshape(-1, 2), y.reshape(-1))
            opt.zero_grad()
            loss.backward()
            opt.step()
    return loop.diagnose()


def found(verdict):
    return [f.layer for f in verdict.findings if f.code == "layer.batch_first"]


def encoder(batch_first):
    layer = nn.TransformerEncoderLayer(D, 2, 16, batch_first=batch_first, dropout=0.0)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


LAYERS = {
    "LSTM": lambda **kwargs: nn.LSTM(D, D, **kwargs),
    "GRU": lambda **kwargs: nn.GRU(D, D, **kwargs),
    "RNN": lambda **kwargs: nn.RNN(D, D, **kwargs),
    "attention": lambda **kwargs: nn.MultiheadAttention(D, 2, **kwargs),
    "attention without weights": lambda **kwargs: encoder(kwargs.get("batch_first", False)),
}


@in_turn("make", LAYERS.values(), ids=LAYERS)
def test_a_forgotten_batch_first_is_found(make):
    verdict = train(Net(make()))
    (layer,) = found(verdict)
    assert layer.startswith("layer")
    (finding,) = [f for f in verdict.findings if f.code == "layer.batch_first"]
    assert f"takes the {N} samples of the batch for the steps" in finding.message
    assert "batch_first=True" in finding.next_steps[0]


@pytest.mark.parametrize("make", first(LAYERS.values()), ids=LAYERS)
def test_with_batch_first_or_steps_first_all_is_well(make):
    assert not found(train(Net(make(batch_first=True))))
    verdict = train(Net(make(), steps_first=True), shape=(T, N, D))
    assert not found(verdict)
    assert NAME in verdict.ruled_out


@pytest.mark.parametrize(
    ("shape", "targets"),
    first(
        [
            ((T, N, D), (T, N)),  # a target for each step
            ((T, N, D), (T * N,)),
            ((T, 1, D), (T,)),  # a single long sequence
            ((T, T, D), (T, T)),
        ]
    ),
)
def test_a_target_for_each_step_does_not_tell_samples_from_steps(shape, targets):
    assert not found(train(Net(nn.GRU(D, D), all_steps=True), shape, targets))


def test_two_batches_are_too_few():
    verdict = train(Net(nn.GRU(D, D)), n=2)
    assert not found(verdict)
    assert NAME not in verdict.ruled_out


def compared(run, fault, n, n_targets, t):
    """Layers found after one more batch, whose targets tell the number of samples."""
    xb, yb = (torch.zeros(n_targets, t, D),), (torch.zeros(n_targets),)
    run.loop = SimpleNamespace(xb=xb, yb=yb, train_iter=0)
    fault.on_batch(run)
    fault.on_output(run, "gru", GRU, torch.zeros(n, t, D))
    fault.on_loss(run)
    run.measured(Targets).on_batch_end(run)
    return [x.layer for x in fault.findings(run) if isinstance(x, Finding)]


def test_one_batch_that_is_right_clears_the_layer():
    run = Run()
    fault = run.measured(BatchFirst)
    assert [compared(run, fault, 12, 12, T) for _ in range(4)] == [[], [], ["gru"], ["gru"]]
    assert compared(run, fault, T, 9, 9) == []
