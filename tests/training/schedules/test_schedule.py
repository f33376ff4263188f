"""Schedule trains as a scheduler of torch does in a loop by hand."""

import itertools
from functools import partial

import pytest
import torch
from torch.optim import lr_scheduler as lrs

from hookcb import Callback, CancelBatchException, CancelStepException, Schedule
from tests.support import fit, in_turn, make_learner, make_model, same, weights
from tests.training.support import Unsized, batches_of, groups, quiet, rates, sgd, train_plainly, two_groups

RAGGED = [4, 4, 2]
flat = itertools.chain.from_iterable

FACTORIES = {
    "step": partial(lrs.StepLR, step_size=2, gamma=0.3),
    "milestones": partial(lrs.MultiStepLR, milestones=[1, 4]),
    "cosine": partial(lrs.CosineAnnealingLR, T_max=4),
    "restarts": partial(lrs.CosineAnnealingWarmRestarts, T_0=2),
    "cyclic": partial(lrs.CyclicLR, base_lr=0.01, max_lr=0.5, step_size_up=2, cycle_momentum=False),
    "exponential": partial(lrs.ExponentialLR, gamma=0.7),
    "linear": partial(lrs.LinearLR, total_iters=3),
    "lambda": partial(lrs.LambdaLR, lr_lambda=lambda i: 1 / (1 + i)),
    "sequential": lambda opt: lrs.SequentialLR(opt, [lrs.LinearLR(opt, 0.1), lrs.StepLR(opt, 2)], [3]),
    "per group": lambda opt: lrs.LambdaLR(opt, [lambda i: 1 / (1 + i), lambda i: 0.5**i]),
    "chained": lambda opt: lrs.ChainedScheduler([lrs.ExponentialLR(opt, 0.9), lrs.StepLR(opt, 2)]),
}


@pytest.mark.parametrize("level", [CancelBatchException, CancelStepException])
def test_cancelled_batches_count_and_nothing_is_warned_of(level):
    learn = make_learner()

    def cancel(cb):
        if cb.training:
            raise level

    event = "before_batch" if level is CancelBatchException else "before_step"
    steps = []
    count = Callback(after_fit=lambda cb: steps.append(cb.learn.schedule.scheduler.last_epoch), name="count")
    count.order = 90
    fit(
        learn,
        2,
        cbs=[Schedule(partial(lrs.StepLR, step_size=1)), Callback(name="c", **{event: cancel}), count],
    )
    assert steps == [6]


def test_validation_within_the_training_steps_nothing():
    def look(cb):
        cb.learn.validate()

    learn = fit(
        make_learner(), cbs=[Schedule(partial(lrs.ExponentialLR, gamma=0.5)), Callback(after_step=look)]
    )
    assert learn.recorder.lrs == [0.1, 0.05, 0.025]


def test_two_schedules_chain_as_in_torch():
    cbs = [Schedule(partial(lrs.ExponentialLR, gamma=g), name=n) for g, n in [(0.5, "a"), (0.1, "b")]]
    learn = fit(make_learner(), cbs=cbs)
    assert learn.recorder.lrs == pytest.approx([0.1, 0.005, 0.00025])
    assert groups(learn.opt)[0]["lr"] == 0.1


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # of SequentialLR of torch 2.6 to itself
@in_turn("per", ["batch", "epoch"])
@in_turn("kind", FACTORIES)
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
    assert learn.recorder.lrs == [of_groups[-1] for of_groups in expected]
    assert same(weights(ours), weights(model))


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
