"""Modules are found by every kind of selection, and their parameters counted."""

import pytest
import torch
from torch import nn

from hookcb import (
    Learner,
    find_modules,
    has_params,
    total_params,
)
from hookcb.hooks.modules import (
    device_of,
    has_uninitialized,
    is_compiled,
    is_leaf,
    named_modules,
    outermost_compiled,
    unsaved_buffers,
    unwrapped,
)
from tests.hooks.support import Plain, frozen_part, parameter_containers, tied
from tests.support import Net, in_turn


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_model_that_is_torchscript_is_refused_as_such():
    with pytest.raises(TypeError, match="TorchScript, which calls no hooks; train the module"):
        find_modules(torch.jit.script(Net()))


def test_find_modules_by_every_kind_of_where():
    net = Net()
    cases = [
        (None, ["stem", "blocks.0.0", "blocks.1.0", "head"]),
        ("blocks.*", ["blocks.0", "blocks.0.0", "blocks.0.1", "blocks.1", "blocks.1.0", "blocks.1.1"]),
        ("blocks.?.0", ["blocks.0.0", "blocks.1.0"]),
        ("blocks.[1].0", ["blocks.1.0"]),
        ("head", ["head"]),
        (nn.ReLU, ["blocks.0.1", "blocks.1.1"]),
        (nn.Linear, ["stem", "blocks.0.0", "blocks.1.0", "head"]),
        (lambda m: getattr(m, "out_features", 0) == 1, ["head"]),
        (net.blocks[1], ["blocks.1"]),
        ([net.head, "stem"], ["stem", "head"]),
        (["blocks.0.*", nn.ReLU], ["blocks.0.0", "blocks.0.1", "blocks.1.1"]),
        ((net.head, net.head), ["head"]),
        ({"head": net.head, "stem": net.stem}.values(), ["stem", "head"]),
    ]
    for where, names in cases:
        found = find_modules(net, where)
        assert list(found) == names, where
        assert all(found[n] is net.get_submodule(n) for n in names)
    paramless = ["stem", "blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1", "head"]
    assert list(find_modules(net, include_paramless=True)) == paramless


def test_find_modules_takes_a_one_shot_iterable():
    net = Net()
    assert list(find_modules(net, iter([net.head, "stem"]))) == ["stem", "head"]


def test_an_empty_list_finds_nothing_and_says_so():
    with pytest.raises((LookupError, ValueError)):
        find_modules(Net(), [])


def test_a_sequential_given_as_where_is_one_module_and_not_its_children():
    net = Net()
    assert list(find_modules(net, net.blocks[0])) == ["blocks.0"]


def test_a_model_that_is_one_layer_is_found():
    model = nn.Linear(2, 1)
    assert [*find_modules(model).values()] == [model]


def test_finding_nothing_is_a_lookup_error_that_lists_what_there_is():
    net = Net()
    with pytest.raises(LookupError) as info:
        find_modules(net, "convs.*")
    for part in ("Net", "'convs.*'", "stem", "blocks.0.0", "head"):
        assert part in str(info.value)
    for where in (nn.Conv2d, lambda m: False, nn.Linear(1, 1), ["stem", "nothing"], ["stem", nn.LSTM]):
        with pytest.raises(LookupError):
            find_modules(net, where)
    with pytest.raises(LookupError, match="nothing"):
        find_modules(net, ["stem", "nothing"])
    for where in (3, [3], int, b"stem"):
        with pytest.raises((TypeError, LookupError)):
            find_modules(net, where)


