"""Statistics that ranks merge are those of the whole tensors."""

import json

import pytest

from tests.ranks.support import ROOT, launched, shared

pytestmark = pytest.mark.slow

EXACT, ROUNDED = 1e-12, 1e-6  # in float64, and in narrower types, whose statistics are in float32
# ranks share means, which a float64 of 1e6 has to 1e-10; kurtosis is a difference of fourth powers
LIMITS = {"output std, offset": 1e-9, "output kurtosis": 1e-9}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of four ranks found: with fewer, no mesh has two dimensions, and no rank an empty part."""

    def compare(folder):
        options = "--in-turn", "--work", folder
        found = launched(ROOT / "benchmarks" / "merging.py", folder, *options, world=4, timeout=120)
        assert [rank["exit"] for rank in found] == [0] * 4, found[0]["log"][-2000:]
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]

    return shared(tmp_path_factory, "merging", compare)


def test_they_are_those_of_an_oracle(ranks):
    found = {
        (way, stat): (value, rank[way]["worst"].get(stat))
        for rank in ranks
        for way in rank
        for stat, value in rank[way]["off"].items()
        if value > (LIMITS.get(stat, EXACT) if way.endswith("float64") else ROUNDED)
    }
    assert found == {}


def test_a_look_sends_sums_and_maxima_once_and_gathers_nothing(ranks):
    for way, found in ranks[0].items():
        n_looks = 1 if way.startswith("DDP") else 2  # of outputs, and of parameters that are divided
        sent = [op for op, n in found["sent"] if n > 2]  # the loss of the epoch has two
        assert sent == ["SUM", "MAX"] * n_looks, way
        assert found["gathers"] == 0
