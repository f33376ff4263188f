"""With HOOKCB=0 nothing of hookcb takes part in a training, and code that uses it still runs."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from hookcb import ActivationStats, Callback, Diagnose, GradientHealth, count_hooks, watch
from hookcb.adapters.base import Attached
from hookcb.cli.main import main
from hookcb.core.switch import OFF
from hookcb.core.torch_private import tensor_hooks
from tests.support import everything as state_of
from tests.support import make_batches, make_learner, make_model, weights


class Counts(Callback):
    """Counts the batches that it is told of."""

    n = 0

    def before_fit(self):
        self.n += 1

    def before_batch(self):
        self.n += 1


def patched():
    """What hookcb may replace in torch while it follows something."""
    hooks = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
    functions = torch.autograd.backward, torch.autograd.grad, torch.Tensor.backward
    return *functions, torch.amp.GradScaler.scale, nn.Module.__call__, *map(len, hooks)


def train(*cbs, follows=True):
    """Trains by hand with every report that a watch takes; returns the model and the watch."""
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    before, w = patched(), watch(model, opt, *cbs) if follows else None
    for xb, yb in make_batches():
        loss = nn.functional.mse_loss(pred := model(xb), yb)
        if w is not None:
            w.begin_batch(True, xb)
            w.report_pred(pred)
            assert w.report_loss(loss) is loss
            w.begin_backward()
            assert not tensor_hooks(loss)
            assert not tensor_hooks(pred)
            assert count_hooks(model) == 0
            assert patched() == before
        loss.backward()
        if w is not None:
            w.end_backward()
            w.begin_step(opt)
        opt.step()
        if w is not None:
            w.end_step()
            w.end_batch()
            w.report_metrics({"val_loss": loss})
            w.end_epoch()
        opt.zero_grad()
    return model, w


def test_a_watch_attaches_nothing_and_its_methods_do_nothing(monkeypatch):
    plain, _ = train(follows=False)
    monkeypatch.setenv("HOOKCB", "0")
    counts = Counts()
    model, w = train(Diagnose(), ActivationStats(), GradientHealth(), counts)
    assert all(map(torch.equal, weights(model), weights(plain)))
    assert counts.n == 0
    assert not w.seen
    assert w.xb == ()
    assert w.pred is None
    assert w.loss is None
    assert w.reported_metrics == {}
    assert not w.has_batch
    assert not w.stop_requested
    assert set(w.coverage.missing.values()) == {OFF}
    assert w.coverage.notes == (OFF,)
    assert isinstance(w.activation_stats, ActivationStats)
    assert isinstance(w.gradient_health, GradientHealth)
    with w:
        pass
    w.close()
    watch(model, counts)  # they may follow another loop


def test_its_verdict_is_that_it_is_off(monkeypatch):
    monkeypatch.setenv("HOOKCB", "0")
    for cbs in ((Diagnose(),), (ActivationStats(),), ()):
        _, w = train(*cbs)
        verdict = w.diagnose()
        assert verdict.status == "unknown"
        assert verdict.reason == "HOOKCB=0 switches hookcb off"
        assert not verdict
        assert OFF in w.report().data.headline


def test_a_watch_stays_as_it_was_opened(monkeypatch):
    monkeypatch.setenv("HOOKCB", "0")
    _, w = train(Diagnose(show=False))
    monkeypatch.delenv("HOOKCB")
    assert w.diagnose().reason == OFF
    counts = Counts()
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, counts):
        monkeypatch.setenv("HOOKCB", "0")
        model(make_batches()[0][0]).sum().backward()
        opt.step()
    assert counts.n == 2


def test_a_learner_trains_with_its_callbacks_and_without_diagnose(monkeypatch):
    plain, learn = make_learner(), make_learner(cbs=[Diagnose(), counts := Counts()])
    with plain.no_logging():
        plain.fit(1)
    monkeypatch.setenv("HOOKCB", "0")
    hooks = []
    counts.after_pred = lambda: hooks.append(count_hooks(learn.model))
    before = state_of(learn.model)["flags"]
    with learn.no_logging():
        learn.fit(1)
    assert all(map(torch.equal, weights(learn.model), weights(plain.model)))
    assert counts.n > 1
    assert hooks
    assert not any(hooks)
    assert state_of(learn.model)["flags"] == before
    assert learn.diagnose().reason == OFF
    assert plain.diagnose().reason == OFF
    monkeypatch.delenv("HOOKCB")
    with learn.no_logging():
        learn.fit(4)
    assert learn.diagnose().reason != OFF


def test_an_adapter_follows_nothing(monkeypatch):
    monkeypatch.setenv("HOOKCB", "0")
    attached, model = Attached(Diagnose(), ActivationStats()), make_model()
    attached.follow(lambda cbs: watch(model, cbs=cbs))
    assert attached.running is None
    assert count_hooks(model) == 0
    assert attached.diagnose().reason == OFF
    assert not attached.stop_requested


@pytest.mark.parametrize("value", ["", "1"])
def test_it_is_on_otherwise(value, monkeypatch):
    monkeypatch.setenv("HOOKCB", value)
    model = make_model()
    with watch(model, ActivationStats()):
        assert count_hooks(model)


@pytest.mark.parametrize("value", ["off", "O", "00", "false"])
def test_a_typo_is_an_error_that_says_what_is_possible(value, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HOOKCB", value)
    wrong = f"HOOKCB in the environment must be 0, which switches hookcb off, or 1, got '{value}'"
    model = make_model()
    with pytest.raises(ValueError, match=wrong):
        watch(model)
    assert count_hooks(model) == 0
    script = tmp_path / "script.py"
    script.write_text("print('ran')")
    with pytest.raises(SystemExit):
        main(["diagnose", str(script)])
    shown = capsys.readouterr()
    assert wrong in " ".join(shown.err.split())
    assert "ran" not in shown.out


SCRIPT = """
import sys, torch
from hookcb import count_hooks
net = torch.nn.Linear(2, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    net(torch.ones(4, 2)).sum().backward()
    opt.step()
    print(count_hooks(net), torch.autograd.backward.__module__, torch.nn.Module.__call__.__module__)
print(sys.argv[1:])
sys.exit(7)
"""


def test_the_command_just_runs_the_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "hookcb", "diagnose", "--json", str(script), "--epochs", "3"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HOOKCB": "0"})
    line = "0 torch.autograd torch.nn.modules.module"
    assert done.stdout.splitlines() == [line] * 3 + ["['--epochs', '3']"]
    assert done.stderr == f"hookcb diagnose: {OFF}, so the script just runs\n"
    assert done.returncode == 7
