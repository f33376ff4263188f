"""Linear layers in a row, as the modules of a model tell."""

import pytest
import torch
from torch import nn

from hookcb.diagnosis.probes.model import observe_model


def codes(model):
    return [(observation.code, observation.layer) for observation in observe_model(model)]


L = nn.Linear
STACKS = {
    "two": ([L(8, 8), L(8, 4)], ["0"]),
    "three": ([L(8, 8), L(8, 8), L(8, 4)], ["0", "1"]),
    "dropout and identity between": ([L(8, 8), nn.Dropout(0.5), nn.Identity(), L(8, 4)], ["0"]),
    "a wider inner": ([L(8, 64), L(64, 8)], ["0"]),
    "narrower to the end": ([L(8, 6), L(6, 4)], ["0"]),
    "an activation between": ([L(8, 8), nn.ReLU(), L(8, 4)], []),
    "a norm between": ([L(8, 8), nn.LayerNorm(8), L(8, 4)], []),
    "a low rank": ([L(8, 2), L(2, 8)], []),
    "a weight norm": ([nn.utils.parametrizations.weight_norm(L(8, 8)), L(8, 4)], []),
}


@pytest.mark.parametrize("name", STACKS)
def test_linear_layers_in_a_row_are_noted(name):
    torch.manual_seed(0)
    layers, expected = STACKS[name]
    assert codes(nn.Sequential(*layers)) == [("model.linear_stack", at) for at in expected]
    inner = nn.ModuleDict({"body": nn.Sequential(*layers)})
    assert codes(inner) == [("model.linear_stack", f"body.{at}") for at in expected]


def test_only_the_order_in_a_sequential_is_known():
    class Residual(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x).relu()

    layers = [L(8, 8), L(8, 8)]
    assert codes(nn.ModuleList(layers)) == codes(Residual(*layers)) == []
