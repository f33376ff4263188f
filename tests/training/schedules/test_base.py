"""What holds for every schedule: rates over a fit go through whatever happens in it, and are given back."""

import copy
import io
import itertools
import math
import pickle
import re
import threading
from functools import partial

import pytest
import torch
from torch.optim import SGD, Adam
from torch.optim import lr_scheduler as lrs

from hookcb import (
    Callback,
    CancelFitException,
    GradientAccumulation,
    OneCycle,
    ReduceLROnPlateau,
    Schedule,
    WarmupCosine,
)
from tests.support import (
    CANCELS,
    EVENTS,
    covering,
    fit,
    in_turn,
    make_batches,
    make_learner,
    make_model,
    same,
    spy,
    weights,
)
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
    validating,
)

RAGGED = [4, 4, 2]
flat = itertools.chain.from_iterable
HORIZON = [OneCycle, WarmupCosine]
MAKES = {
    "one cycle": OneCycle,
    "warm-up": WarmupCosine,
    "per batch": partial(Schedule, partial(lrs.CosineAnnealingLR, T_max=4)),
    "per epoch": partial(Schedule, partial(lrs.ExponentialLR, gamma=0.5), "epoch"),
    "plateau": partial(ReduceLROnPlateau, patience=0, min_delta=10.0),
}


def test_an_earlier_scheduler_does_not_set_the_rate_of_this_fit():
    model = make_model()
    opt = SGD(model.parameters(), lr=7.0)
    lrs.ExponentialLR(opt, 0.5)
    learn = fit(make_learner(model=model, opt_func=opt), lr=0.1, cbs=WarmupCosine(0))
    assert learn.recorder.lrs[0] == 0.1
    assert opt.param_groups[0]["initial_lr"] == 7.0


def test_a_loader_that_gives_more_than_it_says_stays_at_the_last_rate():
    class Liar(list):
        def __len__(self):
            return 4

    learn = make_learner()
    learn.dls = learn.dls._replace(train=Liar(make_batches(6)))
    fit(learn, cbs=OneCycle(1.0))
    assert learn.recorder.lrs[3:] == [pytest.approx(1e-5)] * 3


WRONG = [
    (lambda: Schedule(0.1), TypeError, "must be a function, got 0.1"),
    (lambda: Schedule(lrs.StepLR), TypeError, "partial"),
    (lambda: Schedule(lrs.StepLR(SGD(make_model().parameters(), lr=1), 3)), TypeError, "partial"),
    (lambda: Schedule(partial(lrs.StepLR, step_size=2), per="step"), ValueError, "'batch' or 'epoch'"),
    (lambda: OneCycle(-1.0), ValueError, "lr_max"),
    (lambda: OneCycle(slice(0, 1e-3)), ValueError, "each rate of lr_max"),
    (lambda: OneCycle([0.1, 0]), ValueError, r"lr_max\[1\]"),
    (lambda: OneCycle(div=0), ValueError, "div"),
    (lambda: OneCycle(pct_start=1.5), ValueError, "between 0 and 1"),
    (lambda: OneCycle(moms=(0.95, 0.85, 0.9)), ValueError, "moms must be .*, got "),
    (lambda: OneCycle(moms=(0.95, "a")), TypeError, "moms"),
    (lambda: WarmupCosine(1.5), ValueError, "from 0 to 1"),
    (lambda: WarmupCosine(-1), ValueError, "0 or more"),
    (lambda: WarmupCosine(lr_min=math.inf), ValueError, "lr_min"),
    (lambda: ReduceLROnPlateau(factor=10.0), ValueError, "give factor=0.1"),
    (lambda: ReduceLROnPlateau(factor=1), ValueError, "factor"),
    (lambda: ReduceLROnPlateau(mode="lower"), ValueError, "'min'"),
    (lambda: ReduceLROnPlateau(patience=-1), ValueError, "patience"),
    (lambda: ReduceLROnPlateau(min_delta=math.nan), ValueError, "min_delta"),
]


@in_turn(("make", "error", "text"), WRONG)
def test_arguments_that_cannot_be_are_refused(make, error, text):
    with pytest.raises(error, match=text):
        make()


