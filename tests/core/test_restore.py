"""hookcb.core.restore: what a block may change, and finds put back after it."""

import copy
import random

import numpy
import pytest
import torch
from torch import nn

from hookcb.core.restore import (
    preserve_attribute,
    preserve_buffers,
    preserve_contents,
    preserve_modes,
    preserve_optimizer,
    preserve_random,
    preserve_state,
    preserve_values,
)


def test_attributes_are_put_back_however_the_block_ends():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).eval())

    def change():
        with preserve_attribute(model, "training", False), preserve_modes(model):
            assert [m.training for m in model] == [False, False]
            model.train()
            raise KeyError

    with pytest.raises(KeyError):
        change()
    assert [m.training for m in model] == [True, False]


def test_contents_are_put_back_into_the_same_containers():
    attributes, names = {"a": 1, "b": 2}, {"x"}
    with preserve_contents(attributes, names):
        del attributes["a"]
        attributes["c"] = 3
        names.add("y")
    assert list(attributes.items()) == [("a", 1), ("b", 2)]
    assert names == {"x"}


def test_random_numbers_go_on_as_if_nothing_was():
    generator = torch.Generator()

    def drawn():
        mine = torch.rand(1, generator=generator).item()
        return random.random(), numpy.random.rand(), numpy.random.randn(), torch.rand(1).item(), mine

    with preserve_random([generator]):
        first = drawn()
    assert drawn() == first


@pytest.mark.parametrize("kind", ["dense", "sparse", "NaN"])
def test_values_are_put_back_where_no_graph_counts_it(kind):
    x = {"dense": torch.ones(3), "sparse": torch.eye(3).to_sparse(), "NaN": torch.full((3,), torch.nan)}[kind]
    before, version = copy.deepcopy(x), x._version
    with preserve_values([x]):
        x.data.mul_(0)
        if kind == "sparse":
            x.copy_(torch.ones(3, 3).to_sparse())
    assert torch.equal(x.to_dense().nan_to_num(7.0), before.to_dense().nan_to_num(7.0))
    assert kind == "sparse" or x._version == version


def test_values_that_have_not_changed_are_not_written_if_only_changed_are_asked_for():
    x = torch.ones(1).expand(3)  # which torch refuses to write to
    with preserve_values([x], only_changed=True):
        pass
    with pytest.raises(RuntimeError, match="single memory location"), preserve_values([x]):
        pass


def test_an_optimizer_keeps_the_tensors_and_groups_that_it_had():
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    opt = torch.optim.Adam(params[:1], lr=torch.tensor(0.1), capturable=False, foreach=False)
    params[0].grad = torch.ones(2)
    opt.step()
    group, average, before = (
        opt.param_groups[0],
        opt.state[params[0]]["exp_avg"],
        copy.deepcopy(opt.state_dict()),
    )
    with preserve_optimizer(opt):
        opt.step()
        opt.add_param_group({"params": params[1:]})
        opt.param_groups[0]["extra"] = 1
        opt.param_groups[0]["lr"].fill_(3.0)
        opt.mark = 1
        opt.state[params[1]] = {"step": 1}
    assert opt.state[params[0]]["exp_avg"] is average
    assert opt.param_groups[0] is group
    assert str(opt.state_dict()) == str(before)
    assert not hasattr(opt, "mark")


def test_a_model_works_on_copies_of_its_buffers_and_others_that_write_to_them_are_undone():
    model = nn.BatchNorm1d(2)
    own, version = model.running_mean, model.running_mean._version
    with preserve_buffers(model):
        model(torch.randn(4, 2))
        model.register_buffer("more", torch.ones(1), persistent=False)
    assert model.running_mean is own
    assert own._version == version
    assert not hasattr(model, "more")
    assert not model._non_persistent_buffers_set
    with preserve_buffers(model):
        own.fill_(5.0)
    assert own.tolist() == [0.0, 0.0]


def test_state_of_several_modules_and_their_optimizer_is_put_back():
    model, head = nn.Sequential(nn.Linear(2, 2), nn.Dropout()), nn.Linear(2, 1)
    head.count = 0
    opt = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1, momentum=0.9)
    head.weight.grad = grad = torch.ones(1, 2)
    before = copy.deepcopy([model, head, opt.state_dict()])
    numbers = torch.get_rng_state()
    with preserve_state(model, head, opt=opt):
        assert head.weight.grad is None
        head(model.eval()(torch.rand(3, 2))).sum().backward()
        opt.step()
        head.count = 4
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before[0].parameters(), strict=True))
    assert torch.equal(head.weight, before[1].weight)
    assert head.weight.grad is grad
    assert head.count == 0
    assert model.training
    assert model[1].training
    assert not opt.state
    assert torch.equal(torch.get_rng_state(), numbers)
    assert str(opt.state_dict()) == str(before[2])
