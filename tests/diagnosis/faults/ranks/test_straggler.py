"""A rank that the others wait for, made up."""

import pytest

from hookcb.diagnosis.faults.ranks.straggler import SlowRank
from hookcb.diagnosis.run import Passed, Run, Skipped
from hookcb.processes.stragglers import Straggler
from tests.diagnosis.faults.time.support import only


def slowest(share=0.5, excess=0.02, n_slowest=7, n_blocks=8, phase="data"):
    run = Run()
    run.measured(SlowRank).slowest = Straggler(
        5, "node7", 0.03, 0.01, excess, share, phase, 0.019, n_slowest, n_blocks
    )
    return run


@pytest.mark.parametrize(("phase", "cause"), [("data", "disk"), ("forward", "GPU"), ("callbacks", "logging")])
def test_a_rank_that_the_others_wait_for_is_named(phase, cause):
    found = only(SlowRank, slowest(phase=phase))
    assert (found.code, found.severity, found.value) == ("time.straggler", "warning", 0.5)
    assert "wait for rank 5 (host node7) 50% of the time: it works 30.0 ms in a step" in found.message
    assert f"the others 10.0 ms; its {phase} takes 19.0 ms more" in found.message
    assert cause in found.causes[0]
    assert found.ranks == (5,)


@pytest.mark.parametrize("given", [{"share": 0.1}, {"excess": 2.9e-3}, {"n_slowest": 6}])
def test_a_rank_that_is_little_or_not_always_slower_is_no_straggler(given):
    assert isinstance(only(SlowRank, slowest(**given)), Passed)


def test_four_blocks_are_too_few_for_a_straggler():
    assert isinstance(only(SlowRank, slowest(n_slowest=4, n_blocks=4)), Skipped)
    assert isinstance(only(SlowRank, Run()), Skipped)
