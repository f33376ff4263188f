"""Time of a training by what it is spent on, in a Learner and in a plain loop."""

import gc
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from hookcb import Callback, Diagnose, Learner, watch
from tests.support import Clock, fit, make_batches, make_learner, make_model


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    """As in a process of its own, whatever other tests have compiled."""
    monkeypatch.setattr("hookcb.hooks.modules.compile_counts", lambda kind: {})


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    clock.sample_lines(monkeypatch)
    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr("hookcb.core.clock.perf_counter", clock)
    monkeypatch.setattr("hookcb.core.fetches.perf_counter", clock, raising=False)
    return clock


@pytest.fixture(autouse=True)
def nothing_stays():
    before = list(gc.callbacks)
    yield
    assert gc.callbacks == before
    assert not [thread for thread in threading.enumerate() if thread.name == "hookcb-lines"]


def quiet():
    return Diagnose(show=False, on_sick="ignore")


def places(loop):
    return {f.layer: f.value for f in loop.diagnose().findings if f.code == "time.other"}


def plain(own, n=60, n_valid=0, clock=None):
    """A plain loop that calls `own` after each step, and validates after each fifth if `n_valid`."""
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, opt, quiet()) as w:
        for step, (x, y) in enumerate(make_batches(n)):
            F.mse_loss(model(x), y).backward()
            opt.step()
            opt.zero_grad()
            own(step)
            for _ in range(n_valid if step % 5 == 4 else 0):
                model.eval()
                with torch.no_grad():
                    model(x)
                clock.sleep()
                model.train()
    return w


def test_a_callback_is_named(clock):
    learn = make_learner(40, 0, lr=0.01)
    fit(learn, 1, cbs=[quiet(), Callback(name="sends", after_loss=lambda cb: clock.sleep())])
    assert list(places(learn)) == ["the callback Callback('sends')"]


def test_a_line_of_a_plain_loop_is_named(clock):
    w = plain(lambda step: clock.sleep())
    ((place, share),) = places(w).items()
    assert "test_spent.py" in place
    assert "own(step)" in place
    assert share > 0.9


@pytest.mark.slow
def test_a_line_that_is_slow_now_and_then_is_named_by_its_mean(clock):
    w = plain(lambda step: step % 20 == 19 and clock.sleep(), n=200)
    assert any("own(step)" in place for place in places(w))


@pytest.mark.slow
def test_a_line_that_makes_a_whole_step_is_not_named(clock):
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, opt, quiet()) as w:
        for x, y in make_batches(60):
            (clock.sleep(), F.mse_loss(model(x), y).backward(), opt.step(), opt.zero_grad())
    assert places(w) == {}


@pytest.mark.slow
def test_a_validation_is_told_apart(clock):
    assert list(places(plain(lambda step: None, n_valid=2, clock=clock))) == ["validation"]


def test_a_loss_function_that_takes_most_of_the_time_is_named(clock):
    def loss_func(pred, y):
        clock.sleep()
        return F.mse_loss(pred, y)

    learn = Learner(make_batches(40), make_model(), loss_func, torch.optim.SGD, lr=0.01)
    fit(learn, 1, cbs=quiet())
    assert list(places(learn)) == ["the loss function"]


@pytest.mark.slow
def test_a_training_without_other_work_has_no_place(clock):
    learn = make_learner(40, 0, lr=0.01)
    fit(learn, 1, cbs=quiet())
    assert places(learn) == {}
    assert places(plain(lambda step: None)) == {}


@pytest.mark.slow
def test_weights_are_bit_identical_while_lines_are_sampled():
    def weights(*cbs):
        model = make_model()
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        with watch(model, opt, *(cbs or [Callback()])):
            for x, y in make_batches(60):
                F.mse_loss(model(x), y).backward()
                opt.step()
                opt.zero_grad()
                time.sleep(2e-3)
        return [p.tolist() for p in model.parameters()], torch.rand(2).tolist()

    torch.manual_seed(0)
    expected = weights()
    torch.manual_seed(0)
    assert weights(quiet()) == expected


