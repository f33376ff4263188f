"""Exactly the chosen steps are profiled, and however a fit ends it leaves a whole trace and nothing else."""

import copy
import multiprocessing
import pickle
import re
import threading
import warnings
from contextlib import suppress
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import record_function
from torch.utils.data import DataLoader, TensorDataset

from hookcb import (
    Callback,
    CancelBatchException,
    CancelEpochException,
    CancelTrainException,
    CancelValidException,
    Checkpoint,
    GradientAccumulation,
    Learner,
    ProfilerCallback,
    assert_no_hooks,
    count_hooks,
    watch,
)
from tests.profiling.support import Trace, assert_clean, chosen, exported, nothing_left, profiled, whole
from tests.support import (
    BATCH,
    CANCELS,
    EVENTS,
    SaysSo,
    covering,
    each,
    fit,
    in_turn,
    make_batches,
    make_learner,
    make_model,
    primary_plan,
    same,
    spy,
    weights,
)

ALL = {"wait": 0, "warmup": 0}  # no step is left out before the window
CYCLES = [
    ({}, 7, 1),
    ({"wait": 0, "warmup": 0, "active": 1}, 4, 1),
    ({"wait": 0, "warmup": 0, "active": 2, "repeat": 0}, 5, 1),
    ({"wait": 0, "warmup": 0, "active": 1, "repeat": 0}, 2, 2),
    ({"wait": 1, "warmup": 0, "active": 1, "repeat": 2}, 7, 1),
    ({"wait": 0, "warmup": 1, "active": 1, "repeat": 0}, 3, 2),
    ({"wait": 2, "warmup": 1, "active": 2, "repeat": 2}, 6, 2),
    ({"wait": 3, "warmup": 2, "active": 1}, 3, 2),
    ({"wait": 0, "warmup": 2, "active": 3, "repeat": 0}, 4, 2),
    ({"wait": 1, "warmup": 1, "active": 1, "repeat": 2}, 3, 4),
]


class Loader:
    """Batches, each fetched under a range that tells which of all it is."""

    def __init__(self, kind, n, sized=True):
        self.kind, self.n, self.fetched = kind, n, 0
        if sized:
            self.__class__ = Sized

    def __iter__(self):
        for batch in make_batches(self.n):
            with record_function(f"{self.kind} fetch {self.fetched}"):
                self.fetched += 1
                torch.ones(3).sum()
            yield batch


class Sized(Loader):
    def __len__(self):
        return self.n


class Marked(nn.Module):
    """Says in the trace which batch of training or validation it is called with."""

    def __init__(self):
        super().__init__()
        self.body, self.n = make_model(), {True: 0, False: 0}

    def forward(self, x):
        kind = "train" if self.training else "valid"
        with record_function(f"{kind} call {self.n[self.training]}"):
            self.n[self.training] += 1
            return self.body(x)


def marked_learner(n_train=3, n_valid=2, sized=True, **kwargs):
    valid = Loader("valid", n_valid, sized) if n_valid else None
    return Learner((Loader("train", n_train, sized), valid), Marked(), F.mse_loss, torch.optim.SGD, **kwargs)


def marks(trace, within=None):
    found = trace.matching(r"(train|valid) (fetch|call) \d+")
    return [r.name for r in found if within is None or within.holds(r)]


def both(kind, k):
    return [f"{kind} fetch {k}", f"{kind} call {k}"]


# ---- which steps


