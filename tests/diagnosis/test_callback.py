"""Promises of Diagnose and `diagnose()`: in a fit, in a watch, twice in a row, with and without others."""

import copy
import pickle
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from hookcb import (
    ActivationStats,
    Callback,
    CancelFitException,
    Checkpoint,
    Diagnose,
    GradientHealth,
    Learner,
    StepTimer,
    Verdict,
    assert_no_hooks,
    synth_learner,
    watch,
)
from hookcb.diagnosis.judge import judge
from hookcb.diagnosis.measurements.operations import OpProbe
from tests.support import SaysSo, along, first, fit, in_turn, make_batches, make_learner, make_model
from tests.training.support import TakesDict, TwoInputs, Unsized

NAN = float("nan")
STATUSES = ("healthy", "suspect", "sick", "unknown")
# whether these trainings are healthy is not what is asked here
anyhow = pytest.mark.filterwarnings("ignore:ERROR  :UserWarning")


def repickled(x):
    return pickle.loads(pickle.dumps(x))


def sick_learner(n=30, at=3, n_valid=0):
    """Its loss is NaN from one batch on."""
    calls = []

    def loss_func(pred, y):
        calls.append(1)
        return F.mse_loss(pred, y) * (NAN if len(calls) > at else 1)

    return make_learner(n, n_valid, loss_func=loss_func, lr=0.01)


def watched(model, batches, *cbs, lr=0.01, **kwargs):
    """A loop as users write it."""
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    with watch(model, opt, *cbs, **kwargs) as w:
        for x, y in batches:
            opt.zero_grad()
            loss = F.mse_loss(model(x), y)
            w.report_loss(loss)
            loss.backward()
            opt.step()
    return w


# ---- its arguments


@in_turn("on_sick", ["explode", "", None, True, 3, ["warn"], "WARN", "raise"])
def test_an_on_sick_that_cannot_be_is_refused_with_what_can_be(on_sick):
    error = ValueError if isinstance(on_sick, str) else TypeError
    with pytest.raises(error, match=r"on_sick.*'warn', 'stop', 'ignore' or a function of the verdict"):
        Diagnose(on_sick)


@in_turn("budget", [-0.1, 1.5, NAN, float("inf"), None, "much", True, [0.1]])
def test_a_budget_that_is_no_share_is_refused(budget):
    with pytest.raises((ValueError, TypeError), match="budget"):
        Diagnose(budget=budget)


@pytest.mark.parametrize("name", ["", "two words", "1st"])
def test_a_name_that_is_none_is_refused(name):
    with pytest.raises(ValueError, match="name"):
        Diagnose(name=name)


def test_a_name_that_the_learner_uses_itself_is_refused_before_the_fit():
    learn = make_learner()
    with pytest.raises((ValueError, AttributeError), match="fit"):
        fit(learn, cbs=Diagnose(name="fit"))
    assert_no_hooks(learn.model)


# ---- diagnose() of a learner


def test_with_nothing_recorded_diagnose_says_what_to_do():
    learn = make_learner()
    with pytest.raises(RuntimeError, match="Diagnose"):
        learn.diagnose()
    fit(learn)
    with pytest.raises(RuntimeError, match="Diagnose"):
        learn.diagnose()
    with pytest.raises(RuntimeError, match="Diagnose"):
        fit(learn, cbs=StepTimer()).diagnose()


def test_diagnose_attached_but_not_fitted_says_so():
    learn = make_learner(cbs=Diagnose())
    assert learn.diagnosis.verdict is None
    with pytest.raises(RuntimeError):
        learn.diagnose()
    with pytest.raises(RuntimeError):
        learn.diagnosis.evidence()


@anyhow
@pytest.mark.parametrize(
    "cbs", [[ActivationStats], [GradientHealth], [ActivationStats, GradientHealth]], ids=["a", "g", "both"]
)
def test_callbacks_that_record_are_enough_for_a_verdict(cbs):
    verdict = fit(make_learner(30), cbs=cbs).diagnose()
    assert verdict.status in STATUSES
    assert any("not checked" in line for line in verdict.coverage)
    assert str(verdict)


