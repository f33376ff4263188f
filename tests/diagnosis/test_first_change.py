"""Where a spike of the loss shows first in the forward."""

import copy
import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, watch
from hookcb.diagnosis.first_change import first_change
from hookcb.diagnosis.measurements import spike_looks
from hookcb.diagnosis.measurements.spike_looks import SpikeLooks
from hookcb.diagnosis.measurements.spikes import Spike
from hookcb.diagnosis.run import Layer, Run
from hookcb.testing import count_hooks
from tests.diagnosis.faults.loss.support import noisy
from tests.diagnosis.support import series

USUAL = noisy([1.0] * 10, 0.01)  # at steps 0, 10 … 90
SPIKE = Spike(100, 0, 100, 5.0, 1.0, 0.1, after=[4.0] * 40, lasted=40)


def run_with(looks, **of_layers):
    """A run whose layers had these standard deviations; `looks` has those while the spike lasts, by step."""
    layers = {
        name: Layer(name, "Linear", "Linear 4→4", place, {"std": series(std, every=10)})
        for place, (name, std) in enumerate(of_layers.items())
    }
    run = Run(layers=layers)
    if looks:
        found = {
            step: {name: {"std": x} for name, x in zip(of_layers, values, strict=True)}
            for step, values in looks.items()
        }
        run.measured(SpikeLooks).found = {SPIKE.step: found}
    return run


def test_the_first_layer_in_the_forward_that_changed_is_named():
    run = run_with({102: (1.0, 3.0, 9.0), 105: (1.0, 3.3, 9.0)}, inp=USUAL, clock=USUAL, head=USUAL)
    layer, text = first_change(SPIKE, run)
    assert layer.name == "clock"
    assert text == (
        " At steps 102 and 105 the standard deviation of the output of clock was 3 times its usual value, "
        "while the layer before it in the forward was as before."
    )
    down = run_with({102: (1.0, 0.3, 9.0)}, inp=USUAL, clock=USUAL, head=USUAL)
    assert "clock was 0.3 times its usual value" in first_change(SPIKE, down).text


def test_of_the_first_layer_the_inputs_may_have_changed():
    layer, text = first_change(SPIKE, run_with({102: (3.0, 3.0)}, inp=USUAL, head=USUAL))
    assert layer.name == "inp"
    assert text.endswith("it is the first layer, so that its inputs may have changed.")


@pytest.mark.parametrize(
    ("before", "looks"),
    [
        ([2.0**i for i in range(10)], {102: (1.0, 2.0**10)}),  # it grows so from look to look
        (USUAL, {102: (1.0, 3.0), 105: (1.0, 1.0)}),  # in one look of two
        (USUAL, {102: (1.0, 3.0), 105: (1.0, 0.3)}),  # in two directions
        (USUAL, {102: (1.0, 1.4)}),  # of the last layer
        (USUAL, {102: (1.2, 1.0)}),
    ],
)
def test_a_layer_that_drifts_or_changes_in_one_look_is_not_named(before, looks):
    layer, text = first_change(SPIKE, run_with(looks, inp=USUAL, body=before))
    assert layer is None
    assert "the outputs of all 2 layers were of their usual size" in text


def test_too_few_looks_say_nothing():
    assert first_change(SPIKE, run_with({}, inp=USUAL)) is None
    assert first_change(SPIKE, run_with({102: (3.0,)}, inp=USUAL[:7])) is None
    assert first_change(SPIKE, run_with({102: (1.0, math.nan)}, inp=USUAL, head=USUAL)) is None  # is not all


def test_inspected_batches_soon_after_are_used_if_nothing_else_was_seen():
    run = run_with({}, inp=noisy([1.0] * 20, 0.01), body=[*USUAL, 1.0, 3.0, 3.0, 1.0])  # steps 110 and 120
    layer, text = first_change(SPIKE, run)
    assert layer.name == "body"
    assert " At steps 110 and 120 " in text
    late = run_with({}, inp=noisy([1.0] * 20, 0.01), body=[*USUAL, 1.0, 1.0, 1.0, 1.0, 3.0])
    assert first_change(SPIKE, late).layer is None  # by then the layers have learned from it


class Net(nn.Module):
    """A network with a scale that is no attribute of a layer."""

    scale: dict = {}

    def __init__(self):
        super().__init__()
        self.inp, self.mid, self.head = nn.Linear(6, 32), nn.Linear(32, 32), nn.Linear(32, 3)

    def forward(self, x):
        x = F.gelu(self.inp(x)) * self.scale.get("mid", 1.0)
        return self.head(F.gelu(self.mid(x)))


def trained(change, *cbs, n=240):
    """Train, with a change of batches or of the scale from step 200 on."""
    torch.manual_seed(0)
    model, true, scale = Net(), torch.randn(6, 3), {}
    model.scale = scale
    opt = torch.optim.Adam(model.parameters(), 1e-2)
    with watch(model, opt, *cbs) if cbs else nullcontext() as w:
        for step in range(n):
            x = torch.randn(32, 6)
            y = (x @ true).argmax(1)
            if step == 200 and change == "scale":
                scale["mid"] = 8.0
            if step >= 200 and change == "labels":
                y = (y + 1) % 3
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        return model, w.diagnose() if cbs else None


def of_spike(verdict):
    return next(f for f in verdict.findings if f.code == "loss.spike")


def test_a_layer_whose_inputs_were_scaled_in_mid_run_is_named():
    model, verdict = trained("scale", Diagnose(show=False))
    found = of_spike(verdict)
    assert (found.layer, found.severity) == ("mid", "info")
    assert found.step == 201  # the scores of step 200 were right by chance
    assert "of the output of mid was" in found.message
    assert "while the layer before it in the forward was as before" in found.message
    assert found.next_steps[0] == "Look at what mid gets and computes from step 201 on"
    assert count_hooks(model) == 0
    plain, _ = trained("scale")
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)


def test_labels_that_are_wrong_from_a_batch_on_name_no_layer():
    found = of_spike(trained("labels", Diagnose(show=False))[1])
    assert found.layer == ""
    assert "the outputs of all 3 layers were of their usual size" in found.message


def test_an_error_in_a_look_at_a_spike_ends_nothing(monkeypatch):
    def fail(x):
        raise RuntimeError("no statistics")

    monkeypatch.setattr(spike_looks, "layer_stats", fail)
    model, verdict = trained("scale", Diagnose(show=False))
    assert of_spike(verdict).layer == ""
    assert count_hooks(model) == 0
    assert copy.deepcopy(model) is not model