@pytest.mark.parametrize(
    ("options", "n", "n_epoch", "sized"), each(3, [(*cycle, k % 2 == 0) for k, cycle in enumerate(CYCLES)])
)
def test_the_steps_of_torchs_schedule_are_profiled_from_their_fetch_on(options, n, n_epoch, sized, tmp_path):
    learn = marked_learner(n, 0, sized)
    profiler = profiled(learn, n_epoch, trace=tmp_path / "runs", **options)
    expected = chosen(n * n_epoch, **options)
    assert profiler.profiled_steps == expected
    files = sorted((tmp_path / "runs").iterdir(), key=lambda f: f.stat().st_mtime_ns)
    active = options.get("active", 3)
    assert len(files) == -(-len(expected) // active)
    assert all(file.name.endswith(".pt.trace.json.gz") for file in files)
    seen = []
    for file in files:
        trace = whole(file)
        assert len(trace.steps) <= active
        assert marks(trace) == [mark for k in trace.steps for mark in both("train", k)]
        for k, step in trace.steps.items():
            assert marks(trace, step) == both("train", k)
            (data,) = [r for r in trace.named("data") if step.holds(r)]
            assert marks(trace, data) == [f"train fetch {k}"]
        seen += trace.steps
    assert sorted(seen) == expected


@pytest.mark.parametrize(("on", "first"), covering(["train", "valid", "all"], [0, 1, 3], of=1))
def test_batches_are_counted_over_epochs_in_the_phases_asked_for(on, first, tmp_path):
    order = [("train", 0), ("train", 1), ("train", 2), ("valid", 0), ("valid", 1)]
    order += [("train", 3), ("train", 4), ("train", 5), ("valid", 2), ("valid", 3)]
    order = [step for step in order if on in (step[0], "all")]
    options = {"wait": first, "warmup": 0, "active": len(order) - first - 1}
    options["active"] = max(options["active"], 1)
    expected = chosen(len(order), **options)
    profiler = profiled(marked_learner(sized=first != 1), 2, on=on, **options)
    assert profiler.profiled_steps == expected
    trace = exported(profiler, tmp_path)
    assert list(trace.steps) == expected
    for k, step in trace.steps.items():
        assert marks(trace, step) == both(*order[k])


def test_a_validation_between_profiled_steps_is_in_the_trace_and_in_no_step(tmp_path):
    profiler = profiled(marked_learner(), 2, wait=1, warmup=0, active=4)
    trace = exported(profiler, tmp_path)
    assert list(trace.steps) == [1, 2, 3, 4]
    between = [name for name in marks(trace) if name.startswith("valid")]
    assert between == [*both("valid", 0), *both("valid", 1)]
    assert not [r for r in trace.matching("valid.*") if any(step.holds(r) for step in trace.steps.values())]
    assert not [r for r in trace.matching("valid.*") for p in trace.named("data", "forward") if p.holds(r)]
    for row in profiler.layers():
        assert row.calls == 1, row


def test_no_validation_is_profiled_behind_the_last_step():
    running = []
    note = Callback(before_validate=lambda cb: running.append(torch.autograd._profiler_enabled()))
    profiler = profiled(make_learner(), cbs=[note], wait=1, warmup=1, active=1)
    assert profiler.profiled_steps == [2]
    assert running == [False]


@pytest.mark.parametrize("warmup", [0, 1])
@pytest.mark.parametrize("trace", [False, True])
def test_outside_the_window_there_are_no_hooks_and_no_profiler(warmup, trace, tmp_path):
    seen = []

    def look(cb):
        seen.append((cb.train_iter, count_hooks(cb.model) > 0, torch.autograd._profiler_enabled()))

    options = {"wait": 2, "warmup": warmup, "active": 2, "repeat": 2}
    at = {
        event: look
        for event in [*BATCH[:4], "after_backward", "before_step", "after_step"]
        if event in EVENTS
    }
    learn = make_learner(13, 0)
    profiled(learn, cbs=[Callback(**at)], trace=tmp_path / "t.json" if trace else None, **options)
    active = chosen(13, **options)
    hooked = active + [k - 1 for k in active if warmup and k - 1 not in active]
    assert len(seen) == 13 * 7
    for k, hooks, running in seen:
        assert hooks == (k in hooked), k
        if k in active or k not in hooked:  # what torch does in a warmup is its own affair
            assert running == (k in active), k


def test_of_accumulated_gradients_each_batch_is_a_step(tmp_path):
    learn = make_learner(5, 0, cbs=GradientAccumulation(2))
    profiler = profiled(learn, **ALL, active=5)
    assert profiler.profiled_steps == [0, 1, 2, 3, 4]
    trace = exported(profiler, tmp_path)
    stepped = [
        k for k, step in trace.steps.items() if any(step.holds(r) for r in trace.matching("Optimizer.step.*"))
    ]
    assert stepped == [1, 3, 4]


def test_batches_of_a_dataloader_are_fetched_in_the_phase_of_data(tmp_path):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(20, 2), torch.randn(20, 1))
    learn = Learner(DataLoader(data, 4, shuffle=True), make_model(), F.mse_loss, torch.optim.SGD)
    trace = exported(profiled(learn, 2, wait=3, warmup=1, active=4), tmp_path)
    fetches = trace.matching(r"enumerate\(DataLoader\).*")
    for step in trace.steps.values():
        (data,) = [r for r in trace.named("data") if step.holds(r)]
        assert sum(data.holds(r) for r in fetches) == 1