@pytest.mark.slow
def test_gradient_health_alone_sees_dead_units():
    learn = make_learner(140, lr=0.001, model=nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)))
    nn.init.constant_(learn.model[0].bias, -50.0)
    for cbs in ([GradientHealth], [ActivationStats(include_paramless=True), GradientHealth()], [Diagnose]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            verdict = fit(learn, cbs=cbs).diagnose()
        assert "unit.dead" in [f.code for f in verdict.findings]
        assert verdict.status == "sick"


def test_diagnose_is_a_pure_question():
    learn = fit(synth_learner(30), cbs=Diagnose())
    before = torch.get_rng_state()
    one, two = learn.diagnose(), learn.diagnose()
    assert isinstance(one, Verdict)
    assert one == two == learn.diagnosis.verdict
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
@anyhow
def test_diagnose_can_be_asked_in_the_middle_of_a_fit():
    asked = []
    ask = Callback(after_batch=lambda cb: asked.append(cb.learn.diagnose()))
    ask.order = 90
    learn = fit(make_learner(6), 2, cbs=[Diagnose(), ask])
    assert len(asked) >= 12
    assert {verdict.status for verdict in asked} <= set(STATUSES)
    assert_no_hooks(learn.model)


@anyhow
def test_the_users_own_callbacks_are_used_and_stay_as_they_were():
    own = [ActivationStats(with_hist=True, every=3), GradientHealth(every=2, activations=True)]
    alone = [ActivationStats(with_hist=True, every=3), GradientHealth(every=2, activations=True)]
    fit(make_learner(9), cbs=alone)
    learn = fit(make_learner(9), cbs=[*own, Diagnose()])
    assert learn.activation_stats is own[0]
    assert learn.gradient_health is own[1]
    assert len(own[0].stats) == len(alone[0].stats)
    assert len(own[1].stats) == len(alone[1].stats)
    assert str(list(own[1].stats)) == str(list(alone[1].stats))
    assert learn.diagnose().coverage


@anyhow
def test_callbacks_that_it_brings_go_with_it():
    learn = make_learner(5)
    before = list(learn.cbs)
    fit(learn, cbs=Diagnose())
    assert list(learn.cbs) == before
    fit(learn)
    fit(learn, cbs=[ActivationStats(), GradientHealth()])  # their names are free


@anyhow
def test_user_callbacks_of_other_names_do_not_get_in_its_way():
    cbs = [ActivationStats(name="acts"), GradientHealth(name="grads"), Diagnose(name="doctor")]
    learn = fit(make_learner(5), cbs=cbs)
    assert learn.doctor.verdict == learn.diagnose()
    assert len(learn.acts.stats) > 0


@anyhow
def test_two_of_them_under_different_names_both_give_a_verdict():
    learn = fit(make_learner(6), cbs=[Diagnose(name="a"), Diagnose(name="b")])
    assert learn.a.verdict.findings == learn.b.verdict.findings
    assert_no_hooks(learn.model)
    assert not is_in_torch_dispatch_mode()  # else torch.compile does nothing from now on


def test_a_probe_that_entered_last_exits_first():
    entered, order = [], []

    def enter(probe):
        entered.append(probe)
        return real[0](probe)

    def leave(probe, *error):
        order.append(probe is entered.pop())
        return real[1](probe, *error)

    real = OpProbe.__enter__, OpProbe.__exit__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OpProbe, "__enter__", enter)
        patch.setattr(OpProbe, "__exit__", leave)
        fit(make_learner(6), cbs=[Diagnose(name="a"), Diagnose(name="b")])
    assert order  # torch 2.6 and 2.7 crash if a mode is deleted that is not the last one on their stack
    assert all(order)


# ---- one fit after another


@pytest.mark.slow
def test_a_second_fit_forgets_the_first():
    diagnose = Diagnose()
    with pytest.warns(UserWarning, match="ERROR"):
        fit(sick_learner(), cbs=diagnose)
    assert diagnose.verdict.status == "sick"
    healthy = fit(synth_learner(30), 2, cbs=diagnose)
    assert diagnose.verdict.status == "healthy"
    assert healthy.diagnose().findings == ()
    with pytest.warns(UserWarning, match="ERROR"):  # and warns anew
        fit(sick_learner(), cbs=diagnose)
    assert diagnose.verdict.status == "sick"


