"""Time between the steps of a loop is not waiting for data: only the fetch of a batch is."""

import copy
import pickle
import time
from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from hookcb import Callback, Diagnose, Learner, ProfilerCallback, StepTimer, watch
from tests.support import SLEEP, Clock, first, fit, make_batches, make_learner, make_model

TORCHS_OWN = _BaseDataLoaderIter.__next__


pytestmark = pytest.mark.usefixtures("nothing_compiled")


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    clock.sample_lines(monkeypatch)
    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr("hookcb.core.clock.perf_counter", clock)
    monkeypatch.setattr("hookcb.profiling.steps.timer.perf_counter", clock)
    monkeypatch.setattr("hookcb.core.fetches.perf_counter", clock, raising=False)
    return clock


@pytest.fixture(autouse=True)
def torchs_own_is_put_back():
    yield
    assert _BaseDataLoaderIter.__next__ is TORCHS_OWN


class Slow(IterableDataset):
    """Batches that take a sleep each."""

    def __init__(self, clock, n, sleeps=1):
        self.clock, self.n, self.sleeps = clock, n, sleeps

    def __iter__(self):
        for batch in make_batches(self.n):
            self.clock.sleep(self.sleeps * SLEEP)
            yield batch


def loader(clock, n, sleeps=1):
    return DataLoader(Slow(clock, n, sleeps), batch_size=None)


def trained(batches, *cbs, own=lambda step: None):
    """A plain loop, that does something of its own after each step."""
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, opt, *cbs) as w:
        for step, (x, y) in enumerate(batches):
            w.report_loss(F.mse_loss(model(x), y)).backward()
            opt.step()
            opt.zero_grad()
            own(step)
    return w


def data_bound(w):
    """What the diagnosis says of waiting: a severity, "fine", or "unknown"."""
    verdict = w.diagnose()
    found = [f for f in verdict.findings if f.code == "time.data_bound"]
    if found:
        return found[0].severity
    return "fine" if any("waiting for data" in text for text in verdict.ruled_out) else "unknown"


# ---- the verdict


@pytest.mark.slow
def test_a_loop_that_works_between_its_steps_is_not_data_bound(clock):
    w = trained(make_batches(40), Diagnose(show=False), own=lambda step: clock.sleep())
    assert data_bound(w) == "fine"


@pytest.mark.slow
def test_fetches_from_other_sources_are_unknown_if_little_happens_between_steps(clock):
    w = trained(make_batches(40), Diagnose(show=False))
    assert data_bound(w) == "unknown"
    assert any(
        "time.data_bound (the fetch of a batch was seen before 0 of" in x for x in w.diagnose().coverage
    )


@pytest.mark.slow
def test_a_loader_that_is_quick_in_such_a_loop_is_ruled_out(clock):
    w = trained(loader(clock, 40, sleeps=0), Diagnose(show=False), own=lambda step: clock.sleep())
    assert data_bound(w) == "fine"


@pytest.mark.filterwarnings("ignore:ERROR  Training waits for its batches:UserWarning")
@pytest.mark.parametrize(("sleeps", "told"), first([(5, "error"), (1, "warning"), (0.1, "fine")]))
def test_a_slow_loader_is_told_by_its_share_of_the_time(clock, sleeps, told):
    w = trained(loader(clock, 40, sleeps), Diagnose(show=False), own=lambda step: clock.sleep())
    assert data_bound(w) == told


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ERROR  Training waits for its batches:UserWarning")
def test_the_fetches_of_a_generator_are_timed_as_a_line_of_the_loop(clock):
    def generate():
        for batch in make_batches(40):
            clock.sleep()
            yield batch

    w = trained(generate(), Diagnose(show=False))
    assert data_bound(w) == "error"
    assert "for step, (x, y) in enumerate(batches)." in w.diagnose().primary.message


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ERROR  Training waits for its batches:UserWarning")
def test_fetches_of_several_loaders_at_once_are_counted_once_each(clock):
    batches = zip(loader(clock, 40), loader(clock, 40, sleeps=0), strict=True)
    w = trained(
        (batch for batch, _ in batches), Diagnose(show=False), own=lambda step: clock.sleep(3 * SLEEP)
    )
    assert data_bound(w) == "fine"  # a quarter; counted twice it would be two fifths


@pytest.mark.slow
def test_a_loader_that_reads_another_is_counted_once(clock):
    class Outer(IterableDataset):
        def __iter__(self):
            yield from loader(clock, 40)

    batches = DataLoader(Outer(), batch_size=None)
    w = trained(batches, Diagnose(show=False), own=lambda step: clock.sleep(3 * SLEEP))
    assert data_bound(w) == "fine"


