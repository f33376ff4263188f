"""Histograms of different ranges are joined without losing a count."""

import math

import pytest
import torch

from hookcb.activations.bins import at_level, join, level_of
from hookcb.activations.stats import histogram

RANGES = {"middle": (-1.0, 3.0), "from zero": (0.0, 2.0), "to zero": (-2.0, 0.0), "far": (999.0, 1001.0)}


def counted(rows, edges, bins, levels=None):
    """Counts of rows in ranges that fit them, and the levels of these."""
    ranges = torch.tensor([edges] * len(rows)).double()
    levels = level_of(rows, ranges, bins) if levels is None else levels
    own = at_level(ranges, levels, bins)
    return histogram(rows, own[:, :1], own[:, 1:], bins), levels


@pytest.mark.parametrize("bins", [2, 3, 7, 40])
@pytest.mark.parametrize("edges", RANGES.values(), ids=RANGES.keys())
def test_counts_of_narrow_ranges_are_joined_as_if_counted_in_the_wide_one(edges, bins):
    torch.manual_seed(0)
    low, high = edges
    rows = low + (high - low) * torch.rand(5, 1000).double()
    levels = torch.tensor([0.0, 1.0, 2.0, 3.0, 3.0]).double()
    counts, _ = counted(rows, edges, bins, levels)
    joined, found = join(counts, levels, torch.tensor(edges))
    level = round(math.log2((found[1] - found[0]).item() / (high - low)))
    assert joined[:, 1:-1].sum() >= 0.99 * joined.sum()
    wide = histogram(rows, *found.tolist(), bins).double()
    torch.testing.assert_close(joined[levels <= level], wide[levels <= level])
    torch.testing.assert_close(joined.sum(1), torch.full((5,), 1000.0).double())


@pytest.mark.parametrize("bins", [2, 3, 7, 40])
@pytest.mark.parametrize("edges", RANGES.values(), ids=RANGES.keys())
def test_every_pair_of_levels_agrees_on_the_edges_of_the_wider_one(edges, bins):
    ranges = torch.tensor([edges]).double()

    def cuts(level):
        low, high = at_level(ranges, torch.tensor([level]).double(), bins)[0].tolist()
        return torch.linspace(low, high, bins + 1, dtype=torch.float64)

    for narrow, wide in ((0.0, 1.0), (-2.0, 1.0), (1.0, 4.0)):
        fine, coarse = cuts(narrow), cuts(wide)
        inside = coarse[(coarse >= fine[0] - 1e-9) & (coarse <= fine[-1] + 1e-9)]
        distance = (inside[:, None] - fine).abs().amin(1)
        assert len(inside)
        assert distance.max() < 1e-5 * (fine[-1] - fine[0])


@pytest.mark.parametrize("scale", [1e-6, 0.3, 1.0, 30.0, 1e9])
def test_a_range_follows_the_spread_of_a_record(scale):
    torch.manual_seed(0)
    rows = scale * torch.randn(3, 4096)
    counts, levels = counted(rows, (-4.0, 4.0), 40)
    low, high = at_level(torch.tensor([(-4.0, 4.0)]).double(), levels[:1], 40)[0].tolist()
    assert 1.4 * scale < high < 8 * scale
    assert low == -high
    assert (counts[:, 1:-1].sum(1) > 0.98 * 4096).all()


def test_a_range_from_zero_keeps_its_end():
    rows = torch.rand(2, 500) * 100
    _, levels = counted(rows, (0.0, 1.0), 10)
    assert levels.tolist() == [7.0, 7.0]
    assert at_level(torch.tensor([(0.0, 1.0)]), levels[:1].float(), 10).tolist() == [[0.0, 128.0]]


def test_few_elements_far_away_do_not_widen_a_range():
    rows = torch.randn(1, 4096, generator=torch.Generator().manual_seed(0))
    rows[0, 5] = 1e6
    assert counted(rows, (-4.0, 4.0), 40)[1].item() <= 0


@pytest.mark.parametrize("row", [[float("nan")] * 9, [float("inf"), 1.0, -1.0], [1.0] * 5, []])
def test_levels_of_odd_rows_are_whole_and_small(row):
    levels = level_of(torch.tensor([row]), torch.tensor([(-1.0, 3.0)]).double(), 40)
    assert levels.item() in (0.0, -1.0)


def test_the_joined_range_is_the_narrowest_that_holds_99_percent():
    levels = torch.tensor([0.0] * 99 + [5.0]).double()
    counts = torch.zeros(100, 6).double()
    counts[:, 1:-1] = 25.0
    joined, found = join(counts, levels, torch.tensor([-1.0, 1.0]))
    assert found.tolist() == [-1.0, 1.0]  # one record in a hundred may be outside
    assert joined.sum() == pytest.approx(counts.sum())
    levels[-3:] = 5.0
    assert join(counts, levels, torch.tensor([-1.0, 1.0]))[1].tolist() == [-32.0, 32.0]


def test_records_without_counts_stay_unknown():
    counts = torch.tensor([[1.0, 2.0, 3.0, 4.0], [float("nan")] * 4])
    joined, found = join(counts, torch.tensor([0.0, float("nan")]), torch.tensor([0.0, 1.0]))
    assert joined[0].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert joined[1].isnan().all()
    assert found.tolist() == [0.0, 1.0]
    nothing, same = join(counts[1:], torch.tensor([float("nan")]), torch.tensor([0.0, 1.0]))
    assert nothing.isnan().all()
    assert same.tolist() == [0.0, 1.0]
