"""Batches, examples and steps are counted as they were, cancelled ones left out."""

import statistics
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import (
    Callback,
    CancelBackwardException,
    CancelBatchException,
    CancelStepException,
    Diagnose,
    Learner,
    watch,
)
from hookcb.diagnosis.schedule import Schedule
from hookcb.testing import assert_no_hooks, count_hooks
from tests.support import fit, make_batches, make_learner, make_model


def examples_of_steps(*cbs, n=12):
    """Number of examples that each measurement of dead units gets, in batches of four."""
    looks = []
    diagnose = Diagnose(show=False)

    def follow(cb):
        dead = diagnose._probes.dead
        own = dead.read_gradients
        dead.read_gradients = lambda step, n_examples: (looks.append(n_examples), own(step, n_examples))

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
    [
        (CancelBatchException, "after_pred"),
        (CancelBatchException, "before_batch"),
        (CancelBackwardException, "before_backward"),
    ],
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


@pytest.mark.filterwarnings("ignore:ERROR  param.not_stepped:UserWarning")
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


def calls_per_batch(*cbs, first=520, n=30):
    """Median number of calls of hookcb's functions in a batch, after those in which all steps are checked."""
    counts = []

    def count(frame, event, arg):
        if event == "call" and "hookcb" in frame.f_code.co_filename:
            counts[-1] += 1

    def begin(cb):
        if first <= cb.train_iter < first + n:
            counts.append(0)
        if cb.train_iter in (first, first + n):
            sys.setprofile(count if cb.train_iter == first else None)

    before = Callback(name="before", before_batch=begin)
    before.order = -1000
    try:
        fit(make_learner(first + n + 1, 0, lr=0.01), 1, cbs=[before, *cbs])
    finally:
        sys.setprofile(None)
    assert len(counts) == n
    return statistics.median(counts)


@pytest.mark.parametrize(("has_compiled", "of_a_layer"), [(False, 2), (True, 5)])
def test_a_batch_that_is_not_inspected_costs_few_calls(monkeypatch, has_compiled, of_a_layer):
    monkeypatch.setattr(Schedule, "is_due", lambda self: False)
    # what was compiled may contain hooks, so that they stay
    monkeypatch.setattr("hookcb.hooks.callback.has_compiled", lambda: has_compiled)
    monkeypatch.setattr("hookcb.hooks.callback.contains_compiled", lambda model: has_compiled)
    n_layers = 3
    extra = calls_per_batch(Diagnose(show=False, on_sick="ignore")) - calls_per_batch()
    assert extra <= 70 + of_a_layer * n_layers


# ---- batches that are not inspected


class DropsAlways(nn.Sequential):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, training=True)


def test_a_model_is_without_hooks_in_most_batches_and_its_validation_is_still_inspected(monkeypatch):
    monkeypatch.setattr("hookcb.hooks.modules.compile_counts", lambda kind: {})
    n, counts = 150, []
    model = DropsAlways(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    x = torch.randn(n, 64, 3)
    data = [(batch, batch.sum(1, keepdim=True)) for batch in x]
    learn = Learner((data, data[:2]), model, F.mse_loss, torch.optim.SGD, lr=0.01)
    look = Callback(after_pred=lambda cb: cb.training and counts.append(count_hooks(cb.model)), name="look")
    fit(learn, 1, cbs=[Diagnose(show=False), look])
    assert counts[0] > 0
    assert counts.count(0) > n / 3
    assert "mode.mismatch" in {finding.code for finding in learn.diagnose().findings}
    stats = learn.activation_stats
    assert stats.n_batches + stats.n_skipped == n
    assert stats.n_batches == len(stats.stats)
    assert_no_hooks(model)
