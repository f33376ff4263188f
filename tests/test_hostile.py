"""Hostile tests, written against the contract alone, with oracles of their own."""

import collections
import contextlib
import copy
import dataclasses
import gc
import io
import itertools
import pickle
import types
import weakref

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hookcb import (
    ActivationStats,
    Callback,
    CancelBackwardException,
    CancelBatchException,
    CancelEpochException,
    CancelException,
    CancelFitException,
    CancelStepException,
    CancelTrainException,
    CancelValidException,
    Event,
    Hook,
    HookCallback,
    Hooks,
    Learner,
    Loop,
    Metrics,
    Progress,
    Recorder,
    accuracy,
    assert_no_hooks,
    check_callback,
    count_hooks,
    find_modules,
    hook_output,
    hook_outputs,
    synth_learner,
)

EVENTS = [e.value for e in Event]
CANCELS = {
    "fit": CancelFitException,
    "epoch": CancelEpochException,
    "train": CancelTrainException,
    "validate": CancelValidException,
    "batch": CancelBatchException,
    "backward": CancelBackwardException,
    "step": CancelStepException,
}
DIAGNOSTICS = [
    lambda: ActivationStats(include_paramless=True),
    lambda: ActivationStats(every=2),
    lambda: HookCallback(hook=lambda m, i, o: o.mean(), name="means"),
]


class SaysSo(Exception):
    """An exception whose constructor cannot be called with one message."""

    def __init__(self, a, b, *, c=3):
        super().__init__(a, b)
        self.c = c


