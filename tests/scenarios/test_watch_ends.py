"""However a watch ends, hooks are off, results stay, and the loop's own exceptions arrive as they were."""

import gc
import itertools
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import hookcb
from hookcb import (
    EMA,
    ActivationStats,
    Callback,
    DetectAnomaly,
    Diagnose,
    Event,
    GradientHealth,
    HookCallback,
    MemoryStats,
    Progress,
    Recorder,
    TerminateOnNaN,
    count_hooks,
    watch,
)
from hookcb.loops.coverage import REFUSED
from tests.support import SaysSo, along, changes_in, in_turn, make_batches, make_model, no_collection

X, Y = make_batches(1)[0]
# every public callback that may follow a loop
FOLLOWS = {
    "ActivationStats": {},
    "Callback": {},
    "DetectAnomaly": {},
    "Diagnose": {"show": False},
    "EMA": {"validate": False},
    "EarlyStopping": {},
    "EarlyStoppingCallback": {},
    "GradientHealth": {"activations": True},
    "HookCallback": {"hook": lambda m, i, o: o.mean()},
    "MaxTime": {"seconds": 60},
    "MemoryStats": {"every": 1},
    "ProfilerCallback": {"wait": 0, "warmup": 0, "active": 1},
    "Progress": {"bar": False},
    "Recorder": {},
    "SamplingCallback": {},
    "StepTimer": {},
    "TerminateOnNaN": {},
}


def make(kind):
    return getattr(hookcb, kind)(**FOLLOWS[kind])


def train(model, opt, w=None, n=2):
    for x, y in make_batches(n):
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        if w is not None:
            w.report_loss(loss)
        loss.backward()
        opt.step()


def evaluate(model, w=None):
    model.eval()
    with torch.no_grad():
        loss = F.mse_loss(model(X), Y)
        if w is not None:
            w.report_loss(loss)
    model.train()


def make_pair():
    model = make_model()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def is_off(model):
    return not (count_hooks(model) or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)


def test_every_public_callback_follows_or_is_refused():
    public = {
        thing
        for name in hookcb.__all__
        if isinstance(thing := getattr(hookcb, name), type) and issubclass(thing, Callback)
    }
    refused = {cb for cb in public if issubclass(cb, tuple(REFUSED))}
    expected = {getattr(hookcb, name) for name in FOLLOWS}
    elsewhere = {cb for cb in public if cb.__module__.startswith(("hookcb.loggers", "hookcb.report"))}
    assert public - refused - elsewhere == expected


@in_turn("kind", FOLLOWS)
def test_callbacks_leave_nothing_behind(kind):
    model, opt = make_pair()
    plain, plain_opt = make_pair()
    train(plain, plain_opt)
    with changes_in(model) as changed:
        w = watch(model, opt, make(kind))
        w.close()
    assert changed == []
    with watch(model, opt, make(kind)) as w:
        train(model, opt, w)
        evaluate(model, w)
        w.end_epoch()
    assert is_off(model)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    w.close()  # a second time does nothing
    train(model, opt)
    assert w.epoch == 1


@pytest.mark.parametrize(("kind", "is_held"), along(FOLLOWS, [True, False]))
def test_the_model_may_die_at_any_time(kind, is_held, capsys):
    model, opt = make_pair()
    w = watch(model, opt, make(kind))
    train(model, opt, w)
    loss = F.mse_loss(model(X), Y)  # in the middle of a batch
    gone, cb = weakref.ref(model), w.cbs[0]
    if not is_held:
        w = weakref.ref(w)
    del model, opt, loss
    gc.collect()
    assert gone() is None
    assert not _global_optimizer_pre_hooks
    assert not _global_optimizer_post_hooks
    assert "learn" not in cb.__dict__
    if is_held:
        assert not w.fitting
        assert w.coverage.seen["after_epoch"] == 1
        w.close()
    else:
        gc.collect()
        assert w() is None
    assert capsys.readouterr().err == ""


def test_a_watch_does_not_keep_its_model():
    with no_collection():
        model, opt = make_pair()
        w = watch(model, opt, ActivationStats(modules=nn.ReLU), GradientHealth(), Recorder())
        train(model, opt, w)
        gone = weakref.ref(model)
        del model
        assert gone() is None
    assert len(w.activation_stats.stats) == 2
    assert len(w.gradient_health.stats) == 2


@pytest.mark.parametrize("is_by_hand", [False, True])
def test_a_watch_that_has_ended_keeps_neither_weights_nor_optimizer(is_by_hand):
    model, opt = make_pair()
    with watch(model, None if is_by_hand else opt, GradientHealth(), Diagnose(show=False)) as w:
        for _ in range(5):
            loss = model(X).square().sum()
            loss.backward()
            if is_by_hand:
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.01 * p.grad
                        p.grad = None
            else:
                opt.step()
                opt.zero_grad()
    assert (w.opt is opt) != is_by_hand
    assert w.diagnose().findings is not None
    gone = [weakref.ref(p) for p in model.parameters()] + [weakref.ref(opt)]
    del model, opt, loss
    if is_by_hand:
        del p
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)
    assert w.opt is None
    assert len(w.gradient_health.stats) >= 4


