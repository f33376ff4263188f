"""Hooks come off again, and find_modules finds."""

import copy
import pickle

import pytest
import torch
from torch import nn

from hookcb import (
    ActivationStats,
    Hook,
    Hooks,
    assert_no_hooks,
    count_hooks,
    find_modules,
    hook_output,
    hook_outputs,
)
from tests.support import (
    Net,
    Pair,
    X,
    Y,
    fit,
    make_learner,
    make_model,
)


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


def test_a_model_that_is_one_layer_can_be_found_and_watched():
    model = nn.Linear(2, 1)
    assert [*find_modules(model).values()] == [model]
    stats = ActivationStats()
    fit(make_learner(model=model, cbs=stats))
    assert len(stats.names) == 1
    assert len(stats.stats) == 3


def test_a_hook_stores_and_changes_nothing():
    torch.manual_seed(0)
    layer = nn.Linear(2, 3)
    x = torch.randn(4, 2, requires_grad=True)
    plain = layer(x)
    for value in (False, 0, None, torch.zeros(4, 3), "text"):
        seen = []

        def look(m, i, o, seen=seen, value=value):
            seen.append((m, i, o))
            return value

        with Hook(layer, look) as hook:
            out = layer(x)
        assert torch.equal(out, plain)
        assert out.requires_grad
        (m, i, o), *_ = seen
        assert m is layer
        assert isinstance(i, tuple)
        assert not i[0].requires_grad
        assert not o.requires_grad
        assert hook.stored is value
        layer(x)
        assert len(seen) == 1
    assert_no_hooks(layer)


def test_a_hook_goes_when_its_block_raises_and_removing_is_idempotent():
    layer = nn.Linear(2, 3)
    with pytest.raises(ZeroDivisionError), Hook(layer, lambda m, i, o: 1) as hook:  # noqa: PT012
        layer(X)
        1 / 0  # noqa: B018
    assert count_hooks(layer) == 0
    hook.remove()
    hook.remove()
    assert hook.stored == 1


def test_removing_one_hook_leaves_the_others_of_the_same_module():
    layer = nn.Linear(2, 3)
    one, two = Hook(layer, lambda m, i, o: 1), Hook(layer, lambda m, i, o: 2)
    one.remove()
    one.remove()
    layer(X)
    assert (one.stored, two.stored) == (None, 2)
    two.remove()
    assert count_hooks(layer) == 0


@pytest.mark.parametrize("bad", [3, None, "fc", [nn.Linear(1, 1), 3]])
def test_hooks_on_several_modules_are_all_or_nothing(bad):
    good = nn.Linear(2, 2)
    with pytest.raises((TypeError, AttributeError)):
        Hooks([good, bad], lambda m, i, o: None)
    assert count_hooks(good) == 0


def test_hooks_on_a_sequential_are_on_its_children_and_on_a_module_on_itself():
    model = make_model()
    with Hooks(model, lambda m, i, o: type(m)) as hooks:
        model(X)
        assert list(hooks.stored) == [nn.Linear, nn.ReLU, nn.Linear]
        assert len(hooks) == 3
        assert [h.stored for h in hooks] == list(hooks.stored)
    assert count_hooks(model) == 0
    with Hooks(model[0], lambda m, i, o: 1) as hooks:
        assert len(hooks) == 1
    with Hooks(find_modules(model), lambda m, i, o: 1) as hooks:
        assert len(hooks) == 2
        assert list(hooks.stored) == [None, None]
    assert count_hooks(model) == 0


def test_hook_output_stores_with_or_without_graph_whatever_the_structure():
    class Odd(nn.Module):
        def forward(self, x):
            return {"a": [x * 2, None], "b": Pair(x, 3)}

    x = torch.randn(2, 2, requires_grad=True)
    with hook_output(Odd()) as hook:
        assert hook.stored is None
    layer = Odd()
    with hook_output(layer) as hook:
        layer(x)
    assert not hook.stored["a"][0].requires_grad
    assert type(hook.stored["b"]) is Pair
    assert hook.stored["b"].y == 3
    with hook_output(layer, detach=False) as hook:
        layer(x)
    assert hook.stored["a"][0].grad_fn is not None
    model = make_model()
    with hook_outputs([model[0], model[2]]) as hooks:
        y = model(X)
    assert torch.equal(hooks.stored[1], y)
    assert torch.equal(hooks.stored[0], model[0](X))


def test_copies_of_a_hooked_module_do_not_store_into_its_hook():
    layer = nn.Linear(2, 2)
    with Hook(layer, lambda m, i, o: o.sum().item()) as hook:
        layer(X)
        before = hook.stored
        for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            twin(Y * 100)
            assert hook.stored == before
            assert torch.equal(twin(X), layer(X))


def test_a_stored_output_is_what_the_layer_gave_also_with_an_in_place_successor():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True))
    with hook_outputs(model) as hooks:
        model(X)
    raw = model[0](X)
    assert (raw < 0).any()
    assert torch.equal(hooks[0].stored, raw)
    assert torch.equal(hooks[1].stored, raw.relu())
