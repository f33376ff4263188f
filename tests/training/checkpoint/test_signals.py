"""On Ctrl-C and SIGTERM the batch is finished, a file written, and the fit ends as the signal asks."""

import contextlib
import multiprocessing
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from hookcb import EMA, Callback, CancelFitException
from hookcb.training.checkpoint.callback import Checkpoint
from tests.core.support import names
from tests.support import along, covering, make_batches
from tests.training.checkpoint.support import (
    Stop,
    acting,
    dataset,
    differing,
    go_on,
    handler,
    learner,
    outcome,
    raising,
    sending,
    shuffled,
    train,
    uninterrupted,
)
from tests.training.checkpoint.terminal_worker import MOMENTS, strike

SPAWNED = "spawned"
SIGNALS = {"Ctrl-C": (signal.SIGINT, KeyboardInterrupt), "SIGTERM": (signal.SIGTERM, SystemExit)}
IN_TRAINING = ["before_batch", "after_pred", "after_loss", "before_backward", "after_backward"]
IN_TRAINING += ["before_step", "after_step", "after_batch"]
BETWEEN = ["before_epoch", "before_train", "after_train", "before_validate", "after_validate", "after_epoch"]


@pytest.fixture(autouse=True)
def usual_handlers():
    """Those a Python process begins with, whatever the one that runs the tests has."""
    with handler(signal.SIGINT, signal.default_int_handler), handler(signal.SIGTERM, signal.SIG_DFL):
        yield


def handlers():
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def plain(cbs=()):
    return learner(make_batches(3), cbs)


def shuffling(cbs=()):
    """Training and validation draw from one generator."""
    both = torch.Generator().manual_seed(1)
    return learner(shuffled(12, generator=both), cbs, valid=shuffled(8, generator=both))


def leaving(log):
    return Callback(name="leaving", after_fit=lambda cb: log.append("after_fit"))


def stopped(folder, which, sender, *cbs, make=plain, n_epoch=2, **options):
    """Runs a fit in which a signal comes; it must end as that asks, with nothing left behind."""
    _, error = SIGNALS[which]
    before, left, ended = handlers(), [], []
    count = Callback(name="count", after_batch=lambda cb: ended.append((cb.training, cb.train_iter)))
    with pytest.raises(error) as caught:
        train(make, n_epoch, Checkpoint(folder, **options), sender, count, leaving(left), *cbs)
    assert handlers() == before
    assert left == ["after_fit"]
    if error is SystemExit:
        assert caught.value.code == 128 + signal.SIGTERM
    return ended


def check_goes_on(folder, make=plain, n_epoch=2):
    resumed = go_on(make, n_epoch, Checkpoint(folder), resume="latest")
    assert differing(uninterrupted(make, n_epoch), outcome(resumed)) == []


@pytest.mark.parametrize(("event", "which"), covering(IN_TRAINING, SIGNALS, of=1))
def test_the_batch_is_finished_and_a_file_of_it_written(tmp_path, event, which):
    sender = acting(event, sending(SIGNALS[which][0]), k=1)
    ended = stopped(tmp_path, which, sender)
    assert ended == [(True, 0), (True, 1)]
    assert names(tmp_path) == ["epoch-0001-batch-000002.pt"]
    check_goes_on(tmp_path)


def test_a_signal_in_validation_loses_nothing_of_the_training(tmp_path):
    events = ["before_batch", "after_pred", "after_loss", "after_batch"]
    for k, (event, which) in enumerate(along(events, SIGNALS)):
        sender = acting(event, sending(SIGNALS[which][0]), k=0)
        sender.run_train = False
        ended = stopped(tmp_path / str(k), which, sender, make=shuffling)
        assert [n for training, n in ended if training] == [0, 1, 2]
        assert len(names(tmp_path / str(k))) == 1
        check_goes_on(tmp_path / str(k), make=shuffling)


