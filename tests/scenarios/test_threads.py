"""Fits and other code in several threads: none is disturbed by another, or recorded in its place."""

import copy
import math
import pickle
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import optimizer as torch_optimizer

from hookcb import (
    EMA,
    ActivationStats,
    Callback,
    Diagnose,
    GradientClip,
    GradientHealth,
    HookCallback,
    Learner,
    MemoryStats,
    watch,
)
from hookcb.hooks.optimizer_steps import StepHook
from tests.support import fit, make_batches, make_learner, make_model, same, weights

X, Y = make_batches(1)[0]


def in_thread(function):
    """Runs it in a thread of its own, and waits for its end; an error in it goes on here."""
    errors = []

    def run():
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


def step(model, opt):
    F.mse_loss(model(X), Y).backward()
    opt.step()
    opt.zero_grad()


def values(readings):
    """All that is recorded, as text, in which NaN equals NaN."""
    return [[str(dict(of_one)) for of_one in record] for record in readings.stats]


def hooks_of_torch():
    return [*torch_optimizer._global_optimizer_pre_hooks, *torch_optimizer._global_optimizer_post_hooks]


# ---- steps of optimizers


def test_fits_in_another_thread_may_begin_and_end_in_the_middle_of_a_step():
    model, other = make_model(), make_model(1)
    opt, other_opt = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))

    def one_more(cb):
        in_thread(lambda: fit(make_learner(), cbs=GradientHealth()))

    with (
        watch(model, opt, Callback(before_step=one_more, after_step=one_more)),
        watch(other, other_opt, Callback()),
    ):
        step(model, opt)
        step(other, other_opt)


