"""Each planted spike is told with its cause, and no harmless one is an alarm."""

import pytest
import spikes

from hookcb import Diagnose

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_compiled")]  # else no layer is named


def verdict(case):
    return case.train(0, [Diagnose("ignore", show=False)]).loop.diagnose()


@pytest.mark.parametrize("case", spikes.SPIKES, ids=lambda case: case.name)
def test_the_cause_of_a_spike_is_told(case):
    told = [finding.message for finding in verdict(case).findings if finding.code == "loss.spike"]
    assert told
    assert spikes.SAYS[case.name] in told[0]


@pytest.mark.parametrize("case", spikes.SPIKE_CONTROLS, ids=lambda case: case.name)
def test_a_spike_that_heals_is_no_alarm(case):
    assert verdict(case).status == "healthy"