# ---------------------------------------------------------------- small things


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tiny layers are slow on many threads."""
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)


def make_batches(n=3, bs=4, d=2, seed=0, last=None):
    g = torch.Generator().manual_seed(seed)
    sizes = [bs] * (n - 1) + [last or bs]
    return [(torch.randn(k, d, generator=g), torch.randn(k, 1, generator=g)) for k in sizes]


def make_model(seed=0, d=2):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(d, 3), nn.ReLU(), nn.Linear(3, 1))


def make_learner(n_train=3, n_valid=2, cbs=(), model=None, opt_func=torch.optim.SGD, lr=0.1, **kwargs):
    train = make_batches(n_train)
    valid = make_batches(n_valid, seed=1) if n_valid else None
    kwargs.setdefault("loss_func", F.mse_loss)
    return Learner((train, valid), model or make_model(), opt_func=opt_func, lr=lr, cbs=cbs, **kwargs)


def fit(learn, n_epoch=1, **kwargs):
    with learn.no_logging():
        learn.fit(n_epoch, **kwargs)
    return learn


def weights(model):
    return [p.detach().clone() for p in model.state_dict().values()]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def train_by_hand(model, batches, n_epoch=1, opt=None, lr=0.1, loss_func=F.mse_loss):
    opt = opt or torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for _ in range(n_epoch):
        model.train()
        for x, y in batches:
            loss = loss_func(model(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
    return losses


def spy(log, name, plan=None, **attrs):
    """A callback that logs every event as (name, event), and raises what `plan[event, its index]` says."""
    plan, counts = plan or {}, collections.Counter()

    def acting_at(event):
        def act(cb):
            log.append((name, event))
            k = counts[event]
            counts[event] += 1
            if (event, k) in plan:
                raise plan[event, k]

        return act

    cb = Callback(name=name, **{event: acting_at(event) for event in EVENTS})
    for key, value in attrs.items():
        setattr(cb, key, value)
    return cb


def events(log, name="a"):
    return [event for who, event in log if who == name]


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


PRIMARY = {f"after_cancel_{level}": (f"before_{level}", cancel) for level, cancel in CANCELS.items()}
RAISED = [*CANCELS.values(), ValueError, KeyboardInterrupt]


# ---------------------------------------------------------------- every event × every exception


def primary_plan(event):
    """What brings the loop to an `after_cancel_…` event at all."""
    opener, cancel = PRIMARY.get(event, (None, None))
    return {(opener, k): cancel() for k in range(4)} if opener else {}


def moments():
    """Every event with those of its first and fourth occurrence that there are."""
    for event in EVENTS:
        hand = HandLoop(2, make_batches(2), make_batches(2), make_model(), primary_plan(event))
        hand.fit()
        yield from ((event, nth) for nth in (0, 3) if nth < hand.counts[event])


@pytest.mark.parametrize("raised", RAISED)
@pytest.mark.parametrize(("event", "nth"), list(moments()))
def test_what_fires_and_what_is_trained_agrees_with_a_loop_written_by_hand(event, raised, nth):
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


@pytest.mark.parametrize(
    ("outer", "inner"), list(itertools.combinations(["fit", "epoch", "train", "batch", "step"], 2))
)
@pytest.mark.parametrize("outer_first", [True, False])
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


# ---------------------------------------------------------------- the same weights as a plain loop


@pytest.mark.parametrize(
    "opt_func",
    [
        torch.optim.SGD,
        torch.optim.Adam,
        lambda ps, lr: torch.optim.SGD(ps, lr=lr, momentum=0.9, weight_decay=0.1),
    ],
)
@pytest.mark.parametrize("diagnostics", [False, True])
def test_weights_losses_and_random_state_agree_with_a_plain_loop_bit_for_bit(opt_func, diagnostics):
    def model_and_loader():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 1))
        x, y = torch.randn(18, 2), torch.randn(18, 1)
        return model, DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)

    model, loader = model_and_loader()
    losses = train_by_hand(model, loader, 3, opt=opt_func(model.parameters(), lr=0.05))
    state = torch.get_rng_state()
    expected = weights(model)

    model, loader = model_and_loader()
    learn = Learner((loader, None), model, F.mse_loss, opt_func, lr=0.05)
    fit(learn, 3, cbs=[make() for make in DIAGNOSTICS[:1] + DIAGNOSTICS[2:]] if diagnostics else ())
    assert same(weights(model), expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert list(learn.recorder.losses) == losses


def test_two_fits_go_on_with_the_same_optimizer():
    batches = make_batches(3)
    learn = Learner((batches, None), make_model(), F.mse_loss, torch.optim.Adam, lr=0.1)
    fit(fit(learn))
    model = make_model()
    train_by_hand(model, batches, 2, opt=torch.optim.Adam(model.parameters(), lr=0.1))
    assert same(weights(learn.model), weights(model))


def test_the_learning_rate_given_to_fit_stays_until_another_is_given():
    learn = make_learner(lr=0.1)
    seen = []
    for lr in (None, 0.02, None, 0.3, None):
        fit(learn, lr=lr)
        seen.append(list(learn.recorder.lrs))
    assert seen == [[lr] * 3 for lr in (0.1, 0.02, 0.02, 0.3, 0.3)]


def test_a_learning_rate_of_the_first_fit_is_the_one_it_trains_with():
    batches = make_batches(3)
    learn = fit(Learner((batches, None), make_model(), F.mse_loss, torch.optim.SGD, lr=9.0), lr=0.1)
    model = make_model()
    train_by_hand(model, batches, lr=0.1)
    assert same(weights(learn.model), weights(model))


def test_a_ready_optimizer_keeps_its_own_learning_rates():
    model = make_model()
    opt = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters()}], lr=0.25
    )
    learn = fit(Learner((make_batches(), None), model, F.mse_loss, opt, lr=7.0))
    assert learn.opt is opt
    assert [group["lr"] for group in opt.param_groups] == [0.5, 0.25]
    assert list(learn.recorder.lrs) == [0.25] * 3
    by_hand = make_model()
    opt = torch.optim.SGD(
        [{"params": by_hand[0].parameters(), "lr": 0.5}, {"params": by_hand[2].parameters()}], lr=0.25
    )
    train_by_hand(by_hand, make_batches(), opt=opt)
    assert same(weights(model), weights(by_hand))


def test_a_learning_rate_changed_by_a_callback_is_recorded_for_the_batches_it_trained():
    class Decay(Callback):
        def before_batch(self):
            if self.training:
                for group in self.opt.param_groups:
                    group["lr"] = 0.1 / (1 + self.train_iter)

    learn = fit(make_learner(n_valid=0, cbs=Decay))
    assert list(learn.recorder.lrs) == [0.1, 0.1 / 2, 0.1 / 3]


def test_frozen_layers_stay_as_they_are_and_the_rest_trains():
    model = make_model()
    model[0].requires_grad_(False)
    before = weights(model)
    fit(make_learner(model=model, cbs=ActivationStats()))
    after = weights(model)
    assert same(before[:2], after[:2])
    assert not torch.equal(before[2], after[2])


@pytest.mark.parametrize("frozen", ["no parameters", "all frozen"])
def test_a_model_that_cannot_be_trained_is_refused_before_anything_fires(frozen):
    model = nn.Flatten() if frozen == "no parameters" else make_model().requires_grad_(False)
    log = []
    learn = Learner((make_batches(), None), model, F.mse_loss, cbs=spy(log, "a"))
    with pytest.raises((ValueError, RuntimeError, TypeError), match="param"):
        fit(learn)
    assert log == []


# ---------------------------------------------------------------- modes, grad mode


def modes(model):
    return [m.training for m in model.modules()]


@pytest.mark.parametrize("raised", [None, ValueError, CancelFitException])
@pytest.mark.parametrize("event", ["before_batch", "after_validate"])
def test_the_modes_of_a_partly_eval_model_are_restored_however_the_fit_ends(event, raised):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Dropout(), nn.Linear(3, 1)))
    model.train()
    model[1].eval()
    model[2][0].eval()
    before = modes(model)
    plan = {(event, 0): raised()} if raised else {}
    with contextlib.suppress(ValueError):
        fit(make_learner(model=model, cbs=spy([], "a", plan)))
    assert modes(model) == before
    learn = make_learner(model=model)
    learn.validate()
    assert modes(model) == before
    learn.get_preds()
    assert modes(model) == before
    learn.one_batch()
    assert modes(model) == before


@pytest.mark.parametrize("event", ["before_validate", "after_pred", "after_validate", "after_epoch"])
@pytest.mark.parametrize("raised", [ValueError, KeyboardInterrupt, CancelFitException, CancelEpochException])
def test_grad_mode_is_restored_however_the_validation_ends(event, raised):
    log = []
    with contextlib.suppress(ValueError, KeyboardInterrupt):
        fit(make_learner(n_train=1, cbs=spy(log, "a", {(event, int(event == "after_pred")): raised()})))
    assert events(log).count(event) == 1 + (event == "after_pred")
    assert torch.is_grad_enabled()


def test_training_happens_in_train_mode_with_gradients_and_validation_without_either():
    seen = []

    class Look(Callback):
        def after_loss(self):
            seen.append(
                (self.training, self.model.training, torch.is_grad_enabled(), self.loss.requires_grad)
            )

        def after_epoch(self):
            seen.append(torch.is_grad_enabled())

    fit(make_learner(n_train=1, n_valid=1, cbs=Look))
    assert seen == [(True, True, True, True), (False, False, False, False), True]


# ---------------------------------------------------------------- attaching, in and out of a fit


def attached_in(event, nth, new, log, **kwargs):
    """A fit of two epochs in which `new` is added at the nth time of `event`."""
    count = itertools.count()

    def act(cb):
        if next(count) == nth:
            cb.learn.add_cb(new)
            log.append(("-", "added"))

    learn = make_learner(n_train=2, n_valid=1, cbs=Callback(name="adder", **{event: act}), **kwargs)
    return fit(learn, 2)


BATCH = ["before_batch", "after_pred", "after_loss", "before_backward", "after_backward", "before_step"]
BATCH += ["after_step", "after_batch"]
VALID = ["before_validate", "before_batch", "after_pred", "after_loss", "after_batch", "after_validate"]
EPOCH = ["before_epoch", "before_train", *BATCH, *BATCH, "after_train", *VALID, "after_epoch"]


@pytest.mark.parametrize(
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


@pytest.mark.parametrize("event", [e for e in EVENTS if "cancel" not in e and e != "after_fit"])
@pytest.mark.parametrize("order", [-10, 10])
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


@pytest.mark.parametrize("event", ["before_fit", "before_batch", "after_pred", "after_step", "after_epoch"])
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


@pytest.mark.parametrize(("run_train", "run_valid"), list(itertools.product([True, False], repeat=2)))
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


# ---------------------------------------------------------------- what is refused


def named(class_name, base=Callback, **attrs):
    return type(class_name, (base,), attrs)


@pytest.mark.parametrize(
    "name", ["model", "fit", "opt", "dls", "xb", "pred", "cbs", "emit", "pct_train", "lr", "loss_func", "row"]
)
def test_a_name_that_would_overwrite_something_of_the_loop_is_refused(name):
    learn = make_learner()
    before = dict(vars(learn))
    with pytest.raises(ValueError, match=name):
        learn.add_cb(Callback(name=name))
    with pytest.raises(ValueError, match=name):
        fit(learn, cbs=Callback(name=name))
    assert vars(learn).keys() == before.keys()
    assert learn.model is before["model"]
    assert learn.cbs == before["cbs"]


def test_a_class_called_model_callback_does_not_overwrite_the_model():
    learn = make_learner()
    with pytest.raises(ValueError, match="model"):
        learn.add_cb(named("ModelCallback"))
    assert isinstance(learn.model, nn.Module)


def test_names_are_snake_case_without_callback():
    names = {
        "ActivationLook": "activation_look",
        "ProfilerCallback": "profiler",
        "MyHTTPLogger": "my_http_logger",
    }
    for class_name, name in names.items():
        assert named(class_name)().name == name
    learn = make_learner(cbs=named("ProfilerCallback"))
    assert learn.profiler.name == "profiler"


def test_two_of_a_kind_need_a_name():
    learn = make_learner()
    with pytest.raises(ValueError, match="activation_stats"):
        learn.add_cbs([ActivationStats(), ActivationStats()])
    assert len(learn.cbs) == 3
    learn.add_cbs([ActivationStats(), ActivationStats(name="second")])
    fit(learn)
    assert len(learn.activation_stats.stats) == len(learn.second.stats) == 3
    with pytest.raises(ValueError, match="second"):
        fit(learn, cbs=Callback(name="second"))


def test_the_same_instance_twice_is_refused():
    log = []
    cb = spy(log, "a")
    learn = make_learner()
    with pytest.raises(ValueError, match="a"):
        fit(learn, cbs=[cb, cb])
    assert log == []
    assert cb not in learn.cbs
    learn.add_cb(cb)
    for again in (lambda: learn.add_cb(cb), lambda: fit(learn, cbs=cb)):
        with pytest.raises(ValueError, match="a"):
            again()
    assert learn.cbs.count(cb) == 1
    fit(learn)
    assert events(log).count("before_fit") == 1


def test_an_instance_that_belongs_to_another_loop_is_refused_until_it_is_removed():
    cb = spy([], "a")
    one, two = make_learner(cbs=cb), make_learner()
    with pytest.raises(ValueError, match="a"):
        two.add_cb(cb)
    assert cb.learn is one
    one.remove_cb(cb)
    two.add_cb(cb)
    assert cb.learn is two


def test_attaching_several_is_all_or_nothing():
    learn = make_learner()
    before = list(learn.cbs)
    good = Callback(name="good")
    for bad in (Callback(name="model"), int, 3, good, named("Needs", __init__=lambda self, a: None)):
        with pytest.raises((TypeError, ValueError)):
            learn.add_cbs([good, bad])
        assert learn.cbs == before
        assert not hasattr(learn, "good")
    make_learner(cbs=good)  # it belongs to nobody


@pytest.mark.parametrize("bad", [3, "progress", int, nn.ReLU, print, [3], [[Callback()]], {"a": 1}, object()])
def test_what_is_no_callback_is_refused(bad):
    with pytest.raises(TypeError):
        make_learner(cbs=bad)
    with pytest.raises(TypeError):
        fit(make_learner(), cbs=bad)


def test_a_class_that_needs_arguments_is_refused_by_name():
    class NeedsPatience(Callback):
        def __init__(self, patience):
            self.patience = patience

    with pytest.raises(TypeError, match="NeedsPatience"):
        make_learner(cbs=NeedsPatience)
    make_learner(cbs=NeedsPatience(3))


def test_a_type_error_inside_a_constructor_is_not_taken_for_missing_arguments():
    class Broken(Callback):
        def __init__(self):
            len(3)

    with pytest.raises(TypeError, match="len"):
        make_learner(cbs=Broken)


@pytest.mark.parametrize(
    "wrong", ["after_bacth", "before_bach", "after_batches", "before_training", "after_"]
)
def test_a_misspelt_event_is_refused_wherever_it_is_written(wrong):
    with pytest.raises(TypeError, match=f"unknown event '{wrong}'"):
        named("Wrong", **{wrong: lambda self: None})
    with pytest.raises(TypeError, match=wrong):
        Callback(**{wrong: print})
    mixin = type("Mixin", (), {wrong: lambda self: None})
    with pytest.raises(TypeError, match=wrong):
        type("Mixed", (mixin, Callback), {})
    with pytest.raises(TypeError, match=wrong):
        named("Wrong", HookCallback, **{wrong: lambda self: None})


def test_a_misspelt_event_gets_the_right_one_suggested():
    with pytest.raises(TypeError, match=r"unknown event 'after_bacth'; did you mean 'after_batch'\?"):
        named("Wrong", after_bacth=lambda self: None)
    with pytest.raises(TypeError, match="did you mean 'after_validate'"):
        Callback(after_validat=print)


def test_functions_that_are_no_functions_and_unknown_arguments_are_refused():
    with pytest.raises(TypeError):
        Callback(after_batch=3)
    with pytest.raises(TypeError):
        Callback(on_batch_end=print)
    with pytest.raises(TypeError):
        Callback(print)


def test_a_model_method_named_like_an_event_is_not_called():
    class Model(nn.Linear):
        def after_batch(self):
            raise AssertionError("not yours")

    fit(make_learner(model=Model(2, 1)))


STATE = ["model", "opt", "xb", "yb", "x", "y", "pred", "loss", "dl", "epoch", "n_epoch", "iter", "n_iter"]
STATE += ["train_iter", "pct_train", "training"]


@pytest.mark.parametrize("name", STATE)
def test_the_state_is_read_only_on_a_callback(name):
    seen = []

    def write(cb):
        seen.append(getattr(cb, name) is not None)
        with pytest.raises(AttributeError, match=rf"learn\.{name}"):
            setattr(cb, name, 1)

    fit(make_learner(1, 1, cbs=Callback(name="w", after_step=write)))
    assert seen == [True]


def test_the_state_is_right_at_every_batch():
    seen = []

    class Look(Callback):
        def after_loss(self):
            share = self.pct_train
            seen.append(
                (self.training, self.epoch, self.iter, self.train_iter, self.n_iter, self.n_epoch, share)
            )

    fit(make_learner(2, 1, cbs=Look), 2)
    assert [s[:6] for s in seen] == [
        (True, 0, 0, 0, 2, 2),
        (True, 0, 1, 1, 2, 2),
        (False, 0, 0, 2, 1, 2),
        (True, 1, 0, 2, 2, 2),
        (True, 1, 1, 3, 2, 2),
        (False, 1, 0, 4, 1, 2),
    ]
    assert [s[6] for s in seen if s[0]] == [0, 0.25, 0.5, 0.75]
    assert [s[6] for s in seen if not s[0]] == [0.5, 1]


def test_state_set_through_learn_is_what_goes_on():
    class Double(Callback):
        def before_batch(self):
            self.learn.xb = (self.x * 2,)
            self.learn.yb = (self.y + 1,)

        def after_pred(self):
            self.learn.pred = self.pred * 3

        def after_loss(self):
            self.learn.loss = self.loss * 5

    batches = make_batches()
    learn = fit(Learner((batches, None), make_model(), F.mse_loss, torch.optim.SGD, lr=0.01, cbs=Double))
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in batches:
        (F.mse_loss(model(x * 2) * 3, y + 1) * 5).backward()
        opt.step()
        opt.zero_grad()
    assert same(weights(learn.model), weights(model))


def test_removing_what_is_not_attached_is_refused():
    learn = make_learner()
    with pytest.raises(ValueError, match=r"ActivationStats|activation_stats"):
        learn.remove_cb(ActivationStats())
    with pytest.raises(ValueError, match="ActivationStats"):
        learn.remove_cb(ActivationStats)


def test_removing_by_class_removes_all_of_it():
    learn = make_learner(cbs=[ActivationStats(name="one"), ActivationStats(name="two")])
    learn.remove_cb(ActivationStats)
    assert [type(cb) for cb in learn.cbs] == [Recorder, Metrics, Progress]


def test_added_and_removed_callbacks_come_back_after_an_error():
    learn = make_learner()
    log = []
    cb = spy(log, "a")
    before = set(map(id, learn.cbs))
    with pytest.raises(ZeroDivisionError), learn.added_cbs(cb):  # noqa: PT012
        assert cb in learn.cbs
        1 / 0  # noqa: B018
    assert set(map(id, learn.cbs)) == before
    with pytest.raises(ZeroDivisionError), learn.removed_cbs([Recorder, Metrics, Progress]):  # noqa: PT012
        assert list(learn.cbs) == []
        learn.fit(1)
        1 / 0  # noqa: B018
    assert set(map(id, learn.cbs)) == before
    fit(learn)
    assert len(learn.recorder.losses) == 3


def test_a_default_callback_given_takes_the_place_of_the_default():
    class MyRecorder(Recorder):
        pass

    mine = Recorder()
    learn = make_learner(cbs=[mine, Progress(bar=False)])
    assert learn.recorder is mine
    assert sorted(type(cb).__name__ for cb in learn.cbs) == ["Metrics", "Progress", "Recorder"]
    learn = make_learner(cbs=MyRecorder())
    assert sum(isinstance(cb, Recorder) for cb in learn.cbs) == 1


# ---------------------------------------------------------------- odd callbacks


@dataclasses.dataclass
class Dated(Callback):
    """A dataclass: equal where its fields are, not hashable, and its __init__ is its own."""

    n: int = 0

    def after_step(self):
        self.n += 1


class SameAsAll(Callback):
    """Equal to everything."""

    def __init__(self, label):
        super().__init__(name=label)
        self.seen = 0

    def __eq__(self, other):
        return True

    __hash__ = None

    def after_step(self):
        self.seen += 1


class Iterable(Callback):
    """Iterable, with a length, and empty: false in a condition."""

    n = 0

    def __iter__(self):
        return iter([])

    def __len__(self):
        return 0

    def after_step(self):
        self.n += 1


class NoSuper(Callback):
    """Does not call super().__init__()."""

    def __init__(self, n=0):
        self.n = n

    def after_step(self):
        self.n += 1


class Slotted(NoSuper):
    """With a property called like nothing else."""

    __slots__ = ("extra",)


@pytest.mark.parametrize("cls", [Dated, Iterable, NoSuper, Slotted])
def test_odd_callbacks_work_alone_in_a_list_and_as_a_class(cls):
    for cbs in (cls(), [cls()], (cls(),), cls, [cls]):
        learn = fit(make_learner(), cbs=cbs)
        (cb,) = [v for v in vars(learn).values() if isinstance(v, cls)]
        assert cb.n == 3
        assert cb not in list(learn.cbs)
        assert pickle.loads(pickle.dumps(cb)).n == copy.deepcopy(cb).n == 3
        assert cls.__name__ in repr(cb)
    cb = cls()
    learn = make_learner(cbs=cb)
    fit(fit(learn))
    assert cb.n == 6
    learn.remove_cb(cb)
    assert len(learn.cbs) == 3


def test_equal_callbacks_are_told_apart():
    one, two = SameAsAll("one"), SameAsAll("two")
    learn = make_learner(cbs=[one, two])
    assert len(learn.cbs) == 5
    fit(learn)
    learn.remove_cb(two)
    assert [cb for cb in learn.cbs if cb is two] == []
    assert any(cb is one for cb in learn.cbs)
    fit(learn)
    assert (one.seen, two.seen) == (6, 3)
    with pytest.raises(ValueError, match="two"):
        learn.remove_cb(two)


def test_callbacks_pickle_and_copy_while_attached_in_mid_fit_and_after():
    copies = []

    class Copier(Callback):
        def after_batch(self):
            for cb in self.learn.cbs:
                if cb is not self:
                    copies.append(pickle.loads(pickle.dumps(cb)))
                    copies.append(copy.deepcopy(cb))
                    copies.append(copy.copy(cb))

    stats, plain = ActivationStats(), NoSuper()
    learn = make_learner(cbs=[stats, plain])
    fit(learn, cbs=Copier())
    assert len(copies) == 3 * 4 * (3 + 2)  # Progress is off
    for cb in copies:
        assert getattr(cb, "learn", None) is not learn
        assert getattr(cb, "learn", None) is None
    assert len(stats.stats) == 3
    assert plain.n == 3
    last = [cb for cb in copies if isinstance(cb, ActivationStats)][-1]
    with learn.removed_cbs(stats):
        fit(learn, cbs=last)
    assert len(last.stats) == 3
    assert last.names == stats.names
    again = pickle.loads(pickle.dumps(stats))
    assert list(again.stats) == list(stats.stats)
    assert again.names == stats.names


def test_a_copy_does_not_share_results_with_its_original():
    stats = ActivationStats()
    learn = fit(make_learner(cbs=stats))
    copied = copy.deepcopy(stats)
    before = list(copied.stats)
    fit(learn, 3)
    assert list(copied.stats) == before
    assert len(stats.stats) == 9


def test_a_model_copied_in_mid_fit_carries_inert_hooks():
    got = {}

    class Ema(Callback):
        def after_step(self):
            got["deep"] = copy.deepcopy(self.model)
            buffer = io.BytesIO()
            torch.save(self.model, buffer)
            got["saved"] = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
            got["n"] = count_hooks(self.model)
            for key in ("deep", "saved"):
                got[key](torch.full((64, 2), 1e6))

    stats, means = ActivationStats(), HookCallback(hook=lambda m, i, o: o.abs().max().item(), name="means")
    learn = fit(make_learner(cbs=[stats, means, Ema()]))
    plain = fit(make_learner(cbs=ActivationStats()))
    assert got["n"] > 0
    assert list(stats.stats) == list(plain.activation_stats.stats)
    n, stored = len(stats.stats), list(means.hooks.stored)
    for key in ("deep", "saved"):
        got[key](torch.full((64, 2), 1e6))
        assert same(weights(got[key]), weights(learn.model))
    assert len(stats.stats) == n
    assert list(means.hooks.stored) == stored


# ---------------------------------------------------------------- nested validation


NESTED = [(e, "train") for e in ("before_fit", "before_epoch", "before_train", *BATCH, "after_train")]
NESTED += [(e, "valid") for e in (*VALID, "after_epoch", "after_fit")]


@pytest.mark.parametrize(("event", "phase"), NESTED)
@pytest.mark.parametrize(
    ("what", "order"), [("validate", -1), ("validate", 99), ("get_preds", 99), ("failing", -1)]
)
def test_validating_inside_a_fit_leaves_the_loop_and_its_records_as_they_were(event, phase, what, order):
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
            "stats": list(learn.activation_stats.stats),
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
    records = list(stats.stats)
    log.clear()
    learn.validate()
    learn.get_preds()
    learn.get_preds(make_batches(1), with_loss=True)
    assert list(learn.recorder.rows) == rows
    assert list(learn.recorder.losses) == losses
    assert list(stats.stats) == records
    assert not {"before_fit", "after_fit", "before_epoch", "before_train"} & set(events(log))
    assert count_hooks(learn.model) == 0


# ---------------------------------------------------------------- batches


Pair = collections.namedtuple("Pair", "x y")


class Takes(nn.Module):
    """Keeps what it was called with; its output is linear in whatever the first tensor is."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 1)
        self.got = []

    def forward(self, *args, **kwargs):
        self.got.append((args, kwargs))
        x = args[0] if args else kwargs["x"]
        while not torch.is_tensor(x):
            x = next(iter(x.values())) if isinstance(x, dict) else x[0]
        return self.fc(x)