@pytest.mark.slow
def test_fits_in_two_threads_train_and_record_as_one_after_the_other():
    def made():  # here, as threads would share the random numbers that weights are made of
        return [make_learner(n_train=4) for _ in range(8)]

    def run(learners):
        return [fit(learn, cbs=GradientHealth()) for learn in learners]

    alone, found = run(made())[0], []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [
            threading.Thread(target=lambda group: found.extend(run(group)), args=[made()]) for _ in "ab"
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(found) == 16
    for learn in found:
        assert same(weights(learn.model), weights(alone.model))
        assert values(learn.gradient_health) == values(alone.gradient_health)
        assert learn.gradient_health.skipped == 0


def test_a_step_of_a_model_that_is_not_ours_is_not_taken_for_ours():
    other = make_model(1)
    other_opt = torch.optim.SGD(other.parameters(), lr=0.1)
    between = Callback(before_step=lambda cb: step(other, other_opt), name="between")
    between.order = GradientClip.order - 1
    learn = fit(make_learner(cbs=[GradientHealth(), between, GradientClip(max_norm=1e-3)]))
    clipped = [math.hypot(*(p["clipped_norm"] for p in record)) for record in learn.gradient_health.stats]
    assert clipped == pytest.approx([1e-3] * 3, rel=1e-2)


def test_a_second_optimizer_of_the_model_makes_the_step_too():
    learn = make_learner(cbs=GradientHealth())
    second = torch.optim.SGD(learn.model[2].parameters(), lr=0.1)

    def instead(cb):
        cb.opt.param_groups[0]["lr"] = 0.0
        second.step()

    learn = fit(learn, cbs=Callback(before_step=instead))
    assert learn.gradient_health.skipped == 0
    assert learn.gradient_health.stats[0][2]["update_ratio"] > 0


def test_no_hook_of_torch_stays_when_nobody_listens():
    seen = []
    during = Callback(after_batch=lambda cb: seen.append(len(hooks_of_torch())))
    before = hooks_of_torch()
    model = make_model()
    with watch(model, None), watch(model, None):
        fit(make_learner(cbs=[GradientHealth(), during]))
    assert seen == [2] * 5
    assert hooks_of_torch() == before


class Owner:
    """Counts steps."""

    def __init__(self):
        self.n = 0

    def note(self, opt, args, kwargs):
        self.n += 1


def test_beside_hooks_of_others_ours_stays_silent_until_it_can_go():
    opt = torch.optim.SGD(make_model().parameters(), lr=0.1)
    owner, calls = Owner(), []
    hook = StepHook(owner.note)
    own = torch_optimizer.register_optimizer_step_pre_hook(lambda *seen: calls.append(hook.remove()))
    opt.step()  # the hook goes while torch iterates over both
    opt.step()
    own.remove()
    assert (owner.n, len(calls)) == (1, 2)
    StepHook(owner.note).remove()
    assert not hooks_of_torch()


def test_a_listener_is_not_kept_alive_and_leaves_nothing():
    owner = Owner()
    hooks = [StepHook(owner.note), StepHook(owner.note, after=True)]
    del owner
    torch.optim.SGD(make_model().parameters(), lr=0.1).step()
    assert not any(hook.is_on for hook in hooks)
    for hook in hooks:
        hook.remove()
    assert not hooks_of_torch()


def test_a_step_finds_its_arguments_replaced_by_one_listener_after_another():
    class Wraps:
        def __init__(self, name):
            self.name = name

        def wrap(self, opt, args, kwargs):
            def closure():
                log.append(self.name)
                return args[1]()

            return (opt, closure), {}

    log, a, b = [], Wraps("a"), Wraps("b")
    opt = torch.optim.SGD(make_model().parameters(), lr=0.1)
    hooks = [StepHook(a.wrap), StepHook(b.wrap)]
    assert opt.step(lambda: torch.tensor(3.0)) == 3
    for hook in hooks:
        hook.remove()
    assert log == ["b", "a"]


def test_an_optimizer_that_is_copied_or_pickled_in_a_fit_has_nothing_of_ours():
    def look(cb):
        made.append(pickle.dumps(cb.opt))
        copied.append(vars(copy.deepcopy(cb.opt)))

    made, copied = [], []
    fit(make_learner(n_train=1, cbs=[EMA(validate=False), GradientHealth(), Callback(after_batch=look)]))
    assert not any(b"hookcb" in dumped for dumped in made)
    assert not any(state["_optimizer_step_pre_hooks"] for state in copied)
    assert not any(state["_optimizer_step_post_hooks"] for state in copied)


# ---- calls of the model in other threads

SERVED_AT = ("before_batch", "after_pred", "after_loss", "before_backward", "after_backward", "after_step")


def serving(name="serving"):
    """Has a thread call the model, with and without gradients, at events between which layers are watched."""

    def serve(cb):
        def call():
            cb.model(torch.zeros(7, 2)).sum()
            with torch.no_grad():
                cb.model(torch.ones(9, 2))

        in_thread(call)

    cb = Callback(name=name, **dict.fromkeys(SERVED_AT, serve))
    cb.order = 1000
    return cb


def readings(*cbs):
    """What callbacks have recorded of a training."""
    learn = make_learner(cbs=[*cbs, GradientHealth(activations=True), MemoryStats(every=1)])
    learn = fit(learn, cbs=ActivationStats(include_paramless=True))
    return {
        "activations": values(learn.activation_stats),
        "names": learn.activation_stats.names,
        "gradients": values(learn.gradient_health),
        "outputs": values(learn.gradient_health.output_stats),
        "memory": list(map(str, learn.memory_stats.layers())),
        "weights": list(map(str, weights(learn.model))),
    }


def test_forwards_of_other_threads_are_not_recorded():
    assert readings(serving()) == readings()


class Served(nn.Linear):
    """Is called by another thread in the middle of each call by this one, which comes to its end first."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.thread, self.entered, self.over = None, threading.Event(), threading.Event()

    def forward(self, x):
        if threading.current_thread() is self.thread:
            self.entered.set()
            assert self.over.wait(30)
        else:
            self.thread = threading.Thread(target=self, args=(torch.zeros(7, 2),))
            self.thread.start()
            assert self.entered.wait(30)
        return super().forward(x)

    def end(self, cb):
        self.over.set()
        self.thread.join()


def test_a_gradient_hook_does_not_take_a_call_of_another_thread_for_its_own():
    def run(first, *cbs):
        model = nn.Sequential(first, nn.Linear(3, 1))
        model.load_state_dict(nn.Sequential(make_model()[0], make_model()[2]).state_dict())
        seen = HookCallback(hook=lambda m, i, o: (i[0] is None, o[0].shape, o[0].sum()), is_forward=False)
        learn = fit(make_learner(model=model, n_train=1, n_valid=0, cbs=[seen, *cbs]))
        return str(learn.hook.results)

    served = Served(2, 3)
    assert run(served, Callback(after_pred=served.end)) == run(nn.Linear(2, 3))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.inner(x, x, x)[0].mean(1))


@pytest.mark.slow
def test_a_verdict_does_not_rest_on_calls_of_another_thread():
    def run(*cbs):
        torch.manual_seed(0)
        model = Attention()
        x, y = torch.randn(6, 4, 3, 4), torch.randn(6, 4, 1)
        learn = Learner(list(zip(x, y, strict=True)), model, F.mse_loss, torch.optim.SGD, lr=0.1, cbs=cbs)
        fit(learn, cbs=Diagnose(show=False))
        evidence = learn.diagnosis.evidence()
        layers = {name: str(layer.stats) for name, layer in evidence.layers.items()}
        return layers, str(evidence.sources), list(evidence.notes), learn.diagnose().status

    def serve(cb):
        in_thread(lambda: cb.model(torch.zeros(1, 2, 4)))

    assert run(Callback(before_batch=serve, after_pred=serve)) == run()


def test_a_fit_records_in_the_thread_that_it_runs_in():
    learn = make_learner(cbs=ActivationStats())
    in_thread(lambda: fit(learn))
    assert len(learn.activation_stats.stats) == 3
    fit(learn)
    assert learn.activation_stats.coverage.n_batches == 3


# ---- DataParallel, which calls copies of its module in threads


class TwoDevices(nn.Module):
    """Calls two replicas of its module in threads, each with half of the batch, as DataParallel does."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        halves, outputs = x.chunk(2), [None, None]

        def run(i):
            outputs[i] = replica(self.module)(halves[i])

        for i in range(2):
            in_thread(lambda i=i: run(i))
        return torch.cat(outputs)


def replica(m):
    copied = m._replicate_for_data_parallel()
    for name, p in m._parameters.items():
        setattr(copied, name, p * 1)
    for name, child in m._modules.items():
        copied._modules[name] = replica(child)
    return copied


def silently(function):
    with pytest.warns(UserWarning, match="in another thread"):
        return function()


def test_gradients_of_replicas_are_those_of_the_whole_batch():
    whole, parallel = (
        fit(make_learner(model=model, cbs=GradientHealth()))
        for model in (make_model(), TwoDevices(make_model()))
    )
    for a, b in zip(whole.gradient_health.stats, parallel.gradient_health.stats, strict=True):
        assert [p["norm"] for p in a] == pytest.approx([p["norm"] for p in b], rel=1e-4)


def test_layers_of_replicas_are_not_recorded_in_place_of_the_model_and_it_is_said_why():
    learn = make_learner(model=TwoDevices(make_model()), cbs=ActivationStats())
    silently(lambda: fit(learn))
    stats = learn.activation_stats
    assert stats.coverage.fired == ()
    assert all("in another thread" in why for why in stats.coverage.silent.values())
    assert not stats.names


def test_a_watch_of_the_module_that_replicas_are_made_of_says_that_it_saw_no_call():
    parallel = TwoDevices(make_model())
    opt = torch.optim.SGD(parallel.parameters(), lr=0.1)
    with watch(parallel.module, opt, Callback()) as w:
        step(parallel, opt)
    assert "other threads" in w.coverage.missing["after_pred"]
    assert "2 calls or steps in other threads, ignored" in w.coverage.notes


@pytest.mark.slow
def test_a_data_parallel_on_one_device_is_the_model_inside():
    plain, parallel = make_model(), nn.DataParallel(make_model())
    found = []
    for model in (plain, parallel):
        learn = make_learner(model=model, cbs=[GradientHealth(activations=True), Diagnose(show=False)])
        fit(learn, cbs=ActivationStats())
        found.append((learn.activation_stats.names, values(learn.activation_stats), learn.diagnose().status))
        assert learn.gradient_health.output_stats.names == ["0", "2"]
    assert found[0] == found[1]
    opt = torch.optim.SGD(parallel.parameters(), lr=0.1)
    with watch(parallel, opt, ActivationStats()) as w:
        step(parallel, opt)
    assert w.activation_stats.names == ["0", "2"]


@pytest.mark.parametrize("follow", [lambda model: GradientHealth(), lambda model: watch(model)])
def test_a_step_of_another_thread_while_a_watch_begins_is_left_alone(follow, monkeypatch):
    """As each listener is put on, another thread makes a step at once."""
    other = make_model()
    opt = torch.optim.SGD(other.parameters(), 0.1)
    register, n_steps = StepHook.__init__, []

    def registered(hook, *args, **kwargs):
        register(hook, *args, **kwargs)
        in_thread(lambda: step(other, opt))
        n_steps.append(1)

    monkeypatch.setattr(StepHook, "__init__", registered)
    learn = make_learner()
    followed = follow(learn.model)
    if isinstance(followed, Callback):
        fit(learn, cbs=followed)
    else:
        followed.close()
    assert n_steps
