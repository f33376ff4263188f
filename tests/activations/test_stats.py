"""The reductions against an independent float64 oracle."""

import math
from itertools import pairwise

import pytest
import torch

from hookcb.activations.stats import (
    LAYER_STATS,
    SAMPLED,
    WHOLE,
    _in_one,
    _in_rows,
    has_stats,
    histogram,
    layer_stats,
    take,
)
from tests.support import layer_oracle


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def oracle(x, eps=0.05):
    return list(layer_oracle(x, eps).values())


def stats_of(x, **options):
    return dict(zip(LAYER_STATS, layer_stats(x, **options).tolist(), strict=True))


def check(x, rel=1e-5, abs_tol=1e-6):
    got = layer_stats(x)
    assert got.shape == (len(LAYER_STATS),)
    assert got.dtype is (torch.float64 if x.dtype is torch.float64 else torch.float32)
    assert got.tolist() == pytest.approx(oracle(x), rel=rel, abs=abs_tol, nan_ok=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_float_dtype_is_measured(dtype):
    check((normal(7, 5, 3) * 3 + 1).to(dtype))


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]
)
def test_integers_and_booleans_are_measured(dtype):
    check((normal(7, 5).abs() * 2).to(dtype))


@pytest.mark.parametrize("offset", [0, 1e2, 1e4, 1e6, -1e6])
def test_the_spread_is_right_at_any_offset(offset):
    x = normal(64, 33).double() + offset
    check(x.float(), rel=1e-3)


def test_strided_layouts_are_measured_like_contiguous_ones():
    x = normal(4, 6, 5, 3)
    for view in (
        x.transpose(1, 3),
        x[:, ::2],
        x.to(memory_format=torch.channels_last),
        x[:1].expand(3, -1, -1, -1),
    ):
        check(view)


def test_one_element_and_no_dimension_have_a_mean_and_no_spread():
    check(torch.tensor(0.02))
    check(torch.tensor([[3.0]]))


def test_an_empty_output_has_nan_for_everything():
    *numbers, nonfinite = layer_stats(torch.empty(0, 3)).tolist()
    assert all(map(math.isnan, numbers))
    assert nonfinite == 0


@pytest.mark.parametrize(
    "x",
    [
        torch.tensor([6e4, -6e4, 6e4, -6e4], dtype=torch.float16),
        torch.tensor([3e38, 3e38, -3e38]),
        torch.full((70_000,), 3e38),
        torch.full((70_000,), 7.1),
        normal(1000) * 1e-30,
        normal(70_000) * 1e25,
        normal(70_000).double() * 1e200,
    ],
    ids=["half", "sum overflows", "all large", "constant", "tiny", "squares overflow", "float64"],
)
def test_no_size_of_values_overflows_or_vanishes(x):
    unit = 1e200 if x.dtype is torch.float64 else 1.0  # squares of float64 overflow in the oracle
    values = [value * unit for value in oracle(x / unit)[:5]] + oracle(x)[5:]
    most = torch.finfo(torch.promote_types(x.dtype, torch.float32)).max
    expected = [value if abs(value) < most else math.copysign(math.inf, value) for value in values]
    assert layer_stats(x).tolist() == pytest.approx(expected, rel=1e-4, abs=1e-36)


