"""Where a spike of the loss shows first in the forward."""

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

pytestmark = pytest.mark.usefixtures("nothing_compiled")
SPIKE = Spike(100, 0, 100, 5.0, 1.0, 0.1, after=[4.0] * 40, lasted=40)
USUAL = (1.0, 1.02, 0.98, 1.0)  # in four looks


def run_with(looks, **of_layers):
    """A run whose layers had outputs of these sizes before; `looks` has those in the spike, by step."""
    run = Run(layers={name: Layer(name, "Linear", "Linear 4→4", i) for i, name in enumerate(of_layers)})
    looked = run.measured(SpikeLooks)
    n = max(map(len, of_layers.values()))
    looked.before = {SPIKE.step: {10 * i: {} for i in range(n)}}
    for name, sizes in of_layers.items():
        for i, x in enumerate(sizes):
            looked.before[SPIKE.step][10 * i][name] = profile_of(x)
    looked.after = {
        SPIKE.step: {
            step: {name: profile_of(x) for name, x in zip(of_layers, sizes, strict=True)}
            for step, sizes in looks.items()
        }
    }
    return run


def profile_of(size):
    """Means and standard deviations of two channels."""
    return [0.5 * size, -0.5 * size, size, size]


def test_the_first_layer_in_the_forward_that_changed_is_named():
    run = run_with({102: (1.0, 3.0, 9.0), 105: (1.0, 3.0, 9.0)}, inp=USUAL, clock=USUAL, head=USUAL)
    layer, text = first_change(SPIKE, run)
    assert layer.name == "clock"
    assert text == (
        " At steps 102 and 105 the standard deviation of the output of clock was 3 times that before, "
        "while the layer before it in the forward had not changed."
    )
    down = run_with({102: (1.0, 1.0, 0.3, 9.0)}, inp=USUAL, b=USUAL, clock=USUAL, head=USUAL)
    assert "clock was 0.3 times that before, while the 2 layers before" in first_change(SPIKE, down).text


def test_channels_that_move_without_a_change_of_size_are_told_as_such():
    run = run_with({102: (1.0, 1.0, 1.0)}, inp=USUAL, clock=USUAL, head=USUAL)
    run.measured(SpikeLooks).after[SPIKE.step][102]["clock"] = [-0.5, 0.5, 1.0, 1.0]
    layer, text = first_change(SPIKE, run)
    assert layer.name == "clock"
    assert (
        "the channels of the output of clock had moved, 22 times as much as between the looks before" in text
    )


def test_of_the_first_layer_the_inputs_may_have_changed():
    layer, text = first_change(SPIKE, run_with({102: (3.0, 3.0)}, inp=USUAL, head=USUAL))
    assert layer.name == "inp"
    assert text.endswith("it is the first layer, so that its inputs may have changed.")


def test_of_the_last_layer_the_targets_may_have_changed():
    layer, text = first_change(SPIKE, run_with({102: (1.0, 3.0)}, inp=USUAL, head=USUAL))
    assert layer is None  # as it learns within a few steps
    assert "the output of head was 3 times that before" in text
    assert text.endswith("it is the last layer, so that its targets may have changed.")


@pytest.mark.parametrize(
    ("before", "looks"),
    [
        ([2.0**i for i in range(4)], {102: (1.0, 2.0**4)}),  # it grows so from look to look
        (USUAL, {102: (1.0, 3.0), 105: (1.0, 1.0)}),  # in one look of two
        (USUAL, {102: (1.0, 1.25)}),  # of the last layer
        (USUAL, {102: (1.15, 1.0)}),
    ],
)
def test_a_layer_that_drifts_or_changes_in_one_look_is_not_named(before, looks):
    assert first_change(SPIKE, run_with(looks, inp=USUAL, body=before)) is None


def test_too_few_looks_say_nothing():
    assert first_change(SPIKE, Run()) is None
    assert first_change(SPIKE, run_with({102: (3.0,)}, inp=USUAL[:3])) is None
    assert first_change(SPIKE, run_with({102: (1.0, math.nan)}, inp=USUAL, head=USUAL)) is None  # is not all
    half = run_with({102: (3.0, 3.0)}, inp=(math.nan, *USUAL), head=USUAL)
    assert first_change(SPIKE, half).layer.name == "inp"  # by the other four looks


@pytest.mark.parametrize("shape", [(), (5,), (4, 3), (4, 7, 3), (2, 3, 4, 4), (9_000, 70)])
def test_a_profile_has_means_and_deviations_of_channels(shape):
    x = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    rows = (x.movedim(1, -1) if x.ndim == 4 else x.reshape(-1, *shape[-1:] or (1,))).flatten(0, -2)
    rows = rows[:: max(1, len(rows) // 2_048), :: max(1, rows.shape[1] // 32)][:, :32]
    expected = torch.cat([rows.mean(0), rows.std(0, correction=0)])
    torch.testing.assert_close(spike_looks.profile(x).double(), expected)


class Net(nn.Module):
    """A network with a scale that is no attribute of a layer."""

    def __init__(self):
        super().__init__()
        self.scale = {}
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
    assert "while the layer before it in the forward had not changed" in found.message
    assert found.next_steps[0] == "Look at what mid gets and computes from step 201 on"
    assert count_hooks(model) == 0
    plain, _ = trained("scale")
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)


def test_labels_that_are_wrong_from_a_batch_on_name_no_layer():
    found = of_spike(trained("labels", Diagnose(show=False))[1])
    assert found.layer == ""
    assert "in the forward" not in found.message


def test_an_error_in_a_look_at_a_spike_ends_nothing(monkeypatch):
    def fail(x):
        raise RuntimeError("no statistics")

    monkeypatch.setattr(spike_looks, "profile", fail)
    model, verdict = trained("scale", Diagnose(show=False))
    assert of_spike(verdict).layer == ""
    assert count_hooks(model) == 0
