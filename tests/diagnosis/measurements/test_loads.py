"""What a program loads and saves is heard, and nothing of it is kept alive."""

import copy
import gc
import os
import weakref
from collections import OrderedDict
from io import BytesIO

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from hookcb.diagnosis.heard import heard, listen
from hookcb.diagnosis.measurements.loads import Loads, Saves


@pytest.fixture(autouse=True)
def _listening():
    end = listen([Loads, Saves], from_start=True)
    yield
    assert heard(Loads).failure is None
    assert heard(Saves).failure is None
    end()


def net():
    return nn.Sequential(OrderedDict(body=nn.Linear(4, 3), norm=nn.BatchNorm1d(3), head=nn.Linear(3, 2)))


def copied(model, prefix=""):
    return {prefix + name: x.clone() for name, x in model.state_dict().items()}


def was_loaded(model):
    return [name for name, p in model.named_parameters() if heard(Loads).was_loaded(p)]


def test_only_parameters_that_got_values_were_loaded():
    model = net()
    assert was_loaded(model) == []
    model.load_state_dict({"head.bias": torch.ones(2), "other": torch.ones(1)}, strict=False)
    assert was_loaded(model) == ["head.bias"]
    with pytest.raises(RuntimeError):
        model.load_state_dict({"body.bias": torch.ones(3)})
    model.load_state_dict(copied(model, "module."), strict=False)
    assert was_loaded(model) == ["head.bias"]
    model.body.load_state_dict(copied(model.body))
    assert was_loaded(model) == ["body.weight", "body.bias", "head.bias"]


def test_a_load_by_assign_makes_new_parameters_that_were_loaded():
    model = net()
    before = model.body.weight
    model.load_state_dict(copied(model), assign=True)
    assert model.body.weight is not before
    assert len(was_loaded(model)) == 6
    assert not heard(Loads).was_loaded(before)
    assert heard(Loads).loads[0].n_same == 0


def test_tied_weights_and_models_inside_a_wrapper_count():
    model = net()
    model.tied = model.head
    model.load_state_dict(copied(model))
    wrapper = nn.ModuleDict({"module": net()})
    wrapper.load_state_dict(copied(wrapper))
    assert len(was_loaded(model)) == len(was_loaded(wrapper)) == 6


def test_nothing_of_the_user_is_kept_alive():
    model = net()
    state = copied(model)
    model.load_state_dict(state)
    torch.save({"model": model.state_dict()}, BytesIO())
    file = BytesIO()
    torch.save(state, file)
    file.seek(0)
    read = torch.load(file)
    gone = [weakref.ref(x) for x in (model, model.body.weight, state["body.bias"], read["body.bias"])]
    del model, state, read
    gc.collect()
    assert [x() for x in gone] == [None] * 4


def test_a_load_of_the_models_own_memory_is_seen_also_of_a_shallow_copy():
    model = net()
    loads = heard(Loads)
    loads.clock[1] = 5
    state = model.state_dict()
    loads.clock[1] = 9
    model.load_state_dict({name: x.cpu() for name, x in state.items()})
    model.load_state_dict(copy.deepcopy(state))
    first, second = loads.loads
    assert (first.n_same, first.taken, first.clock) == (6, {1: 5}, {1: 9})
    assert (second.n_same, second.taken) == (0, None)


def test_what_a_file_has_of_optimizers_and_schedulers_is_known(tmp_path):
    model = net()
    opt = Adam(model.parameters(), lr=0.5)
    rate = StepLR(opt, 1)
    model(torch.randn(5, 4)).sum().backward()
    opt.step()
    rate.step()
    all_of_it = {
        "epoch": 3,
        "nets": [{"model": model.state_dict()}],
        "opt": opt.state_dict(),
        "rate": rate.state_dict(),
    }
    path = tmp_path / "a.pt"
    torch.save(all_of_it, path)
    (save,) = heard(Saves).saves
    assert save.path == os.fspath(path)
    assert [x.key for x in save.dicts] == ["model"]
    assert save.optimizers == (6,)
    assert not save.is_opaque
    read = torch.load(path)
    (file,) = heard(Loads).files
    assert (file.path, file.n_states, file.rates[0]["last_epoch"]) == (os.fspath(path), (6,), 1)
    assert file.groups[0]["initial_lr"] == 0.5
    model.load_state_dict(read["nets"][0]["model"])
    assert heard(Loads).loads[-1].file == 0
    assert (heard(Loads).n_optimizers, heard(Loads).n_schedulers) == (0, 0)
    opt.load_state_dict(read["opt"])
    rate.load_state_dict(read["rate"])
    one_cycle = OneCycleLR(SGD(model.parameters(), lr=0.1), 1.0, 10)
    one_cycle.load_state_dict(one_cycle.state_dict())
    assert (heard(Loads).n_optimizers, heard(Loads).n_schedulers) == (1, 2)


class Odd(dict):
    def __getitem__(self, key):
        raise ValueError("code of the user")


def test_objects_of_the_user_are_not_read():
    torch.save([1, "a", {"x": Odd(w=torch.ones(2)), "f": 3}], BytesIO())
    (save,) = heard(Saves).saves
    assert save.dicts[0].shapes == {"w": (2,)}
    torch.save({"model": net(), "w": torch.ones(2)}, BytesIO())
    assert heard(Saves).saves[-1].is_opaque
