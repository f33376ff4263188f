"""The batches in which a diagnosis sleeps: what it knows of them is what it would know awake."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from hookcb import (
    Callback,
    CancelBackwardException,
    CancelBatchException,
    CancelFitException,
    CancelStepException,
    Diagnose,
    GradientAccumulation,
    Learner,
)
from hookcb.core.events import BATCH_EVENTS
from hookcb.diagnosis import recorder
from hookcb.diagnosis.attached import AttachedNotes
from tests.support import each

N = 200


def make_learner(model=None, n=N, **more):
    torch.manual_seed(0)
    batches = [(torch.randn(64, 6), torch.randint(0, 3, (64,))) for _ in range(n)]
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)) if model is None else model
    return Learner(batches, model, nn.functional.cross_entropy, torch.optim.SGD, lr=0.05, **more)


class Counting(Callback):
    """Counts batches that were left to the notes."""

    order = 100

    def __init__(self):
        super().__init__(name="counting")
        self.n_asleep, self.events = 0, set()

    def after_backward(self):
        self.n_asleep += self.learn.diagnosis._is_asleep


def diagnosed(monkeypatch, sleeps, *cbs, model=None, epochs=1, **more):
    """Evidence of a fit, and how many of its batches were only noted."""
    monkeypatch.setattr(recorder, "MAX_ASLEEP", 31 if sleeps else 0)
    learn, counting = make_learner(model, **more), Counting()
    with learn.no_logging():
        learn.fit(epochs, cbs=[Diagnose(on_sick="ignore"), counting, *[make() for make in cbs]])
    return learn, learn.diagnosis.evidence(), counting.n_asleep


def facts(evidence):
    """What does not depend on the clock."""
    return {
        "loss": (evidence.loss.steps, evidence.loss.values),
        "losses": {key: series.values for key, series in evidence.losses.items()},
        "lr": (evidence.lr.steps, evidence.lr.values),
        "n": (evidence.n_batches, evidence.n_looked, evidence.n_steps),
        "looks": evidence.sizes.steps,
        "waits": evidence.waits.steps,
        "observed": evidence.observed,
        "observations": [(x.code, x.step, x.text) for x in evidence.observations],
    }


def cancel_sometimes(event, kind):
    def act(cb):
        if cb.learn.train_iter in (90, 91, 120, 140):
            raise kind

    return partial(Callback, name="cancelling", **{event: act})


def scale_rate():
    def act(cb):
        for group in cb.learn.opt.param_groups:
            group["lr"] = 0.05 / (1 + cb.learn.train_iter)

    return Callback(name="rates", before_batch=act)


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_diagnosis_that_sleeps_knows_what_one_that_does_not_knows(monkeypatch, epochs):
    n = N // epochs
    _, asleep, n_asleep = diagnosed(monkeypatch, True, scale_rate, epochs=epochs, n=n)
    _, awake, n_awake = diagnosed(monkeypatch, False, scale_rate, epochs=epochs, n=n)
    assert n_asleep > 60
    assert n_awake == 0
    assert facts(asleep) == facts(awake)
    assert set(asleep.batches.steps) == set(awake.batches.steps)
    assert all(x > 0 for x in asleep.batches.values)


IN_BATCH = "before_batch", "after_pred", "after_loss", "before_backward", "after_backward", "before_step"


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        *each(6, [(event, CancelBatchException) for event in IN_BATCH]),
        ("before_backward", CancelBackwardException),
        ("before_step", CancelStepException),
    ],
)
def test_batches_that_are_cut_short_in_its_sleep_are_counted_as_when_it_is_awake(monkeypatch, event, kind):
    _, asleep, n_asleep = diagnosed(monkeypatch, True, cancel_sometimes(event, kind))
    _, awake, _ = diagnosed(monkeypatch, False, cancel_sometimes(event, kind))
    assert n_asleep > 5
    assert facts(asleep) == facts(awake)


@pytest.mark.parametrize("event", each(8, [*IN_BATCH, "after_step", "after_batch"]))
def test_a_fit_that_ends_in_its_sleep_is_known_up_to_the_batch_before(monkeypatch, event):
    def end(cb):
        if cb.learn.train_iter == 140:
            raise CancelFitException

    ending = partial(Callback, name="ending", **{event: end})
    _, asleep, n_asleep = diagnosed(monkeypatch, True, ending)
    _, awake, _ = diagnosed(monkeypatch, False, ending)
    assert n_asleep > 20
    assert asleep.loss.values[:140] == awake.loss.values[:140]
    assert asleep.waits.steps[:139] == awake.waits.steps[:139] == list(range(1, 140))
    assert (asleep.n_batches, asleep.n_looked) == (awake.n_batches, awake.n_looked)
    assert asleep.observations == awake.observations


def test_it_does_not_sleep_while_gradients_accumulate(monkeypatch):
    _, asleep, n_asleep = diagnosed(monkeypatch, True, partial(GradientAccumulation, 3))
    _, awake, _ = diagnosed(monkeypatch, False, partial(GradientAccumulation, 3))
    assert not n_asleep
    assert facts(asleep) == facts(awake)


def test_accumulation_that_begins_in_its_sleep_is_seen(monkeypatch):
    def begin():
        def act(cb):
            cb.learn.accumulating = cb.learn.train_iter >= 100 and cb.learn.train_iter % 3 > 0

        return Callback(name="late", before_backward=act)

    _, asleep, n_asleep = diagnosed(monkeypatch, True, begin)
    _, awake, _ = diagnosed(monkeypatch, False, begin)
    assert n_asleep > 5
    assert facts(asleep) == facts(awake)


def spoil(what):
    """A callback that makes the loss or a gradient NaN at batch 130."""

    def loss(cb):
        if cb.learn.train_iter == 130:
            cb.learn.loss = cb.learn.loss * math.nan

    def grad(cb):
        if cb.learn.train_iter == 130:
            next(cb.learn.model.parameters()).grad[0] = math.nan
            cb.learn.model[0].bias.grad[0] = math.nan

    class Spoiling(Callback):
        order = -50

    given = {"after_loss": loss} if what == "loss" else {"after_backward": grad}
    return partial(Spoiling, name="spoiling", **given)


@pytest.mark.parametrize("what", each(2, ["loss", "gradient"]))
def test_a_number_that_is_not_finite_wakes_it_at_once(monkeypatch, what):
    _, asleep, n_asleep = diagnosed(monkeypatch, True, spoil(what))
    _, awake, _ = diagnosed(monkeypatch, False, spoil(what))
    assert n_asleep > 20
    found, expected = ([x for x in evidence.observations if x.step == 130] for evidence in (asleep, awake))
    assert found
    assert [(x.code, x.text) for x in found] == [(x.code, x.text) for x in expected]
    assert (asleep.n_batches, asleep.n_steps) == (awake.n_batches, awake.n_steps)


def test_it_stops_the_fit_in_the_batch_whose_loss_is_not_finite():
    learn = make_learner()
    with learn.no_logging(), pytest.warns(match="nan|NaN|finite"):
        learn.fit(1, cbs=[Diagnose(on_sick="stop"), spoil("loss")()])
    assert learn.train_iter in (130, 131)


def test_another_optimizer_in_its_sleep_is_noticed(monkeypatch):
    def swap():
        def act(cb):
            if cb.learn.train_iter == 130:
                cb.learn.opt = torch.optim.SGD(cb.learn.model.parameters(), 0.01)

        return Callback(name="swap", before_batch=act)

    _, asleep, n_asleep = diagnosed(monkeypatch, True, swap)
    _, awake, _ = diagnosed(monkeypatch, False, swap)
    assert n_asleep > 20
    assert facts(asleep) == facts(awake)
    assert len(asleep.losses) == 2


def test_modes_are_noted_in_its_sleep(monkeypatch):
    def to_eval():
        def act(cb):
            if cb.learn.train_iter == 130:
                cb.learn.model.eval()

        return Callback(name="to_eval", before_batch=act)

    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))

    _, asleep, n_asleep = diagnosed(monkeypatch, True, to_eval, model=model())
    _, awake, _ = diagnosed(monkeypatch, False, to_eval, model=model())
    assert n_asleep > 20
    assert facts(asleep) == facts(awake)


def test_a_validation_in_the_midst_of_its_sleep_changes_nothing(monkeypatch):
    def validate():
        def act(cb):
            if cb.learn.training and cb.learn.train_iter in (100, 130):
                cb.learn.validate(make_learner(n=3).dls.train)

        return Callback(name="validating", after_batch=act)

    _, asleep, n_asleep = diagnosed(monkeypatch, True, validate)
    _, awake, _ = diagnosed(monkeypatch, False, validate)
    assert n_asleep > 20
    assert facts(asleep) == facts(awake)


def test_a_verdict_in_its_sleep_knows_all_batches_so_far():
    seen = []

    def ask(cb):
        if cb.learn.train_iter == 130:
            seen.append((cb.learn.diagnosis._is_asleep, cb.learn.diagnosis.evidence()))

    learn = make_learner()
    with learn.no_logging():
        learn.fit(1, cbs=[Diagnose(on_sick="ignore"), Callback(after_batch=ask)])
    (is_asleep, evidence), *_ = seen
    assert is_asleep
    assert evidence.n_batches == evidence.n_steps == 131
    assert evidence.loss.steps[-1] == 130


def test_the_training_is_the_same_and_nothing_is_left(monkeypatch):
    learn, _, n_asleep = diagnosed(monkeypatch, True)
    plain = make_learner()
    with plain.no_logging():
        plain.fit(1)
    assert n_asleep > 60
    for p, q in zip(learn.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(p, q)
    notes = learn.batch_notes
    assert isinstance(notes, AttachedNotes)
    assert notes.owner is notes.stepper is notes._param is None
    assert notes not in learn.cbs
    assert not learn._resting


def test_events_of_sleep_are_two(monkeypatch):
    """Of Diagnose nothing is called in a batch but the notes, after the loss and after the backward."""
    called = {}

    def look(cb):
        if cb.learn.train_iter == 120:
            own = {"Diagnose", "AttachedStats", "AttachedHealth", "AttachedNotes"}
            for event in BATCH_EVENTS:
                called[event] = [
                    type(x).__name__ for x, _ in cb.learn._awake[event] if type(x).__name__ in own
                ]

    diagnosed(monkeypatch, True, partial(Callback, name="look", after_pred=look))
    cancels = {"after_cancel_batch", "after_cancel_backward", "after_cancel_step"}
    acting = {event: names for event, names in called.items() if names and event not in cancels}
    assert acting == {"after_loss": ["AttachedNotes"], "after_backward": ["AttachedNotes"]}
