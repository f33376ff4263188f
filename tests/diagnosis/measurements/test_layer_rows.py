"""The spread and the saturation of layers' outputs, against what a definition gives."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from hookcb.diagnosis.measurements.layer_rows import (
    MAX_ELEMENTS,
    LayerRows,
    float_output,
    sample_of,
    saturated_share,
    spread,
)
from hookcb.diagnosis.run import Run


def spread_of(x):
    return spread(sample_of(x)[None])


def test_the_spread_is_the_variance_across_the_batch_by_the_second_moment():
    x = torch.randn(6, 3, 5, generator=torch.Generator().manual_seed(0)) + 2
    mean = x.double().mean(0, keepdim=True)
    expected = ((x.double() - mean) ** 2).mean() / (x.double() ** 2).mean()
    assert spread_of(x).item() == pytest.approx(expected.item(), rel=1e-5)


def test_samples_that_are_the_same_have_no_spread_and_a_single_one_has_none_to_tell():
    row = torch.randn(1, 7, generator=torch.Generator().manual_seed(0))
    assert spread_of(row.expand(4, 7)).item() == 0.0
    for x in (row, torch.tensor(1.0), torch.zeros(4, 7)):
        assert math.isnan(spread_of(x).item())


def test_of_a_large_output_the_spread_is_about_that_of_all():
    x = torch.randn(64, 8 * MAX_ELEMENTS // 64, generator=torch.Generator().manual_seed(0)) + 1
    expected = x.var(0, correction=0).mean() / x.square().mean()
    assert spread_of(x).item() == pytest.approx(expected.item(), rel=0.05)


def batch(run, step, *outputs):
    """A batch in which layers have these outputs."""
    rows, run.loop = run.measured(LayerRows), SimpleNamespace(train_iter=step, model=nn.Sequential(nn.Tanh()))
    if not step:
        rows.on_model(run)
    rows.on_batch(run)
    assert rows.last == ""
    for name, m, output in outputs:
        rows.on_output(run, name, m, output)
    assert rows.last == next((name for name, _, x in reversed(outputs) if isinstance(x, Tensor)), "")
    rows.on_batch_end(run)
    return rows


def test_each_batch_makes_a_record_of_the_layers_that_were_called():
    run, told = Run(), Run()
    for step, value in ((0, 0.0), (5, 9.0)):
        rows = batch(run, step, ("0", nn.Tanh(), torch.full((4, 4), math.tanh(value))))
    rows.tell(told)
    layer = told.layers["0"]
    assert (layer.kind, layer.largest) == ("Tanh", torch.finfo(torch.float32).max)
    assert layer.series("saturated").steps == [0, 5]
    assert layer.series("saturated").values == [0.0, 1.0]


def test_what_has_no_numbers_is_left_out_and_copies_are_told():
    run, told = Run(), Run()
    rows = batch(run, 0, ("0", nn.Tanh(), None), ("0", nn.Tanh(), "text"))
    for output in (torch.ones(3, dtype=torch.int64), torch.empty(0, 4)):
        assert float_output("0", output) is None
    rows.on_output(run, "", nn.Tanh(), torch.ones(2, 4))
    rows.tell(told)
    assert told.layers == {}
    assert "copies" in told.reasons["activations"].reason


@pytest.mark.parametrize("kind", [nn.Tanh, nn.Sigmoid])
def test_the_saturated_share_of_nan_is_unknown(kind):
    assert saturated_share(kind(), torch.full((4, 5), math.nan)).isnan()
    assert saturated_share(kind(), torch.tensor([math.nan, 1.0])) == 0.5


def test_saturated_shares_are_counts_of_elements():
    x = torch.randn(50, 7, generator=torch.Generator().manual_seed(0)) * 3
    t, s = x.tanh(), x.sigmoid()
    assert saturated_share(nn.Tanh(), t) == pytest.approx(
        sum(abs(v) > 0.97 for v in t.flatten().tolist()) / 350
    )
    n = sum(not 0.03 <= v <= 0.97 for v in s.flatten().tolist())
    assert saturated_share(nn.Sigmoid(), s) == pytest.approx(n / 350)
    assert saturated_share(nn.ReLU(), x.relu()) is None