@anyhow
def test_a_fit_that_fails_before_its_first_batch_leaves_no_verdict_of_the_last():
    diagnose = Diagnose()
    fit(sick_learner(), cbs=diagnose)

    def fail(cb):
        raise SaysSo(1, 2)

    with pytest.raises(SaysSo):
        fit(make_learner(cbs=Callback(before_epoch=fail)), cbs=diagnose)
    assert diagnose.verdict is None or diagnose.verdict.status != "sick"


@anyhow
def test_attached_to_a_learner_it_sees_fit_after_fit():
    learn = make_learner(5, cbs=Diagnose())
    for n_epoch in (1, 2):
        fit(learn, n_epoch)
        assert f"{5 * n_epoch} batches" in " ".join(learn.diagnose().coverage)
    assert_no_hooks(learn.model)


@anyhow
@pytest.mark.parametrize("copied", first([copy.deepcopy, repickled]))
@pytest.mark.parametrize("fitted", first([False, True]))
def test_it_can_be_copied_and_pickled_before_and_after_a_fit(copied, fitted):
    diagnose = Diagnose("stop", budget=0.1, show=False)
    if fitted:
        fit(sick_learner(), cbs=diagnose)
    twin = copied(diagnose)
    assert str(twin.verdict) == str(diagnose.verdict)
    fit(sick_learner(), cbs=twin)
    assert twin.verdict.status == "sick"
    assert (diagnose.verdict is None) == (not fitted)


@anyhow
@pytest.mark.parametrize("copied", first([copy.deepcopy, repickled]))
def test_a_learner_can_be_copied_and_pickled_after_a_fit(copied):
    learn = fit(make_learner(8, cbs=Diagnose()))
    twin = copied(learn)
    assert twin.diagnose() == learn.diagnose()
    fit(twin)
    assert_no_hooks(twin.model)
    assert twin.model is not learn.model


# ---- what it says, and when


def test_show_prints_the_verdict_once_and_no_logging_does_not(capsys):
    learn = synth_learner()
    learn.fit(1, cbs=Diagnose())
    assert capsys.readouterr().out.count("HEALTHY") == 1
    learn.fit(1, cbs=Diagnose(show=False))
    assert "HEALTHY" not in capsys.readouterr().out
    with learn.no_logging():
        learn.fit(1, cbs=Diagnose(show=True))
    learn.diagnose()
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_a_watch_prints_the_verdict_where_it_shows(capsys):
    batches = [(x, 3 * x[:, :1]) for x, _ in make_batches(9)]
    watched(make_model(), batches, Diagnose(), lr=1e-4)
    assert capsys.readouterr().out.split()[0] in ("HEALTHY", "SUSPECT", "SICK")
    watched(make_model(), batches, Diagnose(show=False), lr=1e-4)
    assert capsys.readouterr().out == ""


@anyhow
def test_what_a_fit_raises_is_not_covered_up_by_the_verdict(capsys):
    learn = make_learner(3, loss_func=lambda pred, y: 1 / 0)
    with pytest.raises(ZeroDivisionError) as raised:
        learn.fit(1, cbs=Diagnose())
    assert raised.value.__context__ is None
    assert learn.diagnose().status in STATUSES
    assert "Traceback" not in capsys.readouterr().out


@pytest.mark.parametrize("on_sick", first(["warn", "stop"]))
def test_a_sick_training_is_warned_of_once(on_sick):
    learn = sick_learner(60)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(learn, 2, cbs=Diagnose(on_sick))
    told = [str(w.message) for w in caught if "ERROR" in str(w.message)]
    assert len(told) <= 1 if on_sick == "stop" else len(told) == 1
    assert on_sick == "stop" or len(learn.recorder.losses) == 120
    assert len(caught) == len(told)