@pytest.mark.parametrize(("event", "order", "which"), along(BETWEEN, [0, 0, 1000, 1000], SIGNALS))
def test_a_signal_between_batches_ends_the_fit(tmp_path, event, order, which):
    ended = stopped(tmp_path, which, acting(event, sending(SIGNALS[which][0]), order=order))
    assert len([n for training, n in ended if training]) <= 4
    assert 1 <= len(names(tmp_path)) <= 2
    assert not list(tmp_path.glob("*.partial"))
    check_goes_on(tmp_path)


@pytest.mark.parametrize("which", SIGNALS)
@pytest.mark.parametrize("order", [0, 1000])
def test_a_signal_in_the_last_event_of_the_last_epoch_is_not_lost(tmp_path, order, which):
    sender = acting("after_epoch", sending(SIGNALS[which][0]), k=1, order=order)
    stopped(tmp_path, which, sender)
    assert "epoch-0002.pt" in names(tmp_path)
    check_goes_on(tmp_path, n_epoch=3)


@pytest.mark.parametrize("which", SIGNALS)
def test_a_signal_before_the_first_batch_ends_the_fit_after_it(tmp_path, which):
    ended = stopped(tmp_path, which, acting("before_fit", sending(SIGNALS[which][0]), order=1000))
    assert ended == [(True, 0)]
    check_goes_on(tmp_path)


def test_a_signal_before_the_checkpoint_has_its_turn_ends_the_fit_as_without_it(tmp_path):
    before = handlers()
    with pytest.raises(KeyboardInterrupt):
        train(plain, 2, Checkpoint(tmp_path), acting("before_fit", sending(signal.SIGINT)))
    assert handlers() == before


@pytest.mark.parametrize("event", ["after_step", "before_train", "before_validate"])
def test_a_signal_in_a_nested_validation_ends_what_is_around_it(tmp_path, event):
    def make(cbs=()):
        look = Callback(name="look", **{event: lambda cb: cb.learn.is_nested or cb.learn.validate()})
        look.run_valid = False
        return shuffling([look, *cbs])

    sender = acting("after_loss", sending(signal.SIGINT))
    sender.run_train = False
    stopped(tmp_path, "Ctrl-C", sender, make=make)
    check_goes_on(tmp_path, make=make)


@pytest.mark.parametrize("event", BETWEEN[::2])
def test_random_numbers_drawn_between_batches_are_the_same_again(tmp_path, event):
    def make(cbs=()):
        return shuffling([Callback(name="draw", **{event: lambda cb: torch.rand(())}), *cbs])

    sender = acting("after_loss", sending(signal.SIGINT))
    sender.run_train = False
    stopped(tmp_path, "Ctrl-C", sender, make=make)
    check_goes_on(tmp_path, make=make)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_fit_at_once(tmp_path, first):
    again = acting("before_backward", sending(signal.SIGINT), k=1, name="again")
    ended = stopped(tmp_path, "Ctrl-C", acting("after_pred", sending(first), k=1), again)
    assert ended == [(True, 0)]
    assert names(tmp_path) == []


def test_a_handler_of_the_user_is_called_when_the_file_is_there(tmp_path):
    calls = []

    def mine(number, frame):
        calls.append((number, [file.name for file in tmp_path.glob("*.p*")]))

    with handler(signal.SIGTERM, mine):
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            train(plain, 2, Checkpoint(tmp_path), acting("after_loss", sending(signal.SIGTERM), k=1))
        assert signal.getsignal(signal.SIGTERM) is mine
    assert calls == [(signal.SIGTERM, ["epoch-0001-batch-000002.pt"])]


