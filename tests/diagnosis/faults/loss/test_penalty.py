"""loss.penalty: penalties beside what is left of the loss."""

import pytest

from hookcb.diagnosis.faults.loss.penalty import DominantPenalty
from hookcb.diagnosis.faults.loss.trivial import TrivialLoss
from hookcb.diagnosis.run import Absent, Passed, Series, Skipped
from tests.diagnosis.faults.loss.support import flat
from tests.diagnosis.support import evidence, only


def penalized(first, last, rest=1.0, n=100, **kwargs):
    steps = list(range(0, n, 8))
    sizes = [first + (last - first) * step / steps[-1] for step in steps]
    loss = [rest + 0.02 * (-1) ** i + first + (last - first) * min(i / steps[-1], 1) for i in range(n)]
    return evidence(loss=loss, penalty=Series(steps, sizes), constant=1.0, loss_kind="mse", **kwargs)


@pytest.mark.parametrize(("first", "last"), [(99.0, 99.0), (99.0, 0.1), (12.0, 99.0)])
def test_a_penalty_that_leaves_nothing_to_learn_is_named_with_its_size(first, last):
    given = penalized(first, last)
    found = only(DominantPenalty, given)
    assert (found.code, found.severity) == ("loss.penalty", "warning")
    assert found.value == pytest.approx(max(first, last) / (max(first, last) + 1), rel=0.01)
    assert "Divide the weight of the penalty by" in found.next_steps[0]
    assert "the loss without its penalty is 1" in only(TrivialLoss, given).message


def test_a_penalty_beside_which_the_model_learns_is_fine():
    assert isinstance(only(DominantPenalty, penalized(99.0, 0.1, rest=0.5)), Passed)
    assert isinstance(only(DominantPenalty, penalized(0.5, 0.5)), Passed)
    assert isinstance(only(TrivialLoss, penalized(99.0, 99.0, rest=0.5)), Passed)


def test_before_50_batches_it_is_a_note():
    assert only(DominantPenalty, penalized(99.0, 99.0, n=20)).severity == "info"


def test_without_a_penalty_the_check_does_not_apply():
    assert isinstance(only(DominantPenalty, evidence(loss=flat(1.0))), Absent)
    assert isinstance(only(DominantPenalty, evidence(loss=flat(1.0), has_penalty=True)), Skipped)
