"""The pure functions behind GradientHealth, against plain float64."""

import itertools
import math
import warnings

import pytest
import torch

from hookcb.gradients.samples import SKETCH, sketch, sketch_copy
from hookcb.gradients.stats import (
    gradient_sums,
    in_rows,
    norm_of_any_size,
    plain_gradient,
    ratio,
    row_norms,
    std_of,
    weight_stats,
)
from tests.support import in_turn


@in_turn(
    "shape, scale",
    itertools.product(
        [(2000,), (40, 50), (512, 784), (8, 16, 3, 3), (1, 5000), (5000, 1)], [1.0, 1e-30, 1e30]
    ),
)
def test_sums_are_those_of_float64(shape, scale):
    g = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * scale
    g[0] = 0
    norm, size, largest, nonfinite, rows = gradient_sums(in_rows(g)).tolist()
    assert norm == pytest.approx(g.double().norm().item(), rel=1e-5)
    assert size == pytest.approx(g.double().abs().sum().item(), rel=0.05 if g.numel() > 65_536 else 1e-5)
    assert (largest, nonfinite) == (g.abs().max().item(), 0)
    assert rows == (1 if len(shape) == 1 else shape[0] - 1)


def test_many_gradients_of_one_shape_are_read_together():
    x = torch.randn(4, 2, 5, 3, generator=torch.Generator().manual_seed(0))
    x[0, 1, 2], x[3, 0, 1, 2] = math.inf, math.nan
    each = torch.stack([torch.stack([gradient_sums(g) for g in record]) for record in x])
    torch.testing.assert_close(gradient_sums(x), each, equal_nan=True)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_extremes_are_of_finite_elements_and_the_others_are_counted(bad):
    g = torch.randn(400, 500, generator=torch.Generator().manual_seed(0))
    g[3, 5] = g[399, 0] = bad
    finite = g[g.isfinite()]
    assert gradient_sums(g)[2:4].tolist() == [finite.abs().max().item(), 2]
    assert gradient_sums(torch.full((2000, 1), bad))[2:4].tolist() == [-1, 2000]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_rows_are_those_of_the_first_dimension_however_memory_lies(memory_format):
    g = torch.randn(6, 4, 3, 5).to(memory_format=memory_format)
    torch.testing.assert_close(row_norms(in_rows(g)), g.reshape(6, -1).norm(dim=1))


@pytest.mark.parametrize("shape", [(10_000_000,), (3, 3_000_001), (65_537,), (200_001, 2)])
def test_norms_of_long_rows_keep_their_digits(shape):
    g = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    want = g.double().reshape(shape[0] if len(shape) > 1 else 1, -1).norm(dim=1)
    torch.testing.assert_close(row_norms(in_rows(g)).double(), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("n", [1025, 2048, 4096, 65_536, 401_408, 2_359_296, 10_007, 1500])
def test_followed_elements_are_spread_over_a_parameter(n):
    followed = sketch_copy(torch.arange(n, dtype=torch.float64))
    assert len(followed) == SKETCH
    assert (followed.diff() > 0).all()
    assert len(set((followed * 8 / n).long().tolist())) == 8


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


def test_a_sketch_is_in_the_order_of_memory():
    whole = torch.arange(240.0).reshape(2, 3, 5, 8)
    assert sketch(whole.permute(0, 3, 1, 2)).tolist() == list(range(240))
    assert len(sketch_copy(torch.randn(4, dtype=torch.complex64))) == 8


def test_the_ratio_of_nothing_changed_is_0_and_of_zero_weights_inf():
    change, before = torch.tensor([0.5, 0.0, 1.0, 1e-30]).double(), torch.tensor([5.0, 0.0, 0.0, 1.0])
    assert ratio(change, before).tolist() == [0.1, 0.0, math.inf, pytest.approx(1e-30)]


@pytest.mark.parametrize("size", [1e-30, 1e-25, 1e-18, 1e18, 1e20, 1e30])
def test_weights_whose_squares_are_out_of_range_have_exact_numbers(size):
    weights = size * torch.tensor([[1.0, -1, 1, 3], [0, 0, 0, 0]])
    norm, mean, std = weight_stats(weights, is_complex=False)
    exact = weights.double()
    torch.testing.assert_close(norm, exact.norm(dim=-1), rtol=1e-6, atol=0)
    torch.testing.assert_close(mean, exact.mean(-1), rtol=1e-6, atol=0)
    torch.testing.assert_close(std, exact.std(-1), rtol=1e-6, atol=0)
    change = norm_of_any_size(weights / 2 - weights)
    torch.testing.assert_close(change, exact.norm(dim=-1) / 2, rtol=1e-6, atol=0)


def test_the_std_of_weights_with_a_nan_is_none():
    norm, total, n = (torch.tensor([x], dtype=torch.float64) for x in (math.nan, math.nan, 4096.0))
    assert std_of(norm, total, n, torch.ones_like(norm)).isnan().all()


def test_weights_far_from_zero_have_an_exact_std():
    x = 1000 + torch.randn(3, 1024, generator=torch.Generator().manual_seed(0))
    norm, mean, std = weight_stats(x, is_complex=False)
    torch.testing.assert_close(std, x.double().std(1), rtol=1e-4, atol=0)
    torch.testing.assert_close(mean, x.double().mean(1))
    torch.testing.assert_close(norm, x.double().norm(dim=1), rtol=1e-6, atol=0)


def test_odd_gradients_become_plain_ones():
    g = torch.randn(3, 4)
    assert plain_gradient(g.bfloat16()).dtype is torch.float32
    assert plain_gradient(torch.complex(g, g)).allclose(torch.complex(g, g).abs())
    assert plain_gradient(g.to_sparse()).equal(g)
    with warnings.catch_warnings(action="ignore"):  # torch says that it is in beta
        assert plain_gradient(g.to_sparse_csr()).equal(g)
    big = torch.randn(500, 30)
    big[10:] = 0
    torch.testing.assert_close(plain_gradient(big.to_sparse(1)), big[:10])  # the rows it stores
    assert plain_gradient(torch.empty(3, device="meta")) is None
