"""The loop keeps the contract: an oracle by hand tells what fires, what is trained and what is cleaned up."""

import collections
import contextlib
import copy
import io
import itertools

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

from hookcb import (
    ActivationStats,
    Callback,
    CancelBatchException,
    CancelException,
    CancelFitException,
    CancelStepException,
    CancelTrainException,
    HookCallback,
    Learner,
    Metrics,
    Progress,
    Recorder,
    count_hooks,
)
from tests.support import (
    BATCH,
    CANCELS,
    EVENTS,
    VALID,
    SaysSo,
    along,
    events,
    fit,
    in_turn,
    make_batches,
    make_learner,
    make_model,
    modes,
    pairs,
    primary_plan,
    same,
    spy,
    weights,
)


class Escaped(Exception):
    """Says, in the oracle, that a cancel was raised outside its level."""


class HandLoop:
    """The oracle: the contract's loop by hand, with real training; its watcher b raises."""

    def __init__(self, n_epoch, train, valid, model, plan, lr=0.1):
        self.n_epoch, self.train_batches, self.valid_batches = n_epoch, train, valid
        self.model, self.plan = model, plan
        self.opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.log, self.counts, self.open = [], collections.Counter(), []
        self.n_step = 0

    def emit(self, event):
        exc = self.plan.get((event, self.counts[event]))
        self.counts[event] += 1
        if exc is None or isinstance(exc, CancelException) or event == "after_fit":
            order = "cba" if event == "after_fit" else "abc"
            self.log += [(who, event) for who in order]
        else:
            self.log += [(who, event) for who in "ab"]
        if exc is not None:
            if isinstance(exc, CancelException) and type(exc).level not in self.open:
                raise Escaped
            raise exc

    def within(self, level, body):
        self.open.append(level)
        cancelled = False
        try:
            try:
                self.emit(f"before_{level}")
                body()
            except CANCELS[level]:
                cancelled = True
                with contextlib.suppress(CANCELS[level]):
                    self.emit(f"after_cancel_{level}")
            with contextlib.suppress(CANCELS[level]):
                self.emit(f"after_{level}")
        finally:
            self.open.pop()
        return cancelled

    def fit(self):
        self.open.append("fit")
        try:
            try:
                self.emit("before_fit")
                for _ in range(self.n_epoch):
                    self.within("epoch", self.epoch)
            except CancelFitException:
                with contextlib.suppress(CancelFitException):
                    self.emit("after_cancel_fit")
        except BaseException:
            entered = {who for who, event in self.log if event == "before_fit"}
            self.log += [(who, "after_fit") for who in "cba" if who in entered]
            raise
        with contextlib.suppress(CancelFitException):
            self.emit("after_fit")

    def epoch(self):
        self.model.train()
        self.within("train", self.train)
        self.model.eval()
        with torch.no_grad():
            self.within("validate", self.validate)

    def train(self):
        for x, y in self.train_batches:
            self.within("batch", lambda x=x, y=y: self.batch(x, y, True))

    def validate(self):
        for x, y in self.valid_batches:
            self.within("batch", lambda x=x, y=y: self.batch(x, y, False))

    def batch(self, x, y, training):
        pred = self.model(x)
        self.emit("after_pred")
        self.loss = F.mse_loss(pred, y)
        self.emit("after_loss")
        if not training:
            return
        self.within("backward", lambda: self.loss.backward())
        if not self.within("step", self.step):
            self.opt.zero_grad()

    def step(self):
        self.opt.step()
        self.n_step += 1


class CountingSGD(torch.optim.SGD):
    """SGD that counts its steps."""

    n_step = 0

    def step(self, *args, **kwargs):
        type(self).n_step += 1
        return super().step(*args, **kwargs)


RAISED = [*CANCELS.values(), ValueError, KeyboardInterrupt]