@pytest.mark.parametrize("n_epoch", [1, 2])
def test_a_fit_shorter_than_the_cycle_warns_with_the_numbers_and_keeps_what_was_profiled(n_epoch, tmp_path):
    before = []
    with pytest.warns(UserWarning, match=rf"wait \+ warmup \+ active\b.* 8 steps.*\b{3 * n_epoch}\b"):
        profiler = profiled(make_learner(), n_epoch, wait=1, warmup=1, active=6, trace=tmp_path / "t.json")
    assert profiler.profiled_steps == chosen(3 * n_epoch, active=6) != []
    assert list(whole(tmp_path / "t.json").steps) == profiler.profiled_steps
    profiler.layers(), profiler.phases(), profiler.table(), profiler.report()
    with pytest.raises(UserWarning), warnings.catch_warnings(action="error"):
        fit(make_learner(cbs=spy(before, "a")), cbs=ProfilerCallback(active=6))
    assert ("a", "before_batch") not in before


@in_turn(("on", "n_epoch", "n_steps"), [("train", 1, 3), ("train", 2, 6), ("valid", 2, 4), ("all", 1, 5)])
def test_it_warns_where_the_window_is_longer_by_one(on, n_epoch, n_steps):
    profiled(make_learner(), n_epoch, wait=0, warmup=1, active=n_steps - 1, on=on)
    with pytest.warns(UserWarning, match=rf"= {n_steps + 1} .*\b{n_steps}\b"):
        profiled(make_learner(), n_epoch, wait=0, warmup=1, active=n_steps, on=on)


def test_of_a_loader_without_a_length_it_does_not_warn(tmp_path):
    profiler = profiled(
        marked_learner(3, 0, sized=False), wait=1, warmup=1, active=9, trace=tmp_path / "t.json"
    )
    assert profiler.profiled_steps == [2]
    assert list(whole(tmp_path / "t.json").steps) == [2]


@pytest.mark.parametrize("options", [{"wait": 5}, {"wait": 1, "warmup": 2}])
def test_where_nothing_was_profiled_the_readings_say_so(options, tmp_path):
    learn = make_learner(n_valid=0)
    with pytest.warns(UserWarning, match="active"):
        profiler = profiled(learn, **options, trace=tmp_path / "t.json")
    assert profiler.profiled_steps == []
    assert not (tmp_path / "t.json").exists() or whole(tmp_path / "t.json").steps == {}
    first = options["wait"] + options.get("warmup", 1)
    for read in READINGS.values():
        with pytest.raises(RuntimeError, match=rf"(?s)(?=.*\b{first}\b)(?=.*\b3\b)"):
            read(profiler, tmp_path)


READINGS = {
    "layers": lambda p, folder: p.layers(),
    "phases": lambda p, folder: p.phases(),
    "table": lambda p, folder: p.table(),
    "report": lambda p, folder: p.report(),
    "export_chrome_trace": lambda p, folder: p.export_chrome_trace(folder / "a.json"),
    "export_stacks": lambda p, folder: p.export_stacks(folder / "a.txt"),
}


@pytest.mark.parametrize("reading", READINGS)
def test_before_a_fit_the_readings_say_what_would_be_profiled(reading, tmp_path):
    for profiler in (ProfilerCallback(with_stack=True), copy.deepcopy(ProfilerCallback(with_stack=True))):
        with pytest.raises(RuntimeError, match=r"(?s)(?=.*\b2\b)(?=.*\b4\b)"):
            READINGS[reading](profiler, tmp_path)
    assert list(tmp_path.iterdir()) == []


# ---- cancels and errors

WITHIN_BATCH = ["before_batch", "after_pred", "after_loss", "before_backward", "after_backward"]
WITHIN_BATCH += ["before_step", "after_step", "after_batch"]
SPANS = {"backward": WITHIN_BATCH[3:5], "step": WITHIN_BATCH[5:7], "batch": WITHIN_BATCH}
OUTER = ["before_batch", "after_loss", "after_backward", "after_batch"]
CANCELLED = [(level, event) for level in CANCELS if level != "validate" for event in SPANS.get(level, OUTER)]
FIRST, LAST = -2000, 2000  # before and behind all callbacks of the package


