"""loss.of_values: classes in a loss for values."""

import pytest

from hookcb.diagnosis.faults.loss.of_values import LossOfValues
from tests.diagnosis.faults.loss.support import flat
from tests.diagnosis.support import evidence


@pytest.mark.parametrize(("level", "severity"), [(1.0, "warning"), (0.5, "info")])
def test_classes_in_a_loss_of_values_are_a_warning_if_nothing_is_learned(level, severity):
    given, fault = evidence(loss=flat(level), constant=1.0), LossOfValues()
    fault.see("The targets are classes.", at="head")
    assert [x.severity for x in fault.findings(given)] == [severity]
