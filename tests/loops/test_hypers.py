"""fastai's names of an optimizer's settings read and write those of torch."""

import copy
import gc
import io
import weakref

import pytest
import torch
from torch.optim import SGD, AdamW, RMSprop

from tests.support import fit, make_learner, make_model


def settings(learn):
    return learn.opt.param_groups[0]


@pytest.mark.parametrize(
    ("opt_func", "names"),
    [
        (AdamW, {"lr": 0.05, "wd": 0.01, "mom": 0.9, "sqr_mom": 0.999, "eps": 1e-8}),
        (lambda p, lr: SGD(p, lr=lr, momentum=0.8, weight_decay=0.1), {"lr": 0.05, "wd": 0.1, "mom": 0.8}),
        (lambda p, lr: RMSprop(p, lr=lr), {"lr": 0.05, "sqr_mom": 0.99, "wd": 0, "mom": 0}),
    ],
)
def test_they_read_and_write_what_torch_has(opt_func, names):
    learn = make_learner(opt_func=opt_func, lr=0.05)
    learn.create_opt()
    hyper = learn.opt.hypers[-1]
    assert {name: hyper[name] for name in names} == names
    for name in names:
        learn.opt.set_hyper(name, 0.5)
        assert hyper[name] == learn.opt.hypers[0][name] == 0.5
        hyper[name] = 0.25
    assert {hyper[name] for name in names} == {0.25}
    torch_names = {"wd": "weight_decay", "mom": "momentum"}
    assert all(settings(learn).get(key, 0.25) == 0.25 for key in (*torch_names.values(), "lr"))
    assert set(hyper) == set(settings(learn)) - {"params"}
    fit(learn)


def test_they_are_those_of_the_optimizer_as_it_is_now():
    learn = make_learner(opt_func=AdamW)
    fit(learn, lr=0.3)
    hypers = learn.opt.hypers
    assert (len(hypers), hypers[-1]["lr"]) == (1, 0.3)
    state = copy.deepcopy(learn.opt.state_dict())
    state["param_groups"][0]["lr"] = 0.7
    learn.opt.load_state_dict(state)
    assert hypers[-1]["lr"] == 0.7
    learn.opt.add_param_group({"params": [torch.zeros(1, requires_grad=True)], "lr": 0.1})
    assert [hyper["lr"] for hyper in hypers[0:]] == [0.7, 0.1]
    learn.opt.set_hyper("lr", slice(1e-3, 1e-1))
    assert [group["lr"] for group in learn.opt.param_groups] == pytest.approx([1e-3, 1e-1])
    assert "'lr': 0.001" in repr(hypers)


def test_errors_say_what_there_is():
    learn = make_learner(opt_func=SGD)
    learn.create_opt()
    with pytest.raises(KeyError, match="sqr_mom: the optimizer has no alpha; it has lr, momentum"):
        learn.opt.hypers[0]["sqr_mom"]
    with pytest.raises(KeyError, match="nothing"):
        learn.opt.set_hyper("nothing", 1.0)
    with pytest.raises(TypeError, match="lr cannot be deleted"):
        del learn.opt.hypers[0]["lr"]
    with pytest.raises(ValueError, match="lr has 2 rates, but the optimizer has 1 parameter groups"):
        learn.opt.set_hyper("lr", [0.1, 0.2])


def test_the_optimizer_saves_copies_and_dies_as_without_them():
    learn = make_learner(opt_func=AdamW)
    fit(learn)
    file, plain = io.BytesIO(), AdamW(make_model().parameters())
    torch.save(learn.opt, file)
    file.seek(0)
    assert vars(torch.load(file, weights_only=False)).keys() == vars(copy.deepcopy(plain)).keys()
    assert learn.opt.state_dict().keys() == plain.state_dict().keys()
    gone = weakref.ref(learn.opt)
    gc.disable()
    try:
        learn.opt = None
        assert gone() is None
    finally:
        gc.enable()


def test_an_optimizer_of_the_user_stays_as_it_is():
    model = make_model()
    opt = SGD(model.parameters(), lr=0.1)
    before = set(vars(opt))
    fit(make_learner(model=model, opt_func=opt))
    assert set(vars(opt)) == before