def ends_like(got, expected):
    if torch.is_tensor(expected):
        return torch.is_tensor(got) and torch.equal(got, expected)
    if isinstance(expected, dict):
        return got.keys() == expected.keys() and all(ends_like(got[k], expected[k]) for k in expected)
    if not isinstance(expected, (tuple, list)):
        return got == expected
    return len(got) == len(expected) and all(map(ends_like, got, expected))


X, Y, Z = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0)).unbind()
PACKED = pack_sequence([torch.ones(3, 2), torch.zeros(2, 2)])


@pytest.mark.parametrize(
    ("batch", "n_inp", "args", "kwargs", "targets"),
    [
        (X, None, (X,), {}, ()),
        ((X,), None, (X,), {}, ()),
        ([X], None, (X,), {}, ()),
        ((X, Y), None, (X,), {}, (Y,)),
        ([X, Y], None, (X,), {}, (Y,)),
        (Pair(X, Y), None, (X,), {}, (Y,)),
        ((X, Y, Z), None, (X, Y), {}, (Z,)),
        ((X, Y, Z), 1, (X,), {}, (Y, Z)),
        ((X, Y, Z), 3, (X, Y, Z), {}, ()),
        ((X, Y), 2, (X, Y), {}, ()),
        (((X, Z), Y), None, ((X, Z),), {}, (Y,)),
        (([X, {"k": Z}], Y), None, ([X, {"k": Z}],), {}, (Y,)),
        (({"x": X, "m": Z}, Y), None, ({"x": X, "m": Z},), {}, (Y,)),
        ((X, {"t": Y}), None, (X,), {}, ({"t": Y},)),
        ((Pair(X, Z), Y), None, (Pair(X, Z),), {}, (Y,)),
        ({"x": X, "mask": Z}, None, (), {"x": X, "mask": Z}, ()),
        (collections.OrderedDict(x=X, mask=Z), None, (), {"x": X, "mask": Z}, ()),
        (types.MappingProxyType({"x": X}), None, (), {"x": X}, ()),
        ((PACKED, Y), None, (PACKED,), {}, (Y,)),
        (PACKED, None, (PACKED,), {}, ()),
    ],
)
def test_a_batch_of_any_form_reaches_the_model_and_the_loss_function_whole(
    batch, n_inp, args, kwargs, targets
):
    seen = []

    def loss_func(pred, *yb):
        seen.append(yb)
        return pred.square().mean()

    model = Takes()
    learn = Learner([batch, batch], model, loss_func, torch.optim.SGD, n_inp=n_inp)
    before = weights(model)
    fit(learn)
    assert len(model.got) == len(seen) == 2
    assert ends_like(model.got[0][0], args)
    assert [type(a) for a in model.got[0][0]] == [type(a) for a in args]
    assert ends_like(model.got[0][1], kwargs)
    assert ends_like(seen[0], targets)
    assert not same(before, weights(model))


def test_single_inputs_and_targets_read_as_x_and_y():
    seen = []
    look = Callback(name="look", after_pred=lambda cb: seen.append((cb.x, cb.y, cb.xb, cb.yb)))
    fit(Learner([(X, Y)], Takes(), lambda p, y: p.mean(), torch.optim.SGD, cbs=look))
    x, y, xb, yb = seen[0]
    assert torch.equal(x, X)
    assert torch.equal(y, Y)
    assert (type(xb), type(yb)) == (tuple, tuple)
    seen.clear()
    look = Callback(name="look", after_pred=lambda cb: seen.append((cb.x, cb.y, cb.xb, cb.yb)))
    fit(Learner([(X, Y, Z)], Takes(), lambda p, y, z: p.mean(), torch.optim.SGD, n_inp=1, cbs=look))
    assert torch.equal(seen[0][0], X)
    assert len(seen[0][1]) == 2


def test_a_mapping_trains_on_the_output_s_own_loss():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 1)

        def forward(self, x, labels):
            pred = self.fc(x)
            return types.SimpleNamespace(loss=F.mse_loss(pred, labels), logits=pred)

    torch.manual_seed(0)
    model = Model()
    by_hand = copy.deepcopy(model.fc)
    batches = make_batches()
    learn = Learner([{"x": x, "labels": y} for x, y in batches], model, opt_func=torch.optim.SGD, lr=0.1)
    fit(learn)
    losses = train_by_hand(by_hand, batches)
    assert same(weights(model.fc), weights(by_hand))
    assert list(learn.recorder.losses) == losses


def test_without_a_loss_function_a_tensor_output_is_refused_before_any_step():
    model = make_model()
    before = weights(model)
    learn = Learner(make_batches(), model)
    with pytest.raises((TypeError, ValueError, RuntimeError, AttributeError), match="loss"):
        fit(learn)
    assert same(weights(model), before)


def test_batches_and_predictions_of_half_precision_and_integers_reach_the_metrics():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 3))
    batches = [(torch.randint(0, 5, (6, 2)), torch.randint(0, 3, (6,))) for _ in range(3)]
    learn = Learner((batches, batches), model, F.cross_entropy, metrics=accuracy)
    fit(learn)
    assert 0 <= learn.recorder.rows[0]["accuracy"] <= 1


@pytest.mark.parametrize("n_inp", [-1, 0, 1.5, "1"])
def test_an_n_inp_that_cannot_be_is_refused(n_inp):
    with pytest.raises((ValueError, TypeError), match="n_inp"):
        fit(Learner(make_batches(), make_model(), F.mse_loss, n_inp=n_inp))


def test_an_n_inp_larger_than_the_batch_is_refused_with_its_name():
    with pytest.raises((ValueError, TypeError), match="n_inp"):
        fit(Learner(make_batches(), make_model(), F.mse_loss, n_inp=5))


