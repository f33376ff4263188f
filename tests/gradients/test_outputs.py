"""Gradients of layers' outputs, beside those of parameters."""

import pytest
from torch import nn

from hookcb import (
    MixedPrecision,
)
from hookcb.gradients.callback import GradientHealth
from tests.support import fit, make_learner


def test_gradients_of_outputs_are_unscaled_and_of_every_call():
    seen = {}

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.head = nn.Linear(2, 2), nn.Linear(2, 1)

        def forward(self, x):
            a = self.fc(x)
            b = self.fc(a.relu())
            for name, t in (("fc#0", a), ("fc#1", b)):
                if t.requires_grad:
                    t.register_hook(lambda g, name=name: seen.setdefault(name, g.clone()))
            return self.head(b)

    for cbs in ([], [MixedPrecision("fp16", init_scale=4.0)]):
        seen.clear()
        health = fit(
            make_learner(model=Twice(), cbs=[GradientHealth(activations=True), *cbs])
        ).gradient_health
        assert health.output_stats.names == ["fc#0", "fc#1", "head"]
        for name, g in seen.items():
            true = g.double() / (4.0 if cbs else 1.0)
            assert health.output_stats.stats[0][name]["std"] == pytest.approx(true.std().item(), rel=1e-4)
            assert health.output_stats.stats[0][name]["abs_max"] == pytest.approx(
                true.abs().max().item(), rel=1e-4
            )
