"""Names of weights in files do not depend on what the model is wrapped in."""

import pytest
import torch
from torch import nn

from hookcb.training.checkpoint.names import key_prefix, plain_weights, with_own_names, with_plain_names
from tests.support import in_turn


def inside():
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def data_parallel(model):
    return nn.DataParallel(model)


def compiled(model):
    return torch.compile(model, backend="eager")


def both(model):
    return torch.compile(nn.DataParallel(model), backend="eager")


WRAPS = [data_parallel, compiled, both]


@pytest.mark.parametrize("wrap", WRAPS)
def test_plain_names_are_those_of_the_model_inside(wrap):
    model = wrap(inside())
    assert list(with_plain_names(model, model.state_dict())) == list(inside().state_dict())


@in_turn("wrap", WRAPS)
@in_turn("wrote", [*WRAPS, lambda model: model])
def test_each_form_of_a_model_loads_what_another_has_written(wrap, wrote):
    torch.manual_seed(0)
    state, model = wrote(inside()).state_dict(), wrap(inside())
    named = with_own_names(model, state, model.state_dict())
    model.load_state_dict(named)
    assert torch.equal(next(model.parameters()), next(iter(state.values())))


def test_names_that_are_the_same_stay_in_the_same_dict_with_its_attributes():
    model = inside()
    state = model.state_dict()
    assert with_plain_names(model, state) is state
    assert with_own_names(model, state, state) is state
    renamed = with_own_names(nn.DataParallel(model), state, nn.DataParallel(model).state_dict())
    assert renamed._metadata is state._metadata


def test_a_name_that_the_model_does_not_have_is_kept_inside_its_wrappers():
    model = nn.DataParallel(inside())
    assert key_prefix(model) == "module."
    assert list(with_own_names(model, {"new": 1}, model.state_dict())) == ["module.new"]


def test_weights_without_a_model_lose_the_names_of_wrappers():
    x = torch.zeros(1)
    assert list(plain_weights({"module.a": x, "module._orig_mod.b": x})) == ["a", "b"]
    assert list(plain_weights({"module.a": x, "b": x, "n": 3})) == ["module.a", "b"]