@pytest.mark.parametrize("n", [WHOLE - 1, WHOLE, WHOLE + 1, 3 * WHOLE, 20 * WHOLE + 17])
@pytest.mark.parametrize("offset", [0, 20, -1e6])
def test_large_outputs_are_measured_in_parts_that_join_exactly(n, offset):
    x = normal(n, seed=n) + offset
    x[: n // 3] *= 1 + 1e-3
    check(x, rel=1e-3, abs_tol=1e-4)


@pytest.mark.parametrize("n", [5, 70_000])
@pytest.mark.parametrize("odd", [[math.nan], [math.inf], [-math.inf], [math.inf, -math.inf], [math.nan, 1e3]])
def test_nan_and_infinities_are_counted_and_left_out_of_extremes(n, odd):
    x = normal(n)
    x[1 : 1 + len(odd)] = torch.tensor(odd)
    check(x)


def test_an_output_without_a_finite_element_has_no_extremes():
    stats = stats_of(torch.tensor([math.inf, math.nan]))
    assert all(math.isnan(stats[stat]) for stat in ("mean", "std", "min", "max", "abs_max"))
    assert stats["nonfinite"] == 2


@pytest.mark.parametrize("offset", [0, 20, 1e5])
@pytest.mark.parametrize(
    "x", [normal(5, 300), normal(3, 300).relu(), torch.zeros(2, 9)], ids=["normal", "relu", "zeros"]
)
def test_what_compiled_code_and_gpus_run_agrees_with_what_a_cpu_runs(x, offset):
    rows = x + offset
    rows[-1, 1] = math.inf
    rows[-1, 2] = math.nan
    for quick, plain in zip(_in_rows(rows), _in_one(rows), strict=True):
        assert torch.allclose(quick.double(), plain.double(), rtol=1e-4, atol=1e-4, equal_nan=True)


def test_eps_is_a_magnitude_and_counts_itself():
    x = torch.tensor([-1.0, -0.5, 0.25, 0.5, 1.0])
    assert stats_of(x, eps=0.5)["near_zero"] == pytest.approx(0.6)
    assert stats_of(x, eps=0)["near_zero"] == 0


def test_up_to_65536_elements_all_are_taken_and_of_more_a_sample_and_exact_moments():
    x = normal(WHOLE + 1)
    elements, exact = take(x[:-1], "auto")
    assert torch.equal(elements, x[:-1])
    assert exact is None
    elements, exact = take(x, "auto")
    assert len(elements) == SAMPLED
    assert exact[0].tolist() == pytest.approx([*oracle(x)[:5], 0], rel=1e-5, abs=1e-6)


def test_a_sample_of_any_size_and_every_element_can_be_asked_for():
    x = normal(WHOLE + 1)
    assert [len(take(x, sample)[0]) for sample in (2, 100, None)] == [2, 100, WHOLE + 1]
    assert [take(x, sample)[1] for sample in (2, 100, None)] == [None] * 3
    assert torch.equal(take(x[:70], 100)[0], x[:70])


@pytest.mark.parametrize("x", [normal(7), normal(7).double(), normal(7).bfloat16(), torch.arange(7)])
def test_what_is_taken_is_a_copy(x):
    elements, _ = take(x, "auto")
    before = elements.clone()
    x.zero_()
    assert torch.equal(elements, before)


@pytest.mark.parametrize("n", [4097, 100_003, 2**20, 64 * 64 * 1024])
def test_a_sample_has_one_index_from_each_stratum_and_always_the_same(n):
    taken = take(torch.arange(n).double(), SAMPLED)[0]
    strata = torch.arange(SAMPLED).double() * n / SAMPLED
    assert (taken >= strata.floor()).all()
    assert (taken <= strata + n / SAMPLED).all()
    assert torch.equal(taken, take(torch.arange(n).double(), SAMPLED)[0])


@pytest.mark.parametrize("period", [2, 3, 7, 28, 64, 100, 256, 512, 1024])
@pytest.mark.parametrize("n", [2**17, 2**20, 64 * 64 * 1024, 100_003 * 3])
def test_a_sample_sees_every_channel_alike(n, period):
    channel = torch.arange(n) % period
    share = (take(channel.float(), SAMPLED)[0] < period / 2).float().mean().item()
    assert share == pytest.approx((channel < period / 2).float().mean().item(), abs=4 * 0.5 / SAMPLED**0.5)


def test_a_histogram_counts_each_element_once_and_no_nan():
    rows = torch.tensor([[0.0, 1, 2, 3, 4, 5, -1, math.nan, math.inf, -math.inf], [0.5] * 10])
    counts = histogram(rows, 0.0, 4.0, 4)
    assert counts.tolist() == [[2, 1, 1, 1, 2, 2], [0, 10, 0, 0, 0, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("low", "high", "bins"), [(-3, 3, 40), (0, 1, 7), (-0.5, 2.0**20, 1)])
def test_a_histogram_agrees_with_plain_counting(low, high, bins, dtype):
    rows = normal(3, 999).to(dtype)
    rows[:, 0], rows[:, 1] = low, high
    edges = torch.linspace(low, high, bins + 1, dtype=torch.float64)
    for row, counts in zip(rows.double(), histogram(rows, low, high, bins).tolist(), strict=True):
        inner = [((row >= a) & (row < b)).sum().item() for a, b in pairwise(edges)]
        inner[-1] += (row == high).sum().item()
        assert counts == [(row < low).sum().item(), *inner, (row > high).sum().item()]


@pytest.mark.parametrize(
    "x",
    [
        None,
        "text",
        torch.ones(2, dtype=torch.complex64),
        torch.eye(2).to_sparse(),
        torch.empty(2, device="meta"),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ],
    ids=["None", "text", "complex", "sparse", "meta", "nested"],
)
def test_what_has_no_statistics_is_told_apart(x):
    assert not has_stats(x)


def test_measuring_leaves_the_tensor_and_its_graph_alone():
    x = normal(3, 4).requires_grad_()
    y = x * 2
    before = y.detach().clone()
    assert not layer_stats(y).requires_grad
    assert torch.equal(y, before)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))