def test_predict_and_get_loss_can_be_overridden():
    class Mine(Learner):
        def predict(self):
            return self.model(*self.xb) * 2

        def get_loss(self):
            return self.loss_func(self.pred, *self.yb) + 1

    batches = make_batches()
    learn = fit(Mine((batches, batches), make_model(), F.mse_loss, torch.optim.SGD, lr=0.1))
    model = make_model()
    losses = train_by_hand(model, batches, loss_func=lambda p, y: F.mse_loss(p * 2, y) + 1)
    assert list(learn.recorder.losses) == losses
    preds, _ = learn.get_preds()
    model.eval()
    with torch.no_grad():
        assert torch.equal(preds, torch.cat([model(x) * 2 for x, _ in batches]))


# ---------------------------------------------------------------- loaders


class Stream(IterableDataset):
    """Has no length."""

    def __iter__(self):
        yield from make_batches()


class Stateless:
    """An iterable whose __iter__ is a generator function."""

    def __iter__(self):
        yield from make_batches()


def loaders():
    flat = [(x, y) for xs, ys in make_batches() for x, y in zip(xs, ys, strict=True)]
    return {
        "list": make_batches(),
        "tuple of three": None,
        "loader": DataLoader(flat, batch_size=4),
        "stream": DataLoader(Stream(), batch_size=None),
        "bare stream": Stream(),
        "generator class": Stateless(),
        "deque": collections.deque(make_batches()),
    }


@pytest.mark.parametrize("kind", [k for k, v in loaders().items() if v is not None])
@pytest.mark.parametrize("form", ["alone", "pair", "attributes"])
def test_every_kind_of_loader_trains_alike(kind, form):
    dl = loaders()[kind]
    dls = {"alone": dl, "pair": (dl, None), "attributes": types.SimpleNamespace(train=dl, valid=dl)}[form]
    learn = fit(Learner(dls, make_model(), F.mse_loss, torch.optim.SGD, lr=0.1), 2)
    model = make_model()
    train_by_hand(model, make_batches(), 2)
    assert same(weights(learn.model), weights(model))
    assert len(learn.recorder.losses) == 6
    assert ("valid_loss" in learn.recorder.rows[0]) == (form == "attributes")


def test_a_loader_without_length_has_no_n_iter():
    seen = []
    look = Callback(name="look", after_batch=lambda cb: seen.append((cb.iter, cb.n_iter, cb.pct_train)))
    fit(Learner(Stateless(), make_model(), F.mse_loss, torch.optim.SGD, cbs=look), 2)
    assert [s[:2] for s in seen] == [(0, None), (1, None), (2, None)] * 2
    assert all(0 <= s[2] <= 1 for s in seen)
    assert [s[2] for s in seen] == sorted(s[2] for s in seen)


def test_a_loader_whose_len_raises_counts_as_without_length():
    class NoLen(Stateless):
        def __len__(self):
            raise TypeError("no length")

    learn = fit(Learner(NoLen(), make_model(), F.mse_loss, torch.optim.SGD))
    assert len(learn.recorder.losses) == 3


def test_a_list_of_exactly_two_batches_is_no_pair_of_loaders():
    batches = [list(b) for b in make_batches(2)]
    learn = fit(Learner(batches, make_model(), F.mse_loss, torch.optim.SGD, lr=0.1))
    assert len(learn.recorder.losses) == 2


def test_without_validation_its_events_do_not_fire_and_the_row_has_no_valid_loss():
    log = []
    learn = fit(make_learner(n_valid=0, cbs=spy(log, "a"), metrics=F.l1_loss))
    assert not {"before_validate", "after_validate"} & set(events(log))
    assert "valid_loss" not in learn.recorder.rows[0] or learn.recorder.rows[0]["valid_loss"] is None
    with pytest.raises((TypeError, ValueError), match=r"valid|dl"):
        learn.validate()
    with pytest.raises((TypeError, ValueError), match=r"valid|dl"):
        learn.get_preds()


@pytest.mark.parametrize("bad", [None, 3, "train", nn.Linear(2, 1), object(), (1, 2), (make_batches(), 3)])
def test_dls_of_the_wrong_kind_are_refused(bad):
    with pytest.raises((TypeError, ValueError), match=r"dls|train|valid|batches"):
        fit(Learner(bad, make_model(), F.mse_loss))


def test_a_function_that_makes_batches_is_refused_or_called():
    def generate():
        yield from make_batches()

    try:
        learn = fit(Learner(generate, make_model(), F.mse_loss, torch.optim.SGD), 2)
    except TypeError as exc:
        assert "generate" in str(exc) or "function" in str(exc)  # noqa: PT017
    else:
        assert len(learn.recorder.losses) == 6


@pytest.mark.parametrize("form", ["alone", "pair"])
def test_a_dataset_given_in_place_of_a_loader_is_refused(form):
    data = TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
    with pytest.raises((TypeError, ValueError), match="DataLoader"):
        fit(Learner(data if form == "alone" else (data, data), make_model(), F.mse_loss))


@pytest.mark.parametrize("empty", [list, lambda: iter(()), lambda: DataLoader(Stream(), batch_size=None)])
def test_an_empty_training_loader_is_told(empty, monkeypatch):
    monkeypatch.setattr(Stream, "__iter__", lambda self: iter(()))
    learn = Learner((empty(), None), make_model(), F.mse_loss)
    with pytest.raises((ValueError, TypeError, RuntimeError), match="batch"):
        fit(learn)


def test_an_empty_validation_loader_is_told():
    learn = make_learner()
    with pytest.raises((ValueError, TypeError), match="batch"):
        learn.validate([])
    with pytest.raises((ValueError, TypeError), match="batch"):
        learn.validate(iter(()))
    with pytest.raises((ValueError, TypeError), match="batch"):
        learn.get_preds([])


def test_a_one_shot_iterator_is_not_silently_empty_in_the_second_epoch():
    learn = Learner((iter(make_batches()), None), make_model(), F.mse_loss, torch.optim.SGD)
    with pytest.raises((ValueError, TypeError, RuntimeError), match=r"batch|iterator"):
        fit(learn, 2)


def test_a_one_shot_iterator_is_not_silently_empty_in_the_second_validation():
    learn = Learner((make_batches(), iter(make_batches())), make_model(), F.mse_loss, torch.optim.SGD)
    with pytest.raises((ValueError, TypeError, RuntimeError), match=r"batch|iterator"):
        fit(learn, 2)


@pytest.mark.parametrize("model", [None, F.relu, nn.Linear, lambda x: x, "model"])
def test_a_model_that_is_no_module_is_refused(model):
    with pytest.raises(TypeError, match="Module"):
        Learner(make_batches(), model, F.mse_loss)
    with pytest.raises(TypeError, match="Module"):
        Loop(model)


@pytest.mark.parametrize("n_epoch", [-1, 1.5, "2", None])
def test_a_number_of_epochs_that_cannot_be_is_refused_before_anything_fires(n_epoch):
    log = []
    learn = make_learner(cbs=spy(log, "a"))
    with pytest.raises((ValueError, TypeError), match="n_epoch"):
        fit(learn, n_epoch)
    assert log == []


def test_a_fit_of_no_epochs_fires_before_and_after_fit_alone():
    log = []
    fit(make_learner(cbs=spy(log, "a")), 0)
    assert events(log) == ["before_fit", "after_fit"]


@pytest.mark.parametrize("lr", [-1, "fast", float("nan")])
def test_a_learning_rate_that_cannot_be_is_refused(lr):
    with pytest.raises((ValueError, TypeError), match=r"lr|learning rate"):
        fit(make_learner(), lr=lr)


@pytest.mark.parametrize("key", ["loss_func", "opt_func", "metrics"])
def test_arguments_of_the_wrong_kind_are_refused_by_name(key):
    with pytest.raises(TypeError, match=key.removesuffix("s")):
        fit(make_learner(**{key: 3}))


def test_a_loss_that_is_no_scalar_is_told():
    with pytest.raises((ValueError, TypeError, RuntimeError), match=r"loss|scalar|element"):
        fit(make_learner(loss_func=lambda p, y: (p - y) ** 2))


def test_a_loss_function_that_returns_a_float_is_told():
    with pytest.raises((ValueError, TypeError, RuntimeError), match=r"loss|ensor"):
        fit(make_learner(loss_func=lambda p, y: 0.5))


# ---------------------------------------------------------------- recorder, metrics


def test_averages_weigh_batches_by_their_size():
    train, valid = make_batches(3, last=1), make_batches(3, seed=1, last=2)
    learn = fit(
        Learner((train, valid), make_model(), F.mse_loss, torch.optim.SGD, lr=0.1, metrics=F.l1_loss), 2
    )
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for row in learn.recorder.rows:
        losses = train_by_hand(model, train, opt=opt)
        expected = sum(loss * len(x) for loss, (x, _) in zip(losses, train, strict=True)) / 9
        assert row["train_loss"] == pytest.approx(expected, rel=1e-6)
        x, y = (torch.cat(t).double() for t in zip(*valid, strict=True))
        with torch.no_grad():
            pred = copy.deepcopy(model).double()(x)
        assert row["valid_loss"] == pytest.approx(F.mse_loss(pred, y).item(), rel=1e-5)
        assert row["l1_loss"] == pytest.approx(F.l1_loss(pred, y).item(), rel=1e-5)
    assert [row["epoch"] for row in learn.recorder.rows] == [0, 1]
    assert all(row["time"] >= 0 for row in learn.recorder.rows)
    got = learn.validate()
    assert list(got) == pytest.approx([learn.recorder.rows[-1][k] for k in ("valid_loss", "l1_loss")])


