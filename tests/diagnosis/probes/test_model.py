"""Faults of a model and its optimizers that need no step."""

import pytest
import torch
from torch import nn

from hookcb.diagnosis.probes.model import is_of_torch, observe_model, observe_optimizers, share_alike


def net(**kwargs):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def codes(model):
    return [(observation.code, observation.layer) for observation in observe_model(model)]


def test_a_model_as_torch_makes_it_is_fine():
    assert codes(net()) == []
    assert codes(nn.LSTM(4, 8)) == codes(nn.GRU(4, 8)) == []


@pytest.mark.parametrize("sign", [1, -1])
def test_hidden_units_that_begin_equal_up_to_sign_are_seen_but_not_those_of_the_last_layer(sign):
    model = net()
    for layer in (model[2], model[4]):
        nn.init.constant_(layer.weight, 0.5)
        layer.weight.data[::2] *= sign
    assert codes(model) == [("init.symmetric", "2")]
    model[2].weight.requires_grad_(False)
    assert codes(model) == []


def test_weights_that_are_emptied_between_forwards_are_not_compared():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model[0].weight.data = torch.empty(0)  # as DeepSpeed's ZeRO-3 does
    assert codes(model) == []


def test_the_share_of_pairs_is_counted():
    rows = torch.arange(20.0).reshape(4, 5)
    assert share_alike(rows) == 0.0
    assert share_alike(rows[[0, 0, 1, 2]]) == pytest.approx(1 / 6)
    assert share_alike(torch.ones(4, 5)) == 1.0
    assert share_alike(torch.ones(3, 5)) == 0.0  # too few to tell


@pytest.mark.parametrize(
    ("layer", "is_told"),
    [
        (nn.Dropout(0.9), True),
        (nn.Dropout2d(0.95), True),
        (nn.Dropout(0.5), False),
        (nn.MultiheadAttention(8, 2, dropout=0.9), True),
    ],
)
def test_a_dropout_of_nearly_all_is_seen(layer, is_told):
    found = codes(nn.Sequential(nn.Linear(8, 8), layer, nn.ReLU(), nn.Linear(8, 8)))
    assert found == ([("dropout.extreme", "1")] if is_told else [])


@pytest.mark.parametrize(("make", "n"), [(nn.LSTM, 3), (nn.GRU, 1)])
def test_gates_that_a_bias_shuts_are_seen(make, n):
    layer = make(4, 8)
    nn.init.constant_(layer.bias_ih_l0, -9.0)
    found = list(observe_model(nn.Sequential(layer, nn.Linear(8, 1))))
    assert [observation.code for observation in found] == [
        "gate.shut"
    ] * n  # a GRU's update gate keeps the state
    assert found[0].param == "0.bias_ih_l0"


def test_a_parameter_in_two_groups_is_seen_and_in_two_optimizers_is_not():
    model = nn.Linear(2, 2)
    one, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    assert list(observe_optimizers(model, [one, other])) == []
    one.param_groups.append({**one.param_groups[0], "params": [model.weight]})
    (found,) = observe_optimizers(model, [one, other])
    assert (found.code, found.param, found.value) == ("param.duplicated", "weight", 2.0)


def test_layers_of_torch_are_told_from_others():
    assert is_of_torch(nn.Linear(2, 2))
    assert not is_of_torch(nn.ParameterList())
    assert not is_of_torch(type("Own", (nn.Module,), {"__module__": "own"})())
