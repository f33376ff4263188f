"""Histograms of what layers put out: where elements are counted, and that none is lost."""

import pytest
import torch
from torch import nn

from hookcb import ActivationStats
from tests.activations.support import INF, NAN, Around, numbered, printed, randn, watch
from tests.support import covering, fit, in_turn, make_learner

CENTRES = {"hist_range": (-0.5, 9.5), "bins": 10, "with_hist": True}  # whole numbers are far from all edges


def counts(stats, layer="odd"):
    """Counts by bin and record, in float64, which must be whole numbers."""
    found = stats.hist(layer).double().expm1()
    assert torch.allclose(found, found.round(), atol=0.5, rtol=1e-5)
    assert (found > -1e-6).all()
    return found.round()


def totals(stats, layer="odd"):
    """Number of elements by record."""
    return stats.hist(layer).double().expm1().sum(0).round(decimals=2).tolist()


def by_hand(x, lo, hi, bins):
    """Counts of elements one by one: below, in each bin, above; NaN in none of them."""
    found = [0] * (bins + 2)
    for value in x.detach().double().flatten().tolist():
        if value == value:
            place = min(max((value - lo) / (hi - lo) * bins, -1), bins)
            found[int(place // 1) + 1] += 1
    return found


@in_turn(
    "make",
    {
        "whole_numbers": lambda: torch.arange(10.0).repeat(7),
        "below_and_above": lambda: torch.arange(-20.0, 30.0),
        "infinite": lambda: torch.tensor([INF, -INF, -INF, 3.0, NAN]),
        "only_nan": lambda: torch.full((8,), NAN),
        "only_inf": lambda: torch.full((8,), INF),
        "empty": lambda: torch.zeros(0, 3),
        "zero_d": lambda: torch.tensor(4.0),
        "int64": lambda: torch.arange(-3, 14),
        "uint8": lambda: torch.arange(256).to(torch.uint8),
        "bool": lambda: torch.tensor([True, False, True]),
        "half": lambda: torch.arange(-5.0, 20.0).half(),
        "bfloat16": lambda: torch.arange(-5.0, 20.0).bfloat16(),
        "float64": lambda: torch.arange(-5.0, 20.0).double() * 1e100,
        "float32_at_its_limit": lambda: torch.tensor([3.4e38, -3.4e38, 1.0, 1e-45]),
        "transposed": lambda: torch.arange(60.0).view(5, 12).t(),
        "channels_last": lambda: torch.arange(96.0).view(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "expanded": lambda: torch.arange(12.0)[:, None].expand(12, 50),
        "every_fourth": lambda: torch.arange(100.0)[::4],
    }.items(),
    ids=lambda item: item[0],
)
def test_each_element_is_counted_where_it_belongs(make):
    x = make[1]()
    stats = watch(x, x, **CENTRES)
    assert counts(stats).T.tolist() == [by_hand(x, -0.5, 9.5, 10)] * 2


@pytest.mark.parametrize("sample", ["auto", None])
def test_random_elements_are_counted_by_the_edges_that_are_told(sample):
    outs = [randn(3000, seed=k) * 3 for k in range(4)]
    stats = watch(*outs, with_hist=True, sample=sample)
    edges = stats.hist_edges("odd").double()
    assert edges.shape == (61,)
    places = [torch.bucketize(out.double(), edges, right=True).bincount(minlength=62) for out in outs]
    assert torch.equal(counts(stats).T, torch.stack(places).double())


RECORDS = {
    "normal": lambda: randn(1000),
    "one_element": lambda: torch.tensor([3.0]),
    "constant": lambda: torch.full((100,), 0.3),
    "zeros": lambda: torch.zeros(100),
    "at_the_limit": lambda: torch.full((100,), 3.4e38),
    "tiny": lambda: randn(100) * 1e-40,
    "both_limits": lambda: torch.tensor([-3.4e38, 3.4e38, 0.0]),
    "beyond_float32": lambda: torch.tensor([-1e300, 1e300, 0.0], dtype=torch.float64),
    "bool": lambda: torch.tensor([True, False]),
    "int64": lambda: torch.arange(1000) - 10**12,
    "half": lambda: (randn(1000) * 1e4).half(),
    "with_nan": lambda: torch.cat([randn(100), torch.full((3,), NAN)]),
    "only_nan": lambda: torch.full((50,), NAN),
    "infinite": lambda: torch.tensor([INF, -INF, NAN]),
    "empty": lambda: torch.zeros(0, 4),
    "up_to_the_sample": lambda: randn(8_192) ** 3,
}


@pytest.mark.parametrize(("name", "bins"), covering(RECORDS, [60, 1, 1000], of=1))
def test_bins_are_the_same_whatever_is_recorded_and_lose_no_element(name, bins):
    x = RECORDS[name]()
    stats = watch(x, randn(500), x, with_hist=True, bins=bins)
    edges = stats.hist_edges("odd")
    others = watch(randn(9), with_hist=True, bins=bins).hist_edges("odd")
    assert torch.equal(edges.float(), others.float())  # in the dtype of the output
    found = counts(stats)
    assert found.shape == (bins + 2, 3)
    n = (~x.isnan()).sum().item()
    assert totals(stats) == [n, 500, n]
    assert found[0, 0] >= (x == -INF).sum()
    assert found[-1, 0] >= (x == INF).sum()


@pytest.mark.parametrize(("sample", "n"), [("auto", 4096), (None, 100_003), (1000, 1000), (7, 7)])
def test_all_of_the_sample_is_counted_and_each_stratum_once(sample, n):
    x = torch.arange(100_003.0)
    stats = watch(x, x, with_hist=True, sample=sample, hist_range=(-0.5, 100_002.5), bins=7)
    found = counts(stats)
    assert found.sum(0).tolist() == [n, n]
    assert found[[0, -1]].sum() == 0
    assert (found[1:-1] - n / 7).abs().max() <= 2


@pytest.mark.parametrize("sample", ["auto", None, 50])
def test_nan_is_in_no_bin_of_a_sample_either(sample):
    x = torch.full((70_000,), NAN)
    x[35_000:] = 3.0
    found = counts(watch(x, **CENTRES, sample=sample))[:, 0]
    n = {"auto": 4096, None: 70_000, 50: 50}[sample]
    assert found[4] == pytest.approx(n / 2, abs=1)
    assert found.sum() == found[4]


def test_every_element_of_up_to_8192_is_counted_and_4096_of_more():
    stats = watch(randn(8_192), randn(8_193), randn(200_000), randn(10), with_hist=True)
    assert totals(stats) == [8_192, 4096, 4096, 10]


def test_a_range_that_is_given_holds_for_all_layers():
    stats = ActivationStats(True, include_paramless=True, hist_range=(-2, 6), bins=16)
    fit(make_learner(3, cbs=stats))
    for layer in range(3):
        assert torch.allclose(
            stats.hist_edges(layer).double(), torch.linspace(-2, 6, 17, dtype=torch.float64)
        )
        assert stats.hist(layer).shape == (18, 3)


def test_a_layer_that_did_not_fire_adds_no_counts_to_that_record():
    class Sometimes(Around):
        def forward(self, x):
            if x[0, 0] != 1:
                self.odd(x)
            return self.fc(x)

    stats = ActivationStats(True)
    fit(numbered(3, 0, stats, Sometimes(nn.Linear(2, 3))))
    assert stats.hist("odd").shape == (62, 3)
    assert stats.hist("odd")[:, [0, 2]].double().expm1().sum(0).tolist() == pytest.approx([12, 12])
    assert not (stats.hist("odd")[:, 1] > 0).any()
    assert totals(stats, "fc") == [4, 4, 4]


def test_without_with_hist_it_says_what_to_pass():
    stats = watch(randn(10))
    for read in (stats.hist, stats.hist_edges, stats.color_dim):
        with pytest.raises(RuntimeError, match="with_hist=True"):
            read("odd")


def test_several_layers_give_several_histograms():
    stats = ActivationStats(True, include_paramless=True)
    fit(make_learner(3, cbs=stats))
    for layers in ("*", slice(None), slice(0, 3)):
        several = stats.hist(layers)
        assert len(several) == 3
        assert all(torch.equal(one, stats.hist(k)) for k, one in enumerate(several))
    assert torch.equal(stats.hist(-1), stats.hist("2"))
    with pytest.raises(LookupError, match="relu"):
        stats.hist("relu")
    with pytest.raises(LookupError, match="9"):
        stats.hist_edges(9)


@in_turn(
    "wrong",
    [
        {"bins": 0},
        {"bins": -3},
        {"bins": 2.5},
        {"bins": "40"},
        {"bins": True},
        {"hist_range": (1, 1)},
        {"hist_range": (2, 1)},
        {"hist_range": (0, INF)},
        {"hist_range": (NAN, 1)},
        {"hist_range": (0, 1, 2)},
        {"hist_range": 3},
        {"hist_range": ("a", "b")},
        {"hist_range": "ab"},
        {"eps": -1e-9},
        {"eps": NAN},
        {"eps": "small"},
        {"eps": None},
        {"sample": 1},
        {"sample": 0},
        {"sample": -5},
        {"sample": 3.5},
        {"sample": True},
        {"sample": "all"},
        {"keep": 1},
        {"keep": 0},
        {"keep": 2.0},
        {"keep": None},
        {"keep": True},
    ],
    ids=str,
)
def test_an_argument_that_cannot_be_is_refused_at_once(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises((ValueError, TypeError)) as info:
        ActivationStats(with_hist=True, **wrong)
    assert name in str(info.value)
    assert repr(value) in str(info.value)


@pytest.mark.parametrize(
    "right",
    [
        {"bins": 1},
        {"hist_range": (-1, 0)},
        {"hist_range": [0.0, 1e-3]},
        {"eps": 0},
        {"eps": INF},
        {"sample": 2},
        {"keep": 2},
    ],
    ids=str,
)
def test_an_argument_at_the_limit_is_good(right):
    stats = watch(randn(50), randn(50), randn(50), with_hist=True, **right)
    assert 2 <= len(stats.stats) <= 3
    assert printed(stats.report())