def test_what_a_handler_of_the_user_raises_ends_the_fit(tmp_path):
    def mine(number, frame):
        raise Stop(number)

    with handler(signal.SIGINT, mine):
        with pytest.raises(Stop):
            train(plain, 2, Checkpoint(tmp_path), acting("after_loss", sending(signal.SIGINT), k=1))
        assert signal.getsignal(signal.SIGINT) is mine
    assert names(tmp_path) == ["epoch-0001-batch-000002.pt"]
    check_goes_on(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_is_ignored_stays_ignored(tmp_path, number):
    """As under nohup, or in a job in the background."""
    with handler(number, signal.SIG_IGN):
        learn = train(plain, 2, Checkpoint(tmp_path), acting("after_loss", sending(number), k=1))
        assert signal.getsignal(number) is signal.SIG_IGN
    assert learn.train_iter == 6


def test_other_signals_are_left_alone(tmp_path):
    calls = []
    with handler(signal.SIGUSR1, lambda number, frame: calls.append(number)):
        train(plain, 1, Checkpoint(tmp_path), acting("after_loss", sending(signal.SIGUSR1)))
    assert calls == [signal.SIGUSR1]


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt, CancelFitException])
@pytest.mark.parametrize("event", ["before_fit", "after_loss", "after_epoch", "after_fit"])
def test_handlers_are_given_back_however_the_fit_ends(tmp_path, event, error):
    before = handlers()
    for order in (-1000, 1000):
        with contextlib.suppress(Stop, KeyboardInterrupt):
            train(plain, 1, Checkpoint(tmp_path), acting(event, raising(error()), order=order))
        assert handlers() == before


def test_handlers_are_given_back_by_a_fit_that_does_not_begin(tmp_path):
    before = handlers()
    (tmp_path / "epoch-0001.pt").write_text("mine")
    with pytest.raises(ValueError, match="epoch-0001"):
        train(plain, 1, Checkpoint(tmp_path), resume=tmp_path / "epoch-0001.pt")
    with pytest.raises((ValueError, LookupError)):
        train(plain, 1, Checkpoint(tmp_path, monitor="valid_los"))
    assert handlers() == before


def test_a_signal_in_the_batch_that_cancels_the_fit_is_not_lost(tmp_path):
    cancel = acting("after_batch", raising(CancelFitException()), k=1, name="cancel")
    stopped(tmp_path, "Ctrl-C", acting("after_loss", sending(signal.SIGINT), k=1), cancel)
    assert names(tmp_path) == ["epoch-0001-batch-000002.pt"]


def test_two_checkpoints_of_a_fit_stop_once_and_give_the_handlers_back(tmp_path):
    other = Checkpoint(tmp_path / "b", name="other")
    stopped(tmp_path / "a", "Ctrl-C", acting("after_loss", sending(signal.SIGINT), k=1), other)
    assert names(tmp_path / "a") or names(tmp_path / "b")


def test_a_fit_in_another_thread_works(tmp_path):
    results, before = [], handlers()

    def work():
        try:
            results.append(outcome(train(plain, 2, Checkpoint(tmp_path, every=1))))
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert differing(results[0], uninterrupted(plain, 2)) == []
    assert handlers() == before


def test_a_fit_inside_a_fit_is_stopped_with_it(tmp_path):
    def inner(cb):
        train(plain, 1, Checkpoint(tmp_path / "in"), acting("after_loss", sending(signal.SIGINT)))

    stopped(tmp_path / "out", "Ctrl-C", acting("after_loss", inner, k=1))
    assert "epoch-0001-batch-000001.pt" in names(tmp_path / "in")


def test_a_process_begun_in_a_fit_can_be_ended_as_usual(tmp_path):
    fork = multiprocessing.get_context("fork")
    begun = fork.Event()

    def begin_and_end(cb):
        child = fork.Process(target=lambda: begun.set() or time.sleep(300))
        child.start()
        assert begun.wait(60)  # Python forgets a signal that comes while it forks
        child.terminate()
        child.join(30)
        alive.append(child.is_alive())
        child.kill()

    alive = []
    train(plain, 1, Checkpoint(tmp_path), acting("after_loss", begin_and_end))
    assert alive == [False]