@in_turn(
    ("cb", "error", "text"),
    [
        (lambda: Schedule(lambda opt: 0.1), TypeError, "must return an LRScheduler, got 0.1"),
        (lambda: Schedule(lrs.ReduceLROnPlateau), TypeError, "hookcb.ReduceLROnPlateau"),
        (
            lambda: Schedule(lambda opt: lrs.StepLR(SGD(make_model().parameters()), 1)),
            ValueError,
            "another opt",
        ),
        (lambda: WarmupCosine(100), ValueError, "the fit has 3"),
        (lambda: WarmupCosine(lr_min=1.0), ValueError, "lr_min"),
        (lambda: ReduceLROnPlateau("val_loss"), LookupError, "did you mean 'valid_loss'"),
    ],
)
def test_what_does_not_go_with_the_fit_is_refused_before_training(cb, error, text):
    learn = make_learner()
    with pytest.raises(error, match=text):
        fit(learn, cbs=cb())
    assert learn.recorder.lrs == []


@pytest.mark.filterwarnings("ignore:.* goes on with")
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_a_schedule_goes_on_from_its_state(make, tmp_path):
    def save(cb):
        if cb.epoch == 1:
            torch.save(whole.state_dict(), tmp_path / "state.pt")

    def load(cb):
        if cb.epoch == 0:
            rest.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))

    saver = Callback(name="saver", after_epoch=save)
    saver.order = 100
    whole, rest = make(), make()
    expected = fit(make_learner(opt_func=Adam), 4, cbs=[whole, saver]).recorder.lrs
    learn = make_learner(opt_func=Adam, lr=0.7)
    fit(learn, 4, cbs=[rest, Callback(name="loader", before_epoch=load)])
    assert learn.recorder.lrs[:6] == expected[6:]
    group = learn.opt.param_groups[0]
    assert (group["lr"], group["betas"], "max_lr" in group) == (0.1, (0.9, 0.999), False)


@pytest.mark.parametrize(
    ("n_epoch", "n_train", "text"),
    [(8, 3, "of 5 epochs, this one has 8.*give n_epoch=5"), (5, 4, "of 15 batches, this one has 20")],
)
def test_a_schedule_over_the_fit_is_not_made_longer(n_epoch, n_train, text):
    states = []
    keep = Callback(after_epoch=lambda cb: states.append(cb.learn.one_cycle.state_dict()))
    fit(make_learner(), 5, cbs=[OneCycle(), keep])
    load = Callback(before_epoch=lambda cb: cb.learn.one_cycle.load_state_dict(states[0]))
    with pytest.raises(ValueError, match=text):
        fit(make_learner(n_train=n_train), n_epoch, cbs=[OneCycle(), load])


@pytest.mark.parametrize(
    ("make", "lr", "told"),
    [
        (lambda: OneCycle(0.02), 0.1, "'one_cycle' goes on with max_lr=0.05.* not with 0.02"),
        (lambda: OneCycle(0.05), 0.1, ""),
        (
            lambda: Schedule(lambda opt: lrs.StepLR(opt, 1)),
            0.3,
            "'schedule' goes on with initial_lr=0.1.* 0.3",
        ),
        (lambda: Schedule(lambda opt: lrs.StepLR(opt, 1)), 0.1, ""),
    ],
)
def test_rates_that_the_checkpoint_replaces_are_told(make, lr, told, recwarn):
    states, first = [], OneCycle(0.05) if isinstance(make(), OneCycle) else make()
    keep = Callback(after_epoch=lambda cb: states.append(first.state_dict()), name="keep")
    keep.order = 100
    fit(make_learner(lr=0.1), 3, cbs=[first, keep])
    cb = make()
    load = Callback(before_epoch=lambda _: cb.epoch or cb.load_state_dict(states[0]), name="loader")
    fit(make_learner(lr=lr), 3, cbs=[cb, load])
    texts = [str(w.message) for w in recwarn if "goes on" in str(w.message)]
    assert len(texts) == bool(told)
    assert not told or re.search(told, texts[0])


def test_nothing_of_a_fit_is_kept():
    def stop(cb):
        raise CancelFitException

    cb = OneCycle()
    fit(make_learner(), cbs=cb)
    assert cb.scheduler is None
    fit(make_learner(), cbs=[pickle.loads(pickle.dumps(cb)), Callback(after_batch=stop)])
    assert cb.state_dict() == {}
    with pytest.raises(RuntimeError, match="no fit is running"):
        cb.load_state_dict({"kind": "OneCycleLR"})


@pytest.mark.parametrize("make", HORIZON)
def test_a_schedule_over_the_whole_fit_needs_a_loader_with_a_length(make):
    learn, log = quiet(Unsized(batches_of(RAGGED)), model=(model := make_model())), []
    before = weights(model)
    with pytest.raises(ValueError, match="no length"):
        learn.fit(2, cbs=[make(), spy(log, "a")])
    assert ("a", "before_epoch") not in log
    assert same(weights(model), before)
    learn.fit(1)