@pytest.mark.parametrize(
    ("level", "event", "order"),
    each(3, [(*what, (FIRST, LAST)[k // 2 % 2]) for k, what in enumerate(CANCELLED)]),
)
def test_a_cancelled_batch_is_a_step_and_its_ranges_are_closed(level, event, order, tmp_path):
    log = []
    canceller = spy(log, "a", {(event, 1): CANCELS[level]()}, order=order)
    learn = make_learner(n_valid=1)
    with warnings.catch_warnings(action="ignore"):  # fewer steps than planned
        profiler = profiled(learn, 2, cbs=[canceller], **ALL, active=6, trace=tmp_path / "t.json")
    begun, ended = (sum(e == what for _, e in log) for what in ("before_batch", "after_batch"))
    begun, ended = begun - log.count(("a", "before_validate")), ended - log.count(("a", "after_validate"))
    trace = whole(tmp_path / "t.json")
    assert set(profiler.profiled_steps) <= set(trace.steps) <= set(range(begun))
    if level in ("batch", "backward", "step"):
        assert begun == 6
        assert profiler.profiled_steps == list(trace.steps) == [0, 1, 2, 3, 4, 5]
    else:  # the last batch of that epoch never came to its after_batch, unless it was cancelled there
        assert ended <= len(profiler.profiled_steps) <= begun
        assert list(trace.steps) == sorted(trace.steps)
    assert sum(row.seconds for row in profiler.phases().rows) == pytest.approx(profiler.phases().step)
    profiler.layers(), profiler.report()


@pytest.mark.parametrize(
    ("cancel", "on", "event"),
    covering(
        [CancelValidException, CancelBatchException, CancelEpochException],
        ["valid", "all", "train"],
        ["before_batch", "after_loss"],
        of=1,
    ),
)
def test_cancels_in_a_validation_leave_a_whole_trace(cancel, event, on, tmp_path):
    plan = {(event, 4): cancel()}  # three batches of training come first
    with warnings.catch_warnings(action="ignore"):
        options = {"trace": tmp_path / "t.json", "on": on}
        profiler = profiled(make_learner(), 2, cbs=[spy([], "a", plan)], **ALL, active=10, **options)
    steps = whole(tmp_path / "t.json").steps
    assert set(profiler.profiled_steps) <= set(steps)
    if on == "train":
        assert profiler.profiled_steps == list(range(6))
    elif cancel is CancelBatchException:
        assert profiler.profiled_steps == list(range(4 if on == "valid" else 10))


def enders():
    raised = [(partial(SaysSo, 1, 2, c=4), FIRST), (KeyboardInterrupt, LAST)]
    return [(event, *how) for event, how in product(EVENTS, raised)]


@pytest.mark.parametrize(("event", "make", "order"), each(4, enders()))
def test_whatever_ends_a_fit_inside_the_window_leaves_a_trace_and_nothing_else(event, make, order, tmp_path):
    error = make()
    k = 0 if event.endswith(("fit", "train", "validate", "epoch")) and not event.startswith("before") else 1
    k = 0 if event in ("before_fit", "before_validate", "after_cancel_fit") else k
    plan = {key: cancel for key, cancel in primary_plan(event).items() if key[1] >= k}
    level = event.removeprefix("after_cancel_")
    if level in ("fit", "epoch", "train"):  # later than at its very beginning
        plan = {("after_batch", 1): CANCELS[level]()}
    saboteur = spy([], "saboteur", {(event, k): error}, order=order)
    learn = make_learner(n_valid=1, cbs=spy([], "canceller", plan))
    profiler = ProfilerCallback(**ALL, active=6, trace=tmp_path / "t.json.gz")
    with nothing_left(learn), pytest.raises(type(error)) as raised:
        fit(learn, 2, cbs=[saboteur, profiler])
    assert raised.value is error
    assert "learn" not in vars(profiler)
    if event == "before_fit":
        assert not (tmp_path / "t.json.gz").exists()
        return
    trace = whole(tmp_path / "t.json.gz")
    assert len(profiler.profiled_steps) >= 1
    assert set(profiler.profiled_steps) <= set(trace.steps)
    assert len(trace.steps) <= len(profiler.profiled_steps) + 1  # the one that was broken off
    assert profiler.layers()["0"].calls <= 1
    profiler.phases(), profiler.table(), profiler.report()


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, error):
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.error is not None:
            raise ctx.error
        return grad, None


class Breaking(nn.Module):
    """Raises `error` at its second call, inside a layer of a layer, forward or backward."""

    def __init__(self, where, error):
        super().__init__()
        self.body, self.where, self.error, self.n = make_model(), where, error, 0
        self.body[1].forward = self.inner

    def inner(self, x):
        self.n += 1
        if self.where == "forward" and self.n == 2:
            raise self.error
        return Breaks.apply(x, self.error if self.where == "backward" and self.n == 2 else None)

    def forward(self, x):
        return self.body(x)


def breaking(where, error):
    batches = make_batches(4)
    model = Breaking(where, error)
    n = dict.fromkeys(("data", "loss", "optimizer"), 0)

    def at(place):
        n[place] += 1
        if where == place and n[place] == 2:
            raise error

    class Opt(torch.optim.SGD):
        def step(self):
            at("optimizer")
            return super().step()

    def loss_func(pred, y):
        at("loss")
        return F.mse_loss(pred, y)

    def loader():
        for batch in batches:
            at("data")
            yield batch

    class Data:
        def __iter__(self):
            return loader()

    return Learner(Data(), model, loss_func, Opt, lr=0.1)


@pytest.mark.parametrize(
    ("where", "error"),
    covering(
        ["data", "forward", "loss", "backward", "optimizer"],
        [SaysSo(1, 2), KeyboardInterrupt(), SystemExit(3)],
        of=1,
    ),
)
def test_an_error_in_any_part_of_a_step_closes_all_ranges(where, error, tmp_path):
    learn = breaking(where, error)
    profiler = ProfilerCallback(**ALL, active=4, trace=tmp_path)
    with nothing_left(learn), pytest.raises(type(error)):
        fit(learn, cbs=profiler)
    (file,) = tmp_path.iterdir()
    trace = whole(file)
    assert profiler.profiled_steps == [0]
    assert 0 in trace.steps
    assert set(trace.steps) <= {0, 1}
    for step in trace.steps.values():
        layers = [r for r in trace.layers("Breaking") if step.holds(r)]
        assert all(any(f.holds(r) for f in trace.named("forward")) for r in layers)


def test_an_error_outside_the_window_leaves_the_file_of_the_window_alone(tmp_path):
    learn = make_learner(6, cbs=spy([], "a", {("after_loss", 4): SaysSo(1, 2)}))
    profiler = ProfilerCallback(wait=0, warmup=1, active=2, trace=tmp_path / "t.json")
    with nothing_left(learn), pytest.raises(SaysSo):
        fit(learn, cbs=profiler)
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]
    assert list(whole(tmp_path / "t.json").steps) == profiler.profiled_steps == [1, 2]


def test_the_trace_is_written_when_its_window_ends_and_not_only_at_the_end(tmp_path):
    there = []
    note = Callback(before_batch=lambda cb: there.append(sorted(p.name for p in tmp_path.iterdir())))
    learn = make_learner(6, 0)
    profiled(learn, cbs=[note], wait=0, warmup=1, active=1, repeat=2, trace=tmp_path / "t.json")
    assert there[3] == ["t.json"]  # the second cycle has begun, and no half-written file is in sight
    assert there[5] == ["t-2.json", "t.json"]


def test_a_trace_that_cannot_be_written_is_an_error_that_leaves_nothing_behind(tmp_path):
    (tmp_path / "file").write_text("")
    learn = make_learner(6, 0)
    with nothing_left(learn), pytest.raises((OSError, ValueError)):
        fit(learn, cbs=ProfilerCallback(trace=tmp_path / "file" / "t.json"))


# ---- what is refused


@in_turn(
    ("options", "error"),
    [
        ({"wait": -1}, ValueError),
        ({"wait": 1.5}, TypeError),
        ({"wait": "1"}, TypeError),
        ({"wait": None}, TypeError),
        ({"warmup": -2}, ValueError),
        ({"warmup": 0.5}, TypeError),
        ({"active": 0}, ValueError),
        ({"active": -3}, ValueError),
        ({"active": "all"}, TypeError),
        ({"active": True}, TypeError),
        ({"repeat": -1}, ValueError),
        ({"repeat": 2.0}, TypeError),
        ({"on": "test"}, ValueError),
        ({"on": "Train"}, ValueError),
        ({"on": 1}, (TypeError, ValueError)),
        ({"trace": "trace.txt"}, ValueError),
        ({"trace": "trace.gz"}, ValueError),
        ({"trace": "trace.json.zip"}, ValueError),
        ({"trace": 3}, TypeError),
        ({"activities": ["gpu"]}, ValueError),
        ({"activities": ["cpu", "tpu"]}, ValueError),
        ({"activities": [3]}, (TypeError, ValueError)),
        ({"activities": []}, ValueError),
        ({"activities": 3}, TypeError),
    ],
    ids=str,
)
def test_arguments_that_cannot_be_are_refused_at_once_with_their_value(options, error):
    ((name, value),) = options.items()
    with pytest.raises(error) as raised:
        ProfilerCallback(**options)
    assert name in str(raised.value)
    odd = [v for v in value if v != "cpu"] if isinstance(value, list) else [value]
    assert all(repr(v) in str(raised.value) for v in odd)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("cuda", ["cuda", torch.profiler.ProfilerActivity.CUDA])
def test_cuda_without_a_gpu_is_refused_in_words(cuda):
    with pytest.raises(ValueError, match=r"(?i)cuda"):
        ProfilerCallback(activities=["cpu", cuda])


@pytest.mark.parametrize("activities", [None, ["cpu"], "cpu", [torch.profiler.ProfilerActivity.CPU]])
def test_activities_go_by_name_or_as_torchs_own(activities, tmp_path):
    profiler = profiled(make_learner(), **ALL, active=1, activities=activities)
    assert exported(profiler, tmp_path).count("aten::linear") == 2
    assert activities is None or profiler.schedule.activities == (torch.profiler.ProfilerActivity.CPU,)


@in_turn("modules", ["nothing.*", ["0", "9"], nn.Conv2d, lambda m: False])
def test_layers_that_are_not_there_end_the_fit_before_it_begins(modules):
    log = []
    learn = make_learner(cbs=spy(log, "a"))
    with nothing_left(learn), pytest.raises(LookupError, match=r"Linear|0"):
        fit(learn, cbs=ProfilerCallback(modules=modules))
    assert ("a", "before_epoch") not in log


def test_two_profilers_on_a_loop_are_refused():
    learn = make_learner(6)
    before = weights(learn.model)
    with nothing_left(learn), pytest.raises(RuntimeError, match="ProfilerCallback"):
        fit(learn, cbs=[ProfilerCallback(name="one"), ProfilerCallback(name="other")])
    assert same(before, weights(learn.model))
    assert profiled(learn).profiled_steps == [2, 3, 4]


@pytest.mark.parametrize("legacy", [False, True])
def test_a_profiler_that_runs_already_is_not_disturbed(legacy):
    learn = make_learner(6)
    make = torch.autograd.profiler.profile if legacy else torch.profiler.profile
    with make() as own:
        with pytest.raises(RuntimeError, match=r"(?i)profiler"):
            fit(learn, cbs=ProfilerCallback())
        assert torch.autograd._profiler_enabled()
        torch.ones(2).add(1)
    assert_no_hooks(learn.model)
    assert "aten::add" in {e.key for e in own.key_averages()}
    assert profiled(learn).profiled_steps == [2, 3, 4]


def test_torch_does_not_make_its_own_table_which_takes_longer_than_all_that_is_read(monkeypatch):
    made = []
    monkeypatch.setattr(
        torch.autograd.profiler.profile, "_parse_kineto_results", lambda *args, **kw: made.append(args)
    )
    fit(learn := make_learner(6), cbs=ProfilerCallback(**ALL))
    assert learn.profiler.table(row_limit=-1)["aten::linear"].count == 2 * 3
    assert not made


def test_a_fit_inside_a_profiled_fit_cannot_be_profiled_too():
    def inner(cb):
        if cb.train_iter == 1:
            with pytest.raises(RuntimeError, match=r"(?i)profiler"):
                fit(other, cbs=ProfilerCallback(**ALL))
            assert_no_hooks(other.model)

    other = make_learner(6)
    profiler = profiled(make_learner(6), cbs=[Callback(after_loss=inner)], **ALL, active=4)
    assert profiler.profiled_steps == [0, 1, 2, 3]


def test_a_profiler_of_the_user_that_starts_before_the_window_goes_on():
    own = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def use(cb):
        if cb.train_iter == 0:
            own.start()
        if cb.train_iter == 3:
            own.stop()

    learn = make_learner(5)
    with nothing_left(learn), pytest.warns(UserWarning, match="profiler"):
        fit(learn, cbs=[ProfilerCallback(wait=1, warmup=1, active=3), Callback(after_batch=use)])
    calls = {e.key: e.count for e in own.key_averages()}
    assert calls["aten::linear"] == 2 * 3
    assert set(learn.profiler.profiled_steps) <= {4}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    ("event", "batch"), [("before_batch", 1), ("before_batch", 2), ("after_loss", 3), ("after_batch", 4)]
)
def test_a_profiler_of_the_user_inside_the_window_does_not_crash_python(event, batch, tmp_path):
    """If two torch profilers run at once, the second takes all from the first; reading the first crashes."""

    def use(cb):
        if cb.train_iter == batch:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
                torch.ones(2).add(1)

    def train():
        learn = make_learner(6)
        profiler = ProfilerCallback(trace=tmp_path / "t.json", wait=1, warmup=1, active=3)
        with warnings.catch_warnings(action="ignore"), suppress(RuntimeError):  # a word about it is well
            fit(learn, cbs=[profiler, Callback(**{event: use})])
        assert_clean(learn)
        with suppress(RuntimeError):
            profiler.layers(), profiler.report()
        assert profiled(make_learner(6)).profiled_steps == [2, 3, 4]

    child = multiprocessing.get_context("fork").Process(target=train)
    child.start()
    child.join()
    assert child.exitcode == 0


# ---- again, copied, removed


@pytest.mark.parametrize("attached", [False, True])
def test_a_second_fit_begins_anew(attached, tmp_path):
    profiler = ProfilerCallback(wait=1, warmup=1, active=2, trace=tmp_path / "t.json")
    learn = make_learner(cbs=profiler if attached else ())
    for n_epoch in (2, 3, 2):
        with nothing_left(learn):
            fit(learn, n_epoch, cbs=() if attached else profiler)
        assert profiler.profiled_steps == list(whole(tmp_path / "t.json").steps) == [2, 3]
        assert {row.calls for row in profiler.layers()} == {1}
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


def test_a_failed_fit_is_followed_by_a_good_one(tmp_path):
    profiler = ProfilerCallback(**ALL, active=3, trace=tmp_path / "t.json")
    learn = make_learner()
    with pytest.raises(KeyboardInterrupt):
        fit(learn, cbs=[profiler, spy([], "a", {("after_loss", 1): KeyboardInterrupt()})])
    assert profiler.profiled_steps == [0]
    with nothing_left(learn):
        fit(learn, cbs=profiler)
    assert profiler.profiled_steps == list(whole(tmp_path / "t.json").steps) == [0, 1, 2]


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))], ids=["deepcopy", "pickle"]
)
def test_a_copy_has_all_readings_and_can_be_fitted(copied, tmp_path):
    options = {"with_flops": True, "profile_memory": True, "wait": 0, "warmup": 1, "active": 1, "repeat": 2}
    profiler = profiled(make_learner(6), **options)
    twin = copied(profiler)
    assert twin.profiled_steps == profiler.profiled_steps == [1, 3]
    assert not hasattr(twin, "learn")
    assert list(map(repr, twin.layers())) == list(map(repr, profiler.layers()))
    assert list(map(repr, twin.phases().rows)) == list(map(repr, profiler.phases().rows))
    one, other = exported(profiler, tmp_path, "one.json"), exported(twin, tmp_path, "other.json")
    assert one.ranges == other.ranges
    twin.table(), twin.report()
    learn = make_learner(6)
    with nothing_left(learn):
        fit(learn, cbs=twin)
    assert twin.profiled_steps == [1, 3]
    assert exported(twin, tmp_path, "other.json").ranges != one.ranges
    assert exported(profiler, tmp_path, "one.json").ranges == one.ranges