def test_averages_weigh_packed_and_mapped_batches_by_their_samples():
    class Rnn(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(2, 3)

        def forward(self, x):
            return self.gru(x)[1][0].mean(-1, keepdim=True)

    g = torch.Generator().manual_seed(0)
    lengths = [(7, 5, 5, 1), (2,)]
    batches = [
        (pack_sequence([torch.randn(n, 2, generator=g) for n in ns]), torch.randn(len(ns), 1, generator=g))
        for ns in lengths
    ]
    model = Rnn()
    loss, *_ = Learner((batches, batches), model, F.mse_loss).validate()
    with torch.no_grad():
        expected = [F.mse_loss(model(x), y).item() for x, y in batches]
    assert loss == pytest.approx((4 * expected[0] + expected[1]) / 5, rel=1e-5)
    alone = [x for x, _ in batches]
    loss, *_ = Learner((alone, alone), model, lambda p: p.square().mean()).validate()
    with torch.no_grad():
        expected = [model(x).square().mean().item() for x in alone]
    assert loss == pytest.approx((4 * expected[0] + expected[1]) / 5, rel=1e-5)


def test_cancelled_batches_leave_no_record_in_losses_averages_or_metrics():
    class Cancel(Callback):
        def __init__(self, event):
            super().__init__(**{event: self.act})

        def act(self, _):
            if self.iter == 1:
                raise CancelBatchException

    for event in ("before_batch", "after_pred", "after_loss", "before_backward", "after_step", "before_step"):
        train, valid = make_batches(3), make_batches(3, seed=1)
        stats = ActivationStats()
        model = make_model()
        learn = Learner((train, valid), model, F.mse_loss, torch.optim.SGD, lr=0.0, metrics=F.l1_loss)
        fit(learn, cbs=[Cancel(event), stats])
        loss = [F.mse_loss(model(x), y).item() for x, y in train]
        assert list(learn.recorder.losses) == pytest.approx([loss[0], loss[2]], rel=1e-6), event
        assert len(learn.recorder.lrs) == 2
        assert learn.recorder.rows[0]["train_loss"] == pytest.approx((loss[0] + loss[2]) / 2, rel=1e-6)
        assert len(stats.stats) == 2
        if event in ("before_batch", "after_pred", "after_loss"):
            mae = [F.l1_loss(model(x), y).item() for x, y in valid]
            assert learn.recorder.rows[0]["l1_loss"] == pytest.approx((mae[0] + mae[2]) / 2, rel=1e-6)


def test_cancelled_epochs_and_trainings_leave_the_records_of_their_batches():
    learn = make_learner(cbs=spy([], "a", {("after_step", 1): CancelEpochException()}))
    fit(learn, 2)
    assert len(learn.recorder.losses) == len(learn.recorder.lrs)
    assert len(learn.recorder.losses) in (4, 5)
    assert learn.recorder.rows[-1]["epoch"] == 1
    assert "valid_loss" in learn.recorder.rows[-1]


def test_a_row_of_a_cancelled_validation_does_not_repeat_the_one_before():
    learn = make_learner(
        metrics=F.l1_loss, cbs=spy([], "a", {("before_validate", 1): CancelValidException()})
    )
    fit(learn, 3)
    rows = list(learn.recorder.rows)
    assert len(rows) == 3
    for key in ("valid_loss", "l1_loss"):
        value = rows[1].get(key)
        assert value is None or value != value
        assert rows[2][key] == rows[2][key] != rows[0][key]


def test_the_recorder_starts_anew_at_each_fit_only():
    learn = fit(make_learner(), 2)
    fit(learn, 1)
    assert len(learn.recorder.losses) == 3
    assert len(learn.recorder.rows) == 1
    assert learn.recorder.rows[0]["epoch"] == 0


def test_recorded_losses_are_plain_numbers_that_hold_no_graph():
    learn = fit(make_learner())
    for loss in learn.recorder.losses:
        assert isinstance(loss, float)
    for row in learn.recorder.rows:
        assert all(isinstance(v, (int, float)) for v in row.values())


class F1:
    """A metric that no average of batches gives."""

    calls = ()

    def reset(self):
        self.calls = []

    def update(self, pred, y):
        self.calls.append((pred > 0, y > 0))

    def compute(self):
        p, y = (torch.cat(t) for t in zip(*self.calls, strict=True))
        return 2 * (p & y).sum() / (p.sum() + y.sum()).clamp(min=1)


def test_metric_objects_are_reset_before_each_validation_and_computed_over_all_of_it():
    metric = F1()
    learn = make_learner(metrics=[metric, F.l1_loss])
    fit(learn, 2)
    preds, y = learn.get_preds()
    p, t = preds > 0, y > 0
    expected = (2 * (p & t).sum() / (p.sum() + t.sum()).clamp(min=1)).item()
    row = learn.recorder.rows[-1]
    (name,) = [k for k in row if k.lower() in ("f1", "f_1")]
    assert row[name] == pytest.approx(expected)
    loss, f1, l1 = learn.validate()
    assert (f1, l1) == pytest.approx((expected, F.l1_loss(preds, y).item()))
    assert loss == pytest.approx(F.mse_loss(preds, y).item())
    assert len(metric.calls) == 2


def test_metrics_are_named_by_functions_partials_lambdas_and_mappings():
    assert Metrics([accuracy, F.l1_loss]).names == ["accuracy", "l1_loss"]
    assert Metrics({"one": accuracy, "two": F1()}).names == ["one", "two"]
    import functools

    (name,) = Metrics(functools.partial(F.l1_loss, reduction="sum")).names
    assert "l1_loss" in name
    with pytest.raises(ValueError, match="accuracy"):
        Metrics([accuracy, accuracy])


@pytest.mark.parametrize("bad", [3, [3], "accuracy", {"a": 3}])
def test_what_is_no_metric_is_refused(bad):
    with pytest.raises(TypeError):
        Metrics(bad)


@pytest.mark.parametrize("name", ["epoch", "train_loss", "valid_loss", "time"])
def test_a_metric_named_like_another_column_does_not_overwrite_it(name):
    try:
        learn = fit(make_learner(metrics={name: lambda p, y: torch.tensor(-77.0)}))
    except ValueError as exc:
        assert name in str(exc)  # noqa: PT017
    else:
        assert learn.recorder.rows[0][name] != -77


def test_metrics_work_with_several_targets_and_without():
    seen = []

    def metric(pred, *yb):
        seen.append(len(yb))
        return pred.mean()

    batches = [(X, Y, Z)]
    fit(Learner((batches, batches), Takes(), lambda p, y, z: p.mean(), n_inp=1, metrics=metric))
    fit(Learner(([X], [X]), Takes(), lambda p: p.mean(), metrics=metric))
    assert seen == [2, 0]


def test_accuracy_is_the_share_of_right_classes_of_any_shape():
    g = torch.Generator().manual_seed(0)
    for shape in ((7,), (5, 3), (2, 3, 4)):
        pred, target = torch.randn(*shape, 3, generator=g), torch.randint(0, 3, shape, generator=g)
        flat = zip(pred.reshape(-1, 3).tolist(), target.flatten().tolist(), strict=True)
        right = [p.index(max(p)) == t for p, t in flat]
        assert accuracy(pred, target).item() == pytest.approx(sum(right) / len(right))


# ---------------------------------------------------------------- validate, get_preds, one_batch


def test_predictions_come_in_order_with_inputs_targets_and_losses():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)).train()
    valid = make_batches(3, seed=1, last=2)
    learn = Learner((make_batches(), valid), model, F.mse_loss)
    state, before = torch.get_rng_state(), weights(model)
    xs, ys = (torch.cat(t) for t in zip(*valid, strict=True))
    expected = copy.deepcopy(model).eval()
    with torch.no_grad():
        expected = torch.cat([expected(x) for x, _ in valid])
    losses = (expected - ys).square()

    for with_input, with_loss in itertools.product([False, True], repeat=2):
        got = learn.get_preds(with_input=with_input, with_loss=with_loss)
        wanted = [xs] * with_input + [expected, ys] + [losses] * with_loss
        assert len(got) == len(wanted)
        for g, w in zip(got[: 2 + with_input], wanted, strict=False):
            assert torch.equal(g, w)
            assert not g.requires_grad
        if with_loss:
            assert len(got[-1]) == 10
            assert got[-1].flatten().tolist() == pytest.approx(losses.flatten().tolist(), rel=1e-6)
    assert torch.equal(torch.get_rng_state(), state)
    assert same(weights(model), before)
    assert all(modes(model))


def test_each_sample_s_loss_is_one_number_also_where_a_sample_has_several_targets():
    model = nn.Linear(2, 3)
    batches = [(torch.randn(4, 2), torch.randn(4, 3)) for _ in range(2)]
    preds, ys, losses = Learner((batches, batches), model, nn.MSELoss()).get_preds(with_loss=True)
    assert losses.shape[0] == 8
    per_sample = losses.reshape(8, -1).mean(1)
    assert per_sample.tolist() == pytest.approx((preds - ys).square().mean(1).tolist(), rel=1e-5)


def test_the_loss_function_keeps_its_reduction():
    for loss_func in (nn.MSELoss(), nn.MSELoss(reduction="sum")):
        learn = make_learner(loss_func=loss_func)
        reduction = loss_func.reduction
        learn.get_preds(with_loss=True)
        assert loss_func.reduction == reduction
        with pytest.raises(ZeroDivisionError):
            learn.get_preds((b if b else 1 / 0 for b in [make_batches(1)[0], None]), with_loss=True)
        assert loss_func.reduction == reduction
    with pytest.raises(ValueError, match="reduction"):
        make_learner(loss_func=lambda p, y: (p - y).mean()).get_preds(with_loss=True)


def test_predictions_of_loaders_without_targets_have_none():
    learn = make_learner()
    preds, targets = learn.get_preds([X, Y])
    assert targets is None
    assert preds.shape == (8, 1)
    preds, targets = learn.get_preds([(X,), (Y,)])
    assert targets is None
    inputs, preds, targets = learn.get_preds([X, Y], with_input=True)
    assert torch.equal(inputs, torch.cat([X, Y]))


def test_predictions_are_nested_as_the_model_gives_them():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 1)

        def forward(self, a, b):
            return {"sum": self.fc(a + b), "pair": (a, Pair(b, None))}

    model = Model()
    batches = [(X, Y, Z, X), (Y, Z, X, Y)]
    learn = Learner((batches, batches), model, lambda p, *y: p["sum"].mean(), n_inp=2)
    inputs, preds, targets = learn.get_preds(with_input=True)
    assert [torch.equal(g, w) for g, w in zip(inputs, (torch.cat([X, Y]), torch.cat([Y, Z])), strict=True)]
    assert torch.equal(inputs[1], torch.cat([Y, Z]))
    assert torch.equal(targets[1], torch.cat([X, Y]))
    assert torch.equal(preds["pair"][1].x, torch.cat([Y, Z]))
    assert preds["pair"][1].y is None
    assert preds["sum"].shape == (8, 1)


def test_batches_that_cannot_be_joined_are_told():
    learn = make_learner(model=nn.Linear(2, 2), loss_func=lambda p, *y: p.mean())
    with pytest.raises(ValueError, match="shape"):
        learn.get_preds([torch.randn(2, 5, 2), torch.randn(2, 4, 2)])


def test_predictions_do_not_share_memory_with_a_buffer_that_is_overwritten():
    class Reuses(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 1)
            self.out = torch.zeros(4, 1)

        def forward(self, x):
            with torch.no_grad():
                return self.out.copy_(self.fc(x))

    model = Reuses()
    batches = make_batches(3)
    preds, _ = Learner((batches, batches), model, F.mse_loss).get_preds()
    with torch.no_grad():
        assert torch.equal(preds, torch.cat([model.fc(x) for x, _ in batches]))


def test_a_callback_that_cancels_batches_does_not_shift_predictions_against_targets():
    class Skip(Callback):
        def before_batch(self):
            if self.iter == 1:
                raise CancelBatchException

    learn = make_learner(n_valid=3, cbs=Skip)
    preds, targets = learn.get_preds()
    assert len(preds) == len(targets) == 8
    with torch.no_grad():
        expected = [learn.model(x) for x, _ in (learn.dls.valid[0], learn.dls.valid[2])]
    assert torch.equal(preds, torch.cat(expected))


def test_validate_with_cbs_attaches_them_for_its_length():
    log = []
    learn = make_learner()
    learn.validate(cbs=spy(log, "a"))
    assert events(log) == [*VALID[:5], *VALID[1:5], "after_validate"]
    assert len(learn.cbs) == 3
    with pytest.raises(ZeroDivisionError):
        learn.validate((1 / 0 for _ in range(1)), cbs=spy(log, "b"))
    assert len(learn.cbs) == 3
    assert torch.is_grad_enabled()


def test_one_batch_trains_on_one_batch_with_its_events():
    log = []
    learn = make_learner(cbs=spy(log, "a"))
    x, y = learn.dls.train[0]
    loss = learn.one_batch()
    model = make_model()
    assert loss.item() == train_by_hand(model, [(x, y)])[0]
    assert same(weights(learn.model), weights(model))
    assert events(log) == BATCH
    assert torch.equal(learn.xb[0], x)
    other = make_batches(1, seed=7)[0]
    assert learn.one_batch(other).item() == train_by_hand(model, [other])[0]
    assert same(weights(learn.model), weights(model))


# ---------------------------------------------------------------- save and load


