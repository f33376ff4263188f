"""Each planted spike is told with its cause, and no harmless one is an alarm."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

from hookcb import Diagnose

PLANTED = Path(__file__).parents[3] / "benchmarks" / "planted"


@pytest.fixture
def spikes(monkeypatch):
    before = set(sys.modules)
    monkeypatch.syspath_prepend(PLANTED)
    yield import_module("spikes")
    for name in set(sys.modules) - before:
        if str(PLANTED) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def verdict(case, seed):
    return case.train(seed, [Diagnose(show=False)]).loop.diagnose()


@pytest.mark.slow
@pytest.mark.parametrize("i", range(6))
def test_the_cause_of_a_spike_is_told(spikes, i):
    case = spikes.SPIKES[i]
    told = [f.message for f in verdict(case, 0).findings if f.code == "loss.spike"]
    assert told, case.name
    assert spikes.SAYS[case.name] in told[0]


@pytest.mark.slow
@pytest.mark.parametrize("i", range(3))
def test_a_spike_that_heals_is_no_alarm(spikes, i):
    case = spikes.SPIKE_CONTROLS[i]
    assert verdict(case, 0).status == "healthy", case.name
