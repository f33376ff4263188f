"""Gates of an LSTM or GRU that a bias keeps closed."""

import pytest
from torch import nn

from hookcb.diagnosis.faults.model.shut_gate import ShutGate
from tests.diagnosis.faults.support import followed


def test_layers_as_torch_makes_them_are_fine():
    assert not [*followed(ShutGate, nn.LSTM(4, 8))[0].seen, *followed(ShutGate, nn.GRU(4, 8))[0].seen]


@pytest.mark.parametrize(("make", "n"), [(nn.LSTM, 3), (nn.GRU, 1)])
def test_gates_that_a_bias_shuts_are_seen(make, n):
    layer = make(4, 8)
    nn.init.constant_(layer.bias_ih_l0, -9.0)
    found = followed(ShutGate, nn.Sequential(layer, nn.Linear(8, 1)))[0].seen
    assert len(found) == n  # a GRU's update gate keeps the state
    assert (found[0].code, found[0].param) == ("gate.shut", "0.bias_ih_l0")
