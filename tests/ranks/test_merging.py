"""Statistics that ranks merge are those of the whole tensors."""

import pytest

from benchmarks.merging import measured

EXACT = 1e-12
# a mean of 1e6 is known to 1e-10, and so is the spread of 0.3 around it, with one process too
OF_OFFSET = 1e-9


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 4])
def ranks(request):
    return measured(request.param)


def test_they_are_those_of_an_oracle(ranks):
    found = {
        (way, stat): (value, rank[way]["worst"].get(stat))
        for rank in ranks
        for way in rank
        for stat, value in rank[way]["off"].items()
        if way.endswith("float64") and value > (OF_OFFSET if "offset" in stat else EXACT)
    }
    assert found == {}


def test_a_look_sends_sums_and_maxima_once_and_gathers_nothing(ranks):
    for way, found in ranks[0].items():
        n_looks = 1 if way.startswith("DDP") else 2  # of outputs, and of parameters that are divided
        assert [op for op, _ in found["sent"]] == ["SUM", "MAX"] * n_looks, way
        assert found["gathers"] == 0