def test_a_watch_that_nobody_holds_goes_on():
    model, opt = make_pair()
    stats = ActivationStats()
    watch(model, opt, stats)
    gc.collect()
    train(model, opt)
    assert len(stats.stats) == 2
    stats.learn.close()
    assert is_off(model)


@in_turn(
    ("error", "where"),
    along(
        [SaysSo(1, 2), KeyboardInterrupt(), SystemExit(3), GeneratorExit()],
        ["before", "forward", "after pred", "after backward", "after step", "valid"],
    ),
)
def test_an_exception_of_the_loop_arrives_as_it_was(error, where):
    class Fails(nn.Sequential):
        def forward(self, x):
            if where == "forward":
                raise error
            return super().forward(x)

    model = Fails(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    log = []
    cbs = [Callback(name=f"n{i}", after_fit=lambda cb: log.append(cb.name)) for i in range(2)]

    def reach(place):
        if place == where:
            raise error

    w = watch(model, opt, *cbs, ActivationStats(), MemoryStats(every=1))

    def loop():
        with w:
            reach("before")
            loss = model(X).mean()
            reach("after pred")
            loss.backward()
            reach("after backward")
            opt.step()
            reach("after step")
            evaluate(model)
            reach("valid")

    with pytest.raises(type(error)) as caught:
        loop()
    assert caught.value is error
    assert not getattr(error, "__notes__", [])
    assert log == ["n1", "n0"]
    assert is_off(model)
    assert not w.fitting
    if where != "before":
        assert "cut short" in w.coverage.missing["after_epoch"]


def test_a_generator_that_is_abandoned_ends_its_watch():
    model, opt = make_pair()
    log = []

    def losses():
        with watch(model, opt, Callback(after_fit=lambda cb: log.append("after_fit")), ActivationStats()):
            while True:
                train(model, opt, n=1)
                yield 1

    running = losses()
    assert sum(itertools.islice(running, 3)) == 3
    assert count_hooks(model) > 0
    del running
    gc.collect()
    assert log == ["after_fit"]
    assert is_off(model)


def test_close_in_the_middle_of_a_batch():
    model, opt = make_pair()
    w = watch(model, opt, ActivationStats(), GradientHealth(activations=True))
    loss = F.mse_loss(model(X), Y)
    w.close()
    assert len(w.activation_stats.stats) == 1
    loss.backward()
    opt.step()
    assert w.coverage.missing["before_backward"]
    assert is_off(model)


def test_close_in_a_callback():
    model, opt = make_pair()
    log = []
    closes = Callback(name="closes", after_pred=lambda cb: cb.learn.close())
    with watch(model, opt, closes, Callback(name="other", after_fit=lambda cb: log.append(1))) as w:
        train(model, opt)
    assert log == [1]
    assert not w.fitting
    assert is_off(model)


def test_an_error_in_after_fit_reaches_the_loop_once():
    def fails(cb):
        raise OSError("disk full")

    model, opt = make_pair()
    log = []
    w = watch(
        model,
        opt,
        Callback(name="a", after_fit=lambda cb: log.append(1)),
        Callback(name="b", after_fit=fails),
    )
    train(model, opt)
    with pytest.raises(OSError, match="disk full"):
        w.close()
    w.close()
    assert log == [1]
    assert is_off(model)


def test_an_error_in_after_fit_is_a_note_of_the_loops_own():
    def fails(cb):
        raise OSError("disk full")

    model, opt = make_pair()
    with pytest.raises(ZeroDivisionError) as caught, watch(model, opt, Callback(after_fit=fails)):
        1 / 0  # noqa: B018
    assert "disk full" in caught.value.__notes__[0]


def test_a_watch_that_has_ended_hears_nothing():
    model, opt = make_pair()
    with watch(model, opt, Recorder()) as w:
        train(model, opt, w)
    n = dict(w.seen)
    train(model, opt, w)
    w.end_epoch()
    assert w.seen == n
    assert len(w.recorder.losses) == 2


def test_only_the_hooks_of_a_watch_come_off():
    model, opt = make_pair()
    mine = [
        model.register_forward_hook(lambda *seen: None),
        model[0].register_forward_pre_hook(lambda *seen: None),
    ]
    mine.append(opt.register_step_pre_hook(lambda *seen: None))
    before = count_hooks(model)
    with watch(model, opt, ActivationStats(), GradientHealth()):
        train(model, opt)
    assert count_hooks(model) == before
    assert len(opt._optimizer_step_pre_hooks) == 1


# ---- coverage


def loop_of(name, model, opt, w):
    if name in ("trains", "both"):
        train(model, opt, w if name == "both" else None)
    if name in ("validates", "both"):
        evaluate(model, w if name == "both" else None)
    if name == "both":
        w.end_epoch()
    if name == "without gradients":
        with torch.no_grad():
            model(X)
    if name == "forward only":
        model(X)
    if name == "steps only":
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        opt.step()
    if name == "no steps":
        model(X).mean().backward()


MISSING = {
    "both": {},
    "trains": {
        "before_validate": "not called in eval mode",
        "after_validate": "not called in eval mode",
        "after_train": "has not ended yet",
        "after_epoch": "has not ended yet",
    },
    "validates": {
        "before_train": "eval mode only",
        "after_train": "eval mode only",
        "after_batch": "has not ended yet",
        "after_loss": "report it with w.report_loss(loss)",
        "before_backward": "eval mode only",
        "after_backward": "eval mode only",
        "before_step": "eval mode only",
        "after_step": "eval mode only",
        "after_validate": "has not ended yet",
        "after_epoch": "has not ended yet",
    },
    "nothing": dict.fromkeys(
        [e.value for e in Event if not e.endswith(("_fit", "_validate")) and "cancel" not in e],
        "the model was not called",
    )
    | dict.fromkeys(["before_validate", "after_validate"], "not called in eval mode"),
    "without gradients": dict.fromkeys(
        [e.value for e in Event if not e.endswith(("_fit", "_validate")) and "cancel" not in e],
        "in train mode only without gradients",
    )
    | dict.fromkeys(["before_validate", "after_validate"], "not called in eval mode"),
    "forward only": {
        "after_loss": "report it with w.report_loss(loss)",
        "before_backward": "no gradient reached",
        "after_backward": "no gradient reached",
        "before_step": "no optimizer of the model made a step",
        "after_step": "no optimizer of the model made a step",
        "after_batch": "has not ended yet",
        "after_train": "has not ended yet",
        "before_validate": "not called in eval mode",
        "after_validate": "not called in eval mode",
        "after_epoch": "has not ended yet",
    },
    "steps only": {
        "after_pred": "the model itself was not called",
        "after_loss": "report it with w.report_loss(loss)",
        "before_backward": "no gradient reached",
        "after_backward": "no gradient reached",
        "after_train": "has not ended yet",
        "before_validate": "not called in eval mode",
        "after_validate": "not called in eval mode",
        "after_epoch": "has not ended yet",
    },
    "no steps": {
        "before_step": "no optimizer of the model made a step",
        "after_step": "no optimizer of the model made a step",
        "after_batch": "has not ended yet",
        "after_train": "has not ended yet",
        "before_validate": "not called in eval mode",
        "after_validate": "not called in eval mode",
        "after_epoch": "has not ended yet",
    },
}


@in_turn("name", MISSING)
def test_each_event_is_seen_or_has_a_true_reason(name):
    model, opt = make_pair()
    with watch(model, opt, Callback()) as w:
        loop_of(name, model, opt, w)
        coverage = w.coverage
    expected = MISSING[name]
    assert set(coverage.missing) == set(expected)
    for event, why in expected.items():
        assert why in coverage.missing[event], event
    events = {e.value for e in Event if not e.endswith("_fit") and "cancel" not in e}
    assert set(coverage.seen) | set(coverage.missing) == events
    assert not set(coverage.seen) & set(coverage.missing)
    text = str(coverage)
    assert all(event in text for event in events)
    assert all(note in text for note in coverage.notes)
    assert "after_epoch" not in w.coverage.missing or name in ("nothing", "without gradients")


def test_coverage_tells_of_epochs():
    model, opt = make_pair()
    with watch(model, opt, Callback()) as w:
        train(model, opt)
        assert any("call w.end_epoch()" in note for note in w.coverage.notes)
        w.end_epoch()
        assert not any("call w.end_epoch()" in note for note in w.coverage.notes)


def test_callbacks_that_write_files_and_lines_are_closed_when_the_model_dies(capsys):
    model, opt = make_pair()
    w = watch(
        model, opt, Recorder, Progress(bar=False), TerminateOnNaN, HookCallback(hook=print, name="prints")
    )
    w.remove_cb(w.prints)
    train(model, opt, w)
    del model, opt
    gc.collect()
    assert [row["epoch"] for row in w.recorder.rows] == [0]
    assert "train_loss" in capsys.readouterr().out


def test_anomaly_mode_and_averages_end_with_the_watch():
    model, opt = make_pair()
    with watch(model, opt, DetectAnomaly(), EMA(0.5, validate=False)):
        train(model, opt)
        model(X)
        assert torch.is_anomaly_enabled()
    assert not torch.is_anomaly_enabled()
    assert not opt._optimizer_step_post_hooks
