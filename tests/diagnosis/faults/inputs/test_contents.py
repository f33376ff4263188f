"""NaN in the inputs, and inputs that are all alike."""

import math

from hookcb.diagnosis.faults.inputs.contents import MIN_BATCHES, ConstantInputs, NonfiniteInputs
from hookcb.diagnosis.measurements.inputs import Inputs
from hookcb.diagnosis.measurements.origin import Found, Origin
from hookcb.diagnosis.run import Passed, Run, Skipped
from hookcb.diagnosis.verdict import Finding
from tests.support import in_turn

NAN = math.nan


def results(differs, bad=(), is_harmful=False):
    """What is said of inspected batches, of which some have inputs that are not finite."""
    run = Run(sources={"batches", "batch"})
    inputs, steps = run.measured(Inputs), [10 * i for i in range(len(differs))]
    inputs.nonfinite = inputs.nonfinite.of(steps, [float(dict(bad).get(i, 0)) for i in range(len(differs))])
    inputs.differs, run.measured(Origin).is_sought = inputs.differs.of(steps, differs), is_harmful
    return [x for fault in (NonfiniteInputs(), ConstantInputs()) for x in fault.findings(run)]


def seen(differs, bad=(), is_harmful=False):
    found = [x for x in results(differs, bad, is_harmful) if isinstance(x, Finding)]
    return [(x.code, x.severity, x.step, x.value) for x in found]


def test_missing_numbers_are_a_note_unless_something_comes_of_them():
    given = (1, 1, 1), [(1, 5), (2, 9)]
    assert seen(*given) == [("input.nonfinite", "info", 10, 5.0)]
    assert seen(*given, is_harmful=True) == [("input.nonfinite", "error", 10, 5.0)]
    assert seen((1, 1, 1), is_harmful=True) == []


def test_the_batch_in_which_a_nan_began_is_told_though_it_was_not_inspected():
    run = Run(sources={"batches", "batch"})
    origin = run.measured(Origin)
    origin.found, origin.step, origin.is_sought = Found(n_inputs=2), 7, True
    (found,) = NonfiniteInputs().findings(run)
    assert (found.severity, found.step, found.value) == ("error", 7, 2.0)


def test_samples_that_are_all_the_same_are_told_after_three_batches():
    assert MIN_BATCHES == 3
    assert seen((0, 0)) == []
    assert seen((0, 0, 0)) == [("input.constant", "error", 0, 0.0)]
    assert seen((NAN, 0, NAN, 0, 0)) == [("input.constant", "error", 10, 0.0)]


@in_turn("differs", [(), (1, 1, 1), (0, 0, 0, 1), (NAN,) * 9, (0, 0, NAN)])
def test_batches_that_differ_or_do_not_tell_are_no_finding(differs):
    assert seen(differs) == []
    is_known = any(x > 0 for x in differs)
    assert isinstance(results(differs)[1], Passed if is_known else Skipped)
