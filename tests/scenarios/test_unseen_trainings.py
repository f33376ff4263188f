"""A verdict on a training of which nothing was seen is unknown, with the reason, and never healthy."""

import io
import json

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

from hookcb import (
    ActivationStats,
    Callback,
    CancelBatchException,
    Diagnose,
    Finding,
    GradientHealth,
    Verdict,
    assert_healthy,
    synth_learner,
    watch,
)
from hookcb.diagnosis.judge import judge
from hookcb.diagnosis.run import Run
from tests.support import along, fit, in_turn, make_learner, make_model

CBS = {"Diagnose": lambda: [Diagnose(show=False)], "records": lambda: [ActivationStats(), GradientHealth()]}


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def train(model, opt, n=25, step=True):
    for _ in range(n):
        loss = F.cross_entropy(model(torch.randn(16, 4)), torch.randint(3, (16,)))
        opt.zero_grad()
        loss.backward()
        if step:
            opt.step()


def other_trained(model, opt):
    """The model and its optimizer are watched, others are trained."""
    other = net()
    train(other, torch.optim.Adam(other.parameters()))


def inference(model, opt):
    for _ in range(5):
        model(torch.randn(4, 4))


def evaluation(model, opt):
    model.eval()
    with torch.no_grad():
        inference(model, opt)


SEEN_NOTHING = {
    "nothing happens": (lambda model, opt: None, "the model was not called"),
    "another model is trained": (other_trained, "the model was not called"),
    "calls in train mode only": (inference, "no gradient reached"),
    "calls in eval mode only": (evaluation, ""),
    "no step is made": (lambda model, opt: train(model, opt, 3, step=False), "no optimizer of the model"),
}


@in_turn(("cbs", "name"), along(CBS, SEEN_NOTHING))
def test_a_watch_that_saw_no_training_is_unknown_with_the_reason(name, cbs):
    happens, reason = SEEN_NOTHING[name]
    torch.manual_seed(0)
    model = net()
    opt = torch.optim.Adam(model.parameters())
    with watch(model, opt, *CBS[cbs]()) as w:
        happens(model, opt)
    verdict = w.diagnose()
    assert verdict.status == "unknown"
    assert reason in verdict.reason
    assert verdict.reason
    assert not verdict.ruled_out


@pytest.mark.filterwarnings("ignore:none of 3 hooked layers was seen:UserWarning")
def test_the_optimizer_of_another_model_is_told():
    """Its steps are seen, the model that is watched is never called."""
    torch.manual_seed(0)
    watched, other = net(), net()
    opt = torch.optim.Adam(other.parameters())
    with pytest.warns(UserWarning, match="no parameter of"):
        w = watch(watched, opt, Diagnose(show=False))
    with w:
        train(other, opt)
    assert (w.diagnose().status, bool(w.diagnose())) == ("unknown", False)
    assert "was not called" in w.diagnose().reason


@pytest.mark.slow
def test_an_optimizer_that_never_steps_is_told():
    """The model is called and gets gradients, and an optimizer that was not given trains it."""
    torch.manual_seed(0)
    model, other = net(), net()
    with pytest.warns(UserWarning, match="no parameter of"):
        w = watch(model, torch.optim.Adam(other.parameters()), Diagnose(show=False))
    with w:
        train(model, torch.optim.Adam(model.parameters()))
    assert w.diagnose().status == "unknown"
    assert "the given optimizer has no parameter of the model" in w.diagnose().reason


def closing(model, opt, n=60):
    x, y = torch.randn(16, 4), torch.randint(3, (16,))

    def closure():
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(n):
        opt.step(closure)