@anyhow
def test_stop_ends_the_fit_soon_after_the_loss_is_nan():
    learn = sick_learner(60, at=3)
    fit(learn, 3, cbs=Diagnose("stop"))
    assert 4 <= len(learn.recorder.losses) <= 8
    assert learn.diagnose().status == "sick"


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_ignore_says_nothing_before_the_verdict_at_the_end():
    learn = fit(sick_learner(60), 2, cbs=Diagnose("ignore", show=False))
    assert len(learn.recorder.losses) == 120
    assert learn.diagnose().status == "sick"


@pytest.mark.filterwarnings("error")
def test_a_function_is_called_once_in_a_fit_with_the_verdict_instead_of_a_warning():
    told = []
    diagnose = Diagnose(told.append, show=False)
    learn = fit(sick_learner(60), 2, cbs=diagnose)
    assert [verdict.status for verdict in told] == ["sick"]
    assert told[0].primary.code == learn.diagnose().primary.code
    assert len(learn.recorder.losses) == 120
    fit(learn, 1, cbs=diagnose)
    assert len(told) == 2


@pytest.mark.parametrize(("on_sick", "n"), first([("ignore", 1), (lambda verdict: None, 2)]))
def test_after_its_reaction_it_judges_no_more_until_the_end(on_sick, n, monkeypatch):
    judged = []
    monkeypatch.setattr(
        "hookcb.diagnosis.callback.judge", lambda *args, **kwargs: judged.append(1) or judge(*args, **kwargs)
    )
    learn = fit(sick_learner(60), 4, cbs=Diagnose(on_sick, show=False))  # checked after batches 20 and 200
    assert learn.diagnosis.verdict.status == "sick"
    assert len(judged) == n


@pytest.mark.filterwarnings("error")
def test_no_function_is_called_if_the_training_is_healthy():
    told = []
    learn = fit(synth_learner(30), 2, cbs=Diagnose(told.append, show=False))
    assert learn.diagnose().status == "healthy"
    assert told == []


@pytest.mark.parametrize("error", [CancelFitException, ZeroDivisionError])
def test_what_a_function_raises_ends_the_fit(error):
    def raises(verdict):
        raise error

    learn = sick_learner(60, at=3)
    heard = nullcontext() if error is CancelFitException else pytest.raises(error)
    with heard:
        fit(learn, 3, cbs=Diagnose(raises, show=False))
    assert 3 <= len(learn.recorder.losses) <= 8
    assert learn.diagnose().status == "sick"
    assert_no_hooks(learn.model)


@pytest.mark.filterwarnings("error")
def test_a_function_is_called_in_a_watch_too():
    told = []
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, opt, Diagnose(told.append, show=False)) as w:
        for i, (x, y) in enumerate(make_batches(30)):
            opt.zero_grad()
            loss = F.mse_loss(model(x), y) * (NAN if i > 3 else 1)
            w.report_loss(loss)
            loss.backward()
            opt.step()
    assert [verdict.status for verdict in told] == ["sick"]
    assert not w.stop_requested


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_stop_in_a_watch_is_no_error_of_the_loop():
    """A cancel is ignored in a watch, because the loop is the user's."""
    calls = []
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, opt, Diagnose("stop", show=False)) as w:
        for x, y in make_batches(30):
            opt.zero_grad()
            loss = F.mse_loss(model(x), y) * (NAN if len(calls) > 3 else 1)
            w.report_loss(loss)
            loss.backward()
            opt.step()
            calls.append(1)
    assert len(calls) == 30
    assert w.stop_requested
    assert w.diagnose().status == "sick"


def test_an_error_that_the_caller_handles_did_not_end_the_fit():
    try:
        raise SaysSo(1, 2)
    except SaysSo:
        learn = fit(synth_learner(30), cbs=Diagnose(show=False))
    assert "ended by" not in str(learn.diagnose())


def test_the_verdict_comes_after_an_interrupted_fit():
    def interrupt(cb):
        if cb.train_iter == 3:
            raise CancelFitException

    learn = fit(make_learner(9, lr=1e-4), cbs=[Diagnose(), Callback(after_batch=interrupt)])
    assert learn.diagnose() == learn.diagnosis.verdict


# ---- in whatever training


