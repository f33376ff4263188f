"""Layers are timed in a few batches, each without the layers that it calls, beside their work."""

import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hookcb import ActivationStats, Diagnose, Hook, Learner, watch
from hookcb.diagnosis.measurements.layer_times import FIRST, MAX_TIMED, MIN_TIMED, LayerTimes, work_of
from hookcb.diagnosis.run import Run
from tests.support import Clock, first, fit, in_turn, make_learner, make_model

pytestmark = pytest.mark.usefixtures("nothing_compiled")


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr("hookcb.core.clock.perf_counter", clock)
    return clock


class Sleeps(nn.Module):
    def __init__(self, clock, inner=None):
        super().__init__()
        self.clock, self.inner = clock, inner or nn.Identity()

    def forward(self, x):
        self.clock.sleep()
        x = self.inner(x)
        self.clock.sleep()
        return x


def run_of(model):
    run = Run(loop=SimpleNamespace(model=model, in_loop_thread=True, is_calling=False))
    run.measured(LayerTimes).on_model(run)
    return run, run.measured(LayerTimes)


def begin(run, step, looking):
    run.n_batches, run.looking = step, looking
    run.measured(LayerTimes).on_batch(run)


def timed(model, n=MIN_TIMED):
    run, times = run_of(model)
    for step in range(FIRST, FIRST + 2 * n):
        begin(run, step, looking=step % 2 == 0)
        model(torch.zeros(2, 3))
    times.on_backward(run)
    times.tell(run)
    return times


def test_a_layer_is_timed_without_those_it_calls(clock):
    model = nn.Sequential(Sleeps(clock, Sleeps(clock)), nn.Linear(3, 3))
    seconds = {name: round(x / 1000) for name, x in timed(model).seconds.items()}
    assert seconds == {"0": 2, "0.inner": 2, "0.inner.inner": 0, "1": 0, "": 0}


def test_other_hooks_count_for_no_layer(clock):
    model = nn.Sequential(Sleeps(clock), nn.Linear(3, 3))
    for m in model.modules():
        m.register_forward_pre_hook(lambda *_: clock.sleep())
        m.register_forward_hook(lambda *_: clock.sleep())
    seconds = {name: round(x / 1000) for name, x in timed(model).seconds.items()}
    assert seconds == {"0": 2, "0.inner": 0, "1": 0, "": 0}


def test_hooks_are_there_only_in_a_few_batches_that_follow_inspected_ones(clock):
    model, with_hooks = make_model(), []
    run, times = run_of(model)
    for step in range(60):
        if times.done:
            break
        begin(run, step, looking=step % 3 == 0)
        if model._forward_pre_hooks:
            with_hooks.append(step)
        times.on_backward(run)
        assert not model._forward_pre_hooks
        assert not model._forward_hooks
    assert with_hooks == [7 + 3 * i for i in range(MAX_TIMED)]


def test_a_forward_that_raises_leaves_the_times_in_order(clock):
    class Fails(nn.Module):
        def forward(self, x):
            if self.training:
                raise KeyError("of the user")
            return x

    model = nn.Sequential(Fails(), Sleeps(clock))
    run, times = run_of(model)
    begin(run, FIRST, looking=True)
    begin(run, FIRST + 1, looking=False)
    with pytest.raises(KeyError):
        model(torch.zeros(2, 3))
    model[0].eval()
    model(torch.zeros(2, 3))
    assert round(times._now["1"] / 1000) == 2


@in_turn(
    ("op", "args", "shape", "expected"),
    [
        ("addmm", ((5,), (4, 3), (3, 5)), (4, 5), 60),
        ("mm", ((4, 3), (3, 5)), (4, 5), 60),
        ("bmm", ((2, 4, 3), (2, 3, 5)), (2, 4, 5), 120),
        ("relu", ((4, 5),), (4, 5), 0),
    ],
)
def test_work_is_counted_in_multiply_adds_and_elements(op, args, shape, expected):
    out = torch.zeros(shape)
    assert work_of(op, tuple(torch.zeros(x) for x in args), out) == expected + 16 * out.numel()


def test_the_work_of_a_convolution_is_that_of_its_weights():
    x, weight = torch.zeros(2, 3, 8, 8), torch.zeros(4, 3, 3, 3)
    out = torch.zeros(2, 4, 6, 6)
    rest = None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    assert work_of("convolution", (x, weight, *rest), out) == out.numel() * 27 + 16 * out.numel()


def test_a_view_is_no_work():
    x = torch.zeros(4, 5)
    assert work_of("t", (x,), x.t()) == 0


def test_diagnose_counts_the_work_of_each_layer():
    learn = make_learner(30, 0, lr=0.01)
    watcher = Diagnose(show=False, on_sick="ignore")
    fit(learn, 1, cbs=watcher)
    times = watcher.evidence().measured(LayerTimes)
    linear = [name for name, m in learn.model.named_modules() if isinstance(m, nn.Linear)]
    assert all(times.work[name] > 0 for name in linear)
    assert set(times.seconds) == {name for name, _ in learn.model.named_modules()}


