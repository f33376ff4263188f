"""Parameters are found by every kind of selection, under the names of the plain model."""

import gc
import weakref

import pytest
import torch
from torch import nn

from hookcb.hooks.params import Held, Param, check_which, find_params
from tests.hooks.support import frozen_part, parameter_containers, tied
from tests.support import Net, in_turn

NAMES = ["scale", "stem.weight", "stem.bias", "blocks.0.0.weight", "blocks.0.0.bias"]
NAMES += ["blocks.1.0.weight", "blocks.1.0.bias", "head.weight", "head.bias"]


def names(found):
    return [param.name for param in found]


def test_all_are_found_once_with_the_type_of_their_module():
    net = Net()
    found = find_params(net)
    assert names(found) == NAMES == [name for name, _ in net.named_parameters()]
    assert all(param.p is net.get_parameter(param.name) for param in found)
    assert found[:2] == [Param("scale", net.scale, "Net"), Param("stem.weight", net.stem.weight, "Linear")]
    assert names(find_params(tied())) == ["embed.weight", "decoder.bias"]
    assert {param.kind for param in find_params(parameter_containers())} == {
        "ParameterList",
        "ParameterDict",
        "Plain",
    }
    assert len(find_params(frozen_part())) == 4  # frozen ones too


@in_turn(
    ("which", "expected"),
    [
        (None, NAMES),
        ("*", NAMES),
        ("head.*", ["head.weight", "head.bias"]),
        ("*.0.bias", ["blocks.0.0.bias", "blocks.1.0.bias"]),
        ("blocks.[1].*", ["blocks.1.0.weight", "blocks.1.0.bias"]),
        ("scale", ["scale"]),
        (lambda name, p: p.ndim == 0, ["scale"]),
        (lambda name, p: name.startswith("stem"), ["stem.weight", "stem.bias"]),
        (["head.bias", "scale"], ["scale", "head.bias"]),
        (("head.*", lambda name, p: p.ndim == 0), ["scale", "head.weight", "head.bias"]),
        (iter(["head.bias", "head.*"]), ["head.weight", "head.bias"]),
    ],
)
def test_a_selection_keeps_the_order_of_the_model(which, expected):
    assert names(find_params(Net(), which)) == expected


def test_names_are_without_wrappers():
    assert names(find_params(nn.DataParallel(Net()), "head.*")) == ["head.weight", "head.bias"]
    compiled = torch.compile(Net(), backend="eager")
    assert names(find_params(compiled)) == NAMES
    inside = nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager"))
    assert names(find_params(inside, "0.*")) == ["0.weight", "0.bias"]


def test_each_part_of_a_selection_has_to_find_something():
    for which in ("conv.*", ["head.*", "conv.*"], lambda name, p: False):
        with pytest.raises(LookupError, match=r"no parameter of Net matches .* it has: scale, stem\.weight"):
            find_params(Net(), which)
    with pytest.raises(LookupError, match="ReLU has no parameters"):
        find_params(nn.ReLU())


def test_what_selects_is_checked_and_made_a_list():
    def which(name, p):
        return True

    assert check_which("*") == ["*"]
    assert check_which(which) == [which]
    assert check_which(("a", which)) == ["a", which]
    for wrong in (3, [3], ["a", None], None, nn.Linear, nn.Linear(2, 2), [nn.Linear]):
        with pytest.raises(TypeError, match="params must be a glob"):
            check_which(wrong)
    with pytest.raises(ValueError, match="params is empty"):
        check_which([])


def test_what_a_model_holds_is_compared_object_by_object():
    net = Net()
    held = Held(net)
    assert held.is_same()
    net.extra = nn.Linear(2, 2)  # more is no change of what was there
    net.head.weight.data = net.head.weight.data.clone()
    assert held.is_same()
    net.head.bias = nn.Parameter(net.head.bias.detach().clone())
    assert not held.is_same()
    held = Held(net)
    net.blocks[0] = nn.Sequential()
    assert not held.is_same()
    net.empty = nn.ModuleList()
    held = Held(net)
    assert held.is_same()
    del net.empty
    assert not held.is_same()


def test_what_a_model_holds_is_not_kept_alive():
    net = Net()
    held, known = Held(net), weakref.ref(net.head.weight)
    del net
    gc.collect()
    assert known() is None
    assert not held.is_same()
