"""Statistics of several layers, and of several batches, together."""

import math

import pytest
import torch
from torch import nn

from hookcb import ActivationRecords, ActivationStats, Learner
from hookcb.activations.stats import STORED
from tests.activations.support import INF, NAN, STATS, oracle, randn
from tests.support import fit


def recorded(*batches, **options):
    """Records of outputs by layer, one dict for each batch."""
    records = ActivationRecords(**options)
    for step, outputs in enumerate(batches):
        for name, x in outputs.items():
            records.take(name, x, "Linear")
        records.end_batch("train", 0, step)
    return records


def parts(n, seed=0):
    """Outputs that differ in size, mean, spread and shape of their distribution."""
    wholes = randn(7 * n, seed=seed), randn(n, 3, seed=seed + 1) ** 3 + 5, randn(2, n, seed=seed + 2).relu()
    return {f"blocks.{i}.mlp": x for i, x in enumerate(wholes)} | {"head": randn(n, seed=seed + 3)}


def flat(outputs, pattern="blocks"):
    return torch.cat([x.flatten() for name, x in outputs.items() if name.startswith(pattern)])


def assert_merged(series, i, whole):
    want = oracle(whole)
    for stat in STATS:
        assert series[stat].values[i] == pytest.approx(want[stat], rel=2e-5, abs=1e-6, nan_ok=True), stat


def test_layers_that_match_a_pattern_are_described_as_one_output():
    batches = [parts(n, seed=n) for n in (3, 40, 300)]
    records = recorded(*batches)
    found = {stat: records.merged("blocks.*.mlp", stat) for stat in STATS}
    for i, outputs in enumerate(batches):
        assert_merged(found, i, flat(outputs))
    assert found["rms"].steps == [0, 1, 2]
    assert records.merged("head", "std").values == pytest.approx(records.series("head", "std"), rel=1e-6)
    assert [round(x, 4) for x in records.merged(slice(None), "max").values] == [
        round(flat(outputs, "").max().item(), 4) for outputs in batches
    ]


def test_batches_between_two_steps_are_described_as_one():
    batches = [parts(n, seed=n) for n in (30, 40, 50, 60, 70)]
    found = {stat: recorded(*batches).merged("blocks.*", stat, batches=2) for stat in STATS}
    assert found["mean"].steps == [0, 2, 4]
    for i in range(3):
        assert_merged(found, i, torch.cat([flat(outputs) for outputs in batches[2 * i : 2 * i + 2]]))


def test_layers_without_elements_spread_or_finite_numbers_merge_as_their_elements_do():
    same, one = torch.full((9,), 2.5), torch.tensor([4.0])
    batches = [
        {"a": same, "b": one, "c": torch.zeros(0, 3)},
        {"a": same, "b": same},
        {"a": torch.tensor([NAN, 1.0, 2.0]), "b": one},
        {"a": torch.tensor([INF, INF]), "b": torch.tensor([-INF, NAN])},
        {"b": randn(50)},
    ]
    records = recorded(*batches)
    found = {stat: records.merged("*", stat) for stat in STATS}
    for i in (0, 1, 4):
        assert_merged(found, i, flat(batches[i], ""))
    assert [found["nonfinite"].values[i] for i in (2, 3)] == [1, 4]
    assert found["max"].values[2] == 4
    assert all(math.isnan(found[stat].values[i]) for stat in ("kurtosis", "mean") for i in (2, 3))
    assert all(math.isnan(records.merged("a", stat).values[4]) for stat in STATS)


def test_a_large_mean_costs_no_more_digits_than_the_records_have():
    outputs = {"a": (randn(500) + 1e3).double(), "b": (randn(500, seed=1) * 2 + 1e3).double()}
    records = recorded(outputs)
    assert_merged({stat: records.merged("*", stat) for stat in STATS}, 0, flat(outputs, ""))


def test_a_fit_has_groups_and_a_saved_file_too(tmp_path):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    stats = ActivationStats()
    fit(Learner([randn(5, 4)] * 6, model, lambda y: y.square().mean(), torch.optim.SGD, lr=0.1, cbs=stats))
    found = stats.merged("[01]", "rms", batches=3)
    assert (found.steps, len(found)) == ([0, 3], 2)
    assert ActivationRecords.load(stats.save(tmp_path / "stats.pt")).merged("[01]", "rms", batches=3) == found


def test_what_cannot_be_merged_says_why():
    records = recorded(parts(3))
    with pytest.raises(LookupError, match=r"no layer 'block\.\*' was recorded.*blocks\.0\.mlp"):
        records.merged("block.*", "rms")
    with pytest.raises(LookupError, match=r"no statistic 'norm'; there are mean.*kurtosis"):
        records.merged("blocks.*", "norm")
    with pytest.raises(ValueError, match="batches must be 1 in validation"):
        records.merged("blocks.*", "rms", "valid", batches=2)
    with pytest.raises((TypeError, ValueError), match="batches"):
        records.merged("blocks.*", "rms", batches=0)


def test_records_of_an_older_version_are_read_but_lack_what_merging_needs():
    state = recorded(parts(3), with_hist=True).state()
    for store in state["stores"].values():
        old = [i for i, name in enumerate(store["columns"]) if name not in ("rms", "kurtosis", *STORED[-2:])]
        store["columns"] = [store["columns"][i] for i in old]
        store["values"] = {name: x[:, old] for name, x in store["values"].items()}
    found, new = ActivationRecords.from_state(state), recorded(parts(3), with_hist=True)
    assert found.series("head", "std") == new.series("head", "std")
    assert torch.equal(found.hist("head"), new.hist("head"))
    assert math.isnan(found.series("head", "kurtosis")[0])
    with pytest.raises(ValueError, match=r"hookcb 0\.2 did not keep them"):
        found.merged("head", "std")
