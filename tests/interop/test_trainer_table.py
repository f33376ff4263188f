"""Every cell of the table of trainers, and what holds in all of them, against the real packages."""

from pathlib import Path

import pytest
import torch

from hookcb import (
    ActivationStats,
    Callback,
    CancelFitException,
    Event,
    GradientHealth,
    Learner,
    assert_no_hooks,
)
from tests.interop import trainers
from tests.interop.trainer_table import COLUMNS, EARLY, TRAINERS, markdown
from tests.interop.trainers import (
    EPOCHS,
    N_TRAIN,
    N_VALID,
    SCALE,
    LossNet,
    Net,
    Planted,
    loaders,
    loss_func,
    quiet,
)

ROOT = Path(__file__).parents[2]
CLIP = 0.01
ALL = {str(e) for e in Event if "cancel" not in e}
STEP = ["before_step", "after_step"]
TRAINING = [
    "before_batch",
    "after_pred",
    "after_loss",
    "before_backward",
    "after_backward",
    *STEP,
    "after_batch",
]
VALIDATION = ["before_batch", "after_pred", "after_loss", "after_batch"]
EPOCH = [
    "before_epoch",
    *("before_train", *TRAINING * N_TRAIN, "after_train"),
    *("before_validate", *VALIDATION * N_VALID, "after_validate"),
    "after_epoch",
]
CONTRACT = ["before_fit", *EPOCH * EPOCHS, "after_fit"]


@pytest.fixture(autouse=True)
def leave_out_warnings_of_others():
    with quiet():
        yield


class Probe(Callback):
    """Notes each event, with what it sees there."""

    def __init__(self, **functions):
        self.events, self.norms, self.scaled, self.losses, self.epochs = [], [], [], [], []
        super().__init__(**functions)

    def handler(self, event):
        def note():
            self.events.append(str(event))
            look = getattr(self, f"at_{event}", None)
            if look:
                look()
            if event in self.__dict__:
                self.__dict__[event]()

        return note

    def norm(self):
        return torch.stack([p.grad.norm() for p in self.model.parameters()]).norm().item()

    def at_after_backward(self):
        self.scaled.append(self.norm())

    def at_before_step(self):
        self.norms.append(self.norm())

    def at_after_loss(self):
        self.losses.append((self.training, self.loss.item()))

    def at_before_batch(self):
        self.epochs.append((self.epoch, self.training, self.iter))


def run(name, *cbs, **options):
    return getattr(trainers, name)([*cbs], **options)


def probed(name, **options):
    probe = Probe()
    _, followed = run(name, probe, **options)
    return probe, followed


def by_learner(name, *cbs):
    if name == "transformers":
        model = LossNet()
        batches = [[{"x": x, "labels": y} for x, y in of] for of in loaders()]
        learn = Learner(tuple(batches), model, lambda pred: pred["loss"], trainers.optimizer(model))
    else:
        model = Net()
        learn = Learner(tuple(loaders()), model, loss_func, trainers.optimizer(model))
    with learn.no_logging():
        learn.fit(EPOCHS, cbs=cbs)


@pytest.fixture(scope="module")
def reference():
    probe = Probe()
    with quiet():
        by_learner("plain", probe)
    return probe


# ---- a check for each thing that a cell may say


def all_events(name, reference):
    probe, followed = probed(name)
    assert probe.events == CONTRACT == reference.events
    assert followed.coverage.missing == {}
    assert all(followed.coverage.seen[e] == CONTRACT.count(e) for e in ALL if not e.endswith("_fit"))


def all_but_pred(name, reference):
    all_events(name, reference)
    from tests.interop import lightning_modules

    probe = Probe()
    callback = lightning_modules.fit(lightning_modules.CallsParts, probe)
    assert probe.events == [e for e in CONTRACT if e != "after_pred"]
    assert callback.coverage.missing == {
        "after_pred": "training_step does not call the module itself, self(x)"
    }


