"""The reductions against an independent float64 oracle."""

import math

import pytest
import torch

from hookcb.stats import LAYER_STATS, has_stats, layer_stats


def oracle(x, eps=0.05):
    values = [float(v) for v in x.flatten().tolist()]
    n = len(values)
    mean = math.fsum(values) / n
    std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1)) if n > 1 else math.nan
    return [mean, std, sum(abs(v) <= eps for v in values) / n]


def check(x, rel=1e-5, abs_tol=1e-6):
    got = layer_stats(x)
    assert got.shape == (len(LAYER_STATS),)
    assert got.dtype is torch.float32
    for value, expected in zip(got.tolist(), oracle(x), strict=True):
        assert value == pytest.approx(expected, rel=rel, abs=abs_tol, nan_ok=True)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


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
    assert layer_stats(torch.empty(0, 3)).isnan().all()


def test_large_values_do_not_overflow():
    mean, std, _ = layer_stats(torch.tensor([6e4, -6e4, 6e4, -6e4], dtype=torch.float16)).tolist()
    assert mean == 0
    assert std == pytest.approx(69282, rel=1e-3)
    assert layer_stats(torch.tensor([3e38, 3e38, -3e38]))[0].item() == pytest.approx(1e38, rel=1e-5)


def test_infinities_and_nan_show_in_the_numbers():
    assert layer_stats(torch.tensor([1.0, math.inf, 0.0])).tolist()[0] == math.inf
    assert layer_stats(torch.tensor([1.0, -math.inf, 0.0])).tolist()[0] == -math.inf
    nan = layer_stats(torch.tensor([1.0, math.nan, 0.0, 0.0])).tolist()
    assert math.isnan(nan[0])
    assert nan[2] == 0.5


def test_eps_is_a_magnitude_and_counts_itself():
    x = torch.tensor([-1.0, -0.5, 0.25, 0.5, 1.0])
    assert layer_stats(x, eps=0.5)[2].item() == pytest.approx(0.6)
    assert layer_stats(x, eps=0)[2].item() == 0


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
