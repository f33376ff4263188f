"""NaN inside the backward, and infinite gradients of a training without Diagnose, on made-up numbers."""

from hookcb.diagnosis.faults.numbers.first_nan import ContainedNan, FirstNan
from hookcb.diagnosis.measurements.origin import Origin
from hookcb.diagnosis.run import Layer, Param, Passed, Run, Series, Skipped
from tests.diagnosis.support import evidence, only, series, weight
from tests.support import in_turn


def of_gradients(outputs, params):
    layer = Layer("body", "Linear", "Linear 4→4", 0, {} if outputs is None else {"grad_nonfinite": outputs})
    param = Param("body.weight", "body", "Linear", "Linear 4→4", 0, (4, 4), stats={"nonfinite": params})
    return Run(layers={"body": layer}, params={param.name: param})


@in_turn(
    ("outputs", "params", "step"),
    [
        ([0, 0, 7, 9], [0, 0, 0, 0], 2),
        ([0, 5, 7, 0], [0, 1, 0, 0], 2),  # at step 1 it has come to the parameters
        ([0, 5, 0, 0], [0, 1, 0, 0], None),
        ([0, 0, 0, 0], [0, 0, 0, 0], None),
    ],
)
def test_a_nan_that_stays_inside_the_backward_is_told(outputs, params, step):
    steps = range(len(outputs))
    (found,) = ContainedNan().findings(of_gradients(Series.of(steps, outputs), Series.of(steps, params)))
    if step is None:
        assert isinstance(found, Passed)
    else:
        assert (found.code, found.layer, found.step, found.value) == ("nonfinite.contained", "body", step, 7)


def test_without_gradients_of_outputs_it_is_said_who_records_them():
    (found,) = ContainedNan().findings(of_gradients(None, Series.of([0], [0])))
    assert isinstance(found, Skipped)
    assert "GradientHealth(activations=True)" in found.reason


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