# ---- a terminal sends Ctrl-C to the workers of a loader too


@pytest.fixture(scope="module")
def terminal(tmp_path_factory):
    """The folder of fits that got Ctrl-C as a terminal sends it: in a batch, and in the wait for one."""
    folder = tmp_path_factory.mktemp("terminal")
    fork = multiprocessing.get_context("fork")
    processes = [
        fork.Process(target=strike, args=(folder, moment)) for moment in MOMENTS if moment != SPAWNED
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
    return folder


@pytest.fixture
def spawning(tmp_path):
    """The same of one whose workers are spawned; a spawned process imports all anew."""
    worker = [sys.executable, "-m", "tests.training.checkpoint.terminal_worker", tmp_path, SPAWNED]
    subprocess.run(worker, cwd=Path(__file__).parents[3], timeout=200, check=True)
    return tmp_path


def unshuffled(cbs=()):
    return learner(DataLoader(dataset(), 4), cbs)


def check_ended(folder, moment):
    assert (folder / f"{moment}.txt").read_text() == "KeyboardInterrupt"
    assert names(folder / moment) in (["epoch-0001-batch-000002.pt"], ["epoch-0001-batch-000003.pt"])
    check_goes_on(folder / moment, make=unshuffled)


@pytest.mark.parametrize("moment", ["batch", "wait", "batch, workers die", "wait, workers die"])
def test_a_signal_to_the_workers_of_a_loader_too_ends_the_fit_with_a_file(terminal, moment):
    check_ended(terminal, moment)


@pytest.mark.slow
def test_a_signal_to_spawned_workers_of_a_loader_too_ends_the_fit_with_a_file(spawning):
    check_ended(spawning, SPAWNED)


def test_a_signal_that_ends_the_workers_of_a_validation_loses_nothing_of_the_training(terminal):
    moment = "validation, workers die"
    assert (terminal / f"{moment}.txt").read_text() == "KeyboardInterrupt"
    assert names(terminal / moment) == ["epoch-0001-trained.pt"]


def test_an_error_of_a_loader_without_a_signal_is_the_users(tmp_path):
    def batches():
        yield from make_batches(2)
        raise ConnectionResetError("mine")

    class Loader:
        def __iter__(self):
            return batches()

    with pytest.raises(ConnectionResetError, match="mine"):
        train(lambda cbs=(): learner(Loader(), cbs), 1, Checkpoint(tmp_path))


@pytest.mark.parametrize("training", [True, False])
def test_a_loader_that_fails_of_the_signal_ends_the_fit_as_the_signal_asks(tmp_path, training):
    class Loader:
        def __iter__(self):
            yield from make_batches(2)
            signal.raise_signal(signal.SIGINT)
            raise FileNotFoundError("the worker is gone")

    def make(cbs=()):
        return learner(Loader(), cbs) if training else learner(make_batches(2), cbs, valid=Loader())

    before = handlers()
    with pytest.raises(KeyboardInterrupt):
        train(make, 1, Checkpoint(tmp_path), EMA(0.5))
    assert names(tmp_path) == ["epoch-0001-batch-000002.pt" if training else "epoch-0001-trained.pt"]
    assert handlers() == before
    plain_weights = train(lambda cbs=(): learner(make_batches(2), cbs, valid=None), 1).model.state_dict()
    saved = torch.load(tmp_path / names(tmp_path)[0], weights_only=True)["model"]
    assert differing(plain_weights, saved) == []


def test_the_signal_comes_before_an_error_of_the_batch_which_is_shown_as_its_cause(tmp_path):
    error = Stop("mine")
    both = Callback(name="both", after_loss=lambda cb: [sending(signal.SIGINT)(cb), raising(error)(cb)])
    with pytest.raises(KeyboardInterrupt) as caught:
        train(plain, 1, Checkpoint(tmp_path), both)
    assert caught.value.__cause__ is error
