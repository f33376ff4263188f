"""The spread and the saturation of layers' outputs, against what a definition gives."""

import math

import pytest
import torch
from hookcb.diagnosis.probes.layer import MAX_ELEMENTS, LayerProbe, spread
from torch import nn


def test_the_spread_is_the_variance_across_the_batch_by_the_second_moment():
    x = torch.randn(6, 3, 5, generator=torch.Generator().manual_seed(0)) + 2
    mean = x.double().mean(0, keepdim=True)
    expected = ((x.double() - mean) ** 2).mean() / (x.double() ** 2).mean()
    assert spread(x).item() == pytest.approx(expected.item(), rel=1e-5)


def test_samples_that_are_the_same_have_no_spread_and_a_single_one_has_none_to_tell():
    row = torch.randn(1, 7, generator=torch.Generator().manual_seed(0))
    assert spread(row.expand(4, 7)).item() == 0.0
    for x in (row, torch.tensor(1.0), torch.zeros(4, 7)):
        assert math.isnan(spread(x).item())


def test_of_a_large_output_the_spread_is_about_that_of_all():
    x = torch.randn(64, 8 * MAX_ELEMENTS // 64, generator=torch.Generator().manual_seed(0)) + 1
    expected = x.var(0, correction=0).mean() / x.square().mean()
    assert spread(x).item() == pytest.approx(expected.item(), rel=0.05)


def test_each_batch_makes_a_record_of_the_layers_that_were_called():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    probe, layers = LayerProbe(model), {}
    for step, value in ((0, 0.0), (5, 9.0)):
        probe.begin_record(step)
        assert probe.last == ""
        probe.measure_layer(model[1], torch.full((4, 4), math.tanh(value)))
        assert probe.last == "1"
        probe.end_record()
    probe.add_to(layers, {"1": "Tanh"})
    assert list(layers) == ["1"]
    assert (layers["1"].kind, layers["1"].largest) == ("Tanh", torch.finfo(torch.float32).max)
    assert layers["1"].series("saturated").steps == [0, 5]
    assert layers["1"].series("saturated").values == [0.0, 1.0]


def test_what_has_no_numbers_is_left_out_and_copies_are_counted():
    model = nn.Sequential(nn.Linear(3, 4))
    probe, layers = LayerProbe(model), {}
    probe.begin_record(0)
    for output in (None, torch.ones(3, dtype=torch.int64), torch.empty(0, 4), "text"):
        probe.measure_layer(model[0], output)
    probe.measure_layer(nn.Linear(3, 4), torch.ones(2, 4))
    probe.end_record()
    probe.add_to(layers, {})
    assert layers == {}
    assert probe.n_copies == 1