def test_diagnose_counts_the_operations_of_each_layer_and_the_numbers_that_it_reads():
    class Looping(nn.Module):
        def forward(self, x):
            return torch.stack([row * row.sum().item() for row in x])

    model = nn.Sequential(nn.Linear(3, 4), Looping(), nn.Linear(4, 2))
    batches = [(torch.randn(16, 3), torch.randn(16, 2)) for _ in range(2)]
    learn = Learner(batches, model, nn.functional.mse_loss, torch.optim.SGD, lr=0.01)
    watcher = Diagnose(show=False, on_sick="ignore")
    fit(learn, 1, cbs=watcher)
    times = watcher.evidence().measured(LayerTimes)
    assert times.n_ops["1"] > 3 * 16 > 16 == times.n_reads["1"]
    assert times.n_ops["0"] < 4
    assert times.n_reads["0"] == 0


def test_no_hooks_are_added_once_anything_is_compiled(monkeypatch):
    monkeypatch.setattr("hookcb.hooks.modules.compile_counts", lambda kind: {"total": 1})
    assert timed(nn.Linear(3, 3)).seconds == {}


def hook_of(clock, seconds=1000.0):
    def slow_hook(m, *_):
        clock.sleep(seconds)

    return slow_hook


@pytest.mark.parametrize("pre", [True, False])
def test_forward_hooks_of_the_user_are_timed_by_their_function(clock, pre):
    model, hook = nn.Sequential(Sleeps(clock), nn.Linear(3, 3)), hook_of(clock)
    for m in (model[0], model[1]):
        (m.register_forward_pre_hook if pre else m.register_forward_hook)(hook)
    ((title, seconds),) = timed(model).hook_seconds.items()
    assert title.startswith("the forward hook test_layer_times.py:")
    assert title.endswith("slow_hook()")
    assert round(seconds / 1000) == 2


def test_hooks_of_the_user_that_hookcb_calls_are_too(clock):
    model = nn.Sequential(nn.Linear(3, 3))
    with Hook(model[0], hook_of(clock)):
        ((title, seconds),) = timed(model).hook_seconds.items()
    assert "slow_hook()" in title
    assert round(seconds / 1000) == 1


@pytest.mark.slow
def test_hooks_of_hookcb_are_not_told_as_the_users(clock):
    learn = make_learner(80, cbs=[Diagnose(), ActivationStats()])
    fit(learn)
    assert learn.diagnosis.evidence().measured(LayerTimes).hook_seconds == {}


@pytest.mark.slow
def test_a_slow_forward_hook_is_named_by_a_diagnosis(clock):
    learn = make_learner(80, cbs=Diagnose())
    learn.model[0].register_forward_hook(hook_of(clock, 20_000.0))
    fit(learn)
    (found,) = (x for x in learn.diagnose().findings if x.code == "time.other")
    assert "slow_hook()" in found.layer


def test_a_hook_that_cannot_be_named_is_no_harm(clock):
    class Odd:
        def __call__(self, *args):
            clock.sleep(1000.0)

        @property
        def __wrapped__(self):
            raise RuntimeError("no name")

    model = nn.Sequential(nn.Linear(3, 3))
    model[0].register_forward_hook(Odd())
    times = timed(model)
    assert times.hook_seconds == {}
    assert set(times.seconds) == {"", "0"}


class Engine(nn.Module):
    """Calls a model, and takes time of its own; it computes something only if told."""

    def __init__(self, clock, seconds, computes):
        super().__init__()
        self.clock, self.seconds, self.computes = clock, seconds, computes
        self.inner = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 3))

    def forward(self, x):
        self.clock.sleep(self.seconds)
        return self.inner(x + 1 if self.computes else x)


@pytest.mark.parametrize(
    ("seconds", "computes", "is_slow"), first([(4e-3, True, True), (4e-3, False, False), (6e-3, False, True)])
)
def test_a_model_that_computes_nothing_itself_may_take_some_milliseconds(clock, seconds, computes, is_slow):
    model = Engine(clock, seconds, computes)
    opt, diagnose = torch.optim.SGD(model.parameters(), lr=0.01), Diagnose(show=False)
    with watch(model, opt, diagnose):
        for _ in range(80):
            x = torch.randn(8, 3)
            (model(x) - x).square().mean().backward()
            opt.step()
            opt.zero_grad()
    notes = [finding.message for finding in diagnose.verdict.findings if finding.code == "time.layer"]
    assert [note.startswith("The model itself takes 100%") for note in notes] == [True] * is_slow


@pytest.mark.slow
def test_an_error_in_a_hook_does_not_reach_the_forward_and_costs_the_times_of_layers(monkeypatch):
    def broken(self, m, args):
        raise RuntimeError("no clock")

    monkeypatch.setattr(LayerTimes, "_begin", broken)
    learn = make_learner(80, cbs=Diagnose())
    fit(learn)
    gaps = {code: gap.reason for gap in learn.diagnose().gaps for code in gap.codes}
    assert "time.layer" in gaps
    assert "no clock" in gaps["time.other"]
    assert "time.garbage" not in gaps
