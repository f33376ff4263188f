"""valid.overfit, valid.trivial: validations beside the training."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hookcb import ActivationStats, Callback, Diagnose, EarlyStopping, Learner, watch
from hookcb.diagnosis.faults.loss.validation import Overfit, TrivialValidation
from hookcb.diagnosis.judge import judge
from hookcb.diagnosis.measurements.validations import Validation, Validations
from hookcb.diagnosis.run import Passed, Run, Skipped
from tests.diagnosis.support import evidence, measured, only
from tests.support import first, in_turn

FALLING = [0.6, 0.4, 0.2, 0.1, 0.05, 0.02]
REAL = F.cross_entropy


def of(losses, train=FALLING, n=60, constant=1.0, is_one_scale=True, accuracy=(), kept=(), **about):
    """A run with these validations, ten batches apart."""
    curve = [1.0, *train]
    given = evidence(loss=[curve[i * len(curve) // n] for i in range(n)], constant=constant, **about)
    found = [
        Validation(10 * (i + 1), x, t, accuracy[i] if accuracy else float("nan"), i in kept)
        for i, (x, t) in enumerate(zip(losses, train, strict=True))
    ]
    return measured(given, Validations, found=found, is_seen=True, is_one_scale=is_one_scale)


RISING = [0.7, 0.5, 0.4, 0.5, 0.6, 0.7]


def test_a_validation_loss_that_rises_while_training_falls_is_a_warning_with_the_best_step():
    found = only(Overfit, of(RISING))
    assert (found.code, found.severity, found.step, found.last_step) == ("valid.overfit", "warning", 30, 60)
    assert found.value == pytest.approx((0.6 - 0.4) / (1.0 - 0.4))
    assert "best at step 30 (validation 3 of 6), 0.4, and has risen to 0.6" in found.message


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"kept": [2]}, "the weights were read then"),
        (
            {"accuracy": [0.7, 0.75, 0.8, 0.8, 0.81, 0.82], "loss_kind": "cross-entropy"},
            "81.0% of the classes",
        ),
    ],
)
def test_a_rise_that_costs_nothing_is_a_note(changed, words):
    found = only(Overfit, of(RISING, constant=float("nan"), **changed))
    assert (found.severity, words in found.message) == ("info", True)


def test_a_first_validation_that_is_never_reached_again_is_a_warning():
    found = only(Overfit, of([0.4, 0.5, 0.6, 0.7, 0.8, 0.9], constant=float("nan"), is_one_scale=False))
    assert (found.severity, found.step) == ("warning", 10)
    assert found.value == pytest.approx((0.8 - 0.4) / 0.4)


NAN = [float("nan")] * 6


def test_an_accuracy_is_judged_where_no_loss_is_known():
    found = only(Overfit, of(NAN, accuracy=[0.7, 0.78, 0.8, 0.76, 0.72, 0.67]))
    assert (found.severity, found.step) == ("warning", 30)
    assert "best at step 30 (validation 3 of 6), 80.0%, and has fallen to 72.0%" in found.message
    kept = of(NAN, accuracy=[0.7, 0.78, 0.8, 0.76, 0.72, 0.67], kept=[2])
    for fine in (kept, of(NAN, accuracy=[0.5, 0.7, 0.8, 0.8, 0.81, 0.8])):
        assert isinstance(only(Overfit, fine), Passed)
    assert "fewer than 4" in only(Overfit, of(NAN[:2], FALLING[:2], accuracy=[0.5, 0.6])).reason


def test_a_rise_within_the_noise_is_a_note():
    found = only(Overfit, of([0.7, 0.52, 0.75, 0.4, 0.66, 0.58]))
    assert found.severity == "info"
    assert "within the noise" in found.message


WORSE = [0.6, 0.3, 0.8, 2.6, 1.5, 0.9, 3.0]


def test_no_noise_explains_a_rise_that_ends_far_above_a_constant():
    train = [*FALLING, 0.01]
    found = only(Overfit, of(WORSE, train, n=70))
    assert found.severity == "warning"
    assert "ends at 3, worse than a constant (1)" in found.message
    assert only(Overfit, of(WORSE, train, n=70, kept=[1])).severity == "info"  # the best weights are kept
    assert only(Overfit, of(WORSE, train, n=70, constant=5.0)).severity == "info"  # it still beats a constant
    assert only(Overfit, of(WORSE, train, n=70, is_one_scale=False)).severity == "info"


def test_a_share_of_correct_classes_of_guessing_excuses_nothing():
    given = {"accuracy": [0.5, 0.5, 0.5, 0.5, 0.51, 0.51], "loss_kind": "cross-entropy", "constant": 0.69}
    assert only(Overfit, of(RISING, **given)).severity == "warning"


@in_turn(
    ("losses", "train"),
    [
        ([0.7, 0.5, 0.4, 0.35, 0.3, 0.3], FALLING),
        ([0.7, 0.5, 0.4, 0.4, 0.41, 0.42], FALLING),
        (RISING, [0.5, 0.3, 0.2, 0.4, 0.5, 0.6]),
        ([0.7, 0.5, 0.4, 0.3, 0.2, 0.6], FALLING),
    ],
    ids=["falls", "hardly rises", "training rises too", "one outlier"],
)
def test_other_validations_are_fine(losses, train):
    assert isinstance(only(Overfit, of(losses, train)), Passed)


def test_what_was_not_seen_is_not_ruled_out_and_says_what_to_do():
    for check in (Overfit, TrivialValidation):
        assert "give the Learner two loaders" in only(check, Run(sources={"loss"})).reason
    assert "fewer than 4" in only(Overfit, of([0.5, 0.4], FALLING[:2])).reason


def test_memorized_noise_is_never_better_than_a_constant():
    found = only(TrivialValidation, of([1.0, 1.1, 1.3, 1.6, 1.8, 2.0]))
    assert (found.code, found.severity) == ("valid.trivial", "warning")
    assert "0.02 in training but 2 in validation, 100 times as much" in found.message
    assert "memorized" in found.causes[0]
    assert isinstance(only(TrivialValidation, of([0.9, 1.1, 1.3, 1.6, 1.8, 2.0])), Passed)


def test_a_validation_that_is_apart_from_the_first_one_on_is_computed_differently():
    found = only(TrivialValidation, of([30.0] * 6))
    assert "from the first one on" in found.message
    assert "prepared differently" in found.causes[0]


def test_few_validations_or_many_correct_classes_are_a_note():
    assert only(TrivialValidation, of([1.0, 1.1], FALLING[:2])).severity == "info"
    sure = of([1.1] * 6, loss_kind="cross-entropy", accuracy=[0.9] * 6)
    assert only(TrivialValidation, sure).severity == "info"


def test_losses_on_two_scales_are_not_compared():
    assert isinstance(only(TrivialValidation, of([30.0] * 6, is_one_scale=False)), Skipped)


def test_nobody_is_told_to_train_longer_while_the_validation_rises():
    given = of(RISING, kept=[2], train=[0.6, 0.5, 0.4, 0.3, 0.2, 0.1])
    given.sources |= {"loss"}
    codes = {finding.code for finding in judge(given).findings}
    assert ("valid.overfit" in codes, "train.unfinished" in codes) == (True, False)


# ---- loops


def data(seed=0, noise=1.0):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(200, 20, generator=rng)
    return x, (x[:, 0] + noise * torch.randn(200, generator=rng) > 0).long()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))


def batches(x, y, size=20):
    return list(zip(x.split(size), y.split(size), strict=True))


def trained(cbs=(), seed=0):
    x, y = data(seed)
    learn = Learner((batches(x[:100], y[:100]), batches(x[100:], y[100:])), net(), F.cross_entropy, lr=5e-3)
    with learn.no_logging():
        learn.fit(20, cbs=[Diagnose(show=False), *cbs])
    return learn


def loop(w=None, report=False, evaluated=("valid",), save=False, model=None):
    """A training by hand, with validations; returns the last losses of the validation data."""
    x, y = data()
    parts = {"train": (x[:100], y[:100]), "valid": (x[100:], y[100:])}
    model = model or net()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []

    def evaluate(x, y):
        model.eval()
        with torch.no_grad():
            return sum(F.cross_entropy(model(a), b).item() for a, b in batches(x, y, 50)) / 2

    with watch(model, opt, Diagnose(show=False)) as w:
        for _ in range(20):
            model.train()
            for a, b in batches(*parts["train"]):
                w.report_loss(loss := F.cross_entropy(model(a), b))
                opt.zero_grad()
                loss.backward()
                opt.step()
            if "train" in evaluated:
                evaluate(*parts["train"])
            losses.append(evaluate(*parts["valid"]))
            if save:
                model.state_dict()
    return w, losses


def validated(report, factor=1.0, loss_func=None):
    """A loop whose training loss has a factor, as to accumulate gradients; it validates ten times."""
    x, y = data(noise=0.1)
    loss_func, model = loss_func or (lambda pred, y: F.cross_entropy(pred, y)), net()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    with watch(model, opt, Diagnose(show=False)) as w:
        for _ in range(10):
            model.train()
            for a, b in batches(x[:100], y[:100]):
                loss = loss_func(model(a), b)
                losses.append(loss.item())
                if report:
                    w.report_loss(loss * factor)
                (loss * factor).backward()
                opt.step()
                opt.zero_grad()
            model.eval()
            with torch.no_grad():
                pred = model(x[100:])
                loss = loss_func(pred, y[100:])
            n = (pred.argmax(1) == y[100:]).float().mean()
            w.report_metrics({"val_loss": loss, "val_acc": 100 * n, "names": "left out", "other": 3})
    return w.diagnosis.evidence().measured(Validations), losses


@pytest.mark.parametrize("factor", first([0.25, 3.0]))
def test_a_training_loss_with_a_factor_is_compared_without_it(factor):
    known, losses = validated(report=True, factor=factor)
    assert (known.is_one_scale, known.scale) == (True, pytest.approx(factor))
    assert known.found[-1].train == pytest.approx(sum(losses[-5:]) / 5)


def test_a_factor_of_one_is_found_in_a_loss_that_nobody_reports():
    known, _ = validated(report=False, factor=torch.ones(()))
    assert (known.is_one_scale, known.scale) == (True, 1.0)


@pytest.mark.slow
def test_a_loop_reports_what_it_has_computed_itself():
    def by_hand(pred, y):
        return -pred.log_softmax(1)[torch.arange(len(y)), y].mean()

    known, _ = validated(report=False, loss_func=by_hand)
    plain, _ = validated(report=False)
    assert not known.is_one_scale
    for one, other in zip(known.found, plain.found, strict=True):
        assert (one.loss, one.accuracy) == pytest.approx((other.loss, other.accuracy), rel=1e-3)


@pytest.mark.slow
def test_a_learner_is_told_of_its_overfitting():
    learn = trained()
    verdict = learn.diagnose()
    assert verdict.status == "suspect"
    assert verdict.primary.code.startswith("valid.")
    found = learn.diagnosis.evidence().measured(Validations).found
    assert [x.loss for x in found] == pytest.approx([row["valid_loss"] for row in learn.recorder.rows])
    assert [x.train for x in found] == pytest.approx([row["train_loss"] for row in learn.recorder.rows])
    assert all(0 <= x.accuracy <= 1 for x in found)
    assert F.cross_entropy is REAL


@pytest.mark.slow
def test_a_learner_that_stops_early_is_not_warned():
    assert trained([EarlyStopping(patience=15)]).diagnose().status == "healthy"


class Saves(Callback):
    """Reads the weights after each validation."""

    def after_epoch(self):
        self.learn.model.state_dict()


@pytest.mark.slow
def test_weights_that_are_saved_after_the_best_validation_are_kept():
    assert trained([Saves()]).diagnose().status == "healthy"
    assert loop(save=True)[0].diagnose().status == "healthy"


@pytest.mark.slow
def test_records_alone_show_it_too():
    x, y = data()
    learn = Learner((batches(x[:100], y[:100]), batches(x[100:], y[100:])), net(), F.cross_entropy, lr=5e-3)
    with learn.no_logging():
        learn.fit(20, cbs=ActivationStats())
    assert any(finding.code == "valid.overfit" for finding in learn.diagnose().findings)


@pytest.mark.slow
@pytest.mark.parametrize("evaluated", [["valid"], ["train", "valid"]], ids=str)
def test_a_watched_loop_needs_no_report_of_its_validation_losses(evaluated):
    w, losses = loop(evaluated=evaluated)
    found = w.diagnosis.evidence().measured(Validations).found
    assert [x.loss for x in found] == pytest.approx(losses)
    assert any(x.code == "valid.overfit" and x.severity == "warning" for x in w.diagnose().findings)
    assert F.cross_entropy is REAL


@pytest.mark.slow
def test_watching_validations_changes_nothing():
    model = net()
    loop(model=model)
    x, y = data()
    plain, opt = net(), None
    opt = torch.optim.Adam(plain.parameters(), lr=5e-3)
    for _ in range(20):
        for a, b in batches(x[:100], y[:100]):
            opt.zero_grad()
            F.cross_entropy(plain(a), b).backward()
            opt.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.slow
def test_a_metric_of_each_step_is_no_validation():
    x, y = data()
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, Diagnose(show=False)) as w:
        for a, b in batches(x, y, 5):
            model.train()
            F.cross_entropy(model(a), b).backward()
            opt.step()
            opt.zero_grad()
            model.eval()
            with torch.no_grad():
                F.cross_entropy(model(a), b)
    assert len(w.diagnosis.evidence().measured(Validations).found) <= 5
    assert "valid.trivial" not in {finding.code for finding in w.diagnose().findings}


@pytest.mark.slow
def test_losses_of_another_kind_are_on_another_scale():
    x, y = data()
    model = net()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    with watch(model, opt, Diagnose(show=False)) as w:
        for _ in range(12):
            model.train()
            for a, b in batches(x, y):
                F.cross_entropy(model(a), b, label_smoothing=0.1).backward()
                opt.step()
                opt.zero_grad()
            model.eval()
            with torch.no_grad():
                F.mse_loss(model(x), 100 * torch.ones(200, 2))
    assert not w.diagnosis.evidence().measured(Validations).is_one_scale
    assert w.diagnose().status == "healthy"
