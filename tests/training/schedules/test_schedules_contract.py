"""Schedules give the rates torch's own schedulers give in a loop by hand, and give everything back."""

import copy
import io
import itertools
import pickle
import threading
from functools import partial

import pytest
import torch
from torch.optim import lr_scheduler as lrs

from hookcb import Callback, GradientAccumulation, OneCycle, ReduceLROnPlateau, Schedule, WarmupCosine
from tests.support import CANCELS, EVENTS, make_model, same, spy, weights
from tests.training.support import (
    DEVIL,
    NESTED_AT,
    Unsized,
    Wide,
    batches_of,
    equal,
    groups,
    momentum,
    quiet,
    raising,
    rates,
    seeded,
    sgd,
    train_plainly,
    two_groups,
    validating,
)

RAGGED = [4, 4, 2]
flat = itertools.chain.from_iterable
FACTORIES = {
    "step": partial(lrs.StepLR, step_size=2, gamma=0.3),
    "milestones": partial(lrs.MultiStepLR, milestones=[1, 4]),
    "cosine": partial(lrs.CosineAnnealingLR, T_max=4),
    "restarts": partial(lrs.CosineAnnealingWarmRestarts, T_0=2),
    "cyclic": partial(lrs.CyclicLR, base_lr=0.01, max_lr=0.5, step_size_up=2, cycle_momentum=False),
    "linear": partial(lrs.LinearLR, total_iters=3),
    "per group": lambda opt: lrs.LambdaLR(opt, [lambda i: 1 / (1 + i), lambda i: 0.5**i]),
    "chained": lambda opt: lrs.ChainedScheduler([lrs.ExponentialLR(opt, 0.9), lrs.StepLR(opt, 2)]),
}


@pytest.mark.parametrize("per", ["batch", "epoch"])
@pytest.mark.parametrize("kind", FACTORIES)
def test_any_scheduler_of_torch_trains_as_in_a_loop_by_hand(kind, per):
    make_opt = two_groups(torch.optim.SGD, momentum=0.9)
    train, model = batches_of(RAGGED), make_model()
    opt = make_opt(model)
    scheduler = FACTORIES[kind](opt)
    expected = []
    note = [lambda: expected.append([g["lr"] for g in opt.param_groups]), scheduler.step]

    def after_batch():
        note[0]()
        if per == "batch":
            scheduler.step()

    train_plainly(model, train, 3, opt, after_batch, scheduler.step if per == "epoch" else None)

    ours = make_model()
    learn = quiet(Unsized(train), batches_of([3]), ours, make_opt(ours))
    watch, seen = rates(learn)
    learn.fit(3, cbs=[Schedule(FACTORIES[kind], per), watch])
    assert seen == expected
    assert same(weights(ours), weights(model))


HORIZON = [OneCycle, WarmupCosine]
MAKES = [
    *HORIZON,
    partial(Schedule, FACTORIES["cosine"]),
    partial(Schedule, FACTORIES["step"], "epoch"),
    partial(ReduceLROnPlateau, patience=1, factor=0.5),
]


@pytest.mark.parametrize("make", HORIZON)
def test_a_schedule_over_the_whole_fit_needs_a_loader_with_a_length(make):
    learn, log = quiet(Unsized(batches_of(RAGGED)), model=(model := make_model())), []
    before = weights(model)
    with pytest.raises(ValueError, match="length"):
        learn.fit(2, cbs=[make(), spy(log, "a")])
    assert ("a", "before_epoch") not in log
    assert same(weights(model), before)
    learn.fit(1)