@anyhow
def test_a_loader_without_length_is_diagnosed():
    learn = Learner(Unsized(make_batches(25)), make_model(), F.mse_loss, torch.optim.SGD, lr=1e-3)
    assert "25 batches" in " ".join(fit(learn, cbs=Diagnose()).diagnose().coverage)


@anyhow
@pytest.mark.parametrize("n", [1, 2])
def test_the_shortest_training_has_a_verdict(n):
    learn = fit(make_learner(n, 0, lr=1e-3), cbs=Diagnose())
    assert learn.diagnose().status == "healthy"
    assert any("not checked" in line for line in learn.diagnose().coverage)


def test_a_fit_of_no_epochs_has_a_verdict_that_claims_nothing():
    """If no batch was seen, neither NaN in the inputs nor wrong modes are ruled out."""
    verdict = fit(make_learner(), 0, cbs=Diagnose()).diagnose()
    assert verdict.findings == ()
    assert "0 batches" in " ".join(verdict.coverage)
    claims = ("NaN", "input", "label", "mode", "loss", "lost to rounding", "left over", "never called")
    assert [line for line in verdict.ruled_out if any(claim in line for claim in claims)] == []


@anyhow
def test_validations_do_not_count_as_training():
    learn = fit(make_learner(5, 7, lr=1e-3), 2, cbs=Diagnose())
    assert "10 batches" in " ".join(learn.diagnose().coverage)
    assert "mode.mismatch" not in [f.code for f in learn.diagnose().findings]
    with learn.no_logging():
        learn.validate()
    assert "10 batches" in " ".join(learn.diagnose().coverage)