def moments():
    """Each event with each error, at its first or at its fourth occurrence; every second one is slow."""
    for which, event in enumerate(EVENTS):
        hand = HandLoop(2, make_batches(2), make_batches(2), make_model(), primary_plan(event))
        hand.fit()
        occurrences = [nth for nth in (0, 3) if nth < hand.counts[event]]
        for k, raised in enumerate(RAISED):
            marks = pytest.mark.slow if (which + k) % 2 else ()
            yield pytest.param(event, occurrences[k // 2 % len(occurrences)], raised, marks=marks)


@pytest.mark.parametrize(("event", "nth", "raised"), list(moments()))
def test_what_fires_and_what_is_trained_agrees_with_a_loop_written_by_hand(event, nth, raised):
    plan = {**primary_plan(event), (event, nth): raised("why")}
    train, valid = make_batches(2), make_batches(2, seed=1)
    hand = HandLoop(2, train, valid, make_model(), plan)
    expected = None
    try:
        hand.fit()
    except BaseException as exc:
        expected = exc
    assert hand.counts[event] > nth

    log = []
    CountingSGD.n_step = 0
    model = make_model()
    learn = Learner(
        (train, valid), model, F.mse_loss, lambda ps, lr: CountingSGD(ps, lr=lr, momentum=0.9), lr=0.1
    )
    got = None
    try:
        fit(learn, 2, cbs=[spy(log, "a"), spy(log, "b", plan), spy(log, "c")])
    except BaseException as exc:
        got = exc

    if isinstance(expected, Escaped):
        assert type(got) is RuntimeError
        assert raised.__name__ in str(got)
        assert event in str(got)
    elif expected is None:
        assert got is None
    else:
        assert got is plan[event, nth]
        assert got.args == ("why",)
        assert any(event in note for note in got.__notes__)
    assert log == hand.log
    assert CountingSGD.n_step == hand.n_step
    assert same(weights(model), weights(hand.model))
    assert count_hooks(model) == 0
    assert torch.is_grad_enabled()
    assert all(m.training for m in model.modules())
    assert [type(cb) for cb in learn.cbs] == [Recorder, Metrics, Progress]
    assert not learn.fitting


@in_turn(("outer", "inner"), list(itertools.combinations(["fit", "epoch", "train", "batch", "step"], 2)))
@in_turn("outer_first", [True, False])
def test_of_several_cancels_at_one_event_the_outermost_level_wins(outer, inner, outer_first):
    plan_of = {True: outer, False: inner}
    log = []
    cbs = [
        spy(log, "a", {("before_step", 0): CANCELS[plan_of[outer_first]]()}),
        spy(log, "b", {("before_step", 0): CANCELS[plan_of[not outer_first]]()}),
        spy(log, "c"),
    ]
    fit(make_learner(cbs=cbs))
    for who in "abc":
        assert "before_step" in events(log, who)
        fired = [e for e in events(log, who) if e.startswith("after_cancel")]
        assert fired == [f"after_cancel_{outer}"]


def test_a_cancel_outside_its_level_names_exception_event_and_callback():
    class Confused(Callback):
        def before_fit(self):
            raise CancelStepException

    model = make_model()
    learn = make_learner(model=model)
    with pytest.raises(RuntimeError) as info:
        fit(learn, cbs=Confused())
    for part in ("CancelStepException", "before_fit", "Confused"):
        assert part in str(info.value)
    fit(learn)  # the loop is still usable


def test_an_exception_keeps_identity_type_and_args_and_gets_a_note_of_its_place():
    class BadStats(Callback):
        def after_batch(self):
            if self.training and (self.epoch, self.iter) == (1, 2):
                raise error

    error = SaysSo(1, 2, c=9)
    with pytest.raises(SaysSo) as info:
        fit(make_learner(cbs=BadStats()), 3)
    assert info.value is error
    assert (info.value.args, info.value.c) == ((1, 2), 9)
    assert info.value.__notes__ == ["in BadStats.after_batch, epoch 1, batch 2"]


def test_an_exception_of_the_model_goes_on_as_it_was():
    class Breaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 1)
            self.n = 0

        def forward(self, x):
            self.n += 1
            if self.n == 2:
                raise error
            return self.fc(x)

    error, log, model = SaysSo("a", "b"), [], Breaks()
    with pytest.raises(SaysSo) as info:
        fit(make_learner(model=model, cbs=[spy(log, "a"), ActivationStats()]))
    assert info.value is error
    assert events(log)[-2:] == ["before_batch", "after_fit"]
    assert count_hooks(model) == 0


def test_every_after_fit_runs_though_several_of_them_raise_and_the_original_goes_on():
    errors = {name: ValueError(name) for name in "abc"}
    original = KeyboardInterrupt("stop")
    log = []
    cbs = [spy(log, name, {("after_fit", 0): errors[name]}) for name in "abc"]
    cbs.append(spy(log, "d", {("after_loss", 1): original}))
    with pytest.raises(KeyboardInterrupt) as info:
        fit(make_learner(cbs=cbs))
    assert info.value is original
    assert [who for who, event in log if event == "after_fit"] == ["d", "c", "b", "a"]


def test_every_after_fit_runs_though_two_of_them_raise_after_a_good_fit():
    log = []
    first, second = ValueError("c"), TypeError("a")
    cbs = [
        spy(log, "a", {("after_fit", 0): second}),
        spy(log, "b"),
        spy(log, "c", {("after_fit", 0): first}),
    ]
    learn = make_learner(cbs=cbs)
    with pytest.raises((ValueError, TypeError)) as info:
        fit(learn)
    assert info.value is first
    assert [who for who, event in log if event == "after_fit"] == ["c", "b", "a"]


def test_a_cancel_in_after_fit_after_an_error_does_not_hide_the_error():
    log, error = [], SaysSo(1, 2)
    cbs = [
        spy(log, "a"),
        spy(log, "b", {("after_fit", 0): CancelFitException(), ("before_step", 0): error}),
    ]
    with pytest.raises(SaysSo) as info:
        fit(make_learner(cbs=cbs))
    assert info.value is error
    assert [who for who, event in log if event == "after_fit"] == ["b", "a"]


def test_after_fit_is_called_only_where_before_fit_was_entered():
    log = []
    cbs = [spy(log, "a"), spy(log, "b", {("before_fit", 0): ValueError("no")}), spy(log, "c")]
    with pytest.raises(ValueError, match="no"):
        fit(make_learner(cbs=cbs))
    assert log == [("a", "before_fit"), ("b", "before_fit"), ("b", "after_fit"), ("a", "after_fit")]


@in_turn("ending", ["end", "cancel", "error", "removed"])
def test_after_fit_is_told_how_the_fit_has_ended(ending):
    def end(cb):
        if ending == "cancel":
            raise CancelFitException
        if ending == "error":
            raise error
        if ending == "removed" and cb.train_iter == 0 and cb.training:
            cb.learn.remove_cbs(witness)

    error, seen = SaysSo(1, 2), []
    witness = Callback(
        name="witness", after_fit=lambda cb: seen.append((cb.learn.fit_succeeded, cb.learn.fit_error))
    )
    learn = make_learner(cbs=[witness, Callback(name="end", after_batch=end)])
    try:
        raise ValueError("one that the caller handles while it trains")
    except ValueError:
        with pytest.raises(SaysSo) if ending == "error" else contextlib.nullcontext():
            fit(learn)
    assert seen == [(ending in ("end", "cancel"), error if ending == "error" else None)]
    assert (learn.fit_succeeded, learn.fit_error) == (False, None)  # an error keeps what its frames hold


def test_the_loop_can_be_fitted_again_after_any_error():
    learn = make_learner()
    with pytest.raises(KeyboardInterrupt):
        fit(learn, cbs=spy([], "a", {("after_pred", 4): KeyboardInterrupt()}))
    log = []
    fit(learn, cbs=spy(log, "a"))
    assert events(log).count("after_step") == 3
    assert len(learn.recorder.losses) == 3


def test_a_cancel_raised_by_the_model_or_the_loss_function_ends_its_level():
    calls = []

    def loss_func(pred, y):
        calls.append(1)
        if len(calls) == 2:
            raise CancelBatchException
        return F.mse_loss(pred, y)

    log = []
    learn = fit(make_learner(n_valid=0, loss_func=loss_func, cbs=spy(log, "a")))
    assert events(log).count("after_cancel_batch") == 1
    assert events(log).count("after_step") == 2
    assert len(learn.recorder.losses) == 2


def test_a_cancel_raised_by_the_loader_ends_the_training():
    class Stops:
        def __iter__(self):
            yield make_batches(1)[0]
            raise CancelTrainException

    log = []
    learn = Learner((Stops(), make_batches(1)), make_model(), F.mse_loss, torch.optim.SGD, cbs=spy(log, "a"))
    fit(learn)
    assert events(log).count("after_step") == 1
    assert events(log).count("after_cancel_train") == 1
    assert events(log).count("after_validate") == 1


def test_gradients_accumulate_over_cancelled_steps_as_in_a_loop_by_hand():
    class Accumulate(Callback):
        def before_step(self):
            if self.iter % 2 == 0:
                raise CancelStepException

    batches = make_batches(4)
    learn = fit(Learner((batches, None), make_model(), F.mse_loss, torch.optim.SGD, lr=0.1, cbs=Accumulate))
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(batches):
        F.mse_loss(model(x), y).backward()
        if i % 2:
            opt.step()
            opt.zero_grad()
    assert same(weights(learn.model), weights(model))


def test_gradients_are_there_in_after_step_and_gone_in_after_batch():
    seen = []

    class Look(Callback):
        def after_step(self):
            seen.append(all(p.grad is not None for p in self.model.parameters()))

        def after_batch(self):
            if self.training:
                seen.append(all(p.grad is None or not p.grad.any() for p in self.model.parameters()))

    fit(make_learner(n_train=2, cbs=Look))
    assert seen == [True, True, True, True]


@in_turn(
    ("raised", "event"),
    along(
        [StopIteration, GeneratorExit, SystemExit, AttributeError], ["before_fit", "after_loss", "after_fit"]
    ),
)
def test_an_exception_python_itself_uses_goes_on_as_it_was(raised, event):
    log, error = [], raised("why")
    learn = make_learner(cbs=[ActivationStats(), spy(log, "a", {(event, 0): error})])
    with pytest.raises(raised) as info:
        fit(learn)
    assert info.value is error
    assert events(log)[-1] == "after_fit"
    assert count_hooks(learn.model) == 0
    assert not learn.fitting


def test_a_stop_iteration_of_the_model_does_not_end_the_epoch_quietly():
    error = StopIteration("why")

    class Stops(nn.Linear):
        def forward(self, x):
            raise error

    with pytest.raises(StopIteration) as info:
        fit(make_learner(model=Stops(2, 1)))
    assert info.value is error


def test_an_error_of_the_loader_goes_on_and_ends_the_fit():
    def broken():
        yield make_batches(1)[0]
        raise error

    class Broken:
        def __iter__(self):
            return broken()

    log, error = [], SaysSo(1, 2)
    with pytest.raises(SaysSo) as info:
        fit(Learner(Broken(), make_model(), F.mse_loss, torch.optim.SGD, cbs=spy(log, "a")))
    assert info.value is error
    assert events(log)[-2:] == ["after_batch", "after_fit"]


def test_a_fit_inside_a_fit_is_refused_and_the_error_says_so():
    log = []
    learn = make_learner(cbs=[spy(log, "a"), Callback(name="again", after_step=lambda cb: cb.learn.fit(1))])
    with pytest.raises(RuntimeError, match="fit"):
        fit(learn)
    assert events(log).count("before_fit") == events(log).count("after_fit") == 1


def attached_in(event, nth, new, log, **kwargs):
    """A fit of two epochs in which `new` is added at the nth time of `event`."""
    count = itertools.count()

    def act(cb):
        if next(count) == nth:
            cb.learn.add_cb(new)
            log.append(("-", "added"))

    learn = make_learner(n_train=2, n_valid=1, cbs=Callback(name="adder", **{event: act}), **kwargs)
    return fit(learn, 2)


EPOCH = ["before_epoch", "before_train", *BATCH, *BATCH, "after_train", *VALID, "after_epoch"]


@in_turn(
    ("event", "expected"),
    [
        ("before_fit", [*EPOCH, *EPOCH]),
        ("before_epoch", [*EPOCH[1:-1], *EPOCH]),
        ("before_train", [*BATCH, *BATCH, *VALID, *EPOCH]),
        ("before_batch", [*BATCH[3:-1], *BATCH, *VALID, *EPOCH]),
        ("after_backward", [*BATCH[5:7], *BATCH, *VALID, *EPOCH]),
        ("after_batch", [*BATCH, *VALID, *EPOCH]),
        ("after_train", [*VALID, *EPOCH]),
        ("after_validate", EPOCH),
        ("after_epoch", EPOCH),
    ],
)
def test_a_callback_added_in_a_fit_gets_before_fit_at_once_and_takes_part_in_later_levels(event, expected):
    log = []
    attached_in(event, 0, spy(log, "a"), log)
    assert log[:2] == [("a", "before_fit"), ("-", "added")]
    levels = ("before_", "after_")
    got = [e for e in events(log[2:]) if e.startswith(levels) and e not in ("after_pred", "after_loss")]
    expected = [e for e in expected if e not in ("after_pred", "after_loss")]
    assert got == [*expected, "after_fit"]


def test_a_callback_added_in_after_fit_is_finished_too():
    log = []
    model = make_model()

    def add(cb):
        cb.learn.add_cb(spy(log, "a"))
        cb.learn.add_cb(ActivationStats())

    fit(make_learner(model=model, cbs=Callback(name="adder", after_fit=add)))
    assert events(log).count("before_fit") == events(log).count("after_fit")
    assert count_hooks(model) == 0


@in_turn(("event", "order"), along([e for e in EVENTS if "cancel" not in e and e != "after_fit"], [-10, 10]))
def test_a_callback_removed_in_a_fit_gets_after_fit_at_once_and_nothing_more(event, order):
    log = []
    victim = spy(log, "a", order=order)

    def remove(cb):
        if victim in cb.learn.cbs:
            cb.learn.remove_cb(victim)
            log.append(("-", "removed"))

    learn = make_learner(cbs=[Callback(name="remover", **{event: remove}), victim])
    fit(learn)
    cut = log.index(("-", "removed"))
    assert log[cut + 1 :] == []
    assert events(log).count("after_fit") == events(log).count("before_fit")
    assert events(log)[-1:] == (["after_fit"] if "before_fit" in events(log) else [])


@in_turn("event", ["before_fit", "before_batch", "after_pred", "after_step", "after_epoch"])
def test_a_callback_can_remove_itself(event):
    log = []

    class Once(Callback):
        def after_fit(self):
            log.append("after_fit")

    def act(self):
        log.append(event)
        self.learn.remove_cb(self)

    cls = type("Once", (Once,), {event: act})
    learn = fit(make_learner(cbs=[cls, spy([], "other")]), 2)
    assert log == [event, "after_fit"]
    assert len(learn.cbs) == 4


def test_the_hooks_of_a_callback_removed_in_a_fit_are_gone_at_once():
    stats = ActivationStats()
    counts = []

    def remove(cb):
        if cb.epoch == 1:
            cb.learn.remove_cb(stats)
        counts.append(count_hooks(cb.model))

    learn = fit(make_learner(cbs=[stats, Callback(name="remover", after_epoch=remove)]), 3)
    assert counts[0] > 0
    assert counts[1:] == [0, 0]
    assert len(stats.stats) == 6
    assert learn.activation_stats is stats


def test_a_callback_added_in_before_fit_gets_before_fit_once():
    log = []
    attached_in("before_fit", 0, spy(log, "a"), log)
    assert events(log).count("before_fit") == 1
    assert events(log).count("after_fit") == 1


def test_an_error_in_before_fit_of_a_callback_added_in_a_fit_ends_that_fit_and_cleans_up():
    log = []
    error = SaysSo(1, 2)
    with pytest.raises(SaysSo) as info:
        attached_in("after_batch", 1, spy(log, "a", {("before_fit", 0): error}), log)
    assert info.value is error
    assert events(log) == ["before_fit", "after_fit"]


def test_switching_run_off_in_a_fit_still_gives_after_fit():
    log = []
    victim = spy(log, "a")

    def off(cb):
        victim.run = False

    fit(make_learner(cbs=[Callback(name="switch", after_epoch=off), victim]), 3)
    assert events(log)[-1] == "after_fit"
    assert events(log).count("before_epoch") == 1


def test_a_hook_callback_switched_off_in_a_fit_leaves_no_hook():
    model = make_model()
    stats = ActivationStats()
    switch = Callback(name="switch", after_step=lambda cb: setattr(stats, "run", False))
    learn = make_learner(model=model, cbs=[switch, stats])
    fit(learn)
    assert count_hooks(model) == 0
    assert len(stats.stats) <= 1


def test_a_callback_with_run_off_sees_nothing_and_one_switched_on_later_ends_nothing_it_did_not_begin():
    log = []
    victim = spy(log, "a", run=False)

    def on(cb):
        if cb.epoch == 1:
            victim.run = True

    fit(make_learner(n_train=1, n_valid=0, cbs=[victim, Callback(name="switch", after_batch=on)]), 3)
    whole = ["before_epoch", "before_train", *BATCH, "after_train", "after_epoch"]
    assert events(log) == whole


@in_turn(("run_train", "run_valid"), list(itertools.product([True, False], repeat=2)))
def test_run_train_and_run_valid_switch_the_events_of_batches(run_train, run_valid):
    log = []
    fit(make_learner(1, 1, cbs=spy(log, "a", run_train=run_train, run_valid=run_valid)))
    train, valid = BATCH * run_train, VALID[1:-1] * run_valid
    inside = ["before_train", *train, "after_train", "before_validate", *valid, "after_validate"]
    assert events(log) == ["before_fit", "before_epoch", *inside, "after_epoch", "after_fit"]


def test_run_train_switched_off_in_a_batch_ends_at_the_latest_with_the_batch():
    log = []
    victim = spy(log, "a")
    switch = Callback(name="switch", after_loss=lambda cb: setattr(victim, "run_train", False))
    fit(make_learner(3, 0, cbs=[switch, victim]))
    assert events(log).count("before_batch") == 1
    assert events(log).count("after_train") == 1


def test_run_train_switched_on_in_a_batch_gives_no_after_without_its_before():
    log = []
    victim = spy(log, "a", run_train=False)
    switch = Callback(name="switch", after_backward=lambda cb: setattr(victim, "run_train", True))
    fit(make_learner(2, 0, cbs=[switch, victim]))
    for level in ("batch", "backward", "step"):
        befores, afters = (events(log).count(f"{x}_{level}") for x in ("before", "after"))
        assert befores == afters, level


def test_order_decides_at_every_event_but_after_fit_which_is_the_other_way_round():
    log = []
    cbs = [spy(log, name, order=order) for name, order in zip("cadb", (1, -5, 1, 0), strict=True)]
    fit(make_learner(1, 1, cbs=cbs))
    for event in set(events(log)):
        who = "".join(w for w, e in log if e == event)[:4]
        assert who == ("dcba" if event == "after_fit" else "abcd"), event


def test_callbacks_leave_the_learner_after_fit_and_stay_readable():
    learn = make_learner()
    for _ in range(2):
        cb = ActivationStats()
        fit(learn, cbs=cb)
        assert cb not in learn.cbs
        assert learn.activation_stats is cb
        assert len(cb.stats) == 3
    other = make_learner()
    fit(other, cbs=cb)
    assert len(cb.stats) == 3


OURS = {
    "stats": ActivationStats,
    "hook": lambda: HookCallback(hook=lambda m, i, o: 0, name="h"),
    "recorder": Recorder,
    "metrics": lambda: Metrics(F.l1_loss),
    "progress": lambda: Progress(console=Console(file=io.StringIO(), force_terminal=True)),
}
MOMENTS = [e for e in EVENTS if "cancel" not in e]


def without(kind, cbs):
    """A learner whose default callback of that kind is away."""
    learn = make_learner(2, 1, metrics=F.l1_loss if kind != "metrics" else (), cbs=cbs)
    for cls in (Recorder, Metrics, Progress):
        if cls.__name__.lower() == kind:
            learn.remove_cb(cls)
    if kind != "progress":
        learn.remove_cb(Progress)
    return learn


@in_turn(("event", "kind"), along(MOMENTS, OURS))
def test_ours_can_be_added_at_any_event_of_a_fit_and_removed_at_any(kind, event):
    cb = OURS[kind]()
    calls = itertools.count()

    def act(acting):
        n = next(calls)
        if n == 0:
            acting.learn.add_cb(cb)
        elif any(c is cb for c in acting.learn.cbs) and n == 2:
            acting.learn.remove_cb(cb)

    actor = Callback(name="actor", **{event: act})
    actor.order = 99
    learn = without(kind, [actor])
    learn.fit(2)
    learn.fit(1)
    assert next(calls) >= 1
    assert count_hooks(learn.model) == 0


@in_turn(("event", "kind"), along(MOMENTS, OURS))
def test_ours_can_be_switched_on_and_off_at_any_event_of_a_fit(kind, event):
    cb = OURS[kind]()
    cb.run = False
    actor = Callback(name="actor", **{event: lambda acting: setattr(cb, "run", not cb.run)})
    actor.order = 99
    learn = without(kind, [actor])
    learn.add_cb(cb)
    learn.fit(3)
    assert count_hooks(learn.model) == 0
    cb.run = True
    with learn.removed_cbs(actor):
        learn.fit(1)
    if kind == "recorder":
        assert len(cb.losses) == 2
    if kind == "stats":
        assert len(cb.stats) == 2


@in_turn(("switch", "kind", "event"), pairs(["run_train", "run_valid"], OURS, ["before_batch", "after_loss"]))
def test_ours_can_have_their_phases_switched_in_the_middle_of_batches(kind, event, switch):
    cb = OURS[kind]()
    flips = itertools.cycle([True, False, False])
    actor = Callback(name="actor", **{event: lambda acting: setattr(cb, switch, next(flips))})
    learn = without(kind, [actor])
    learn.add_cb(cb)
    learn.fit(2)
    assert count_hooks(learn.model) == 0


NESTED = [(e, "train") for e in ("before_fit", "before_epoch", "before_train", *BATCH, "after_train")]
NESTED += [(e, "valid") for e in (*VALID, "after_epoch", "after_fit")]


@in_turn(("place", "act"), along(NESTED, [("validate", -1), ("get_preds", 99), ("failing", 99)]))
def test_validating_inside_a_fit_leaves_the_loop_and_its_records_as_they_were(place, act):
    (event, phase), (what, order) = place, act

    class Total:
        """A metric object, whose state a nested validation would wipe."""

        def __init__(self):
            self.reset()

        def reset(self):
            self.sum = self.n = 0

        def update(self, pred, y):
            self.sum += (pred - y).abs().sum().item()
            self.n += len(y)

        def compute(self):
            return self.sum / self.n

    def make(cbs):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        metrics = {"mae": F.l1_loss, "total": Total()}
        return make_learner(3, 2, model=model, cbs=[ActivationStats(), *cbs], metrics=metrics)

    def state(learn):
        tensors = [t for t in (*learn.xb, *learn.yb, learn.pred, learn.loss) if t is not None]
        plain = [getattr(learn, k) for k in ("epoch", "n_epoch", "iter", "n_iter", "train_iter", "training")]
        plain += [learn.dl is learn.dls.train, learn.pct_train, modes(learn.model), torch.is_grad_enabled()]
        return [id(t) for t in tensors], plain, dict(learn.row)

    other = make_batches(5, seed=9)
    acting = [False]

    def act(cb):
        if acting[0] or (event in BATCH and cb.training != (phase == "train")):
            return
        acting[0] = True
        before = state(cb.learn)
        if what == "validate":
            cb.learn.validate(other)
        elif what == "get_preds":
            cb.learn.get_preds(other, with_input=True, with_loss=True)
        else:
            with pytest.raises(ZeroDivisionError):
                cb.learn.validate(b if i else 1 / 0 for i, b in ((1, other[0]), (0, None)))
        assert state(cb.learn) == before
        acting[0] = False

    nested = Callback(name="nested", **{event: act})
    nested.order = order
    nested = fit(make([nested]), 2)
    plain = fit(make([]), 2)
    results = [
        {
            "losses": list(learn.recorder.losses),
            "lrs": list(learn.recorder.lrs),
            "rows": [{k: v for k, v in row.items() if k != "time"} for row in learn.recorder.rows],
            "stats": learn.activation_stats.table(),
            "weights": [w.tolist() for w in weights(learn.model)],
        }
        for learn in (nested, plain)
    ]
    assert [k for k in results[0] if results[0][k] != results[1][k]] == []


def test_validate_and_get_preds_outside_a_fit_touch_no_results():
    log = []
    stats = ActivationStats()
    learn = fit(make_learner(cbs=[stats, spy(log, "a")], metrics=F.l1_loss), 2)
    rows, losses = copy.deepcopy(list(learn.recorder.rows)), list(learn.recorder.losses)
    records = stats.table()
    log.clear()
    learn.validate()
    learn.get_preds()
    learn.get_preds(make_batches(1), with_loss=True)
    assert list(learn.recorder.rows) == rows
    assert list(learn.recorder.losses) == losses
    assert stats.table() == records
    assert not {"before_fit", "after_fit", "before_epoch", "before_train"} & set(events(log))
    assert count_hooks(learn.model) == 0