def test_training_goes_on_from_a_file_as_if_never_interrupted(tmp_path):
    def make():
        return make_learner(n_valid=0, opt_func=torch.optim.Adam, lr=0.05)

    whole = fit(make(), 2)
    first = fit(make())
    path = first.save(tmp_path / "half.pt")
    assert path.exists()
    second = make()
    second.load(path)
    assert same(weights(second.model), weights(first.model))
    fit(second)
    assert same(weights(second.model), weights(whole.model))
    plain = make()
    plain.load(str(path), with_opt=False)
    assert same(weights(plain.model), weights(first.model))
    fit(plain)
    assert not same(weights(plain.model), weights(whole.model))


def test_a_learner_that_was_never_fitted_saves_and_loads(tmp_path):
    learn = make_learner()
    path = learn.save(tmp_path / "new.pt")
    other = make_learner(model=make_model(seed=5))
    other.load(path)
    assert same(weights(other.model), weights(learn.model))
    fit(other)


def test_a_file_saved_without_optimizer_loads(tmp_path):
    learn = fit(make_learner(opt_func=torch.optim.Adam))
    path = learn.save(tmp_path / "weights.pt", with_opt=False)
    other = make_learner(model=make_model(seed=5), opt_func=torch.optim.Adam)
    other.load(path)
    assert same(weights(other.model), weights(learn.model))
    fit(other)


class Evil:
    """Runs code when unpickled."""

    ran = False

    def __reduce__(self):
        return (setattr, (Evil, "ran", True))


@pytest.mark.parametrize("kind", ["truncated", "empty", "text", "tensor", "foreign", "pickle", "evil"])
def test_a_file_of_another_kind_is_told_and_changes_nothing(tmp_path, kind):
    learn = fit(make_learner())
    path = learn.save(tmp_path / "file.pt")
    if kind in ("truncated", "empty"):
        path.write_bytes(path.read_bytes()[: 200 if kind == "truncated" else 0])
    elif kind == "text":
        path.write_text("no weights at all\n" * 9)
    elif kind == "pickle":
        path.write_bytes(pickle.dumps({"model": 1}))
    else:
        torch.save({"tensor": torch.ones(3), "foreign": {"epoch": 3}, "evil": {"model": Evil()}}[kind], path)
    before = weights(learn.model)
    with pytest.raises(ValueError, match=r"file.pt"):
        learn.load(path)
    assert same(weights(learn.model), before)
    assert not Evil.ran


def test_a_file_that_is_not_there_is_a_file_not_found_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        make_learner().load(tmp_path / "nothing.pt")


def test_weights_that_do_not_fit_are_told(tmp_path):
    path = make_learner(model=nn.Linear(2, 1)).save(tmp_path / "linear.pt")
    learn = make_learner()
    before = weights(learn.model)
    with pytest.raises(RuntimeError):
        learn.load(path)
    assert same(weights(learn.model), before)


def test_saving_over_a_file_leaves_the_old_one_whole_where_it_fails(tmp_path):
    class Unsaveable(nn.Linear):
        def get_extra_state(self):
            return 1 / 0

        def set_extra_state(self, state):
            pass

    learn = fit(make_learner())
    path = learn.save(tmp_path / "file.pt")
    before = path.read_bytes()
    bad = make_learner(model=Unsaveable(2, 1))
    with pytest.raises(ZeroDivisionError):
        bad.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["file.pt"]


# ---------------------------------------------------------------- find_modules


class Net(nn.Module):
    """Blocks, a shared layer, a lone parameter, a paramless leaf."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(2, 2)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)])
        self.again = self.stem
        self.head = nn.Linear(2, 1)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.again(x)) * self.scale


def test_find_modules_by_every_kind_of_where():
    net = Net()
    cases = [
        (None, ["stem", "blocks.0.0", "blocks.1.0", "head"]),
        ("blocks.*", ["blocks.0", "blocks.0.0", "blocks.0.1", "blocks.1", "blocks.1.0", "blocks.1.1"]),
        ("blocks.?.0", ["blocks.0.0", "blocks.1.0"]),
        ("blocks.[1].0", ["blocks.1.0"]),
        ("head", ["head"]),
        (nn.ReLU, ["blocks.0.1", "blocks.1.1"]),
        (nn.Linear, ["stem", "blocks.0.0", "blocks.1.0", "head"]),
        (lambda m: getattr(m, "out_features", 0) == 1, ["head"]),
        (net.blocks[1], ["blocks.1"]),
        ([net.head, "stem"], ["stem", "head"]),
        (["blocks.0.*", nn.ReLU], ["blocks.0.0", "blocks.0.1", "blocks.1.1"]),
        ((net.head, net.head), ["head"]),
        ({"head": net.head, "stem": net.stem}.values(), ["stem", "head"]),
    ]
    for where, names in cases:
        found = find_modules(net, where)
        assert list(found) == names, where
        assert all(found[n] is net.get_submodule(n) for n in names)
    paramless = ["stem", "blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1", "head"]
    assert list(find_modules(net, include_paramless=True)) == paramless


def test_find_modules_takes_a_one_shot_iterable():
    net = Net()
    assert list(find_modules(net, iter([net.head, "stem"]))) == ["stem", "head"]


def test_an_empty_list_finds_nothing_and_says_so():
    with pytest.raises((LookupError, ValueError)):
        find_modules(Net(), [])


def test_a_sequential_given_as_where_is_one_module_and_not_its_children():
    net = Net()
    assert list(find_modules(net, net.blocks[0])) == ["blocks.0"]


def test_finding_nothing_is_a_lookup_error_that_lists_what_there_is():
    net = Net()
    with pytest.raises(LookupError) as info:
        find_modules(net, "convs.*")
    for part in ("Net", "'convs.*'", "stem", "blocks.0.0", "head"):
        assert part in str(info.value)
    for where in (nn.Conv2d, lambda m: False, nn.Linear(1, 1), ["stem", "nothing"], ["stem", nn.LSTM]):
        with pytest.raises(LookupError):
            find_modules(net, where)
    with pytest.raises(LookupError, match="nothing"):
        find_modules(net, ["stem", "nothing"])
    for where in (3, [3], int, b"stem"):
        with pytest.raises((TypeError, LookupError)):
            find_modules(net, where)


def test_a_model_that_is_one_layer_can_be_found_and_watched():
    model = nn.Linear(2, 1)
    assert [*find_modules(model).values()] == [model]
    stats = ActivationStats()
    fit(make_learner(model=model, cbs=stats))
    assert len(stats.names) == 1
    assert len(stats.stats) == 3


# ---------------------------------------------------------------- hooks


def test_a_hook_stores_and_changes_nothing():
    torch.manual_seed(0)
    layer = nn.Linear(2, 3)
    x = torch.randn(4, 2, requires_grad=True)
    plain = layer(x)
    for value in (False, 0, None, torch.zeros(4, 3), "text"):
        seen = []

        def look(m, i, o, seen=seen, value=value):
            seen.append((m, i, o))
            return value

        with Hook(layer, look) as hook:
            out = layer(x)
        assert torch.equal(out, plain)
        assert out.requires_grad
        (m, i, o), *_ = seen
        assert m is layer
        assert isinstance(i, tuple)
        assert not i[0].requires_grad
        assert not o.requires_grad
        assert hook.stored is value
        layer(x)
        assert len(seen) == 1
    assert_no_hooks(layer)


def test_a_hook_goes_when_its_block_raises_and_removing_is_idempotent():
    layer = nn.Linear(2, 3)
    with pytest.raises(ZeroDivisionError), Hook(layer, lambda m, i, o: 1) as hook:  # noqa: PT012
        layer(X)
        1 / 0  # noqa: B018
    assert count_hooks(layer) == 0
    hook.remove()
    hook.remove()
    assert hook.stored == 1


def test_removing_one_hook_leaves_the_others_of_the_same_module():
    layer = nn.Linear(2, 3)
    one, two = Hook(layer, lambda m, i, o: 1), Hook(layer, lambda m, i, o: 2)
    one.remove()
    one.remove()
    layer(X)
    assert (one.stored, two.stored) == (None, 2)
    two.remove()
    assert count_hooks(layer) == 0


@pytest.mark.parametrize("bad", [3, None, "fc", [nn.Linear(1, 1), 3]])
def test_hooks_on_several_modules_are_all_or_nothing(bad):
    good = nn.Linear(2, 2)
    with pytest.raises((TypeError, AttributeError)):
        Hooks([good, bad], lambda m, i, o: None)
    assert count_hooks(good) == 0


def test_hooks_on_a_sequential_are_on_its_children_and_on_a_module_on_itself():
    model = make_model()
    with Hooks(model, lambda m, i, o: type(m)) as hooks:
        model(X)
        assert list(hooks.stored) == [nn.Linear, nn.ReLU, nn.Linear]
        assert len(hooks) == 3
        assert [h.stored for h in hooks] == list(hooks.stored)
    assert count_hooks(model) == 0
    with Hooks(model[0], lambda m, i, o: 1) as hooks:
        assert len(hooks) == 1
    with Hooks(find_modules(model), lambda m, i, o: 1) as hooks:
        assert len(hooks) == 2
        assert list(hooks.stored) == [None, None]
    assert count_hooks(model) == 0


def test_hook_output_stores_with_or_without_graph_whatever_the_structure():
    class Odd(nn.Module):
        def forward(self, x):
            return {"a": [x * 2, None], "b": Pair(x, 3)}

    x = torch.randn(2, 2, requires_grad=True)
    with hook_output(Odd()) as hook:
        assert hook.stored is None
    layer = Odd()
    with hook_output(layer) as hook:
        layer(x)
    assert not hook.stored["a"][0].requires_grad
    assert type(hook.stored["b"]) is Pair
    assert hook.stored["b"].y == 3
    with hook_output(layer, detach=False) as hook:
        layer(x)
    assert hook.stored["a"][0].grad_fn is not None
    model = make_model()
    with hook_outputs([model[0], model[2]]) as hooks:
        y = model(X)
    assert torch.equal(hooks.stored[1], y)
    assert torch.equal(hooks.stored[0], model[0](X))


def test_copies_of_a_hooked_module_do_not_store_into_its_hook():
    layer = nn.Linear(2, 2)
    with Hook(layer, lambda m, i, o: o.sum().item()) as hook:
        layer(X)
        before = hook.stored
        for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            twin(Y * 100)
            assert hook.stored == before
            assert torch.equal(twin(X), layer(X))


# ---------------------------------------------------------------- HookCallback and ActivationStats


@pytest.mark.parametrize("raised", [CancelBatchException, CancelFitException, KeyboardInterrupt])
@pytest.mark.parametrize("event", EVENTS)
def test_hooks_are_gone_however_the_fit_ends(event, raised):
    model = make_model()
    plan = {**primary_plan(event), (event, 0): raised("why")}
    cbs = [ActivationStats(), HookCallback(hook=lambda m, i, o: 0, name="h"), spy([], "a", plan, order=5)]
    learn = make_learner(1, 1, model=model, cbs=cbs)
    with contextlib.suppress(ValueError, KeyboardInterrupt, RuntimeError):
        fit(learn)
    assert_no_hooks(model)
    assert count_hooks(model) == 0


def test_an_error_in_the_hook_goes_on_and_leaves_no_hook():
    model = make_model()
    error = SaysSo(1, 2)

    def bad(m, i, o):
        raise error

    learn = make_learner(model=model)
    with pytest.raises(SaysSo) as info:
        fit(learn, cbs=HookCallback(hook=bad, name="bad"))
    assert info.value is error
    assert count_hooks(model) == 0


@pytest.mark.parametrize("every", [1, 2, 3, 4, 100])
@pytest.mark.parametrize("order", [-9, 0, 9])
def test_every_acts_on_training_batches_0_n_2n_counted_over_epochs(every, order):
    class Reads(HookCallback):
        seen = ()

        def before_fit(self):
            super().before_fit()
            self.seen = []

        def hook(self, m, i, o):
            self.seen.append((self.epoch, self.iter))

    for make in (lambda: Reads(modules="0", every=every), lambda: ActivationStats(modules="0", every=every)):
        cb = make()
        cb.order = order
        log = []
        others = [spy(log, "a", order=-1), spy(log, "b", order=1)]
        fit(make_learner(n_train=5, cbs=[*others, cb]), 2)
        numbers = [5 * epoch + i for epoch, i in itertools.product(range(2), range(5))]
        expected = [divmod(n, 5) for n in numbers if n % every == 0]
        if isinstance(cb, Reads):
            assert cb.seen == expected
        else:
            assert len(cb.stats) == len(expected)


@pytest.mark.parametrize("every", [0, -1, 1.5, "2", True])
def test_an_every_that_cannot_be_is_refused(every):
    for cls in (ActivationStats, HookCallback):
        with pytest.raises((ValueError, TypeError), match="every"):
            cls(every=every, **({"hook": print} if cls is HookCallback else {}))


def test_a_hook_callback_without_a_hook_is_told():
    with pytest.raises((TypeError, NotImplementedError, ValueError), match="hook"):
        fit(make_learner(), cbs=HookCallback())
    with pytest.raises(TypeError, match="hook"):
        HookCallback(hook=3)


def test_modules_that_select_nothing_are_told_when_the_fit_begins():
    model = make_model()
    learn = make_learner(model=model)
    with pytest.raises(LookupError, match="convs"):
        fit(learn, cbs=[ActivationStats(modules="convs.*")])
    assert count_hooks(model) == 0


def test_modules_are_looked_up_at_each_fit():
    stats = ActivationStats(include_paramless=True)
    learn = fit(make_learner(cbs=stats))
    assert list(stats.names) == ["0", "1", "2"]
    learn.model.add_module("3", nn.Tanh())
    fit(learn)
    assert list(stats.names) == ["0", "1", "2", "3"]


def test_hooks_left_on_by_choice_are_not_doubled_and_go_with_remove():
    model = make_model()
    cb = HookCallback(hook=lambda m, i, o: o.mean().item(), remove_end=False, name="h")
    learn = make_learner(model=model, cbs=cb)
    fit(learn)
    n = count_hooks(model)
    assert n == 2
    fit(learn)
    assert count_hooks(model) == n
    cb.remove()
    cb.remove()
    assert count_hooks(model) == 0
    assert len(cb.hooks.stored) == 2


def test_the_stored_results_are_those_of_the_last_training_batch():
    learn = make_learner(lr=0.0, cbs=HookCallback(hook=lambda m, i, o: o.clone(), name="h"))
    fit(learn)
    x, _ = learn.dls.train[-1]
    with torch.no_grad():
        assert torch.equal(learn.h.hooks.stored[0], learn.model[0](x))
        assert torch.equal(learn.h.hooks.stored[1], learn.model(x))


def oracle(t, eps=0.05):
    t = t.detach().double().flatten()
    return {
        "mean": t.mean().item(),
        "std": t.std().item() if len(t) > 1 else float("nan"),
        "near_zero": (t.abs() <= eps).double().mean().item(),
    }


def assert_stats(got, t, eps=0.05, rel=1e-4):
    want = oracle(t, eps)
    assert set(got) == set(want)
    for key, value in want.items():
        assert got[key] == pytest.approx(value, rel=rel, abs=1e-7, nan_ok=True), key
        assert isinstance(got[key], float)


@pytest.mark.parametrize("eps", [0.05, 0.5, 0.0])
def test_activation_statistics_agree_with_float64(eps):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(27, 5),
        nn.Tanh(),
        nn.Linear(5, 2),
    )
    batches = [(torch.randn(k, 1, 8, 8) * 3 + 1, torch.randint(0, 2, (k,))) for k in (4, 4, 3)]
    stats = ActivationStats(include_paramless=True, eps=eps)
    fit(Learner(batches, model, F.cross_entropy, torch.optim.SGD, lr=0.0, cbs=stats))
    assert list(stats.names) == list("0123456")
    assert len(stats.stats) == 3
    for record, (x, _) in enumerate(batches):
        for layer, module in enumerate(model):
            x = module(x)
            assert_stats(stats.stats[record][layer], x, eps)


@pytest.mark.parametrize("offset", [0.0, 1e3, -1e4])
def test_the_spread_is_right_far_from_zero(offset):
    class Shift(nn.Module):
        def forward(self, x):
            return x + offset

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), Shift())
    x = torch.randn(64, 2)
    stats = ActivationStats(include_paramless=True)
    fit(Learner([x], model, lambda p: p.mean(), torch.optim.SGD, lr=0.0, cbs=stats))
    assert_stats(stats.stats[0][1], model(x), rel=1e-3)


class Gives(nn.Module):
    """A layer that puts out what a function makes of its input."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x)


