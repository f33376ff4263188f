"""Batches that a diagnosis does not look at: it knows the loss of each, its rate and its step."""

import math

import pytest
import torch
from torch import nn

from hookcb import Callback, CancelFitException, Diagnose, GradientAccumulation, Learner, watch
from hookcb.diagnosis.fault import findings_of
from hookcb.diagnosis.measurements.curves import Curves
from tests.support import first

N = 200


def make_learner(model=None, n=N):
    torch.manual_seed(0)
    batches = [(torch.randn(64, 6), torch.randint(0, 3, (64,))) for _ in range(n)]
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)) if model is None else model
    return Learner(batches, model, nn.functional.cross_entropy, torch.optim.SGD, lr=0.05)


def evidence_of(*cbs, model=None, epochs=1, n=N):
    learn = make_learner(model, n)
    with learn.no_logging():
        learn.fit(epochs, cbs=[Diagnose(on_sick="ignore"), *cbs])
    return learn.diagnosis.evidence()


def at(step, event, act):
    """A callback that acts in one batch, before a diagnosis."""

    class Acting(Callback):
        order = -50

    return Acting(name="acting", **{event: lambda cb: act(cb.learn) if cb.learn.train_iter == step else None})


@pytest.mark.parametrize("epochs", first([1, 4]))
def test_each_batch_is_known(epochs):
    def scale(cb):
        cb.learn.opt.param_groups[0]["lr"] = 0.05 / (1 + cb.learn.train_iter)

    evidence = evidence_of(Callback(name="rates", before_batch=scale), epochs=epochs, n=N // epochs)
    assert evidence.loss.steps == evidence.lr.steps == list(range(N))
    assert evidence.lr.values == [0.05 / (1 + i) for i in range(N)]
    assert (evidence.n_batches, evidence.n_steps) == (N, N)
    assert evidence.n_looked < N / 5
    firsts = set(range(0, N, N // epochs))  # whose fetch starts the loader
    curves = evidence.measured(Curves)
    assert set(curves.waits.steps) == set(curves.batches.steps) == set(range(N)) - firsts
    assert all(x > 0 for x in curves.batches.values)


@pytest.mark.parametrize("event", first(["before_batch", "after_loss", "before_step", "after_batch"]))
def test_a_fit_that_ends_is_known_up_to_the_batch_before(event):
    def end(learn):
        raise CancelFitException

    evidence = evidence_of(at(140, event, end))
    assert evidence.loss.steps[:140] == list(range(140))
    assert evidence.measured(Curves).waits.steps[:139] == list(range(1, 140))


@pytest.mark.slow
def test_steps_of_accumulated_batches_are_counted():
    evidence = evidence_of(GradientAccumulation(4))
    assert (evidence.n_batches, evidence.n_steps) == (N, N // 4)


@pytest.mark.parametrize("what", first(["loss", "gradient"]))
def test_a_number_that_is_not_finite_is_found_in_its_batch(what):
    def loss(learn):
        learn.loss = learn.loss * math.nan

    def gradient(learn):
        learn.model[0].bias.grad[0] = math.nan

    acting = at(130, "after_loss", loss) if what == "loss" else at(130, "after_backward", gradient)
    evidence = evidence_of(acting)
    assert [x.step for x in findings_of("nonfinite.first", evidence)] == [130]


@pytest.mark.slow
def test_it_stops_the_fit_in_the_batch_whose_loss_is_not_finite():
    def spoil(learn):
        learn.loss = learn.loss * math.nan

    learn = make_learner()
    with learn.no_logging(), pytest.warns(match="nan|NaN|finite"):
        learn.fit(1, cbs=[Diagnose(on_sick="stop"), at(130, "after_loss", spoil)])
    assert learn.train_iter in (130, 131)


@pytest.mark.parametrize("what", first(["loss", "gradient"]))
def test_a_number_that_is_not_finite_is_found_in_its_batch_of_a_watched_loop(what):
    learn = make_learner()
    opt = torch.optim.SGD(learn.model.parameters(), lr=0.05)
    with watch(learn.model, opt, Diagnose(on_sick="ignore", show=False)) as w:
        for i, (x, y) in enumerate(learn.dls.train):
            if i == 151 and what == "gradient":  # as by a hook of the user, in the backward
                learn.model[0].bias.register_hook(lambda grad: grad * torch.nan)
            if i == 151 and what == "loss":
                learn.model[2].bias.data[0] = torch.nan
            nn.functional.cross_entropy(learn.model(x), y).backward()
            opt.step()
            opt.zero_grad()
    evidence = w.diagnosis.evidence()
    assert [x.step for x in findings_of("nonfinite.first", evidence)] == [151]


@pytest.mark.slow
def test_another_optimizer_is_noticed():
    def swap(learn):
        learn.opt = torch.optim.SGD(learn.model.parameters(), 0.01)

    losses = evidence_of(at(130, "before_batch", swap)).measured(Curves).losses
    assert [series.steps for series in losses.values()] == [list(range(130)), list(range(130, N))]


@pytest.mark.slow
def test_layers_that_change_their_mode_are_noticed():
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    to_eval = at(131, "before_batch", lambda learn: learn.model.eval())
    assert [x.step for x in findings_of("mode.mismatch", evidence_of(to_eval, model=model))] == [131]


@pytest.mark.slow
def test_a_verdict_on_the_way_knows_all_batches_so_far():
    seen = []
    evidence_of(at(131, "before_batch", lambda learn: seen.append(learn.diagnosis.evidence())))
    (evidence,) = seen
    assert evidence.n_batches == evidence.n_steps == 131
    assert evidence.loss.steps[-1] == 130
