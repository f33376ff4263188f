"""NaN and infinite gradients of a training without Diagnose, on made-up numbers."""

from hookcb.diagnosis.faults.numbers.first_nan import FirstNan
from hookcb.diagnosis.measurements.origin import Origin
from hookcb.diagnosis.run import Passed, Run, Skipped
from tests.diagnosis.support import evidence, only, series, weight


def test_the_parameters_with_the_first_nan_are_named_unless_a_scaler_has_skipped_that_step():
    params = weight("a", nonfinite=[0, 0, 4, 4]), weight("b", nonfinite=[9, 0, 1, 0])
    skips = {"scale": series([8.0] * 4), "skipped": series([1.0, 0.0, 0.0, 0.0])}
    found = only(FirstNan().findings, evidence(*params, steps=skips))
    assert (found.code, found.param, found.step, found.value) == ("nonfinite.first", "a.weight", 2, 4)
    assert "4 NaN or infinite elements at step 2, as have b.weight" in found.message
    assert only(FirstNan().findings, evidence(*params)).param == "b.weight"


def test_a_loss_that_is_not_finite_is_not_ruled_out_without_a_search():
    lost = evidence(weight(), loss=[1.0, float("inf")])
    assert only(FirstNan().findings, lost).reason.startswith("the loss of step 1 was not finite")


def test_nothing_is_ruled_out_before_a_backward_was_seen():
    given = Run(sources={"batch"})
    assert isinstance(only(FirstNan().findings, given), Skipped)
    given.measured(Origin).has_looked = True
    assert isinstance(only(FirstNan().findings, given), Passed)
    assert isinstance(only(FirstNan().findings, Run()), Skipped)