@pytest.mark.slow
def test_a_validation_between_epochs_is_no_waiting(clock):
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, opt, Diagnose(show=False)) as w:
        for _ in range(3):
            for x, y in loader(clock, 20, sleeps=0):
                w.report_loss(F.mse_loss(model(x), y)).backward()
                opt.step()
                opt.zero_grad()
            model.eval()
            with torch.no_grad():
                for x, _ in loader(clock, 5):
                    model(x)
            model.train()
    assert data_bound(w) == "fine"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ERROR  Training waits for its batches:UserWarning")
def test_a_loader_is_seen_in_a_loop_that_accumulates(clock):
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, opt, Diagnose(show=False)) as w:
        for step, (x, y) in enumerate(loader(clock, 40)):
            w.report_loss(F.mse_loss(model(x), y)).backward()
            if step % 4 == 3:
                opt.step()
                opt.zero_grad()
    assert data_bound(w) == "error"


@pytest.mark.slow
def test_a_learner_that_does_its_own_work_after_a_batch_is_not_data_bound(clock):
    learn = make_learner(40, 0, lr=0.01)
    fit(learn, 1, cbs=[Diagnose(show=False), Callback(after_batch=lambda cb: clock.sleep())])
    assert data_bound(learn) == "fine"


@pytest.mark.filterwarnings("ignore:ERROR  Training waits for its batches:UserWarning")
def test_a_learner_sees_whatever_gives_its_batches(clock):
    class Batches:
        def __iter__(self):
            yield from Slow(clock, 20)

    learn = Learner(Batches(), make_model(), F.mse_loss, torch.optim.SGD, lr=0.01)
    fit(learn, 1, cbs=Diagnose(show=False))
    assert data_bound(learn) == "error"


# ---- StepTimer


def test_step_timer_calls_what_lies_between_steps_other(clock):
    timer = trained(make_batches(12), StepTimer(), own=lambda step: clock.sleep()).step_timer
    assert {round(step.other / SLEEP) for step in timer.times[1:]} == {1}
    assert all(step.data == 0 for step in timer.times)
    assert not any("waiting for data" in line for line in timer.report().lines)


def test_step_timer_sees_the_fetches_of_a_loader(clock):
    timer = trained(loader(clock, 12, sleeps=3), StepTimer(), own=lambda step: clock.sleep()).step_timer
    assert {(round(step.data / SLEEP), round(step.other / SLEEP)) for step in timer.times[1:]} == {(3, 1)}
    assert any("of the time is spent waiting for data" in line for line in timer.report().lines)
    for step in timer.times:
        phases = (step.data, step.forward, step.loss, step.backward, step.optimizer, step.callbacks)
        assert step.total == pytest.approx(step.start + sum(phases) + step.other)


def test_step_timer_of_a_learner_has_nothing_other(clock):
    learn = make_learner(5, 0)
    fit(learn, 1, cbs=[StepTimer(), Callback(after_batch=lambda cb: clock.sleep())])
    assert {step.other for step in learn.step_timer.times} == {0.0}


def test_step_timer_of_a_watch_is_copied_and_pickled():
    w = trained(make_batches(3), StepTimer())
    for copied in (copy.deepcopy(w.step_timer), pickle.loads(pickle.dumps(w.step_timer))):
        assert len(copied.times) == 3


# ---- ProfilerCallback


def test_a_profile_does_not_call_what_lies_between_steps_data():
    profiler = ProfilerCallback(wait=0, warmup=1, active=2)
    trained(make_batches(5), profiler, own=lambda step: time.sleep(1e-3))
    phases = profiler.phases()
    assert phases["data"].seconds == 0
    assert phases["other"].seconds > 1e-3
    assert "time spent waiting for data is unknown" in str(profiler.report())


# ---- nothing stays


@pytest.mark.parametrize("kind", [Diagnose, StepTimer])
def test_a_loop_that_dies_leaves_torchs_own_method(kind):
    def die(step):
        if step == 1:
            raise KeyError("of the user")

    options = {"show": False} if kind is Diagnose else {}
    with pytest.raises(KeyError):
        trained(make_batches(3), kind(**options), own=die)
    assert _BaseDataLoaderIter.__next__ is TORCHS_OWN


def test_many_watches_share_one_replacement():
    with ExitStack() as stack:
        models = [make_model() for _ in range(3)]
        for model in models:
            stack.enter_context(watch(model, None, Diagnose(show=False), StepTimer()))
        assert _BaseDataLoaderIter.__next__.__wrapped__ is TORCHS_OWN
