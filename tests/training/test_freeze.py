"""Freeze, freeze and unfreeze: what is frozen stays to the bit, the rest trains as by hand."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Freeze, freeze, unfreeze
from tests.support import Net, fit, make_batches, make_learner, make_model, same, weights


class Body(nn.Module):
    """A body with batch norm, and a head."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU())
            self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.body(x))


def sgd(params, lr):
    return torch.optim.SGD(params, lr=lr, momentum=0.9, weight_decay=0.1)


def adamw(params, lr):
    return torch.optim.AdamW(params, lr=lr, weight_decay=0.1)


def required(model):
    return [p.requires_grad for p in model.parameters()]


@pytest.mark.parametrize("opt_func", [sgd, adamw])
@pytest.mark.parametrize("until", [None, 0, 1, 2, 9])
def test_it_trains_as_a_loop_that_freezes_by_hand(opt_func, until):
    learn = make_learner(model=Body(), opt_func=opt_func)
    fit(learn, 1)  # so that there are momenta and running statistics
    fit(learn, 3, cbs=Freeze("body", until=until))

    model = Body()
    opt = opt_func(model.parameters(), lr=0.1)

    def epochs(n, n_frozen):
        for epoch in range(n):
            model.train()
            model.body.requires_grad_(epoch >= n_frozen)
            if epoch < n_frozen:
                model.body.eval()
            for x, y in make_batches(3):
                F.mse_loss(model(x), y).backward()
                opt.step()
                opt.zero_grad()
        model.requires_grad_(True)

    epochs(1, 0)
    epochs(3, 9 if until is None else until)
    assert same(weights(learn.model), weights(model))
    assert all(required(learn.model))


@pytest.mark.parametrize("opt_func", [sgd, adamw])
def test_what_is_frozen_does_not_move_nor_what_batch_norm_has_counted(opt_func):
    learn = fit(make_learner(model=Body(), opt_func=opt_func), 1)
    for p in learn.model.parameters():
        p.grad = torch.ones_like(p)
    learn.opt.zero_grad = lambda: None  # leaves gradients behind
    body, head = weights(learn.model.body), weights(learn.model.head)
    fit(learn, 2, cbs=Freeze([nn.BatchNorm1d, "body.0"]))
    assert same(weights(learn.model.body), body)
    assert not same(weights(learn.model.head), head)


def test_requires_grad_is_restored_as_it_was_however_the_fit_ends():
    class Fails(Freeze):
        def after_loss(self):
            raise KeyboardInterrupt

    model = Body()
    model.body[1].requires_grad_(False)
    before = required(model)
    cb = Freeze("body", until=1)
    fit(make_learner(model=model, cbs=cb), 2)
    assert required(model) == before
    with pytest.raises(KeyboardInterrupt):
        fit(make_learner(model=model, cbs=Fails("body")))
    assert required(model) == before
    fit(
        make_learner(model=model),
        cbs=[pickle.loads(pickle.dumps(cb)), copy.deepcopy(Freeze("body.0", name="b"))],
    )
    assert required(model) == before


@pytest.mark.parametrize("order", [1, -1])
def test_a_parameter_held_by_two_waits_for_the_last(order):
    learn, seen = make_learner(model=Body()), []
    cbs = [Freeze("body", until=1, name="all"), Freeze("body.0", until=2, name="first")][::order]

    class Look(Freeze):
        def before_train(self):
            seen.append(required(self.model.body))

    fit(learn, 3, cbs=[*cbs, Look("head", until=0)])
    assert seen == [[False] * 4, [False] * 2 + [True] * 2, [True] * 4]
    assert all(required(learn.model))


def test_shared_weights_are_frozen_for_all_who_share_them():
    model = Net()
    before = weights(model.again)
    fit(make_learner(model=model, cbs=Freeze("stem")))
    assert same(weights(model.again), before)


def test_what_cannot_be_frozen_is_refused_before_training():
    for where, error, message in (
        ("bodi", LookupError, "did you mean 'body'"),
        ("*", ValueError, "leaves nothing to train of Body"),
        (None, ValueError, "leaves nothing to train"),
        (3, TypeError, "3 selects no modules"),
    ):
        learn = make_learner(model=Body())
        with pytest.raises(error, match=message):
            fit(learn, cbs=Freeze(where))
        assert learn.train_iter == 0
        assert all(required(learn.model))
    for until, error in ((-1, ValueError), (1.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match="until is "):
            Freeze("body", until=until)


def test_a_generator_of_modules_serves_two_fits():
    model = Body()
    before, cb = weights(model.body), Freeze(m for m in model.body)
    for _ in range(2):
        fit(make_learner(model=model), cbs=cb)
    assert same(weights(model.body), before)


def test_the_functions_freeze_and_unfreeze_for_good():
    model = make_model()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    freeze(model, "0")
    assert required(model) == [False, False, True, True]
    assert [p.grad is None for p in model.parameters()] == [True, True, False, False]
    before = weights(model[0])
    fit(make_learner(model=model, opt_func=adamw))
    assert same(weights(model[0]), before)
    assert required(model) == [False, False, True, True]
    freeze(model, None)
    assert not any(required(model))
    unfreeze(model, nn.Linear)
    assert all(required(model))
    model.lone = nn.Parameter(torch.ones(1), requires_grad=False)
    model.count = nn.Parameter(torch.ones(1, dtype=torch.int64), requires_grad=False)
    unfreeze(model)
    assert model.lone.requires_grad
    assert not model.count.requires_grad
    with pytest.raises(LookupError, match="did you mean"):
        freeze(nn.Sequential(nn.ModuleDict({"encoder": nn.Linear(1, 1)})), "0.encodr")