@in_turn("make", MAKES.values(), ids=MAKES)
def test_a_fit_of_no_epochs_changes_nothing(make):
    learn = quiet(batches_of(RAGGED), batches_of([2]))
    learn.fit(0, cbs=make())
    assert learn.recorder.lrs == []
    assert groups(learn.opt) == groups(sgd(make_model().parameters(), 0.1))


@pytest.mark.parametrize(
    ("make", "opt_func"), covering(MAKES.values(), [momentum, partial(torch.optim.Adam, amsgrad=True)], of=1)
)
def test_each_group_gets_back_exactly_what_it_had_however_the_fit_ends(make, opt_func):
    learn = quiet(batches_of(RAGGED), batches_of([2]), opt=opt_func)
    learn.fit(1)
    kept, attributes = groups(learn.opt), set(vars(learn.opt))
    learn.fit(3, cbs=make())
    assert (groups(learn.opt), set(vars(learn.opt))) == (kept, attributes)
    for event, raised in zip(EVENTS, itertools.cycle(DEVIL), strict=False):
        with pytest.raises(raised):
            learn.fit(3, cbs=[make(), raising(event, raised("why"), nth=0 if event.endswith("fit") else 1)])
        assert groups(learn.opt) == kept
        assert [list(group) for group in groups(learn.opt)] == [list(group) for group in kept]
        assert set(vars(learn.opt)) == attributes


@in_turn("make", MAKES.values(), ids=MAKES)
def test_what_the_user_keeps_in_a_group_stays_that_very_thing(make):
    learn = quiet(batches_of(RAGGED), batches_of([2]))
    learn.fit(1)
    learn.opt.param_groups[0]["mine"] = mine = threading.Lock()  # nothing that could be copied
    learn.fit(1, cbs=make())
    assert learn.opt.param_groups[0]["mine"] is mine


@in_turn("make", MAKES.values(), ids=MAKES)
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


@in_turn(("shift", "make"), list(enumerate(MAKES.values())), ids=MAKES)
def test_a_validation_inside_the_fit_moves_no_rate(shift, make):
    def run(*cbs):
        seeded()
        learn = quiet(batches_of(RAGGED), batches_of([2, 3]), Wide(), momentum)
        watch, seen = rates(learn)
        learn.fit(3, cbs=[make(), watch, *cbs])
        return seen, weights(learn.model)

    expected, plain = run()
    for event in NESTED_AT[shift % 3 :: 3]:
        seen, trained = run(validating(event))
        assert seen == expected, event
        assert same(trained, plain), event


@in_turn("make", [*HORIZON, MAKES["per batch"]])
@in_turn("level", ["batch", "backward", "step"])
@in_turn("nth", [0, 1])
def test_batches_without_a_step_count_too_and_torch_does_not_warn(make, level, nth):
    learn = quiet(batches_of(RAGGED))
    watch, expected = rates(learn)
    learn.fit(2, cbs=[make(), watch])
    watch, seen = rates(learn)
    watch.order = -5
    plan = {(f"before_{level}", nth + k): CANCELS[level]() for k in range(2)}
    learn.fit(2, cbs=[make(), watch, spy([], "a", plan)])
    assert seen == expected


@in_turn("make", MAKES.values(), ids=MAKES)
def test_neither_accumulation_nor_a_fit_without_any_step_makes_torch_warn(make):
    learn = quiet(batches_of(RAGGED), batches_of([2]))
    learn.fit(2, cbs=[make(), GradientAccumulation(3)])
    before = weights(learn.model)
    learn.fit(2, cbs=[make(), spy([], "a", {("before_step", k): CANCELS["step"]() for k in range(6)})])
    assert same(weights(learn.model), before)


@pytest.mark.parametrize(
    ("make", "level", "nth"), covering(MAKES.values(), ["train", "epoch", "validate"], range(3))
)
def test_a_cancelled_phase_ends_no_fit(make, level, nth):
    log = []
    learn = quiet(batches_of(RAGGED), batches_of([2]))
    learn.fit(3, cbs=[make(), spy(log, "a", {(f"before_{level}", nth): CANCELS[level]()})])
    assert log.count(("a", "after_epoch")) == 3


@in_turn("make", [*HORIZON, ReduceLROnPlateau, MAKES["per batch"]])
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


@in_turn("make", MAKES.values(), ids=MAKES)
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
