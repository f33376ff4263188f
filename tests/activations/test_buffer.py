"""Histograms of what layers put out: where elements are counted, and that none is lost."""

import pytest
import torch
from torch import nn

from hookcb import ActivationStats, Learner
from tests.activations.support import INF, NAN, Around, Puts, numbered, printed, randn, watch
from tests.support import covering, fit, make_learner

CENTRES = {"hist_range": (-0.5, 9.5), "bins": 10, "with_hist": True}  # whole numbers are far from all edges


def counts(stats, layer="odd"):
    """Counts by bin and record, in float64, which must be whole numbers."""
    found = stats.hist(layer).double().expm1()
    assert torch.allclose(found, found.round(), atol=0.5, rtol=1e-5)
    assert (found > -1e-6).all()
    return found.round()


def totals(stats, layer="odd"):
    """Number of elements by record; a record with a wider range than `hist_edges` has parts in its bins."""
    return stats.hist(layer).double().expm1().sum(0).round(decimals=2).tolist()


def by_hand(x, lo, hi, bins):
    """Counts of elements one by one: below, in each bin, above; NaN in none of them."""
    found = [0] * (bins + 2)
    for value in x.detach().double().flatten().tolist():
        if value == value:
            place = min(max((value - lo) / (hi - lo) * bins, -1), bins)
            found[int(place // 1) + 1] += 1
    return found


@pytest.mark.parametrize(
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
    assert edges.shape == (41,)
    places = [torch.bucketize(out.double(), edges, right=True).bincount(minlength=42) for out in outs]
    moved = (counts(stats).T - torch.stack(places)).abs().sum()
    assert totals(stats) == [3000] * 4
    assert moved <= 4 * 3  # an element at an edge may be rounded past it


FIRST_RECORDS = {
    "normal": lambda: randn(1000),
    "one_element": lambda: torch.tensor([3.0]),
    "constant": lambda: torch.full((100,), 0.3),
    "zeros": lambda: torch.zeros(100),
    "constant_far_off": lambda: torch.full((100,), 1e8),
    "constant_at_the_limit": lambda: torch.full((100,), 3.4e38),
    "nearly_constant": lambda: 1e6 + torch.arange(2.0) / 16,
    "tiny": lambda: randn(100) * 1e-40,
    "both_limits": lambda: torch.tensor([-3.4e38, 3.4e38, 0.0]),
    "beyond_float32": lambda: torch.tensor([-1e300, 1e300, 0.0], dtype=torch.float64),
    "close_in_float64": lambda: 1e6 + torch.arange(9, dtype=torch.float64) * 1e-9,
    "bool": lambda: torch.tensor([True, False]),
    "all_true": lambda: torch.tensor([True, True]),
    "int64": lambda: torch.arange(1000) - 10**12,
    "half": lambda: (randn(1000) * 1e4).half(),
    "with_nan": lambda: torch.cat([randn(100), torch.full((3,), NAN)]),
    "up_to_the_sample": lambda: randn(8_192) ** 3,
}


@pytest.mark.parametrize(("name", "bins"), covering(FIRST_RECORDS, [40, 1, 1000], of=1))
def test_the_automatic_range_holds_the_first_record(name, bins):
    x = FIRST_RECORDS[name]()
    stats = watch(x, x * 2 if x.is_floating_point() else x, x, with_hist=True, bins=bins)
    n = x.isfinite().sum().item()
    edges = stats.hist_edges("odd")
    assert edges.shape == (bins + 1,)
    assert edges.isfinite().all()
    assert (edges.diff() >= 0).all()
    assert edges[0] < edges[-1]
    found = counts(stats)
    assert found.shape == (bins + 2, 3)
    if x.dtype != torch.float64 or x.abs().max() < 1e38:
        assert found[1:-1, 0].sum() >= 0.99 * n
    assert totals(stats) == [n] * 3


@pytest.mark.parametrize(
    "first",
    [
        torch.full((50,), NAN),
        torch.full((50,), INF),
        torch.tensor([INF, -INF, NAN]),
        torch.zeros(0, 4),
        torch.tensor(NAN),
    ],
    ids=["nan", "inf", "both", "empty", "zero_d"],
)
def test_a_first_record_without_a_finite_element_loses_none_of_the_later_ones(first):
    later = randn(500)
    stats = watch(first, later, later * 100, with_hist=True)
    not_nan = (~first.isnan()).sum().item()
    assert totals(stats) == [not_nan, 500, 500]
    assert counts(stats)[0, 0] == (first == -INF).sum()
    assert counts(stats)[-1, 0] == (first == INF).sum()
    edges = stats.hist_edges("odd")
    assert edges.isfinite().all()
    assert (edges.diff() > 0).all()


def test_infinite_elements_do_not_widen_the_automatic_range():
    x = torch.cat([randn(1000), torch.tensor([INF, -INF, -INF, NAN])])
    stats = watch(x, with_hist=True)
    edges = stats.hist_edges("odd")
    assert edges.abs().max() < 20
    found = counts(stats)[:, 0]
    assert (found[0], found[-1]) == (2, 1)
    assert found[1:-1].sum() >= 990


def test_the_range_follows_when_most_elements_leave_that_of_the_first_record():
    stats = watch(
        torch.linspace(-1, 1, 200), torch.full((70,), 50.0), torch.full((30,), -50.0), with_hist=True
    )
    edges, found = stats.hist_edges("odd"), counts(stats)
    assert 50 <= edges[-1] <= 200
    assert found[[0, -1]].sum() == 0
    for record, value, n in ((1, 50.0, 70), (2, -50.0, 30)):
        (at,) = found[:, record].nonzero().flatten().tolist()
        assert edges[at - 1] <= value <= edges[at]
        assert found[at, record] == n


def test_rare_outliers_do_not_widen_the_range():
    stats = watch(
        *[randn(2000) for _ in range(9)], torch.cat([randn(1990), torch.full((10,), 1e4)]), with_hist=True
    )
    assert stats.hist_edges("odd")[-1] < 10
    assert counts(stats)[-1, -1] >= 10
    assert totals(stats) == [2000] * 10


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


def test_an_automatic_range_is_of_each_layer_and_holds_all_records_of_the_fit():
    class Two(Around):
        def forward(self, x):
            self.fc2(x)
            return super().forward(x)

    model = Two(Puts([torch.arange(10.0), torch.arange(100.0)]))
    model.fc2 = Puts([-torch.arange(1000.0), torch.ones(3)])
    stats = ActivationStats(True, modules=["odd", "fc2"])
    fit(Learner([torch.ones(3, 2)] * 2, model, torch.mean, torch.optim.SGD, cbs=stats))
    odd, other = stats.hist_edges("odd"), stats.hist_edges("fc2")
    assert 99 <= odd[-1] < 400
    assert -2000 < other[0] <= -999
    assert totals(stats) == [10, 100]
    assert totals(stats, "fc2") == [1000, 3]


def test_a_layer_that_did_not_fire_adds_no_counts_to_that_record():
    class Sometimes(Around):
        def forward(self, x):
            if x[0, 0] != 1:
                self.odd(x)
            return self.fc(x)

    stats = ActivationStats(True)
    fit(numbered(3, 0, stats, Sometimes(nn.Linear(2, 3))))
    assert stats.hist("odd").shape == (42, 3)
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


@pytest.mark.parametrize(
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