def all_but_steps_of_lbfgs(name, reference):
    all_events(name, reference)
    from skorch import NeuralNet

    from hookcb import watch

    probe = Probe()
    net = NeuralNet(
        Net, torch.nn.CrossEntropyLoss, optimizer=torch.optim.LBFGS, batch_size=6, train_split=None, verbose=0
    ).initialize()
    with watch(net.module_, net.optimizer_, probe) as w:
        net.partial_fit(*trainers.SETS[0].tensors)
    # each evaluation of the 10 epochs is a batch
    assert probe.events.count("before_batch") == probe.events.count("after_backward") > N_TRAIN * 10
    assert not {*STEP} & {*probe.events}
    assert "LBFGS" in w.coverage.missing["before_step"]


def unscaled(name, reference):
    probe, _ = probed(name, scaled=True)
    # autocast computes in half precision in some
    assert probe.norms == pytest.approx(reference.norms, rel=0.01)
    assert probe.scaled == pytest.approx([SCALE * norm for norm in reference.norms], rel=0.01)
    assert [loss for _, loss in probe.losses] == pytest.approx([x for _, x in reference.losses], rel=0.01)


def no_scaler(name, reference):
    import inspect

    from skorch import NeuralNet

    assert not [line for line in inspect.getsource(NeuralNet).splitlines() if "scaler" in line.lower()]


def clipped_norms(name, **options):
    health = GradientHealth()
    probe = Probe()
    run(name, probe, health, clip=CLIP, **options)
    assert health.step_series("total_norm") == pytest.approx(probe.norms)
    return probe.norms


def before(name, reference, **options):
    norms = clipped_norms(name, **options)
    assert norms[0] == reference.norms[0] > 10 * CLIP
    assert min(norms) > 10 * CLIP


def after(name, reference):
    assert clipped_norms(name) == pytest.approx([CLIP] * EPOCHS * N_TRAIN, rel=1e-3)


def after_or_none(name, reference):
    after(name, reference)
    assert probed(name)[0].norms == reference.norms


def after_or_told(name, reference):
    after(name, reference)
    before(name, reference, early=True)


def epochs(name, reference):
    probe, _ = probed(name)
    assert probe.epochs == reference.epochs
    assert {epoch for epoch, _, _ in probe.epochs} == {0, 1}


def losses(name, reference):
    assert probed(name)[0].losses == reference.losses


def validation(name, reference):
    probe, _ = probed(name)
    assert probe.events.count("before_validate") == probe.events.count("after_validate") == EPOCHS
    assert sum(not training for _, training, _ in probe.epochs) == EPOCHS * N_VALID


def no_sanity_check(name, reference):
    validation(name, reference)
    probe, _ = probed(name, num_sanity_val_steps=0)
    assert probe.events == CONTRACT  # the same as with it


def stops(name, reference):
    probe = Probe(after_batch=end_at(2))
    run(name, probe)
    assert probe.events.count("after_step") == 2


def end_at(n):
    def end(cb):
        if cb.train_iter == n - 1 and cb.training:
            raise CancelFitException

    return end


def stop_is_for_the_loop(name, reference):
    with pytest.warns(UserWarning, match=r"look at \.stop_requested in your loop"):
        stops(name, reference)


CHECKS = {
    "events": {
        "all": all_events,
        "all; `after_pred` where `training_step` calls `self(x)`": all_but_pred,
        "all; LBFGS none of the step": all_but_steps_of_lbfgs,
    },
    "scale": {"unscaled": unscaled, "it has no GradScaler": no_scaler},
    "clipping": {"before": before, EARLY: after_or_told, "after; `max_grad_norm=0` has none": after_or_none},
    "epochs": dict.fromkeys([row["epochs"] for row in TRAINERS.values()], epochs),
    "loss": dict.fromkeys([row["loss"] for row in TRAINERS.values()], losses),
    "validation": {
        "yes": validation,
        "calls in eval mode": validation,
        "yes, without the sanity check": no_sanity_check,
    },
    "stop": {"look at `w.stop_requested`": stop_is_for_the_loop, "stops the trainer": stops},
}