@pytest.mark.parametrize("make", MAKES)
def test_a_fit_of_no_epochs_changes_nothing(make):
    learn = quiet(batches_of(RAGGED), batches_of([2]))
    learn.fit(0, cbs=make())
    assert groups(learn.opt) == groups(sgd(make_model().parameters(), 0.1))


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("opt_func", [momentum, partial(torch.optim.Adam, amsgrad=True)])
def test_each_group_gets_back_exactly_what_it_had_however_the_fit_ends(make, opt_func):
    learn = quiet(batches_of(RAGGED), batches_of([2]), opt=opt_func)
    learn.fit(1)
    kept = groups(learn.opt)
    for event, raised in zip(EVENTS, itertools.cycle(DEVIL), strict=False):
        with pytest.raises(raised):
            learn.fit(3, cbs=[make(), raising(event, raised("why"), nth=0 if event.endswith("fit") else 1)])
        assert groups(learn.opt) == kept
        assert [list(group) for group in groups(learn.opt)] == [list(group) for group in kept]


@pytest.mark.parametrize("make", MAKES)
def test_what_the_user_keeps_in_a_group_stays_that_very_thing(make):
    learn = quiet(batches_of(RAGGED), batches_of([2]))
    learn.fit(1)
    learn.opt.param_groups[0]["mine"] = mine = threading.Lock()  # nothing that could be copied
    learn.fit(1, cbs=make())
    assert learn.opt.param_groups[0]["mine"] is mine


@pytest.mark.parametrize("make", MAKES)
def test_a_rate_that_is_a_tensor_is_scheduled_and_stays_the_same_tensor(make):
    model, lr = make_model(), torch.tensor(0.1)
    learn = quiet(batches_of(RAGGED), batches_of([2]), model, torch.optim.Adam(model.parameters(), lr=lr))
    learn.fit(2, cbs=make())
    assert learn.opt.param_groups[0]["lr"] is lr
    assert torch.equal(lr, torch.tensor(0.1))
    watch, seen = rates(learn)
    learn.fit(2, cbs=[make(), watch])
    plain = quiet(batches_of(RAGGED), batches_of([2]))
    watch, expected = rates(plain)
    plain.fit(2, cbs=[make(), watch])
    if not isinstance(make(), ReduceLROnPlateau):
        assert list(flat(seen)) == pytest.approx(list(flat(expected)))


def test_a_rate_given_to_fit_is_where_the_schedule_begins_and_what_is_there_afterwards():
    learn = quiet(batches_of(RAGGED))
    watch, seen = rates(learn)
    learn.fit(1, lr=0.5, cbs=[watch, Schedule(partial(lrs.StepLR, step_size=1, gamma=0.5))])
    assert seen == [[0.5], [0.25], [0.125]]
    assert learn.opt.param_groups[0]["lr"] == 0.5


def test_several_schedules_at_once_multiply_and_all_is_given_back():
    learn = quiet(batches_of(RAGGED), batches_of([2]))
    watch, seen = rates(learn)
    halve = partial(lrs.MultiplicativeLR, lr_lambda=lambda i: 0.5)
    tenth = partial(lrs.MultiplicativeLR, lr_lambda=lambda i: 0.1)
    learn.fit(2, cbs=[Schedule(halve), Schedule(tenth, "epoch", name="epochs"), watch])
    assert list(flat(seen)) == pytest.approx([0.1, 0.05, 0.025, 0.00125, 0.000625, 0.0003125])
    assert groups(learn.opt) == groups(sgd(make_model().parameters(), 0.1))


@pytest.mark.parametrize("make", MAKES)
def test_a_validation_inside_the_fit_moves_no_rate(make):
    def run(*cbs):
        seeded()
        learn = quiet(batches_of(RAGGED), batches_of([2, 3]), Wide(), momentum)
        watch, seen = rates(learn)
        learn.fit(3, cbs=[make(), watch, *cbs])
        return seen, weights(learn.model)

    expected, plain = run()
    for event in NESTED_AT:
        seen, trained = run(validating(event))
        assert seen == expected, event
        assert same(trained, plain), event