def test_a_copy_made_inside_the_window_runs_on_its_own():
    copies, models = [], []

    def take(cb):
        if cb.train_iter == 2:
            profiler = cb.learn.profiler
            copies.extend([copy.deepcopy(profiler), pickle.loads(pickle.dumps(profiler))])
            models.append(copy.deepcopy(cb.model))
            models.append(pickle.loads(pickle.dumps(cb.model)))
        if cb.train_iter == 3:
            for model in models:
                model(torch.ones(4, 2)).sum().backward()

    learn = make_learner(6)
    profiler = profiled(learn, cbs=[Callback(after_loss=take)], wait=1, warmup=1, active=3)
    assert profiler.profiled_steps == [2, 3, 4]
    assert {row.calls for row in profiler.layers()} == {1}
    for twin in copies:
        assert not hasattr(twin, "learn")
        other = make_learner(6)
        with nothing_left(other):
            fit(other, cbs=twin)
        assert twin.profiled_steps == [2, 3, 4]
        assert {row.calls for row in twin.layers()} == {1}


@pytest.mark.parametrize(
    ("event", "order"),
    each(
        2,
        [
            (event, (FIRST, LAST)[k // 2 % 2])
            for k, event in enumerate([*WITHIN_BATCH, "before_validate", "after_epoch"])
        ],
    ),
)
def test_taken_off_inside_the_window_it_gives_back_all_and_keeps_what_it_has(event, order, tmp_path):
    def remove(cb):
        if cb.train_iter >= 2 and cb.learn.profiler in cb.learn.cbs:
            cb.learn.remove_cb(cb.learn.profiler)
            assert not torch.autograd._profiler_enabled()
            assert_no_hooks(cb.model)

    plain, learn = make_learner(), make_learner()
    profiler = ProfilerCallback(**ALL, active=6, trace=tmp_path / "t.json")
    remover = Callback(**{event: remove})
    remover.order = order
    with nothing_left(learn):
        fit(learn, 2, cbs=[profiler, remover])
    trace = whole(tmp_path / "t.json")
    assert 2 <= len(profiler.profiled_steps) <= 3
    assert set(profiler.profiled_steps) <= set(trace.steps)
    assert {row.calls for row in profiler.layers()} == {1}
    assert same(weights(fit(plain, 2).model), weights(learn.model))


def test_put_on_in_the_middle_of_a_fit_it_counts_from_there():
    def add(cb):
        if cb.train_iter == 2 and not hasattr(cb.learn, "profiler"):
            cb.learn.add_cb(ProfilerCallback(wait=1, warmup=1, active=2))

    for event in ("before_batch", "after_loss", "after_step", "after_batch"):
        learn = make_learner(9)
        fit(learn, cbs=Callback(**{event: add}))
        assert len(learn.profiler.profiled_steps) == 2
        assert_clean(learn)
        assert {row.calls for row in learn.profiler.layers()} == {1}


def test_a_resumed_fit_counts_anew(tmp_path):
    fit(make_learner(6, cbs=Checkpoint(tmp_path)), 1)
    learn = make_learner(6, cbs=Checkpoint(tmp_path))
    with nothing_left(learn):
        fit(learn, 2, cbs=ProfilerCallback(wait=1, warmup=1, active=2), resume="latest")
    assert learn.profiler.profiled_steps == [2, 3]


# ---- the loop's other uses


def test_nothing_outside_a_fit_touches_what_it_has():
    learn = make_learner(6, cbs=ProfilerCallback(wait=1, warmup=1, active=2))
    fit(learn)
    profiler, rows = learn.profiler, [repr(row) for row in learn.profiler.layers()]
    enabled = []
    looks = Callback(
        after_pred=lambda cb: enabled.append(count_hooks(cb.model) or torch.autograd._profiler_enabled())
    )
    with nothing_left(learn), learn.added_cbs(looks), learn.no_logging():
        learn.validate()
        learn.get_preds()
        learn.one_batch()
        learn.lr_find(num_it=8, stop_div=False)
    with nothing_left(learn):
        learn.summary()
    assert len(enabled) >= 13
    assert not any(enabled)
    assert learn.profiler is profiler
    assert profiler.profiled_steps == [2, 3]
    assert [repr(row) for row in profiler.layers()] == rows


def test_before_any_fit_the_other_uses_work_as_without():
    learn = make_learner(6, cbs=ProfilerCallback(**ALL))
    with nothing_left(learn), learn.no_logging():
        learn.one_batch()
        learn.validate()
        learn.lr_find(num_it=5, stop_div=False)
    learn.summary()
    with pytest.raises(RuntimeError):
        learn.profiler.layers()


@pytest.mark.parametrize(
    ("event", "on"),
    covering(
        ["before_batch", "after_pred", "after_backward", "after_step", "after_batch"],
        ["train", "valid", "all"],
        of=1,
    ),
)
def test_a_validation_in_the_middle_of_a_batch_does_no_harm(event, on, tmp_path):
    def look(cb):
        if cb.training and cb.train_iter in (1, 2):
            cb.learn.validate()
            cb.learn.get_preds()

    plain, learn = make_learner(), make_learner()
    options = {"trace": tmp_path / "t.json", "on": on, "active": {"train": 6, "valid": 4, "all": 10}[on]}
    profiler = profiled(learn, 2, cbs=[Callback(**{event: look})], **ALL, **options)
    trace = Trace(tmp_path / "t.json")
    if on == "train":
        whole(tmp_path / "t.json")
        assert profiler.profiled_steps == list(trace.steps) == list(range(6))
        assert {row.calls for row in profiler.layers()} == {1}
        for step in trace.steps.values():
            (forward,) = [r for r in trace.named("forward") if step.holds(r)]
            names = [r.name.split(" #")[0] for r in trace.layers("Sequential") if forward.holds(r)]
            assert names == ["Sequential", "0 (Linear)", "1 (ReLU)", "2 (Linear)"]
    assert same(weights(fit(plain, 2).model), weights(learn.model))


def test_a_cancelled_training_is_followed_by_the_next_epochs_steps(tmp_path):
    class Ends(Callback):
        def after_batch(self):
            if self.training and self.iter == 1:
                raise CancelTrainException

    profiler = profiled(make_learner(), 3, cbs=[Ends()], wait=1, warmup=1, active=3, on="train")
    assert profiler.profiled_steps == [2, 3, 4]
    trace = exported(profiler, tmp_path)
    assert [sum(s.holds(r) for r in trace.named("forward")) for s in trace.steps.values()] == [1, 1, 1]


def test_it_says_what_it_is():
    profiler = ProfilerCallback(wait=2, active=4)
    assert profiler.order == 1001
    assert profiler.name == "profiler"
    assert re.match(r"ProfilerCallback\(", repr(profiler))


def test_trainings_in_two_threads_share_the_only_profiler():
    """Whichever comes second leaves out the steps that the first one records."""

    def train(profiler):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        with watch(model, opt, profiler):
            for _ in range(60):
                model(torch.randn(8, 4)).square().mean().backward()
                opt.step()
                opt.zero_grad()

    profilers = [ProfilerCallback(), ProfilerCallback()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a step left out, or nothing profiled
        threads = [threading.Thread(target=train, args=(p,)) for p in profilers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert any(len(p.profiled_steps) > 0 for p in profilers)
    assert not torch.autograd._profiler_enabled()
