"""Batches, examples and steps are counted as they were, cancelled ones left out."""

import sys
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hookcb import (
    Callback,
    CancelBackwardException,
    CancelBatchException,
    CancelStepException,
    Diagnose,
    Learner,
    watch,
)
from hookcb.diagnosis.fault import FAULTS, Fault, Measurement
from hookcb.diagnosis.measurements.dead_units import DeadUnits
from hookcb.diagnosis.schedule import Schedule
from hookcb.testing import assert_no_hooks
from tests.support import first, fit, make_batches, make_learner, make_model


def examples_of_steps(*cbs, n=12):
    """Number of examples that each measurement of dead units gets, in batches of four."""
    looks = []
    diagnose = Diagnose(show=False)

    def follow(cb):
        dead = diagnose._dispatcher.run.measured(DeadUnits)
        own = dead.read_gradients
        dead.read_gradients = lambda step, n, *rest: (looks.append(n), own(step, n, *rest))

    fit(make_learner(n, 0, lr=0.01), 1, cbs=[diagnose, Callback(before_train=follow), *cbs])
    return looks


def raising(cancel, event, of=lambda i: True):
    def handle(cb):
        if of(cb.train_iter):
            raise cancel

    return Callback(name="raising", **{event: handle})


def test_each_step_has_the_examples_of_its_batch():
    assert len(set(examples_of_steps())) == 1


@pytest.mark.parametrize(
    ("cancel", "event"),
    first(
        [
            (CancelBatchException, "after_pred"),
            (CancelBatchException, "before_batch"),
            (CancelBackwardException, "before_backward"),
        ]
    ),
)
def test_the_examples_of_a_cancelled_batch_count_for_no_step(cancel, event):
    size = examples_of_steps()[0]
    odd = raising(cancel, event, of=lambda i: i % 2 == 1)
    looks = examples_of_steps(odd)
    assert set(looks) <= {size, 0}
    assert looks.count(size) == 6


def test_examples_of_a_cancelled_step_count_for_the_next_one():
    size = examples_of_steps()[0]
    looks = examples_of_steps(raising(CancelStepException, "before_step", of=lambda i: i % 3 != 2))
    assert looks == [size, 2 * size, 3 * size] * 4


def test_steps_that_are_cancelled_swallow_no_update_and_leave_no_stale_gradients():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)).bfloat16()
    batches = [(torch.randn(16, 8).bfloat16(), torch.randn(16, 1).bfloat16()) for _ in range(24)]
    learn = Learner(batches, model, F.mse_loss, torch.optim.SGD, lr=0.5)
    cancels = raising(CancelStepException, "before_step", of=lambda i: i < 19)
    verdict = fit(learn, 1, cbs=[Diagnose(show=False), cancels]).diagnose()
    assert not {"update.lost_to_rounding", "grad.stale"} & {f.code for f in verdict.findings}


@pytest.mark.filterwarnings("ignore:ERROR  Parameters never change:UserWarning")
def test_backwards_are_counted_by_backwards():
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, opt, Diagnose(show=False)) as w:
        for x, y in make_batches(25):
            w.report_loss(F.mse_loss(model(x), y)).backward()
        for x, _ in make_batches(5):
            model(x)
    found = next(f for f in w.diagnose().findings if f.code == "param.not_stepped")
    assert "In 25 batches with a backward" in found.message


# ---- batches that are not inspected


