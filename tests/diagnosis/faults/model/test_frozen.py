"""Layers that are frozen between trained ones."""

import pytest
import torch
from torch import nn

from hookcb import Diagnose, watch
from hookcb.diagnosis.faults.model.frozen import FrozenBetween
from hookcb.diagnosis.frame import Frame
from hookcb.diagnosis.run import Run, Skipped
from tests.diagnosis.faults.support import numbers, small_net, trained
from tests.support import first


def findings(model, *names):
    for name in names:
        model.get_submodule(name).requires_grad_(False)
    return [x for x in trained(model).findings if x.code == "param.frozen_between"]


def frozen_in(model, *names):
    return [(x.severity, x.layer) for x in findings(model, *names)]


def deep(*hidden):
    torch.manual_seed(0)
    pairs = [(nn.Linear(8, 8), nn.ReLU()) for _ in range(5)]
    layers = [layer for pair in pairs for layer in pair]
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), *layers, *hidden, nn.Linear(8, 1))


def test_frozen_layers_are_told_in_one_sentence():
    (found,) = findings(deep(), "4", "8")
    assert found.message.startswith("Layers 4, 8 are frozen")
    (found,) = findings(small_net(), "2")
    assert found.message.startswith("Layer 2 is frozen")


@pytest.mark.slow
def test_a_frozen_layer_between_trained_ones_is_noted_once():
    assert frozen_in(deep(), "4") == [("info", "4")]
    assert frozen_in(deep(), "4", "8") == [("info", "4")]
    assert frozen_in(small_net(), "2") == [("info", "2")]


@pytest.mark.parametrize(
    "names",
    first(
        [
            ["0", "2", "4"],  # features below that are kept
            ["2", "4", "6", "8"],  # fine-tuning
            ["2", "4", "6"],  # half of the layers, with more than half of the weights
            ["0"],
            ["12"],
            [],
        ]
    ),
)
def test_layers_frozen_at_an_end_or_for_fine_tuning_are_not(names):
    assert frozen_in(deep(), *names) == []


@pytest.mark.slow
def test_a_frozen_network_inside_and_norms_and_parts_of_a_layer_are_not():
    inner = nn.Sequential(nn.Linear(8, 2), nn.ReLU(), nn.Linear(2, 8))
    assert frozen_in(deep(inner), "12") == []
    assert frozen_in(deep(nn.BatchNorm1d(8)), "12") == []
    model = deep()
    model[4].weight.requires_grad_(False)  # but not its bias
    assert frozen_in(model) == []


def test_a_model_that_is_frozen_as_a_whole_is_an_error_with_what_the_optimizer_holds():
    model = small_net().requires_grad_(False)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, Diagnose(show=False, on_sick="ignore")) as w:
        for step in range(6):
            w.report_loss(model(numbers(8, 4, seed=step).requires_grad_()).mean()).backward()
            opt.step()
    primary = w.diagnose().primary
    assert (primary.code, primary.severity, primary.value) == ("param.frozen", "error", 6.0)
    assert "the optimizer holds 6 of them" in primary.message


def test_without_gradients_or_calls_nothing_is_said_of_frozen_layers():
    given = Run()
    given.measured(Frame).frozen = {"b": 64}
    assert [type(x) for x in FrozenBetween().findings(given)] == [Skipped]
