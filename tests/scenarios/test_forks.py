"""In a process that the training has forked, hookcb does nothing, waits for nothing, and shows nothing."""

import os
import signal
import sys
import threading

import pytest
import torch
import torch.nn.functional as F

from hookcb import ActivationStats, Callback, Diagnose, watch
from hookcb.cli.main import main
from hookcb.core import threads
from hookcb.diagnosis.measurements.spent import SpentTime
from tests.core.support import in_child
from tests.support import make_batches, make_model

SWITCH = sys.getswitchinterval()


@pytest.fixture(autouse=True)
def no_fork_hangs():
    """A child that waits for a lock is ended by a signal, and says nothing."""
    before = signal.getsignal(signal.SIGALRM)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGALRM, before)


def forked(act):
    def in_time():
        signal.alarm(10)
        torch.set_num_threads(1)  # a fork has none of the threads that OpenMP waits for
        return act()

    return in_child(in_time)


def make_step():
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(n=1):
        for x, y in make_batches(n):
            F.mse_loss(model(x), y).backward()
            opt.step()
            opt.zero_grad()

    return model, opt, step


def test_a_watch_does_nothing_in_a_forked_process():
    model, opt, step = make_step()
    seen = []
    probe = Callback(after_step=lambda cb: seen.append("step"), after_fit=lambda cb: seen.append("end"))
    with watch(model, opt, probe, ActivationStats, Diagnose(show=False)) as w:
        step(3)

        def act():
            step(2)
            w.close()
            return len(seen), w.seen["after_step"], len(w.activation_stats.stats), sys.getswitchinterval()

        w.diagnosis._dispatcher.run.measured(SpentTime).samples.start()
        assert forked(act) == str((3, 3, 3, SWITCH))
        step()
    assert seen == ["step"] * 4 + ["end"]
    assert w.diagnose().looked[0].startswith("4 batches")


def test_a_forked_process_may_watch_a_model_of_its_own():
    def act():
        model, opt, step = make_step()
        with watch(model, opt, ActivationStats) as w:
            step(2)
        return len(w.activation_stats.stats)

    assert act() == 2
    assert forked(act) == "2"


@pytest.mark.slow
def test_no_lock_of_another_thread_is_waited_for_in_a_forked_process():
    model, opt, step = make_step()
    with watch(model, opt, Diagnose(show=False)) as w:
        step(2)
        lines = w.diagnosis._dispatcher.run.measured(SpentTime).samples
        lines.start()
        held, done = threading.Event(), threading.Event()

        def hold():
            with lines._stop._cond, threads.locked():
                held.set()
                done.wait(20)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(20)

        def act():
            own_model, own_opt, own_step = make_step()
            with watch(own_model, own_opt, Diagnose(show=False)):
                own_step(2)
            lines.close()
            return "done"

        try:
            assert forked(act) == "done"
        finally:
            done.set()
            thread.join()


# ---- the command

BEGIN = """
import os, sys
import torch
from torch import nn
from torch.nn import functional as F

def train(lr):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    opt = torch.optim.Adam(net.parameters(), lr)
    for i in range(40):
        x = torch.randn(16, 4)
        F.mse_loss(net(x), x[:, :1]).backward()
        opt.step()
        opt.zero_grad()
        if i == forks_at and not fork():
            sys.exit(0)

def fork():
    children.append(os.fork())
    return children[-1]

children = []
"""
WAIT = "for child in children:\n    os.waitpid(child, 0)\n"  # only for these, as pytest has others


@pytest.fixture
def run(tmp_path, capfd):
    """What the command shows of a script, in this process and those that the script forks."""

    def run(lines):
        (tmp_path / "script.py").write_text(BEGIN + lines + WAIT)
        process = os.getpid()
        code = main(["diagnose", str(tmp_path / "script.py")])
        if os.getpid() != process:
            os._exit(code)
        return code, *capfd.readouterr()

    return run


@pytest.mark.slow
def test_a_forked_process_that_trains_nothing_shows_nothing(run):
    code, out, err = run("forks_at = 20\ntrain(1e-3)\n")
    assert code == 0
    assert out.count("Sequential, trained by Adam") == out.count("HEALTHY") == 1
    assert not err


@pytest.mark.slow
def test_a_fault_in_a_forked_training_is_told_there(run):
    code, out, err = run("forks_at = None\nif not fork():\n    train(10.0)\n    sys.exit(0)\n")
    assert code == 1
    assert err.count("hookcb diagnose: ERROR") == 1
    assert out.count("SICK") == 1
    assert "no training was seen" in out  # in the process that has only waited
