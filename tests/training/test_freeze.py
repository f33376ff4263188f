"""Freeze, freeze and unfreeze: what is frozen stays to the bit, the rest trains as by hand."""

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn

from hookcb import Callback, Freeze, freeze, unfreeze
from tests.support import (
    EVENTS,
    covering,
    fit,
    in_turn,
    make_learner,
    make_model,
    modes,
    same,
    weights,
)
from tests.training.support import (
    DEVIL,
    ENDS,
    NESTED_AT,
    Wide,
    batches_of,
    momentum,
    quiet,
    raising,
    seeded,
    state_of,
    validating,
)

RAGGED = [4, 4, 2]


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


def adamw(params, lr):
    return torch.optim.AdamW(params, lr=lr, weight_decay=0.1)


def required(model):
    return [p.requires_grad for p in model.parameters()]


@pytest.mark.parametrize("opt_func", [momentum, adamw])
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


def test_what_cannot_be_frozen_is_refused_before_training():
    for where, error, message in (
        ("bodi", LookupError, "did you mean 'body'"),
        ("*", ValueError, "leaves nothing to train in Body"),
        (None, ValueError, "leaves nothing to train"),
        (3, TypeError, "where must be a glob.*got 3"),
    ):
        learn = make_learner(model=Body())
        with pytest.raises(error, match=message):
            fit(learn, cbs=Freeze(where))
        assert learn.train_iter == 0
        assert all(required(learn.model))
    for until, error in ((-1, ValueError), (1.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match="until must be "):
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


def frozen_by_hand(model, names, n_epoch, until, opt_func):
    opt = opt_func(model.parameters(), lr=0.1)
    parts = [dict(model.named_modules())[name] for name in names]
    for epoch in range(n_epoch):
        model.train()
        frozen = until is None or epoch < until
        for part in parts:
            part.requires_grad_(not frozen)
            for m in part.modules():
                m.training = not (frozen and isinstance(m, nn.BatchNorm1d))
        for x, y in batches_of(RAGGED):
            nn.functional.mse_loss(model(x), y).backward()
            opt.step()
            opt.zero_grad()
    return weights(model)


WHERE = [
    (["stem", "norm"], ["stem", "norm"]),
    ("[sn][to]*", ["stem", "norm"]),
    (nn.BatchNorm1d, ["norm"]),
    (lambda m: isinstance(m, nn.Linear) and m.out_features == 1, ["head"]),
    ("mid", ["mid"]),
]


@pytest.mark.parametrize(
    ("nth", "until", "opt_func"),
    covering(range(len(WHERE)), [None, 0, 1, 7], [momentum, torch.optim.AdamW]),
)
def test_what_is_frozen_stays_to_the_bit_and_the_rest_trains_as_by_hand(nth, until, opt_func):
    where, names = WHERE[nth]
    seeded()
    expected = frozen_by_hand(Wide(), names, 3, until, opt_func)
    seeded()
    learn = quiet(batches_of(RAGGED), batches_of([2]), Wide(), opt_func)
    learn.fit(3, cbs=Freeze(where, until))
    assert same(weights(learn.model), expected)
    assert all(p.requires_grad for p in learn.model.parameters())


def test_weights_that_have_moved_before_have_neither_momentum_nor_decay_while_frozen():
    learn = quiet(batches_of(RAGGED), model=Wide(), opt=momentum)
    learn.fit(2)
    before = state_of(learn.model)["state_dict"]
    learn.fit(2, cbs=Freeze(["stem", "norm"]))
    after = learn.model.state_dict()
    for name, value in before.items():
        assert torch.equal(value, after[name]) == (name.startswith(("stem", "norm")) or name == "unused"), (
            name
        )
    learn.fit(1)
    assert not torch.equal(learn.model.stem.weight, before["stem.weight"])


@pytest.mark.parametrize("until", [None, 1])
def test_what_the_user_had_frozen_stays_frozen_during_and_after(until):
    model, seen = Wide(), []
    model.stem.weight.requires_grad_(False)
    before = model.stem.weight.clone()
    look = Callback(name="look", before_batch=lambda cb: seen.append(cb.model.stem.bias.requires_grad))
    learn = quiet(batches_of(RAGGED), None, model)
    learn.fit(2, cbs=[Freeze("stem", until), look])
    assert seen == [False] * 3 + [until == 1] * 3
    assert not model.stem.weight.requires_grad
    assert model.stem.bias.requires_grad
    assert torch.equal(model.stem.weight, before)


@in_turn(("shift", "raised"), list(enumerate(ENDS)))
def test_however_the_fit_ends_all_may_train_again(shift, raised):
    for event, until in zip(EVENTS[shift % 2 :: 2], itertools.cycle([None, 1]), strict=False):
        model = Wide()
        model.head.bias.requires_grad_(False)
        model.norm.eval()
        kept, mode = state_of(model)["requires_grad"], modes(model)
        learn = quiet(batches_of(RAGGED), batches_of([2]), model)
        try:
            learn.fit(
                2, cbs=[Freeze(["stem", "norm"], until), Freeze("norm", name="two"), raising(event, raised())]
            )
        except (*DEVIL, RuntimeError):
            pass
        assert state_of(model)["requires_grad"] == kept, event
        assert modes(model) == mode, event


@in_turn("event", NESTED_AT[::2])
def test_a_validation_inside_thaws_nothing(event):
    def run(*cbs):
        seeded()
        learn = quiet(batches_of(RAGGED), batches_of([2]), Wide(), momentum)
        learn.fit(3, cbs=[Freeze(["stem", "norm"], until=2), *cbs])
        return weights(learn.model)

    assert same(run(validating(event)), run())


def test_a_tied_weight_is_frozen_wherever_it_is_used():
    model = Wide()
    before = model.mid.weight.clone()
    quiet(batches_of(RAGGED), None, model).fit(1, cbs=Freeze("again"))
    assert torch.equal(model.mid.weight, before)


def test_freeze_and_unfreeze_are_there_as_functions():
    model = Wide()
    freeze(model, "stem")
    freeze(model, nn.BatchNorm1d)
    trains = {name for name, p in model.named_parameters() if p.requires_grad}
    assert not any(name.startswith(("stem", "norm")) for name in trains)
    assert {"mid.weight", "head.bias", "unused"} <= trains
    unfreeze(model, "stem")
    assert model.stem.weight.requires_grad
    assert not model.norm.weight.requires_grad
    unfreeze(model)
    assert all(p.requires_grad for p in model.parameters())
    for function in (freeze, unfreeze):
        with pytest.raises(LookupError, match="nowhere"):
            function(model, "nowhere")
