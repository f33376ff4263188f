"""Bins of histograms: where elements are counted, what a picture shows, and bins of older versions."""

import itertools
import math
from itertools import pairwise

import pytest
import torch

from hookcb.activations.bins import Bins, from_levels, trimmed
from tests.activations.support import INF, NAN, randn
from tests.support import in_turn

ALL = [Bins(60), Bins(41), Bins(7), Bins(2), Bins(1), Bins(40, (-3.0, 3.0)), Bins(7, (0.0, 1.0))]
DTYPES = [torch.float32, torch.float64]


def plain_counts(row, edges):
    """Counts by comparing; the last bin holds its upper edge."""
    inner = [((row >= a) & (row < b)).sum().item() for a, b in pairwise(edges)]
    inner[-1] += (row == edges[-1]).sum().item()
    return [(row < edges[0]).sum().item(), *inner, (row > edges[-1]).sum().item()]


@pytest.mark.parametrize("bins", ALL, ids=str)
def test_there_are_as_many_bins_as_asked_for_and_their_edges_grow(bins):
    assert bins.edges.shape == (bins.n + 1,)
    assert (bins.edges.diff() > 0).all()


@pytest.mark.parametrize("n", [1, 2, 7, 60])
def test_bins_by_default_are_alike_on_both_sides_of_0_up_to_1024(n):
    edges = Bins(n).edges
    assert torch.equal(edges, -edges.flip(0))
    assert edges[-1] == 1024
    assert (0 in edges) == (n % 2 == 0)


@in_turn("dtype, bins", itertools.product(DTYPES, ALL))
def test_elements_are_counted_between_the_edges(bins, dtype):
    rows = (randn(3, 999) ** 3).to(dtype)
    rows[1] *= 1e-3 if bins.ends is None else 1
    rows[2] *= 100
    rows[:, :4] = torch.tensor([0.0, 1e9, -1e9, 1e-30])
    for row, counts in zip(rows.double(), bins.counts_of(rows).tolist(), strict=True):
        moved = (torch.tensor(counts) - torch.tensor(plain_counts(row, bins.edges))).abs().sum() / 2
        assert moved <= 4  # an element at an edge may be rounded past it


def test_nan_is_in_no_bin_and_infinity_beyond_them():
    rows = torch.tensor([[0.0, 1, 2, 3, 4, 5, -1, NAN, INF, -INF], [0.5] * 10])
    assert Bins(4, (0.0, 4.0)).counts_of(rows).tolist() == [[2, 1, 1, 1, 2, 2], [0, 10, 0, 0, 0, 0]]
    odd = torch.tensor([[NAN, INF, -INF, 0.0]])
    assert Bins(4).counts_of(odd).tolist() == [[1, 0, 0, 1, 0, 1]]
    assert Bins(3).counts_of(odd).tolist() == [[1, 0, 1, 0, 1]]
    assert Bins(4).counts_of(odd[:, :0]).tolist() == [[0] * 6]


@pytest.mark.parametrize("bins", ALL, ids=str)
def test_counts_of_parts_add_up_to_those_of_the_whole(bins):
    rows = randn(1, 1000) * 3
    parts = sum(bins.counts_of(part) for part in rows.split([1, 99, 400, 500], 1))
    assert torch.equal(parts, bins.counts_of(rows))


def test_a_picture_shows_the_bins_with_99_percent_and_loses_no_element():
    counts = torch.zeros(3, 10)
    counts[:, 4:7] = 1000
    counts[0, [0, 2, 9]] = torch.tensor([3.0, 2.0, 4.0])
    counts[1] = NAN
    shown, edges = trimmed(counts, torch.arange(9.0))
    assert edges.tolist() == [3.0, 4.0, 5.0, 6.0]
    assert shown[0].tolist() == [5.0, 1000.0, 1000.0, 1000.0, 4.0]
    assert shown[1].isnan().all()
    nothing = torch.full((2, 10), NAN)
    assert torch.equal(trimmed(nothing, torch.arange(9.0))[1], torch.arange(9.0))


def test_histograms_of_older_versions_are_read_in_the_bins_of_today():
    x = randn(4000)
    ends, levels = {"fc": (-2.0, 2.0)}, [1.0, 2.0]
    old = [Bins(40, (-2.0 * 2**level, 2.0 * 2**level)).counts_of(x[None])[0] for level in levels]
    values = torch.stack(
        [
            torch.cat([torch.tensor([0.5]), own, torch.tensor([level])])
            for own, level in zip(old, levels, strict=True)
        ]
    )
    values = torch.cat([values, torch.full((1, len(values[0])), NAN)])  # a batch in which it was not called
    store = {"columns": ["mean", *(f"bin {i}" for i in range(42)), "level"], "values": {"fc": values}}
    new = from_levels(store, ends, Bins(40).edges)
    assert new["columns"] == store["columns"][:-1]
    first, second, missing = new["values"]["fc"]
    assert missing.isnan().all()
    assert first[0] == 0.5
    for found in (first, second):
        assert found[1:].sum().item() == pytest.approx(4000)
        assert (found[1:] - Bins(40).counts_of(x[None])[0]).abs().sum() < 0.1 * 4000


def test_log2_at_powers_of_2_is_exact_enough_for_edges():
    x = Bins(22).edges.float()[None]  # each a power of 2, or 0
    assert all(math.log2(value).is_integer() for value in x[0, 12:].tolist())
    assert Bins(22).counts_of(x).sum() == 23
    assert Bins(22).counts_of(x)[0, 12:].tolist() == [1] * 11 + [1]
