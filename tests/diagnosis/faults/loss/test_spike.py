"""loss.spike: single losses that jump."""

import pytest

from hookcb.diagnosis.faults.loss.spike import LossSpikes
from hookcb.diagnosis.run import Passed, Skipped
from tests.diagnosis.faults.loss.support import losses, noisy
from tests.diagnosis.support import only


def test_two_jumps_are_a_note():
    values = noisy([1.0] * 200, 0.05)
    values[80], values[150] = 5.0, 9.0
    found = only(LossSpikes, losses(values))
    assert (found.code, found.severity) == ("loss.spike", "info")
    assert (found.step, found.last_step, found.value) == (80, 150, 9.0)


@pytest.mark.parametrize("at", [(), (80,), (5, 10)])
def test_noise_one_jump_and_the_beginning_are_no_spikes(at):
    values = noisy([1.0] * 200, 0.05)
    for i in at:
        values[i] = 5.0
    assert isinstance(only(LossSpikes, losses(values)), Passed)


def test_thirty_two_batches_are_too_few_for_spikes():
    assert isinstance(only(LossSpikes, losses([1.0] * 31 + [9.0])), Skipped)