@pytest.mark.parametrize("column", CHECKS)
@pytest.mark.parametrize("name", TRAINERS)
def test_a_cell_says_what_the_trainer_gives(name, column, reference):
    CHECKS[column][TRAINERS[name][column]](name, reference)


def test_every_column_has_a_check():
    assert [*COLUMNS] == ["attach", *CHECKS]
    assert all([*row] == [*COLUMNS] for row in TRAINERS.values())


UNTOLD = {name for name, row in TRAINERS.items() if "w.report_loss" in row["loss"]}


@pytest.mark.parametrize("name", sorted(UNTOLD))
def test_without_being_told_losses_are_found_and_epochs_stay_unknown(name, monkeypatch):
    from hookcb import Watch

    monkeypatch.setattr(Watch, "report_loss", lambda self, loss: loss)
    monkeypatch.setattr(Watch, "end_epoch", lambda self: None)
    probe, followed = probed(name)
    assert {*probe.events} == ALL
    assert followed.facts.n_losses_found == followed.seen["after_loss"] == followed.seen["before_backward"]
    assert {epoch for epoch, _, _ in probe.epochs} == {0}
    assert any("w.end_epoch()" in note for note in followed.coverage.notes)


# ---- what holds in all of them


@pytest.mark.parametrize("name", TRAINERS)
def test_records_are_those_of_a_learner_to_the_bit(name):
    def readings():
        return ActivationStats(with_hist=True, include_paramless=True, on_valid=True), GradientHealth()

    of_learner, of_trainer = readings(), readings()
    by_learner(name, *of_learner)
    run(name, *of_trainer)
    for ours, theirs in zip(of_trainer, of_learner, strict=True):
        assert len(ours.stats) == EPOCHS * N_TRAIN
        assert exact(ours) == exact(theirs)


def exact(readings):
    """All numbers as text, which has every digit, and NaN equal to itself."""
    found = [readings.table(), [[*record] for record in readings.stats]]
    if isinstance(readings, ActivationStats):
        assert len(readings.valid_stats) == EPOCHS * N_VALID
        found += [[[*record] for record in readings.valid_stats], readings.hist(0).tolist()]
    else:
        found += [readings.step_series(column) for column in ("total_norm", "lr")]
    return repr(found)


@pytest.mark.parametrize("name", TRAINERS)
def test_weights_are_those_without_us_to_the_bit(name):
    alone, _ = getattr(trainers, name)(None)
    watched, _ = run(name, ActivationStats(with_hist=True), GradientHealth(activations=True))
    assert len(list(alone.parameters())) == 4
    assert not any(torch.equal(a, b) for a, b in zip(alone.parameters(), Net().parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), watched.parameters(), strict=True))


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize("fails_at", [None, 2])
def test_hooks_come_off_however_it_ends(name, fails_at, monkeypatch):
    made = []
    init = Net.__init__

    def noted(self, *args, **kwargs):
        init(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(Net, "__init__", noted)
    from torch.optim import optimizer

    stats, health, probe = ActivationStats(), GradientHealth(), Probe()
    if fails_at is None:
        run(name, stats, health, probe)
    else:
        with pytest.raises(Planted):
            run(name, stats, health, probe, fails_at=fails_at)
    assert made
    for model in made:
        assert_no_hooks(model)
    assert not optimizer._global_optimizer_pre_hooks
    assert not optimizer._global_optimizer_post_hooks
    assert probe.events[-1] == "after_fit"
    assert len(stats.stats) == len(health.stats) == (EPOCHS * N_TRAIN if fails_at is None else fails_at)


def test_the_guide_has_this_table():
    text = (ROOT / "docs/guide/loops.md").read_text()
    between = text.split("<!-- trainers -->")[1].split("<!-- /trainers -->")[0]
    assert between.strip() == markdown()