class Around(nn.Module):
    """Calls a layer of any output and trains on something else."""

    def __init__(self, make):
        super().__init__()
        self.odd = Gives(make)
        self.fc = nn.Linear(2, 1)

    def forward(self, x):
        self.out = self.odd(x)
        return self.fc(x)


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    extra: object = None


def watch(make, **kwargs):
    stats = ActivationStats(modules="odd", **kwargs)
    model = Around(make)
    fit(Learner([X, Y], model, lambda p: p.mean(), torch.optim.SGD, cbs=stats))
    return stats, model


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda x: (x, x * 2), ["odd[0]", "odd[1]"]),
        (lambda x: [x, None, x], ["odd[0]", "odd[2]"]),
        (lambda x: {"a": x, "b": {"c": x}}, ["odd.a", "odd.b.c"]),
        (lambda x: Pair(x, x), ["odd.x", "odd.y"]),
        (lambda x: Output(x), ["odd.logits"]),
        (lambda x: (x, (x, [x])), ["odd[0]", "odd[1][0]", "odd[1][1][0]"]),
        (lambda x: x.half(), ["odd"]),
        (lambda x: x.bfloat16(), ["odd"]),
        (lambda x: x.double(), ["odd"]),
        (lambda x: (x * 100).int(), ["odd"]),
        (lambda x: x.mean(), ["odd"]),
        (lambda x: x[:1, :1], ["odd"]),
        (lambda x: x[:, 0].t().contiguous().t(), ["odd"]),
        (lambda x: x.expand(3, 4, 2), ["odd"]),
        (lambda x: (x * 1e4).half().clamp(-6e4, 6e4), ["odd"]),
    ],
)
def test_outputs_of_any_structure_and_type_are_named_by_path_and_measured(make, names):
    stats, model = watch(make)

    def tensors(o):
        if torch.is_tensor(o):
            return [o]
        if isinstance(o, dict):
            o = list(o.values())
        if isinstance(o, Output):
            o = [o.logits]
        return [t for part in o or () for t in tensors(part)] if o is not None else []

    got = [n.replace("['", ".").replace("']", "") for n in stats.names]
    assert got == names or list(stats.names) == [n.replace(".x", "[0]").replace(".y", "[1]") for n in names]
    assert len(stats.stats) == 2
    for layer, t in enumerate(tensors(model.out)):
        assert_stats(stats.stats[1][layer], t, rel=1e-3)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: None,
        lambda x: (None, "text"),
        lambda x: 3,
        lambda x: x[:0],
        lambda x: x > 0,
        lambda x: torch.complex(x, x),
        lambda x: x.to_sparse(),
        lambda x: x.to(torch.float8_e4m3fn),
        lambda x: torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8),
        lambda x: torch.nested.as_nested_tensor([x[0], x[1][:1]], layout=torch.jagged),
        lambda x: x.to("meta"),
        lambda x: object(),
        lambda x: (x for _ in range(2)),
        lambda x: {1: x, None: x},
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_no_output_raises_out_of_the_forward(make):
    stats, model = watch(make)
    assert len(stats.stats) in (0, 1, 2)
    assert count_hooks(model) == 0
    assert stats.names or stats.left_out


def test_nan_and_inf_are_data():
    stats, _ = watch(lambda x: torch.where(x > 0, x, float("nan")))
    assert stats.stats[0][0]["mean"] != stats.stats[0][0]["mean"]
    stats, _ = watch(lambda x: torch.full_like(x, float("inf")))
    assert stats.stats[0][0]["mean"] == float("inf")
    assert stats.stats[0][0]["near_zero"] == 0


def test_what_has_no_statistics_is_listed_as_left_out():
    stats, _ = watch(lambda x: (None, "text", x))
    assert list(stats.names) == ["odd[2]"]
    assert "odd" in str(stats.left_out)


def test_an_lstm_and_a_packed_sequence_are_measured():
    class Rnn(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(2, 3)
            self.fc = nn.Linear(3, 1)

        def forward(self, x):
            self.out = self.lstm(x)
            return self.fc(self.out[1][0][-1])

    model = Rnn()
    stats = ActivationStats(modules="lstm")
    fit(Learner([(X[:, None], Y[:1, :1])], model, F.mse_loss, torch.optim.SGD, lr=0.0, cbs=stats))
    assert stats.names[0] == "lstm[0]"
    assert len(stats.names) == 3
    assert_stats(stats.stats[0][0], model.out[0])
    assert_stats(stats.stats[0][2], model.out[1][1])
    fit(
        Learner(
            [(PACKED, Y[:2, :1])],
            model,
            F.mse_loss,
            torch.optim.SGD,
            lr=0.0,
            cbs=(s := ActivationStats(modules="lstm")),
        )
    )
    assert s.names[0].startswith("lstm[0]")
    assert_stats(s.stats[0][0], model.out[0].data)


def test_a_layer_called_several_times_gets_one_entry_a_call():
    model = Net()
    stats = ActivationStats(modules=["stem", "head"])
    outs = []
    with Hook(model.stem, lambda m, i, o: outs.append(o.clone())):
        fit(Learner([(X, Y[:, :1])], model, F.mse_loss, torch.optim.SGD, lr=0.0, cbs=stats))
    assert sorted(stats.names) == ["head", "stem#0", "stem#1"]
    for call, out in enumerate(outs):
        assert_stats(stats.stats[0][stats.names.index(f"stem#{call}")], out)


def test_a_layer_that_is_called_in_some_batches_only_gets_nan_in_the_others():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 1), nn.Linear(2, 1)
            self.n = -1

        def forward(self, x):
            self.n += 1
            return self.a(x) if self.n % 2 else self.b(x) + self.a(x)

    model = Sometimes()
    stats = ActivationStats()
    batches = make_batches(4)
    fit(Learner(batches, model, F.mse_loss, torch.optim.SGD, lr=0.0, cbs=stats))
    assert sorted(stats.names) == ["a", "b"]
    a, b = stats.names.index("a"), stats.names.index("b")
    for i, (x, _) in enumerate(batches):
        assert len(stats.stats[i]) == 2
        assert_stats(stats.stats[i][a], model.a(x))
        if i % 2:
            assert all(v != v for v in stats.stats[i][b].values())
        else:
            assert_stats(stats.stats[i][b], model.b(x))