@pytest.mark.slow
def test_a_loop_that_dies_while_lines_are_sampled_leaves_nothing():
    def own(step):
        time.sleep(2e-3)
        if step == 30:
            assert [thread for thread in threading.enumerate() if thread.name == "hookcb-lines"]
            raise KeyError("of the user")

    with pytest.raises(KeyError):
        plain(own)


@pytest.mark.slow
def test_the_start_of_a_loader_is_told_apart_from_its_fetches(clock):
    class Slow(DataLoader):
        def __iter__(self):
            clock.sleep()
            return super().__iter__()

    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, opt, quiet()) as w:
        for _ in range(12):
            for x, y in Slow(make_batches(5), batch_size=None):
                F.mse_loss(model(x), y).backward()
                opt.step()
                opt.zero_grad()
    assert list(places(w)) == ["the time between epochs and the start of the loader"]


def test_names_of_callbacks_that_begin_like_ours_are_no_logs(clock):
    class LogitLens(Callback):
        def after_loss(self):
            clock.sleep()

    learn = make_learner(40, 0, lr=0.01)
    fit(learn, 1, cbs=[quiet(), LogitLens()])
    assert list(places(learn)) == ["the callback LogitLens"]


@pytest.mark.parametrize(("n", "is_found"), [(3, True), (2, False)])
def test_long_waits_that_come_again_are_no_machine(clock, n, is_found):
    """Two long ones may be a machine that was busy elsewhere; a third one of 0.1 s or more is the loop's."""

    def own(cb):
        clock.sleep(1e-6)
        if cb.train_iter in range(30, 30 + 10 * n, 10):
            clock.sleep(0.4)

    learn = make_learner(80, cbs=[quiet(), Callback(after_batch=own, name="own")])
    fit(learn)
    assert bool(places(learn)) is is_found


@pytest.mark.slow
def test_an_iterator_that_begins_elsewhere_is_no_start_of_a_loader(clock):
    class Slow:
        def __iter__(self):
            clock.sleep()
            return iter(())

    ((place, _),) = places(plain(lambda step: list(Slow()))).items()
    assert place.endswith(", own(step)")


@pytest.mark.slow
def test_what_wraps_a_loader_is_named_by_its_line(clock):
    def prepared(loader):
        for batch in loader:
            clock.sleep()
            yield batch

    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, opt, quiet()) as w:
        for _ in range(3):
            for x, y in prepared(DataLoader(make_batches(20), batch_size=None)):
                F.mse_loss(model(x), y).backward()
                opt.step()
                opt.zero_grad()
    ((place, share),) = places(w).items()
    assert ", for x, y in prepared(DataLoader(" in place
    assert share > 0.5


@pytest.mark.slow
def test_a_validation_that_waits_for_its_loader_is_named(clock):
    class Slow(list):
        def __getitem__(self, i):
            clock.sleep()
            return super().__getitem__(i)

    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, opt, quiet()) as w:
        for _ in range(4):
            model.train()
            for x, y in DataLoader(make_batches(20), batch_size=None):
                F.mse_loss(model(x), y).backward()
                opt.step()
                opt.zero_grad()
            model.eval()
            with torch.no_grad():
                for x, y in DataLoader(Slow(make_batches(20)), batch_size=None):
                    F.mse_loss(model(x), y)
    assert "validation" in places(w)
    assert not [f for f in w.diagnose().findings if f.code == "time.data_bound"]


@pytest.mark.slow
@pytest.mark.parametrize("watched", [False, True], ids=["Learner", "watch"])
def test_a_model_whose_own_forward_is_slow_is_named(clock, watched):
    class Slow(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = make_model()

        def forward(self, x):
            clock.sleep()
            return self.layer(x)

    if watched:
        model = Slow()
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        with watch(model, opt, quiet()) as loop:
            for x, y in make_batches(60):
                F.mse_loss(model(x), y).backward()
                opt.step()
                opt.zero_grad()
    else:
        loop = Learner(make_batches(60), Slow(), F.mse_loss, torch.optim.SGD, lr=0.01)
        fit(loop, 1, cbs=[quiet()])
    found = [f for f in loop.diagnose().findings if f.code == "time.layer"]
    assert [f.message.partition(" takes")[0] for f in found] == ["The model itself"]