@pytest.mark.parametrize("make", [*HORIZON, partial(Schedule, FACTORIES["cosine"])])
@pytest.mark.parametrize("level", ["batch", "backward", "step"])
@pytest.mark.parametrize("nth", [0, 1])
def test_batches_without_a_step_count_too_and_torch_does_not_warn(make, level, nth):
    learn = quiet(batches_of(RAGGED))
    watch, expected = rates(learn)
    learn.fit(2, cbs=[make(), watch])
    watch, seen = rates(learn)
    watch.order = -5
    plan = {(f"before_{level}", nth + k): CANCELS[level]() for k in range(2)}
    learn.fit(2, cbs=[make(), watch, spy([], "a", plan)])
    assert seen == expected


@pytest.mark.parametrize("make", MAKES)
def test_neither_accumulation_nor_a_fit_without_any_step_makes_torch_warn(make):
    learn = quiet(batches_of(RAGGED), batches_of([2]))
    learn.fit(2, cbs=[make(), GradientAccumulation(3)])
    before = weights(learn.model)
    learn.fit(2, cbs=[make(), spy([], "a", {("before_step", k): CANCELS["step"]() for k in range(6)})])
    assert same(weights(learn.model), before)


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("level", ["train", "epoch", "validate"])
@pytest.mark.parametrize("nth", range(3))
def test_a_cancelled_phase_ends_no_fit(make, level, nth):
    log = []
    learn = quiet(batches_of(RAGGED), batches_of([2]))
    learn.fit(3, cbs=[make(), spy(log, "a", {(f"before_{level}", nth): CANCELS[level]()})])
    assert log.count(("a", "after_epoch")) == 3


@pytest.mark.parametrize("make", [OneCycle, WarmupCosine, ReduceLROnPlateau, MAKES[2]])
def test_copies_before_in_and_after_a_fit_train_the_same(make):
    def trained(cb):
        learn = quiet(batches_of(RAGGED), batches_of([2]), opt=momentum)
        learn.fit(3, cbs=cb)
        return weights(learn.model)

    cb, copies = make(), []
    taken = Callback(
        name="take", after_batch=lambda c: copies.append(copy.deepcopy(cb)) if c.training else None
    )
    expected = trained(make())
    quiet(batches_of(RAGGED), batches_of([2]), opt=momentum).fit(1, cbs=[cb, taken])
    for again in (
        cb,
        copy.deepcopy(make()),
        pickle.loads(pickle.dumps(make())),
        pickle.loads(pickle.dumps(cb)),
    ):
        assert same(trained(again), expected)
    assert same(trained(copies[-1]), expected)


@pytest.mark.parametrize("make", MAKES)
def test_state_is_plain_and_loading_it_back_changes_nothing(make):
    def reload(cb):
        if cb.training and cb.train_iter % 2:
            file = io.BytesIO()
            torch.save(cb.learn.tested.state_dict(), file)
            cb.learn.tested.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))

    def run(*cbs):
        learn = quiet(batches_of(RAGGED), batches_of([2]), opt=momentum)
        cb = make()
        cb.name = "tested"
        watch, seen = rates(learn)
        learn.fit(4, cbs=[cb, watch, *cbs])
        return seen, weights(learn.model)

    again = Callback(name="again", after_batch=reload)
    again.order = 100
    assert equal(list(run(again)), list(run()))


@pytest.mark.parametrize("make", HORIZON)
def test_the_state_of_a_shorter_fit_is_refused_with_what_to_do(make):
    states = []
    take = Callback(
        name="take", after_epoch=lambda cb: states.append(copy.deepcopy(cb.learn.tested.state_dict()))
    )
    take.order = 100
    load = Callback(name="loads", before_epoch=lambda cb: cb.learn.tested.load_state_dict(states[0]))
    learn = quiet(batches_of(RAGGED))
    learn.fit(5, cbs=[make(name="tested"), take])
    with pytest.raises(ValueError, match=r"(?s)5.*8.*n_epoch=5|n_epoch=5"):
        learn.fit(8, cbs=[make(name="tested"), load])
    learn.fit(5, cbs=[make(name="tested"), load])