def test_an_in_place_successor_does_not_change_what_is_measured():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))
    stats = ActivationStats()
    batches = make_batches()
    fit(Learner(batches, model, F.mse_loss, torch.optim.SGD, lr=0.0, cbs=stats))
    for record, (x, _) in enumerate(batches):
        assert_stats(stats.stats[record][0], model[0](x))


def test_recomputation_under_checkpointing_is_not_counted():
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = make_model(), nn.Linear(1, 1)

        def forward(self, x):
            return self.head(checkpoint(self.body, x, use_reentrant=False))

    stats = ActivationStats(modules="body.*")
    hooked = HookCallback(modules="body.0", hook=lambda m, i, o: calls.append(1), name="h")
    calls = []
    fit(make_learner(model=Checkpointed(), cbs=[stats, hooked]))
    assert list(stats.names) == ["body.0", "body.1", "body.2"]
    assert len(calls) == 3


def test_statistics_are_of_training_batches_alone_and_calls_between_batches_do_not_count():
    class Peeks(Callback):
        def after_batch(self):
            self.model(torch.full((4, 2), 1e6))

        def before_batch(self):
            self.model(torch.full((4, 2), 1e6))

        def after_step(self):
            self.model(torch.full((4, 2), 1e6))

    def records(cbs):
        stats = ActivationStats(modules="0")
        fit(make_learner(cbs=[stats, *cbs]), 2)
        return stats

    plain = records([])
    assert len(plain.stats) == 6
    between = records([Callback(name="p", after_batch=lambda cb: cb.model(torch.full((4, 2), 1e6)))])
    assert list(between.stats) == list(plain.stats)
    assert list(between.names) == list(plain.names)


def test_before_fit_resets_the_statistics():
    stats = ActivationStats()
    learn = fit(make_learner(cbs=stats), 2)
    fit(learn, 1)
    assert len(stats.stats) == 3


def test_the_report_prints_every_layer():
    stats = ActivationStats(include_paramless=True)
    fit(make_learner(cbs=stats))
    out = io.StringIO()
    Console(file=out, width=120).print(stats.report())
    for name in ("0", "1", "2", "mean", "std"):
        assert name in out.getvalue()
    Console(file=io.StringIO()).print(ActivationStats().report())  # never fitted


# ---------------------------------------------------------------- leaks


@pytest.mark.parametrize("raised", [None, ValueError, KeyboardInterrupt, CancelFitException])
def test_a_callback_kept_after_the_fit_keeps_neither_learner_nor_model_nor_batches(raised):
    cbs = [make() for make in DIAGNOSTICS[:1] + DIAGNOSTICS[2:]] + [Recorder(name="r2"), NoSuper()]
    model = make_model()
    learn = make_learner(model=model)
    refs = [weakref.ref(o) for o in (learn, model, model[0], learn.dls.train[0][0])]
    plan = {("after_pred", 1): raised()} if raised else {}
    with contextlib.suppress(ValueError, KeyboardInterrupt):
        fit(learn, cbs=[*cbs, spy([], "a", plan)])
    del learn, model, plan
    gc.collect()
    assert [r() for r in refs] == [None] * 4
    assert len(cbs) == 4


def test_a_removed_callback_does_not_keep_the_learner():
    cb = ActivationStats()
    learn = make_learner(cbs=cb)
    fit(learn)
    learn.remove_cb(cb)
    ref = weakref.ref(learn)
    del learn
    gc.collect()
    assert ref() is None


def test_the_graph_of_a_batch_is_not_kept_after_the_fit():
    refs = []
    learn = make_learner(cbs=Callback(name="look", after_loss=lambda cb: refs.append(weakref.ref(cb.loss))))
    fit(learn)
    gc.collect()
    assert sum(r() is not None for r in refs[:3]) == 0


def test_a_model_dropped_while_the_learner_lives_is_not_the_callback_s_business():
    cb = HookCallback(hook=lambda m, i, o: 1, name="h")
    model = make_model()
    learn = fit(make_learner(model=model, cbs=cb))
    ref = weakref.ref(model)
    learn.model = nn.Linear(2, 1)
    learn.opt = None
    del model
    gc.collect()
    assert ref() is None


# ---------------------------------------------------------------- testing helpers


def test_count_hooks_counts_every_kind_there_is():
    model = make_model()
    model[0].register_forward_hook(lambda m, i, o: None)
    model[0].register_forward_pre_hook(lambda m, i: None)
    model[0].register_full_backward_hook(lambda m, i, o: None)
    model[1].register_full_backward_pre_hook(lambda m, o: None)
    model.register_state_dict_post_hook(lambda *a: None)
    model.register_load_state_dict_post_hook(lambda *a: None)
    assert count_hooks(model) == 6
    model[2].weight.register_hook(lambda g: None)
    model[2].bias.register_post_accumulate_grad_hook(lambda p: None)
    assert count_hooks(model) == 8
    with pytest.raises(AssertionError) as info:
        assert_no_hooks(model)
    for name in ("0", "1", "2.weight", "2.bias"):
        assert name in str(info.value)


def bad_callbacks():
    class LeavesHook(Callback):
        def before_fit(self):
            self.model[0].register_forward_hook(print_nothing)

    class LeavesHookOnError(Callback):
        def before_train(self):
            self.handle = self.model[0].register_forward_hook(print_nothing)

        def after_train(self):
            self.handle.remove()
            self.handle = None

    class UsesRandom(Callback):
        def before_batch(self):
            torch.rand(1)

    class KeepsModel(Callback):
        def before_fit(self):
            self.net = self.model

    class KeepsLearner(Callback):
        def before_fit(self):
            self.mine = self.learn

    class CannotPickle(Callback):
        def before_fit(self):
            self.f = lambda: 0

    class OnceOnly(Callback):
        done = False

        def before_fit(self):
            assert not self.done
            self.done = True

    class BadRepr(Callback):
        def __repr__(self):
            return str(1 / 0)

    return [v for v in locals().values() if isinstance(v, type)]


def print_nothing(*args):
    """A hook that can be pickled."""


@pytest.mark.parametrize("cls", bad_callbacks(), ids=lambda c: c.__name__)
def test_check_callback_finds_every_breach(cls):
    globals()[cls.__name__] = cls
    cls.__qualname__ = cls.__name__
    try:
        with pytest.raises(AssertionError):
            check_callback(cls)
    finally:
        del globals()[cls.__name__]


def test_synth_learner_is_the_same_each_time_and_leaves_the_generator_alone():
    state = torch.get_rng_state()
    one, two, other = synth_learner(), synth_learner(), synth_learner(seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    for learn in (one, two, other):
        fit(learn, 2)
    assert same(weights(one.model), weights(two.model))
    assert not same(weights(one.model), weights(other.model))
    assert one.recorder.losses[-1] < one.recorder.losses[0]
    assert synth_learner(n_valid=0).dls.valid is None


# ---------------------------------------------------------------- what is shown


def shown(n_epoch=2, **kwargs):
    out = io.StringIO()
    learn = make_learner(cbs=Progress(console=Console(file=out, width=100)), metrics=F.l1_loss)
    learn.fit(n_epoch, **kwargs)
    return learn, out


def test_progress_prints_a_plain_row_per_epoch_where_there_is_no_terminal():
    _, out = shown(3)
    lines = [line for line in out.getvalue().splitlines() if line.strip()]
    assert "\x1b" not in out.getvalue()
    assert sum("train_loss" in line for line in lines) == 1
    assert len([line for line in lines if line.split()[0] in ("0", "1", "2")]) == 3
    assert "l1_loss" in out.getvalue()


def test_a_row_is_printed_as_soon_as_its_epoch_ends():
    out = io.StringIO()
    sizes = []
    look = Callback(name="look", before_epoch=lambda cb: sizes.append(out.getvalue().count("\n")))
    learn = make_learner(cbs=[Progress(console=Console(file=out, width=100)), look])
    learn.fit(3)
    assert sizes[0] < sizes[1] < sizes[2]


def test_no_logging_prints_nothing_and_comes_back_after_an_error():
    out = io.StringIO()
    learn = make_learner(cbs=Progress(console=Console(file=out, width=100)))
    with pytest.raises(ZeroDivisionError), learn.no_logging():  # noqa: PT012
        learn.fit(1)
        1 / 0  # noqa: B018
    assert out.getvalue() == ""
    assert len(learn.recorder.rows) == 1
    learn.fit(1)
    assert out.getvalue() != ""
    with pytest.raises(ZeroDivisionError), learn.no_bar():  # noqa: PT012
        assert learn.progress.bar is False
        1 / 0  # noqa: B018
    assert learn.progress.bar is True


def test_what_a_callback_puts_into_the_row_is_recorded_and_shown():
    out = io.StringIO()
    note = Callback(name="note", after_train=lambda cb: cb.learn.row.update(grad_norm=1.25))
    learn = make_learner(cbs=[Progress(console=Console(file=out, width=120)), note])
    learn.fit(1)
    assert learn.recorder.rows[0]["grad_norm"] == 1.25
    assert "grad_norm" in out.getvalue()
    assert "1.25" in out.getvalue()


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "text", torch.tensor(2.5), 10**30, True])
def test_progress_shows_odd_values_without_failing(value):
    out = io.StringIO()
    note = Callback(name="note", after_train=lambda cb: cb.learn.row.update(odd=value))
    learn = make_learner(cbs=[Progress(console=Console(file=out, width=120)), note])
    learn.fit(2)
    assert "odd" in out.getvalue()


def test_progress_in_a_terminal_gives_the_terminal_back_however_the_fit_ends():
    for raised in (None, ValueError, KeyboardInterrupt, CancelFitException):
        out = io.StringIO()
        console = Console(file=out, width=100, force_terminal=True)
        plan = {("after_step", 1): raised()} if raised else {}
        learn = make_learner(cbs=[Progress(console=console), spy([], "a", plan)])
        with contextlib.suppress(ValueError, KeyboardInterrupt):
            learn.fit(2)
        assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h")
        learn.fit(1)


def test_the_training_loop_is_shown_with_who_acts_where(capsys):
    class Watches(Callback):
        def after_backward(self):
            pass

    make_learner(cbs=Watches).show_training_loop()
    out = capsys.readouterr().out
    assert (
        out.index("before_fit")
        < out.index("before_epoch")
        < out.index("before_batch")
        < out.index("after_fit")
    )
    line = next(line for line in out.splitlines() if "after_backward" in line)
    assert "watches" in line.lower()
    assert "watches" not in next(line for line in out.splitlines() if "before_fit" in line).lower()


# ---------------------------------------------------------------- exceptions that Python itself uses


@pytest.mark.parametrize("raised", [StopIteration, GeneratorExit, SystemExit, AttributeError])
@pytest.mark.parametrize("event", ["before_fit", "after_loss", "after_fit"])
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


# ---------------------------------------------------------------- the callbacks that are there, in mid-fit

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


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("event", MOMENTS)
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


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("event", MOMENTS)
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


@pytest.mark.parametrize("switch", ["run_train", "run_valid"])
@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("event", BATCH)
def test_ours_can_have_their_phases_switched_in_the_middle_of_batches(kind, event, switch):
    cb = OURS[kind]()
    flips = itertools.cycle([True, False, False])
    actor = Callback(name="actor", **{event: lambda acting: setattr(cb, switch, next(flips))})
    learn = without(kind, [actor])
    learn.add_cb(cb)
    learn.fit(2)
    assert count_hooks(learn.model) == 0
