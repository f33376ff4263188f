"""The pure functions behind GradientHealth, against plain float64."""

import math
import warnings

import pytest
import torch

from hookcb.gradients.samples import RUN, SKETCH, sketch, sketch_copy, sketch_stride
from hookcb.gradients.stats import (
    plain_gradient,
    reduce_small,
    row_norms,
    std_of,
    summarize_gradient,
    update_ratio,
    weight_stats,
)


@pytest.mark.parametrize("shape", [(2000,), (40, 50), (512, 784), (8, 16, 3, 3), (1, 5000), (5000, 1)])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_a_summary_has_the_norms_of_rows_and_the_extremes(shape, scale):
    g = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * scale
    summary = summarize_gradient(g)
    rows = g.double().reshape(shape[0] if len(shape) > 1 else 1, -1).square().sum(1).sqrt()
    torch.testing.assert_close(summary.rows.double(), rows, rtol=1e-5, atol=0)
    assert (summary.largest, summary.nonfinite) == (g.abs().max().item(), 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_extremes_are_of_finite_elements_and_the_others_are_counted(bad):
    g = torch.randn(400, 500, generator=torch.Generator().manual_seed(0))
    g[3, 5] = g[399, 0] = bad
    finite = g[g.isfinite()]
    summary = summarize_gradient(g)
    assert (summary.largest, summary.nonfinite) == (finite.abs().max().item(), 2)


def test_nothing_finite_has_no_extremes():
    summary = summarize_gradient(torch.full((2000,), math.nan))
    assert summary.largest < 0
    assert summary.nonfinite == 2000


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_rows_are_those_of_the_first_dimension_however_memory_lies(memory_format):
    g = torch.randn(6, 4, 3, 5).to(memory_format=memory_format)
    torch.testing.assert_close(row_norms(g), g.reshape(6, -1).norm(dim=1))


@pytest.mark.parametrize("shape", [(10_000_000,), (3, 3_000_001), (65_537,), (200_001, 2)])
def test_norms_of_long_rows_keep_their_digits(shape):
    g = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    want = g.double().reshape(shape[0] if len(shape) > 1 else 1, -1).norm(dim=1)
    torch.testing.assert_close(row_norms(g).double(), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("n", [1025, 2048, 4096, 65_536, 401_408, 2_359_296, 10_007, 1500])
def test_followed_elements_are_spread_and_share_no_divisor_with_dimensions(n):
    n_runs = n // RUN
    assert math.gcd(sketch_stride(n_runs), n_runs) == 1
    followed = sketch_copy(torch.arange(n, dtype=torch.float64))
    assert len(followed) == SKETCH
    assert (followed.diff() > 0).all()
    assert len(set((followed * 8 / n).long().tolist())) == 8


def test_a_sketch_is_a_view_that_follows_the_weights():
    p = torch.nn.Parameter(torch.randn(164, 164))
    view = sketch(p)
    with torch.no_grad():
        p.add_(1)
    torch.testing.assert_close(view.flatten(), sketch_copy(p))
    assert not view.requires_grad


@pytest.mark.parametrize("n_columns", [512, 600, 513, 8, 36])
def test_a_sketch_has_elements_of_all_columns_and_most_rows(n_columns):
    columns = torch.arange(n_columns, dtype=torch.float32).expand(600, n_columns).contiguous()
    rows = torch.arange(600, dtype=torch.float32)[:, None].expand(600, n_columns).contiguous()
    assert len(sketch_copy(columns).unique()) >= min(n_columns, 500)
    assert len(sketch_copy(rows).unique()) >= 200


def test_a_sketch_is_no_copy_that_follows_a_small_parameter():
    p = torch.ones(8)
    kept = sketch_copy(p)
    p.zero_()
    assert kept.sum() == 8


def test_a_sketch_of_strided_memory_without_gaps_is_a_view_and_else_none():
    dense = torch.randn(6, 8, 3, 5).to(memory_format=torch.channels_last)
    assert sketch(dense) is not None
    assert sketch(torch.randn(400, 400)[::2]) is None
    assert sketch(torch.randn(40, 40)) is None  # a stride would miss an end
    assert sketch(torch.randn(4, dtype=torch.complex64)) is None
    assert len(sketch_copy(torch.randn(4, dtype=torch.complex64))) == 8


def test_the_update_ratio_of_nothing_changed_is_0_and_of_zero_weights_inf():
    before = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 0.0]]).double()
    change = torch.tensor([[0.0, 0.5], [0.0, 0.0], [1.0, 0.0]]).double()
    assert update_ratio(change, before).tolist() == [0.1, 0.0, math.inf]


