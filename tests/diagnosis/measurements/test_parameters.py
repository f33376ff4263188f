"""Whether parameters have moved, against full copies of them."""

import copy

import torch
from torch import nn

from hookcb.diagnosis.measurements.parameters import Parameters
from hookcb.diagnosis.run import Run
from tests.diagnosis.faults.support import followed, numbers, stepped
from tests.support import in_turn


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 40), nn.LayerNorm(40), nn.ReLU(), nn.Linear(40, 3))


def moved(parts):
    parts.tell(Run())
    return parts.moved


@in_turn("trained", [range(6), [0], [1, 5], [2, 3], []])
def test_what_has_moved_is_what_differs_from_a_copy(trained):
    model = net()
    before, (parts, _) = copy.deepcopy(model), followed(Parameters, model)
    params = list(model.parameters())
    assert len(params) == 6
    stepped(model, [params[i] for i in trained] or [torch.ones(1, requires_grad=True)])
    expected = {
        name: not torch.equal(p, q)
        for (name, p), q in zip(model.named_parameters(), before.parameters(), strict=True)
    }
    assert moved(parts) == expected
    assert sum(expected.values()) == len(trained)


def test_a_layer_that_comes_later_is_compared_with_its_own_beginning():
    model = net()
    (parts, run), kept = followed(Parameters, model), model[3].weight
    stepped(model, model.parameters())
    model[3] = nn.Linear(40, 3)
    parts.on_model(run)
    assert moved(parts)["3.weight"] is False
    stepped(model, [model[3].weight])
    assert moved(parts)["3.weight"] is True
    assert moved(parts)["0.weight"] is True
    assert kept is not model[3].weight


@in_turn("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_change_by_one_bit_is_a_move(dtype):
    model = nn.Module()
    model.p = nn.Parameter(torch.ones(7, dtype=dtype))
    parts, _ = followed(Parameters, model)
    assert moved(parts) == {"p": False}
    with torch.no_grad():
        model.p[4] += torch.finfo(dtype).eps
    assert moved(parts) == {"p": True}


def test_of_a_small_parameter_every_element_is_followed():
    for i in range(64):
        model = nn.Module()
        model.p = nn.Parameter(torch.zeros(8, 8))
        parts, _ = followed(Parameters, model)
        with torch.no_grad():
            model.p.view(-1)[i] = 1.0
        assert moved(parts)["p"]


@in_turn("shape", [(64, 64), (200, 200), (1000, 3), (3, 5000), (512, 16, 3, 3)])
def test_of_a_large_one_elements_all_over_are(shape):
    for part in range(4):
        model = nn.Module()
        model.p = nn.Parameter(numbers(*shape))
        parts, _ = followed(Parameters, model)
        with torch.no_grad():
            model.p.view(-1).chunk(4)[part].add_(1.0)
        assert moved(parts)["p"]


def test_parameters_of_all_shapes_and_kinds_are_followed():
    model = nn.Module()
    model.scalar = nn.Parameter(torch.tensor(1.0))
    model.empty = nn.Parameter(torch.zeros(0, 3))
    model.turned = nn.Parameter(numbers(6, 9).T)
    model.complex = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    model.lazy = nn.LazyLinear(3)
    parts, _ = followed(Parameters, model)
    assert moved(parts) == {"scalar": False, "turned": False, "complex": False}
    with torch.no_grad():
        model.scalar += 1
        model.turned[8, 5] += 1
        model.complex[1] += 1j
    assert moved(parts) == {"scalar": True, "turned": True, "complex": True}
