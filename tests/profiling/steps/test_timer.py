"""StepTimer tells what each step took, in which phase, and what happened then; and leaves all as it was."""

import copy
import gc
import math
import pickle
import re
import time
from contextlib import suppress
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hookcb import (
    Callback,
    CancelBackwardException,
    CancelBatchException,
    CancelEpochException,
    CancelStepException,
    CancelTrainException,
    Checkpoint,
    Compile,
    GradientAccumulation,
    Learner,
    watch,
)
from hookcb.core.clock import PHASES
from hookcb.profiling.steps.timer import StepTimer
from hookcb.profiling.steps.times import FIRST_BATCH, SHOWN_PHASES
from tests.support import (
    CANCELS,
    EVENTS,
    SLEEP,
    Clock,
    SaysSo,
    fit,
    in_turn,
    make_batches,
    make_learner,
    make_model,
    primary_plan,
    spy,
)


@pytest.fixture(autouse=True)
def no_collection_of_its_own():
    """Garbage is collected only if a test asks for it, because a collection would be noted."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("hookcb.core.clock.perf_counter", clock)
    monkeypatch.setattr("hookcb.profiling.steps.timer.perf_counter", clock)
    return clock


def timed(learn, n_epoch=1, cbs=(), **kwargs):
    timer = StepTimer(**kwargs)
    fit(learn, n_epoch, cbs=[timer, *cbs])
    return timer


def slept(step):
    """The phases that a planted sleep shows in, by how many sleeps."""
    found = {phase: round(getattr(step, phase) / SLEEP) for phase in SHOWN_PHASES}
    return {phase: n for phase, n in found.items() if n}


# ---- phases


class Sleeping(nn.Module):
    """Sleeps in the forward or, by a hook, in the backward."""

    def __init__(self, model, clock, forward=False, backward=False):
        super().__init__()
        self.model, self.clock, self.in_forward, self.in_backward = model, clock, forward, backward

    def forward(self, x):
        if self.in_forward:
            self.clock.sleep()
        pred = self.model(x)
        if self.in_backward and pred.requires_grad:
            pred.register_hook(lambda grad: self.clock.sleep())
        return pred


class SleepingBatches:
    def __init__(self, batches, clock):
        self.batches, self.clock = batches, clock

    def __iter__(self):
        for batch in self.batches:
            self.clock.sleep()
            yield batch


class SleepingSGD(torch.optim.SGD):
    clock = None
    where = "step"

    def step(self, closure=None):
        if self.where == "step":
            self.clock.sleep()
        super().step(closure)

    def zero_grad(self, set_to_none=True):
        if self.where == "zero_grad" and self.clock:
            self.clock.sleep()
        super().zero_grad(set_to_none)


def learner_that_sleeps(clock, where):
    def loss_func(pred, y):
        if where == "loss":
            clock.sleep()
        return F.mse_loss(pred, y)

    model = Sleeping(make_model(), clock, where == "forward", where == "backward")
    learn = make_learner(model=model, loss_func=loss_func)
    if where == "data":
        learn.dls = type(learn.dls)(SleepingBatches(learn.dls.train, clock), learn.dls.valid)
    if where in ("step", "zero_grad"):
        learn.opt = SleepingSGD(model.parameters(), lr=0.1)
        learn.opt.clock, learn.opt.where = clock, where
    return learn


@in_turn(
    ("where", "phase"),
    [
        ("data", "data"),
        ("forward", "forward"),
        ("loss", "loss"),
        ("backward", "backward"),
        ("step", "optimizer"),
        ("zero_grad", "optimizer"),
    ],
)
@in_turn("bare", [False, True], ids=["with default callbacks", "alone"])
def test_what_takes_long_shows_in_its_phase(clock, where, phase, bare):
    learn = learner_that_sleeps(clock, where)
    if bare:
        learn.remove_cbs(list(learn.cbs))
        learn.fit(1, cbs=(timer := StepTimer()))
    else:
        timer = timed(learn)
    first = {"start" if phase == "data" else phase: 1}
    assert [slept(step) for step in timer.times] == [first, {phase: 1}, {phase: 1}]


@in_turn("event", [e for e in EVENTS if e.endswith(("_pred", "_loss", "_batch", "_backward", "_step"))])
@in_turn("order", [-999, 0, 999])
def test_what_callbacks_take_shows_in_callbacks(clock, event, order):
    cancel = spy([], "canceller", primary_plan(event))
    slow = Callback(name="slow", **{event: lambda cb: clock.sleep() if cb.training else None})
    slow.order = order
    timer = timed(make_learner(), cbs=[cancel, slow])
    assert [slept(step) for step in timer.times] == [{"callbacks": 1}] * 3


@in_turn(
    "event",
    ["before_train", "after_train", "before_epoch", "after_epoch", "before_validate", "after_validate"],
)
def test_what_lies_between_epochs_is_in_no_step(clock, event):
    slow = Callback(name="slow", **{event: lambda cb: clock.sleep()})
    learn = make_learner()
    learn.dls = type(learn.dls)(learn.dls.train, SleepingBatches(learn.dls.valid, clock))
    timer = timed(learn, 3, [slow])
    assert [slept(step) for step in timer.times] == [{}] * 9
    assert all(0 < step.total < 1e-3 for step in timer.times)


def test_the_start_of_a_loader_is_in_the_first_step_of_an_epoch(clock):
    class SlowToStart(SleepingBatches):
        def __iter__(self):
            self.clock.sleep()
            return iter(self.batches)

    learn = make_learner()
    learn.dls = type(learn.dls)(SlowToStart(learn.dls.train, clock), None)
    timer = timed(learn, 2)
    assert [slept(step) for step in timer.times] == [{"start": 1}, {}, {}] * 2
    found = timer.percentiles()["start"]
    assert (found.p50, found.max) == pytest.approx((SLEEP, SLEEP), rel=0.01)
    text = " ".join(str(timer.report()).split())
    assert re.search(r"start of the loader.*100%", text)
    assert "0% of the time is spent waiting for data, 100% for the loader to start" in text
    assert "start of the loader took" in text
    assert [step.notes for step in timer.times] == [(FIRST_BATCH,), (), ()] * 2


class Samples(Dataset):
    """Samples of which each takes a sleep to read."""

    def __init__(self, clock):
        self.clock = clock

    def __len__(self):
        return 2

    def __getitem__(self, i):
        self.clock.sleep()
        return torch.ones(2), torch.ones(1)


class StartingLoader(DataLoader):
    """Takes two sleeps to start, as one with workers does."""

    def _get_iterator(self):
        self.dataset.clock.sleep()
        self.dataset.clock.sleep()
        return super()._get_iterator()


@pytest.mark.parametrize("is_watched", [False, True])
def test_the_start_of_workers_is_a_part_of_the_start_of_their_loader(is_watched):
    class Starting(DataLoader):
        def _get_iterator(self):
            time.sleep(0.05)
            return super()._get_iterator()

    data = TensorDataset(torch.ones(6, 2), torch.ones(6, 1))
    with_workers, without = (Starting(data, batch_size=2, num_workers=n) for n in (1, 0))
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for loader in (with_workers, without):
        if is_watched:
            with watch(model, opt, timer := StepTimer()) as w:
                next(iter(with_workers))  # of another loader, as it seems
                for x, y in loader:
                    F.mse_loss(model(x), y).backward()
                    opt.step()
                w.end_epoch()
        else:
            validate = Callback(
                before_batch=lambda cb: cb.training and cb.iter == 1 and cb.learn.validate(with_workers)
            )
            learn = Learner((loader, with_workers), model, F.mse_loss, torch.optim.SGD, lr=0.1)
            timer = timed(learn, 1, [validate])
        first, *others = timer.times
        assert [step.workers for step in others] == [0.0, 0.0]
        assert first.start >= 0.05
        has_workers = loader is with_workers
        assert (0.05 <= first.workers <= first.start) if has_workers else first.workers == 0.0
        assert ("… its workers" in str(timer.report())) == has_workers
        assert "workers" in timer.table()[0]
    assert "call_hooks" not in vars(DataLoader.__iter__)


@pytest.mark.parametrize("tells_epochs", [True, False])
def test_in_a_watch_the_start_of_a_loader_is_in_the_first_step_of_an_epoch_too(clock, tells_epochs):
    model, loader, other = make_model(), StartingLoader(Samples(clock)), StartingLoader(Samples(clock))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, StepTimer()) as w:
        next(iter(other))  # a look at a batch before the training
        for _ in range(2):
            for x, y in loader:
                F.mse_loss(model(x), y).backward()
                opt.step()
            if tells_epochs:
                w.end_epoch()
                list(other)  # of a validation
    assert [slept(step) for step in w.step_timer.times] == [{"start": 3}, {"data": 1}] * 2
    assert w.step_timer.times[0].total == pytest.approx(3 * SLEEP, rel=0.1)
    assert [step.notes for step in w.step_timer.times] == [(FIRST_BATCH,), ()] * 2


def test_in_a_watch_the_time_between_backward_and_step_is_not_that_of_callbacks(clock):
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    acts = Callback(name="acts", after_backward=lambda cb: None, after_step=lambda cb: None)
    with watch(model, opt, StepTimer(), acts) as w:
        for x, y in make_batches(3):
            F.mse_loss(model(x), y).backward()
            clock.sleep()
            opt.step()
    assert [slept(step) for step in w.step_timer.times] == [{"backward": 1}] * 3


def test_a_callback_of_any_order_shows_in_callbacks(clock):
    slow = Callback(name="slow", after_batch=lambda cb: clock.sleep() if cb.training else None)
    slow.order = 5000
    assert sum(step.callbacks for step in timed(make_learner(), cbs=[slow]).times) >= 2 * SLEEP


def test_in_a_watch_one_iterator_for_all_epochs_starts_once(clock):
    model, batches = make_model(), iter(StartingLoader(Samples(clock), sampler=[0, 1] * 4))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, StepTimer()) as w:
        for _ in range(2):
            for _ in range(3):
                x, y = next(batches)
                F.mse_loss(model(x), y).backward()
                opt.step()
            w.end_epoch()
    assert [slept(step) for step in w.step_timer.times] == [{"start": 1}, {"data": 1}, {"data": 1}] * 2


def test_a_look_for_a_batch_that_does_not_come_is_in_no_step(clock):
    class SlowToEnd(SleepingBatches):
        def __iter__(self):
            yield from self.batches
            self.clock.sleep()

    learn = make_learner()
    learn.dls = type(learn.dls)(SlowToEnd(learn.dls.train, clock), SlowToEnd(learn.dls.valid, clock))
    timer = timed(learn, 2, on_valid=True)
    assert [slept(step) for step in [*timer.times, *timer.valid_times]] == [{}] * 10


def test_the_phases_add_up_and_the_fields_say_which_step_it_is():
    learn = make_learner(4)
    timer = timed(learn, 2)
    assert [(step.epoch, step.step) for step in timer.times] == [(i // 4, i) for i in range(8)]
    for step in timer.times:
        waited = ("data", "start") if FIRST_BATCH in step.notes else ("start", "data")
        assert [getattr(step, phase) > 0 for phase in waited] == [False, True]
        assert all(getattr(step, phase) > 0 for phase in PHASES if phase != "data")
        assert step.total == pytest.approx(sum(getattr(step, phase) for phase in SHOWN_PHASES))
        assert step.device_total is None
    assert timer.samples_per_second > 0
    assert set(timer.percentiles()) == {*SHOWN_PHASES, "workers", "total"}


def test_by_the_real_clock_a_slow_loader_shows_in_data():
    class Slow(SleepingBatches):
        def __iter__(self):
            for batch in self.batches:
                time.sleep(0.05)
                yield batch

    learn = make_learner(2)
    learn.dls = type(learn.dls)(Slow(learn.dls.train, None), None)
    timer = timed(learn)
    assert [step.start >= 0.05 for step in timer.times] == [True, False]
    assert timer.times[1].data >= 0.05
    assert timer.percentiles()["data"].share > timer.percentiles()["forward"].share


# ---- samples


@in_turn(
    ("batches", "expected"),
    [
        (make_batches(3, bs=4, last=2), [4, 4, 2]),
        ([{"x": x, "y": y} for x, y in make_batches(2, bs=5)], [5, 5]),
        ([((x, x), y) for x, y in make_batches(2, bs=6)], [6, 6]),
        ([("words", torch.zeros(4, 1))] * 2, [None, None]),
    ],
    ids=["tuples", "mappings", "nested", "no tensor"],
)
def test_samples_are_counted_along_the_first_dimension_of_the_inputs(batches, expected):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 1)

        def forward(self, x, y=None):
            x = x[0] if isinstance(x, tuple) else x
            pred = self.fc(torch.zeros(4, 2) if isinstance(x, str) else x)
            return pred if y is None else F.mse_loss(pred, y)

    def loss_func(pred, y=None):
        return pred if y is None else F.mse_loss(pred, y)

    timer = timed(Learner(batches, Net(), loss_func, torch.optim.SGD, lr=0.1))
    assert [step.n_samples for step in timer.times] == expected
    assert (timer.samples_per_second is None) == (None in expected)


# ---- what happened


def test_a_validation_in_the_middle_of_a_batch_is_noted_and_counts_as_a_callback(clock):
    def validate(cb):
        if cb.training and cb.train_iter == 1:
            cb.learn.validate()

    learn = make_learner()
    learn.dls = type(learn.dls)(learn.dls.train, SleepingBatches(learn.dls.valid, clock))
    for event in ("before_batch", "after_pred", "after_backward", "after_step", "after_batch"):
        timer = timed(learn, 2, [Callback(name="validates", **{event: validate})], on_valid=True)
        assert [step.notes for step in timer.times] == [
            (FIRST_BATCH,),
            ("validation",),
            (),
            (FIRST_BATCH,),
            (),
            (),
        ]
        assert [slept(step) for step in timer.times] == [{}, {"callbacks": 2}, {}, {}, {}, {}]
        assert [step.step for step in timer.valid_times] == [0, 1, 0, 1]  # those in the batch are not in
        (found,) = timer.outliers()
        assert (found.step, found.phase, found.notes) == (1, "callbacks", ("validation",))


def test_a_validation_that_dies_in_the_middle_of_a_batch_spoils_nothing(clock):
    def validate(cb):
        if cb.training and cb.train_iter == 1:
            with pytest.raises(SaysSo):
                cb.learn.validate(cbs=Callback(name="fails", after_loss=fail))

    def fail(cb):
        raise SaysSo(1, 2)

    slow = Callback(name="slow", after_loss=lambda cb: clock.sleep())
    timer = timed(make_learner(), 1, [Callback(after_batch=validate), slow])
    assert [slept(step) for step in timer.times] == [{"callbacks": 1}, {"callbacks": 2}, {"callbacks": 1}]
    assert timer.times[1].notes == ("validation",)


def test_a_checkpoint_is_noted_in_the_step_that_wrote_it(tmp_path):
    timer = timed(make_learner(4), 2, [Checkpoint(tmp_path, every=3)])
    assert [step.step for step in timer.times if "checkpoint written" in step.notes] == [2, 5]


def test_a_collection_of_garbage_is_noted_where_it_was():
    def collect(cb):
        if cb.training and cb.train_iter == 1:
            gc.collect()

    for event in ("before_batch", "after_loss", "after_batch"):
        timer = timed(make_learner(), 1, [Callback(**{event: collect})])
        noted = [[note for note in step.notes if note.startswith("garbage")] for step in timer.times]
        assert [len(notes) for notes in noted] == [0, 1, 0]
        assert noted[1][0].startswith("garbage collection of ")


def test_a_collection_between_epochs_is_noted_nowhere():
    timer = timed(make_learner(), 2, [Callback(after_epoch=lambda cb: gc.collect())], on_valid=True)
    texts = [note for step in [*timer.times, *timer.valid_times] for note in step.notes]
    assert not any(text.startswith("garbage") for text in texts)


def test_a_compilation_is_noted_and_a_second_one():
    torch.compiler.reset()
    batches = make_batches(3, bs=4) + make_batches(2, bs=5)
    learn = Learner(batches, make_model(), F.mse_loss, torch.optim.SGD, lr=0.1)
    timer = timed(learn, 1, [Compile(backend="eager", dynamic=False)])
    assert [step.step for step in timer.times if "compilation" in step.notes] == [0, 3]
    torch.compiler.reset()


def test_a_cancelled_batch_is_in_with_a_note(clock):
    for event in ("before_batch", "after_pred", "after_backward", "before_step", "after_step"):
        log = []
        timer = timed(make_learner(n_valid=0), 1, [spy(log, "a", {(event, 1): CancelBatchException()})])
        assert [step.notes for step in timer.times] == [(FIRST_BATCH,), ("cancelled",), ()]
        assert [step.step for step in timer.times] == [0, 1, 2]


def test_a_batch_cancelled_in_a_validation_in_its_middle_is_not_cancelled():
    def validate(cb):
        if cb.training and cb.train_iter == 1:
            cb.learn.validate(cbs=spy([], "b", {("after_pred", 0): CancelBatchException()}))

    timer = timed(make_learner(), 1, [Callback(after_loss=validate)], on_valid=True)
    assert timer.times[1].notes == ("validation",)


@pytest.mark.parametrize("cancel", [CancelTrainException, CancelEpochException])
def test_a_batch_whose_training_is_cancelled_is_out(clock, cancel):
    slow = Callback(name="slow", after_cancel_train=lambda cb: clock.sleep())
    plan = {("after_pred", 1): cancel()}
    timer = timed(make_learner(n_valid=0), 2, [spy([], "a", plan), slow])
    assert [(step.epoch, step.step) for step in timer.times] == [(0, 0), (1, 1), (1, 2), (1, 3)]
    assert [slept(step) for step in timer.times] == [{}] * 4


def test_cancels_of_backward_and_step_leave_the_phases_right(clock):
    for event, cancel in (("before_backward", CancelBackwardException), ("before_step", CancelStepException)):
        learn = learner_that_sleeps(clock, "step")
        timer = timed(learn, 1, [spy([], "a", {(event, 1): cancel()})])
        expected = [{"optimizer": 1}, {"optimizer": 1}, {"optimizer": 1}]
        if cancel is CancelStepException:
            expected[1] = {}
        assert [slept(step) for step in timer.times] == expected


def test_while_gradients_accumulate_the_optimizer_takes_nothing(clock):
    learn = learner_that_sleeps(clock, "step")
    timer = timed(learn, 1, [GradientAccumulation(2)])
    assert [slept(step) for step in timer.times] == [{}, {"optimizer": 1}, {"optimizer": 1}]
    assert timer.times[0].optimizer == 0.0


# ---- validation


def test_steps_of_validation_are_timed_where_asked(clock):
    learn = make_learner(3, 2)
    learn.dls = type(learn.dls)(learn.dls.train, SleepingBatches(learn.dls.valid, clock))
    timer = timed(learn, 2, on_valid=True)
    assert [(step.epoch, step.step, step.n_samples) for step in timer.valid_times] == [
        (0, 0, 4),
        (0, 1, 4),
        (1, 0, 4),
        (1, 1, 4),
    ]
    assert [slept(step) for step in timer.valid_times] == [{"start": 1}, {"data": 1}] * 2
    assert all(step.backward == step.optimizer == 0.0 for step in timer.valid_times)
    assert [step.notes for step in timer.valid_times] == [(FIRST_BATCH,), ()] * 2
    assert len(timer.times) == 6
    assert timer.percentiles("valid")["data"].p50 > timer.percentiles("train")["data"].p50
    assert "4 steps of validation" in timer.report("valid").title


def test_without_being_asked_it_does_not_look_at_validation():
    timer = timed(make_learner())
    assert timer.valid_times == []
    with pytest.raises(RuntimeError, match=r"no step of validation .* on_valid=True"):
        timer.percentiles("valid")


# ---- memory


def test_keep_bounds_what_stays():
    timer = timed(make_learner(30), 4, keep=8)
    steps = [step.step for step in timer.times]
    assert len(steps) <= 8
    assert steps[0] == 0
    assert steps[-1] == 119
    assert len({b - a for a, b in pairwise(steps[:-1])}) == 1
    assert "120 steps" in timer.report().title


def test_an_outlier_is_found_though_its_step_was_dropped(clock):
    slow = Callback(after_batch=lambda cb: clock.sleep() if cb.training and cb.train_iter == 77 else None)
    timer = timed(make_learner(30), 4, [slow], keep=4)
    assert 77 not in [step.step for step in timer.times]
    assert [outlier.step for outlier in timer.outliers(100)] == [77]
    assert timer.percentiles()["total"].max > SLEEP


# ---- how a fit ends


@in_turn(("shift", "event"), list(enumerate(EVENTS)))
def test_whatever_goes_wrong_nothing_of_it_stays(shift, event):
    before = list(gc.callbacks)
    cancels = [CANCELS[level] for level in ("fit", "epoch", "train", "validate", "batch")]
    planted = [(SaysSo(1, 2), -2000), (SaysSo(1, 2), 2000), (KeyboardInterrupt(), 0)]
    errors = planted + [(cancel(), 2000) for cancel in cancels]
    for error, order in errors[shift % 2 :: 2]:
        learn, timer = make_learner(2, 1), StepTimer(on_valid=True)
        plan = primary_plan(event) | {(event, 0): error}
        with suppress(SaysSo, KeyboardInterrupt, RuntimeError):
            fit(learn, cbs=[spy([], "a", plan, order=order), timer])
        assert gc.callbacks == before
        assert not hasattr(timer, "learn")
        assert [cb.name for cb in learn.cbs] == ["recorder", "metrics", "progress"]
        assert all(math.isfinite(step.total) for step in timer.times)


def test_a_batch_that_dies_is_out_and_what_was_before_can_be_read(clock):
    timer = StepTimer()
    with pytest.raises(SaysSo):
        fit(make_learner(), cbs=[timer, spy([], "a", {("after_loss", 2): SaysSo(1, 2)})])
    assert [step.step for step in timer.times] == [0, 1]
    assert len(timer.report().phases) == len(SHOWN_PHASES) + 2


def test_a_fit_forgets_the_one_before():
    learn, timer = make_learner(), StepTimer()
    fit(learn, 3, cbs=timer)
    fit(learn, 1, cbs=timer)
    assert [step.step for step in timer.times] == [0, 1, 2]
    fit(make_learner(2), 1, cbs=timer)
    assert [step.step for step in timer.times] == [0, 1]


def test_outside_a_fit_nothing_is_timed():
    learn, timer, followed = make_learner(), StepTimer(on_valid=True), list(gc.callbacks)
    learn.add_cb(timer)
    fit(learn)
    before = timer.times, timer.valid_times
    learn.validate()
    learn.get_preds()
    learn.one_batch()
    learn.summary()
    learn.lr_find(num_it=3)
    assert (timer.times, timer.valid_times) == before
    assert gc.callbacks == followed
    fit(learn)
    assert len(timer.times) == 3


def test_one_that_joins_in_the_middle_times_what_begins_later(clock):
    for event in ("before_batch", "after_pred", "after_loss", "after_step", "after_batch"):
        timer = StepTimer()

        def join(cb, timer=timer):
            if cb.training and cb.train_iter == 1:
                cb.learn.add_cb(timer)

        learn = fit(make_learner(5), 2, cbs=Callback(name="joins", **{event: join}))
        steps = [step.step for step in timer.times]
        assert steps in ([2, 3, 4, 5, 6, 7, 8, 9], [3, 4, 5, 6, 7, 8, 9])
        learn.remove_cb(timer)


def test_one_that_leaves_in_the_middle_keeps_what_it_has():
    timer = StepTimer()

    def leave(cb):
        if cb.train_iter == 1:
            cb.learn.remove_cb(timer)

    learn = fit(make_learner(5), 1, cbs=[timer, Callback(name="sends", after_loss=leave)])
    assert [step.step for step in timer.times] == [0]
    assert len(learn.cbs) == 3


# ---- copies


def test_it_is_copied_with_what_it_has():
    timer = timed(make_learner(), on_valid=True)
    for copied in (pickle.loads(pickle.dumps(timer)), copy.deepcopy(timer)):
        assert copied.times == timer.times
        assert copied.valid_times == timer.valid_times
        assert copied.percentiles() == timer.percentiles()
        fit(make_learner(2), cbs=copied)
        assert len(copied.times) == 2
    assert len(timer.times) == 3


def test_it_is_copied_in_the_middle_of_a_fit():
    copies = []

    def take(cb):
        if cb.training and cb.train_iter == 2:
            timer = cb.learn.step_timer
            copies.extend([pickle.loads(pickle.dumps(timer)), copy.deepcopy(timer), pickle.dumps(cb.learn)])

    learn = make_learner(5, loss_func=F.mse_loss)
    fit(learn, cbs=[timer := StepTimer(), Copying(take)])
    pickled, copied, loaded = *copies[:2], pickle.loads(copies[2])
    assert [step.step for step in pickled.times] == [step.step for step in copied.times] == [0, 1]
    assert [step.step for step in timer.times] == [0, 1, 2, 3, 4]
    before = timer.times
    loaded.validate()
    assert timer.times == before  # its clock is not told of another loop
    assert loaded.step_timer.times == copied.times


class Copying(Callback):
    """A callback with a function that is not copied."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def after_loss(self):
        if self.function is not None:
            self.function(self)

    def __getstate__(self):
        return super().__getstate__() | {"function": None}


