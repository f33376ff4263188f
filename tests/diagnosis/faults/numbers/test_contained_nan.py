"""NaN and infinity that stay inside the backward."""

import pytest

from hookcb.diagnosis.faults.numbers.contained_nan import ContainedNan
from hookcb.diagnosis.run import Layer, Param, Passed, Run, Series, Skipped


def of_gradients(outputs, params):
    layer = Layer("body", "Linear", "Linear 4→4", 0, {} if outputs is None else {"grad_nonfinite": outputs})
    param = Param("body.weight", "body", "Linear", "Linear 4→4", 0, (4, 4), stats={"nonfinite": params})
    return Run(layers={"body": layer}, params={param.name: param})


@pytest.mark.parametrize(
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
