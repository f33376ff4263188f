"""Outlier channels: their number against its definition, and what is told of them."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, Learner
from hookcb.diagnosis.faults.model.outliers import N_POSITIONS, OutlierChannels, _places, peaks
from hookcb.diagnosis.measurements.inputs import Inputs
from hookcb.diagnosis.run import Layer, Passed, Run, Series, Skipped
from tests.diagnosis.support import measured
from tests.support import fit, in_turn

FLOAT16, BFLOAT16 = 65_504.0, 3.4e38


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@in_turn(
    "dtype, shape",
    itertools.product(
        [torch.float32, torch.float64, torch.float16, torch.bfloat16], [(8, 64), (4, 16, 64), (2, 3, 5, 128)]
    ),
)
def test_kurtosis_and_share_are_what_their_definition_gives(shape, dtype):
    x = (randn(*shape) * 100).to(dtype)
    x[..., 7] *= 9
    squares = x.double().reshape(-1, shape[-1]).square().mean(0)
    want = [(squares**2).mean() / squares.mean() ** 2, squares.max() / squares.sum()]
    rel = 1e-6 if x.numel() // shape[-1] <= N_POSITIONS else 0.2
    assert peaks(x)[0].tolist() == pytest.approx([v.item() for v in want], rel=rel)


def test_the_ends_are_one_and_the_number_of_channels():
    assert peaks(torch.ones(9, 64))[0].tolist() == pytest.approx([1, 1 / 64])
    assert peaks(F.one_hot(torch.full((9,), 3), 64).float() * 1e30)[0].tolist() == pytest.approx([64, 1])
    assert peaks(torch.zeros(9, 64)).isnan().all()


@pytest.mark.parametrize("length", [16, 64, 100, 1024])
def test_the_positions_are_at_many_places_of_a_sequence(length):
    places = _places(8 * length, N_POSITIONS, torch.device("cpu"))
    assert len({place % length for place in places.tolist()}) >= min(length, N_POSITIONS) / 2


def given(kurtosis, largest=BFLOAT16, abs_max=10.0, n=8, name="norm"):
    """What was seen of a layer before the head."""
    steps = list(range(0, 10 * n, 10))
    layers = {
        x: Layer(x, "LayerNorm", "LayerNorm 64", i, {"abs_max": Series(steps, [abs_max] * n)}, largest)
        for i, x in enumerate((name, "head"))
    }
    fault = OutlierChannels()
    values = kurtosis if isinstance(kurtosis, list) else [kurtosis] * n
    fault._series = {
        name: {"channels": Series(steps[: len(values)], values), "largest": Series(steps, [0.6] * n)}
    }
    (found,) = fault.findings(measured(Run(layers=layers), Inputs, std=Series()))
    return found


def test_outlier_channels_are_a_note_with_their_share():
    found = given(40.0)
    assert (found.code, found.severity, found.layer) == ("act.outliers", "info", "norm")
    assert "60% of the sum of squares" in found.message
    assert (found.value, found.limit, found.step, found.last_step) == (40.0, 20.0, 0, 70)


@pytest.mark.parametrize(
    ("largest", "abs_max", "severity"),
    [(FLOAT16, 16_000, "info"), (FLOAT16, 17_000, "warning"), (BFLOAT16, 1e30, "info")],
)
def test_they_are_a_warning_only_if_float16_is_near_its_end(largest, abs_max, severity):
    found = given(40.0, largest, abs_max)
    assert found.severity == severity
    assert ("float16 ends at 65,504" in found.message) == (severity == "warning")


def test_a_few_records_or_a_peak_that_passes_say_nothing():
    assert isinstance(given([50.0] * 4), Skipped)
    assert isinstance(given([50.0] * 4 + [3.0] * 4), Passed)
    assert isinstance(given([3.0, 3.0, 90.0, 3.0, 3.0, 3.0]), Passed)


@pytest.mark.parametrize(("scale", "codes"), [(60.0, ["act.outliers"]), (3.0, [])])
def test_a_training_with_one_large_channel_is_told_and_the_head_is_not(scale, codes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 96), nn.LayerNorm(96), nn.ReLU(), nn.Linear(96, 64))
    with torch.no_grad():
        model[1].weight[5] *= scale
        model[3].weight[5] *= 100
    batches = [(randn(32, 8, seed=k), randn(32, 64, seed=k + 50)) for k in range(30)]
    learn = Learner(batches, model, F.mse_loss, torch.optim.SGD, lr=1e-6)
    fit(learn, 1, cbs=[Diagnose("ignore", show=False)])
    found = [x for x in learn.diagnose().findings if x.code == "act.outliers"]
    assert [x.code for x in found] == codes
    assert [x.layer for x in found] == ["1"] * len(codes)