def test_tiny_updates_do_not_underflow():
    change, before = torch.full((1, 4), 1e-30).double(), torch.ones(1, 4)
    assert update_ratio(change, before).item() == pytest.approx(1e-30)


@pytest.mark.parametrize("size", [1e-30, 1e-25, 1e-18, 1e18, 1e20, 1e30])
def test_weights_whose_squares_are_out_of_range_have_exact_numbers(size):
    weights = size * torch.tensor([[1.0, -1, 1, 3], [0, 0, 0, 0]])
    norm, mean, std = weight_stats(weights, is_complex=False)
    exact = weights.double()
    torch.testing.assert_close(norm, exact.norm(dim=-1), rtol=1e-6, atol=0)
    torch.testing.assert_close(mean, exact.mean(-1), rtol=1e-6, atol=0)
    torch.testing.assert_close(std, exact.std(-1), rtol=1e-6, atol=0)
    ratio = update_ratio(weights / 2 - weights, weights)
    torch.testing.assert_close(ratio, torch.tensor([0.5, 0.0], dtype=torch.float64), rtol=1e-6, atol=0)


def test_the_std_of_weights_with_a_nan_is_none():
    norm, total, n = (torch.tensor([x], dtype=torch.float64) for x in (math.nan, math.nan, 4096.0))
    assert std_of(norm, total, n, torch.ones_like(norm)).isnan().all()


def test_weights_far_from_zero_have_an_exact_std():
    x = 1000 + torch.randn(3, 1024, generator=torch.Generator().manual_seed(0))
    norm, mean, std = weight_stats(x, is_complex=False)
    torch.testing.assert_close(std, x.double().std(1), rtol=1e-4, atol=0)
    torch.testing.assert_close(mean, x.double().mean(1))
    torch.testing.assert_close(norm, x.double().norm(dim=1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e25])
def test_small_gradients_are_reduced_as_in_float64(scale):
    x = torch.randn(4, 2, 15, generator=torch.Generator().manual_seed(0)) * scale
    x[:, :, 3:6] = 0
    found = reduce_small(x, torch.Size([5, 3]))
    wide = x.double()
    torch.testing.assert_close(found.norm, wide.norm(dim=2), rtol=1e-5, atol=0)
    torch.testing.assert_close(found.abs_max, wide.abs().amax(2), rtol=1e-6, atol=0)
    torch.testing.assert_close(found.mean_abs, wide.abs().mean(2), rtol=1e-5, atol=0)
    assert (found.zero_rows == 0.2).all()
    assert (found.nonfinite == 0).all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_share_of_zero_rows_is_unknown_without_a_finite_row(value):
    shape, x = torch.Size([5, 3]), torch.zeros(2, 3, 15)
    x[0, 1] = value  # all of a gradient
    x[1, 1, :7] = value  # only a part of it
    found = reduce_small(x, shape)
    assert found.zero_rows.isnan().nonzero().tolist() == [[0, 1]]


def test_odd_gradients_become_plain_ones():
    g = torch.randn(3, 4)
    assert plain_gradient(g.bfloat16()).dtype is torch.float32
    assert plain_gradient(torch.complex(g, g)).allclose(torch.complex(g, g).abs())
    assert plain_gradient(g.to_sparse()).equal(g)
    with warnings.catch_warnings(action="ignore"):  # torch says that it is in beta
        assert plain_gradient(g.to_sparse_csr()).equal(g)
    big = torch.randn(500, 30)
    big[10:] = 0
    norms = row_norms(plain_gradient(big.to_sparse(1)))
    torch.testing.assert_close(norms, big.norm(dim=1))
    assert plain_gradient(torch.empty(3, device="meta")) is None