@pytest.mark.slow
def test_a_training_by_closures_is_judged_by_what_was_seen_of_it():
    """LBFGS has no one gradient for a step; layers and losses are there."""
    torch.manual_seed(0)
    model = net()
    opt = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    with watch(model, opt, Diagnose(show=False)) as w:
        closing(model, opt)
    verdict = w.diagnose()
    told = {x.code for x in verdict.findings if x.severity != "info"}
    assert not {code for code in told if not code.startswith("time.")}  # which another process can cause
    assert verdict.reason == ""
    assert verdict.n_checked < verdict.n_checks
    fine = " ".join(verdict.ruled_out)
    assert "flat loss" in fine
    assert not any(word in fine for word in ("attenuated", "exploding", "update", "dead"))


@pytest.mark.slow
def test_gradients_alone_see_nothing_of_a_training_by_closures():
    torch.manual_seed(0)
    model = net()
    opt = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    with watch(model, opt, GradientHealth()) as w:
        closing(model, opt)
    assert w.diagnose().status == "unknown"


def test_a_frozen_model_is_unknown():
    model = net().requires_grad_(False)
    with watch(model, None, Diagnose(show=False)) as w:
        inference(model, None)
    assert (w.diagnose().status, w.diagnose().reason) == (
        "unknown",
        "no parameter of the model requires a gradient",
    )


def test_a_fit_of_no_batches_is_unknown():
    learn = fit(make_learner(), 0, cbs=Diagnose())
    assert (learn.diagnose().status, learn.diagnose().reason) == ("unknown", "no training batch was seen")


def test_a_fit_whose_batches_are_all_cancelled_is_unknown():
    def cancel(cb):
        raise CancelBatchException

    learn = fit(make_learner(5), cbs=[Diagnose(show=False), Callback(before_batch=cancel)])
    assert learn.diagnose().status == "unknown"
    assert learn.diagnose().reason == "no optimizer step was seen in 5 batches, so no gradient was inspected"


def test_a_training_that_was_seen_is_never_unknown():
    learn = fit(synth_learner(), 1, cbs=[ActivationStats()])
    assert learn.diagnose().status == "healthy"
    learn = fit(synth_learner(), 1, cbs=[GradientHealth()])
    assert learn.diagnose().status == "healthy"


@in_turn("cbs", [[ActivationStats], [ActivationStats, GradientHealth]])
def test_a_tenth_of_the_checks_makes_no_training_healthy(cbs):
    model = net()
    with watch(model, torch.optim.Adam(model.parameters()), *[cls() for cls in cbs]) as w:
        train(model, w.opt)
    verdict = w.diagnose()
    assert verdict.headline.startswith("UNKNOWN  too little was seen: ")
    assert "checks could run; Diagnose() among the callbacks sees more" in verdict.reason


def test_a_verdict_is_true_only_if_it_is_healthy():
    assert judge(fit(synth_learner(), 2, cbs=Diagnose(show=False)).diagnosis.evidence())
    assert not judge(Run())
    sick = Finding("unit.dead", "error", message="all units are dead", next_steps=("look",))
    assert not Verdict("sick", sick, (sick,), (), ())
    assert not Verdict("suspect", sick, (sick,), (), ())


def test_unknown_is_said_in_text_json_and_color():
    verdict = judge(Run())
    assert str(verdict).startswith("UNKNOWN  nothing was seen: no training batch was seen")
    told = json.loads(verdict.to_json())
    assert (told["status"], told["reason"], told["primary"]) == ("unknown", verdict.reason, None)
    console = Console(record=True, force_terminal=True, width=100, file=io.StringIO())
    console.print(verdict)
    assert "UNKNOWN" in console.export_text()


def test_assert_healthy_does_not_pass_what_was_not_seen(monkeypatch):
    monkeypatch.setitem(assert_healthy.__globals__, "diagnose", lambda *args, **kwargs: judge(Run()))
    with pytest.raises(AssertionError, match="UNKNOWN  nothing was seen"):
        assert_healthy(make_model(), None)


def test_an_unknown_verdict_that_is_judged_again_is_the_same():
    learn = fit(make_learner(), 0, cbs=Diagnose())
    assert learn.diagnose() == learn.diagnose() == learn.diagnosis.verdict