class Operators(TorchDispatchMode):
    """Counts operators of torch by name."""

    def __init__(self):
        super().__init__()
        self.n_calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n_calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def work_of_a_batch(n_layers, *cbs, at=40):
    """Calls of torch's operators and hookcb's modules in a batch; as late as if 500 had been left out."""
    operators, calls = Operators(), Counter()

    def count(frame, event, arg):
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.partition(".")[0] == "hookcb":
            calls[module] += 1

    def begin(cb):
        if cb.train_iter == at - 2 and cbs:
            cbs[0]._dispatcher.run.n_steps += 500
        elif cb.train_iter == at:
            operators.__enter__()
            sys.setprofile(count)
        elif cb.train_iter == at + 1:
            sys.setprofile(None)
            operators.__exit__(None, None, None)

    layers = [layer for _ in range(n_layers) for layer in (nn.Linear(2, 2), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(2, 1))
    first = Callback(before_batch=begin, name="first")
    first.order = -1000
    fit(make_learner(at + 2, 0, model=model, lr=0.01), 1, cbs=[first, *cbs])
    return operators.n_calls, calls


def test_a_batch_that_is_not_inspected_costs_a_closed_gate_per_layer(monkeypatch):
    monkeypatch.setattr(Schedule, "is_due", lambda self: False)
    own = []
    for n_layers in (1, 8):
        plain, _ = work_of_a_batch(n_layers)
        operators, calls = work_of_a_batch(n_layers, Diagnose(show=False, on_sick="ignore"))
        own.append((operators - plain, calls))
    (operators, calls), (operators_of_8, calls_of_8) = own
    assert operators == operators_of_8
    per_layer = {module.removeprefix("hookcb.").split(".")[0] for module in calls_of_8 - calls}
    assert per_layer == {"hooks", "core"}  # and whether the model still holds the same, by what core reads


class DropsAlways(nn.Sequential):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, training=True)


@pytest.mark.slow
def test_the_validation_of_a_long_epoch_is_inspected():
    n = 150
    model = DropsAlways(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    x = torch.randn(n, 64, 3)
    data = [(batch, batch.sum(1, keepdim=True)) for batch in x]
    learn = Learner((data, data[:2]), model, F.mse_loss, torch.optim.SGD, lr=0.01)
    fit(learn, 1, cbs=Diagnose(show=False))
    assert "dropout.in_eval" in {finding.code for finding in learn.diagnose().findings}
    stats = learn.activation_stats
    assert stats.n_batches + stats.n_skipped == n
    assert stats.n_batches == len(stats.stats)
    assert_no_hooks(model)


class Evaluations(Measurement):
    """What it is shown of validations."""

    def __init__(self):
        self.seen = []

    def on_eval_batch(self, run):
        (x,) = run.loop.xb
        self.seen.append(("batch", run.step, run.loop.training, len(x)))

    def on_eval_prediction(self, run):
        self.seen.append(("prediction", run.step, run.loop.training, len(run.loop.pred)))

    def on_eval_loss(self, run):
        self.seen.append(("loss", run.step, run.loop.training, run.loop.loss.ndim))


class OfEvaluations(Fault):
    code, uses = "test.evaluations", (Evaluations,)


@pytest.fixture
def evaluations(monkeypatch):
    monkeypatch.setitem(FAULTS, OfEvaluations.code, OfEvaluations)
    diagnose = Diagnose(show=False)
    return diagnose, lambda: diagnose.evidence().measured(Evaluations).seen


def test_faults_are_shown_the_first_batches_of_each_validation(evaluations):
    diagnose, seen = evaluations
    fit(make_learner(3, 6, lr=0.01), 2, cbs=diagnose)
    of_batch = [("batch", 4), ("prediction", 4), ("loss", 0)]
    of_each = [(what, n) for _ in range(4) for what, n in of_batch] + [("loss", 0)] * 2
    assert seen() == [(what, step, False, n) for step in (3, 6) for what, n in of_each]


def test_faults_are_shown_batches_of_a_validation_that_a_watch_sees(evaluations):
    diagnose, seen = evaluations
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, opt, diagnose):
        for _ in range(2):
            model.train()
            for x, y in make_batches(3):
                opt.zero_grad()
                F.mse_loss(model(x), y).backward()
                opt.step()
            model.eval()
            with torch.no_grad():
                for x, _ in make_batches(6):
                    model(x)
    of_each = [("batch", 4), ("prediction", 4)] * 4
    assert seen() == [(what, step, False, n) for step in (3, 6) for what, n in of_each]


def test_an_error_in_a_fault_ends_no_validation(evaluations, monkeypatch):
    diagnose, _ = evaluations

    def fails(part, run):
        raise ZeroDivisionError

    monkeypatch.setattr(Evaluations, "on_eval_prediction", fails)
    learn = fit(make_learner(3, 6, lr=0.01), 2, cbs=diagnose)
    assert learn.train_iter == 6
    assert any("ZeroDivisionError" in note for note in diagnose.evidence().notes)