@in_turn(
    ("make", "expected"),
    [
        (lambda: nn.Linear(10, 30), (330, True)),
        (lambda: nn.Linear(10, 30).requires_grad_(False), (330, False)),
        (lambda: nn.ReLU(), (0, False)),
        (lambda: nn.Sequential(), (0, False)),
        (lambda: frozen_part(), (23, "partly")),
        (lambda: tied(), (77, True)),
        (lambda: nn.Sequential(*[nn.Linear(3, 3)] * 3), (12, True)),
        (lambda: nn.LSTM(5, 7), (4 * 7 * 14, True)),
        (lambda: nn.MultiheadAttention(8, 2), (288, True)),
        (lambda: parameter_containers(), (12 + 5 + 8 + 7 + 1, True)),
        (lambda: nn.BatchNorm1d(8), (16, True)),
    ],
)
def test_total_params_counts_each_parameter_once(make, expected):
    found = total_params(make())
    assert found == expected
    assert (found.n, found.trainable) == expected
    assert found.trainable is expected[1] or found.trainable == "partly"


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_parameter_has_no_elements_yet():
    assert total_params(nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))).n == 8


def test_has_params_finds_parameters_at_any_depth():
    assert has_params(nn.Sequential(nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))) is True
    assert has_params(Plain(None, w=nn.Parameter(torch.ones(())))) is True
    assert has_params(nn.Sequential(nn.ReLU())) is False
    assert has_params(Plain(None, b=torch.ones(()))) is False


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_module_is_uninitialized_until_it_has_run():
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.LazyLinear(2)))
    assert has_uninitialized(model)
    model(torch.ones(1, 3))
    assert not has_uninitialized(model)
    assert not has_uninitialized(nn.ReLU())


def test_a_leaf_has_no_module_in_it():
    assert is_leaf(nn.Linear(2, 2))
    assert is_leaf(nn.Sequential())
    assert not is_leaf(nn.Sequential(nn.ReLU()))


WRAPPED = {
    "DataParallel": lambda model: nn.DataParallel(model),
    "torch.compile": lambda model: torch.compile(model, backend="eager"),
    "both": lambda model: nn.DataParallel(torch.compile(model, backend="eager")),
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_wrappers_are_looked_through(wrap):
    net = Net()
    wrapped = wrap(net)
    assert unwrapped(wrapped) is unwrapped(net) is net
    found = named_modules(wrapped)
    assert list(found) == list(named_modules(net)) == [name for name, _ in net.named_modules()]
    assert all(found[name] is net.get_submodule(name) for name in found)
    assert list(find_modules(wrapped, "blocks.*.0")) == ["blocks.0.0", "blocks.1.0"]
    assert list(find_modules(wrapped, wrapped)) == [""]


def test_what_was_compiled_is_told_by_its_outermost_name():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert outermost_compiled(model) == {}
    assert not is_compiled(model)
    model[1][0].compile(backend="eager")
    assert is_compiled(model[1][0])
    assert not is_compiled(model)
    assert outermost_compiled(model) == {"1.0": model[1][0]}
    model[1].compile(backend="eager")
    assert outermost_compiled(model) == {"1": model[1]}
    whole = torch.compile(model, backend="eager")
    assert is_compiled(whole)
    assert outermost_compiled(whole) == {"": whole}


def test_unsaved_buffers_are_those_that_the_state_lacks():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[1].register_buffer("seen", torch.zeros(3), persistent=False)
    found = unsaved_buffers(model, model.state_dict())
    assert list(found) == ["1.seen"]
    assert found["1.seen"] is model[1].seen


def test_a_model_is_placed_where_it_is_told_or_stays():
    model = nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
    assert device_of(model) == torch.device("cpu")
    assert device_of(model, torch.device("meta")) == torch.device("meta")
    assert model[1].weight.device.type == "meta"
    assert device_of(model) == torch.device("meta")
    assert device_of(nn.BatchNorm1d(2, affine=False)) == torch.device("cpu")
    assert device_of(nn.ReLU(), torch.device("meta")) == torch.device("meta")
    assert device_of(nn.ReLU()) == torch.device("cpu")


@pytest.mark.parametrize("there", [None, "meta"])
def test_auto_is_the_accelerator_of_this_machine_or_else_the_cpu(there, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: there is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(there))
    learn = Learner([1], nn.Linear(1, 1), device="auto")
    assert learn.device == torch.device(there or "cpu")