# ---- together


def test_two_of_a_kind_time_the_same_steps(clock):
    learn = learner_that_sleeps(clock, "forward")
    timers = [StepTimer(), StepTimer(name="other", on_valid=True)]
    fit(learn, 2, cbs=timers)
    for timer in timers:
        assert [slept(step) for step in timer.times] == [{"forward": 1}] * 6
    assert [len(timer.valid_times) for timer in timers] == [0, 4]


def test_it_works_on_a_resumed_fit(tmp_path):
    fit(make_learner(), 1, cbs=Checkpoint(tmp_path, every=2))
    timer = StepTimer()
    fit(make_learner(), 2, cbs=[timer, Checkpoint(tmp_path)], resume=tmp_path / "epoch-0001-batch-000002.pt")
    assert [(step.epoch, step.step) for step in timer.times] == [(0, 2), (1, 3), (1, 4), (1, 5)]


# ---- errors


@in_turn(
    ("kwargs", "error", "message"),
    [
        ({"keep": 1}, ValueError, "keep must be a whole number of steps, 2 or more, got 1"),
        ({"keep": 0}, ValueError, "keep must be .*, got 0"),
        ({"keep": 2.0}, TypeError, r"keep must be .*, got 2\.0"),
        ({"name": "my timer"}, ValueError, "name must be an identifier.*got 'my timer'"),
    ],
)
def test_arguments_that_cannot_be_are_refused(kwargs, error, message):
    with pytest.raises(error, match=message):
        StepTimer(**kwargs)


def test_without_a_step_there_is_nothing_to_read():
    timer = StepTimer()
    assert timer.times == []
    for read in (timer.percentiles, timer.outliers, timer.report, lambda: timer.samples_per_second):
        with pytest.raises(RuntimeError, match=r"no step of training has ended .* train for a step first"):
            read()


def test_what_is_asked_for_must_be_possible():
    timer = timed(make_learner())
    with pytest.raises(ValueError, match="part is 'test'; give 'train' or 'valid'"):
        timer.percentiles("test")
    for factor in (1.0, 0, -3, math.inf):
        with pytest.raises(ValueError, match=r"factor must be a number above 1, got "):
            timer.outliers(factor)
    with pytest.raises(TypeError, match="factor must be a number above 1, got '3'"):
        timer.outliers("3")


@pytest.mark.cuda
def test_on_cuda_the_device_tells_its_own_times():
    learn = make_learner(20, model=make_model().cuda())
    timer = timed(learn, 2)
    torch.cuda.synchronize()
    assert all(step.device_total > 0 for step in timer.times)
    assert timer.percentiles()["device_forward"].p50 > 0