def test_a_validation_whose_loss_is_nan_is_not_the_trainings_fault():
    def loss_func(pred, y):
        return F.mse_loss(pred, y) * (1 if pred.requires_grad else NAN)

    learn = make_learner(8, 3, loss_func=loss_func, lr=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(learn, 2, cbs=Diagnose())
    assert "nonfinite.first" not in [f.code for f in learn.diagnose().findings]


@pytest.mark.slow
def test_lr_find_leaves_an_attached_one_alone():
    learn = synth_learner(30, cbs=Diagnose())
    fit(learn, 2)
    before = learn.diagnose()
    weights = [p.clone() for p in learn.model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # rates far too high are what lr_find is for
        learn.lr_find(num_it=25)
    assert learn.diagnose() == before
    assert all(map(torch.equal, weights, learn.model.parameters()))
    assert_no_hooks(learn.model)


@pytest.mark.slow
@anyhow
def test_a_resumed_fit_is_diagnosed_and_warns_of_nothing(tmp_path):
    for n_epoch in (1, 2):
        learn = synth_learner(25)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fit(learn, n_epoch, cbs=[Diagnose(), Checkpoint(tmp_path)], resume="latest")
    assert learn.diagnose().status == "healthy"
    assert learn.diagnosis.verdict is not None


@anyhow
def test_two_watches_of_one_model_each_give_a_verdict():
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    with watch(model, opt, Diagnose(show=False)) as one, watch(model, opt, Diagnose(show=False)) as two:
        for x, y in make_batches(8):
            opt.zero_grad()
            loss = F.mse_loss(model(x), y)
            one.report_loss(loss)
            two.report_loss(loss)
            loss.backward()
            opt.step()
    assert one.diagnose().findings == two.diagnose().findings
    assert one.diagnose().coverage[0].startswith("8 batches")
    assert two.diagnose().coverage[0].startswith("8 batches")
    assert_no_hooks(model)


def test_one_and_the_same_under_two_watches_is_refused_or_follows_the_second():
    diagnose, model = Diagnose(show=False), make_model()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    with watch(model, opt, diagnose):
        with pytest.raises((ValueError, RuntimeError)), watch(model, opt, diagnose):
            pass
        model(make_batches(1)[0][0]).sum().backward()
        opt.step()
    assert_no_hooks(model)


@anyhow
def test_one_watch_after_another_with_the_same_diagnose():
    diagnose = Diagnose(show=False)
    for n in (5, 8):
        w = watched(make_model(), make_batches(n), diagnose, lr=1e-3)
        assert w.diagnose().coverage[0].startswith(f"{n} batches")


@anyhow
def test_a_watch_that_is_told_no_loss_has_a_verdict():
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    with watch(model, opt, Diagnose(show=False)) as w:
        for x, y in make_batches(25):
            F.mse_loss(model(x), y).backward()
            opt.step()
            opt.zero_grad()
        w.end_epoch()
    assert w.diagnose().status == "healthy"
    assert "loss" in " ".join(line for line in w.diagnose().coverage if "not checked" in line)


@pytest.mark.slow
@anyhow
def test_a_watch_can_be_asked_within_the_loop():
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    with watch(model, opt, Diagnose(show=False)) as w:
        for x, y in make_batches(5):
            opt.zero_grad()
            loss = F.mse_loss(model(x), y)
            w.report_loss(loss)
            assert w.diagnose().status in STATUSES
            loss.backward()
            assert w.diagnose().status in STATUSES
            opt.step()
            assert w.diagnose().status in STATUSES


def test_a_watch_without_a_diagnose_says_what_to_do():
    model = make_model()
    w = watched(model, make_batches(2), StepTimer())
    with pytest.raises(RuntimeError, match="Diagnose"):
        w.diagnose()


@anyhow
def test_models_with_several_inputs_and_with_a_loss_of_their_own_are_diagnosed():
    x, y = make_batches(1)[0]
    several = Learner([(x, x, y)] * 6, TwoInputs(), F.mse_loss, torch.optim.SGD, lr=1e-3)
    mapped = Learner([{"x": x, "labels": y}] * 6, TakesDict(), None, torch.optim.SGD, lr=1e-3)
    for learn in (several, mapped):
        assert fit(learn, cbs=Diagnose()).diagnose().coverage[0].startswith("6 batches")


class OfSequences(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(2, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.rnn(x)[1][0])


@anyhow
def test_batches_of_packed_sequences_are_diagnosed():
    g = torch.Generator().manual_seed(0)
    sequences = [[torch.randn(n, 2, generator=g) for n in (5, 3, 2)] for _ in range(6)]
    batches = [(pack_sequence(s), torch.ones(3, 1)) for s in sequences]
    learn = fit(Learner(batches, OfSequences(), F.mse_loss, torch.optim.Adam, lr=1e-3), cbs=Diagnose())
    assert learn.diagnose().status == "healthy"


@anyhow
def test_two_optimizers_of_one_model_are_followed():
    model = make_model()
    opts = [torch.optim.SGD(model[0].parameters(), lr=1e-3), torch.optim.Adam(model[2].parameters(), lr=1e-3)]
    with watch(model, opts, Diagnose(show=False)) as w:
        for x, y in make_batches(12):
            F.mse_loss(model(x), y).backward()
            for opt in opts:
                opt.step()
                opt.zero_grad()
    codes = [f.code for f in w.diagnose().findings]
    assert "param.not_in_optimizer" not in codes
    assert "grad.stale" not in codes


def test_lbfgs_with_its_closure_is_no_stale_gradient():
    model = make_model()
    opt = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    x, y = make_batches(1, bs=16)[0]

    def closure():
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with watch(model, opt, Diagnose(show=False)) as w:
            for _ in range(8):
                opt.step(closure)
    assert "grad.stale" not in [f.code for f in w.diagnose().findings]
    assert_no_hooks(model)


def test_gradients_left_over_are_found_in_a_loop_that_never_drops_them():
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with watch(model, opt, Diagnose(show=False)) as w:
            for x, y in make_batches(8):
                F.mse_loss(model(x), y).backward()
                opt.step()
    assert w.diagnose().primary.code == "grad.stale"


@anyhow
def test_accumulation_in_a_loop_is_no_stale_gradient():
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    with watch(model, opt, Diagnose(show=False)) as w:
        for k, (x, y) in enumerate(make_batches(24)):
            F.mse_loss(model(x), y).backward()
            if k % 3 == 2:
                opt.step()
                opt.zero_grad(set_to_none=k % 2 == 0)
    assert "grad.stale" not in [f.code for f in w.diagnose().findings]


@anyhow
def test_a_scaler_whose_scale_has_not_settled_is_no_divergence():
    """From 2 to the 40 it comes down in the first steps, none of which is made."""
    model, scaler = make_model(), torch.amp.GradScaler("cpu", init_scale=2.0**40)
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    with watch(model, opt, Diagnose(show=False), scaler=scaler) as w:
        for x, y in make_batches(24):
            opt.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = F.mse_loss(model(x), y)
            w.report_loss(loss)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
    codes = {f.code for f in w.diagnose().findings}
    assert codes <= {"amp.scale_collapse", "param.not_stepped", "train.unfinished"}


# ---- the last word includes the first


def losses_of(values):
    """A loss function that gives these values, batch by batch, with the gradient of a squared error."""
    left = iter(values)
    return lambda pred, y: (loss := F.mse_loss(pred, y)) * (next(left) / loss.detach())


HEALED = [0.02, *[3.0 * 0.9**i for i in range(60)]]  # as of a run resumed without its optimizer


def trained_in(way, diagnose, values=HEALED, loss_func=None):
    """The verdict of `diagnose` on a training with these losses."""
    loss_func, model, batches = loss_func or losses_of(values), make_model(), make_batches(len(values))
    if way == "learner":
        return fit(Learner(batches, model, loss_func, torch.optim.SGD, lr=0.01), cbs=diagnose).diagnose()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, opt, diagnose) as w:
        for x, y in batches:
            w.report_loss(loss := loss_func(model(x), y))
            loss.backward()
            opt.step()
            opt.zero_grad()
    return w.diagnose()


@pytest.mark.parametrize(("way", "on_sick"), first(along(["learner", "watch"], ["warn", "function"])))
def test_an_error_that_was_told_and_is_over_is_in_the_verdict_as_past(way, on_sick):
    told = []
    given = Diagnose("warn" if on_sick == "warn" else told.append, show=False)
    with pytest.warns(UserWarning, match=r"loss\.diverging") if on_sick == "warn" else nullcontext():
        verdict = trained_in(way, given)
    (past,) = [f for f in verdict.findings if f.code == "loss.diverging"]
    assert verdict.status == "suspect"
    assert not verdict
    assert (past.severity, past.step) == ("warning", 1)
    assert past.last_step < past.recovered < len(HEALED) - 1  # as the loss shows
    assert f"steps 1–{past.last_step}, recovered by {past.recovered}" in str(verdict)
    assert all(v.primary.code == "loss.diverging" for v in told)


def test_what_nobody_was_told_is_not_kept():
    assert "loss.diverging" not in [f.code for f in trained_in("learner", Diagnose("ignore")).findings]


@pytest.mark.slow
def test_a_second_fit_keeps_nothing_that_was_told_in_the_first():
    learn = Learner(make_batches(61), make_model(), losses_of(HEALED), torch.optim.SGD, lr=0.01)
    fit(learn, cbs=(diagnose := Diagnose(lambda verdict: None, show=False)))
    learn.loss_func = losses_of([1.0 - i / 100 for i in range(61)])
    fit(learn, cbs=diagnose)
    assert "loss.diverging" not in [f.code for f in diagnose.verdict.findings]


@pytest.mark.slow
def test_what_was_told_is_in_the_verdict_of_a_fit_that_ends_by_an_error():
    n, given = iter(range(99)), losses_of(HEALED)

    def fails(pred, y):
        if next(n) == 55:
            raise ValueError("the loop's own")
        return given(pred, y)

    diagnose = Diagnose(lambda verdict: None, show=False)
    with pytest.raises(ValueError, match="the loop's own"):
        trained_in("learner", diagnose, loss_func=fails)
    assert "loss.diverging" in [f.code for f in diagnose.verdict.findings]


@pytest.mark.slow
def test_what_was_told_is_in_the_verdict_if_no_other_can_be_made(monkeypatch):
    def breaks(verdict):
        monkeypatch.setattr("hookcb.diagnosis.callback.judge", None)

    verdict = trained_in("learner", Diagnose(breaks, show=False))
    assert (verdict.status, verdict.primary.code) == ("sick", "loss.diverging")
    assert "a part of Diagnose" in verdict.reason
