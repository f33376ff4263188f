"""Lightning's Trainer with our callback: what is its own, beside the table."""

import inspect
import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hookcb import (
    ActivationStats,
    Callback,
    CancelFitException,
    Diagnose,
    GradientClip,
    GradientHealth,
    Learner,
    NanTrace,
    Recorder,
    assert_no_hooks,
    watch,
)
from tests.interop.trainers import (
    EPOCHS,
    N_TRAIN,
    N_VALID,
    Planted,
    lightning_trainer,
    loaders,
    loss_func,
    quiet,
)

with quiet():
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import Callback as LightningCallback

    from hookcb.adapters.lightning import HookcbCallback
    from tests.interop.lightning_modules import CallsItself, CallsParts, HasNanLoss, TwoOptimizers, fit


@pytest.fixture(autouse=True)
def leave_out_warnings_of_others():
    on_interrupt = signal.getsignal(signal.SIGINT)
    with quiet():
        yield
    signal.signal(signal.SIGINT, on_interrupt)  # after Ctrl-C the trainer leaves it ignored


def noting(**looks):
    """A callback that keeps, by event, what these functions of it gave."""
    cb = Callback(name="noting")
    cb.seen = {event: [] for event in looks}
    for event, look in looks.items():
        setattr(cb, event, lambda event=event, look=look: cb.seen[event].append(look(cb)))
    return cb


def test_readings_are_attributes_also_before_and_after_the_fit():
    stats = ActivationStats()
    callback = HookcbCallback(stats, GradientHealth)
    assert callback.activation_stats is stats
    assert callback.coverage is None
    assert not callback.stop_requested
    callback = fit(CallsItself, stats, GradientHealth)
    assert callback.activation_stats.names == ["net.0", "net.2"]
    assert len(callback.gradient_health.stats) == EPOCHS * N_TRAIN
    assert "before_step: 8 times" in str(callback.coverage)


def test_layers_are_recorded_also_where_the_module_itself_is_not_called():
    parts, itself = fit(CallsParts, ActivationStats), fit(CallsItself, ActivationStats)
    assert repr(parts.activation_stats.table()) == repr(itself.activation_stats.table())


def test_what_cannot_be_attached_is_refused():
    with pytest.raises(TypeError, match="is not a Callback"):
        HookcbCallback("stats")
    with pytest.raises(ValueError, match="'activation_stats' is attached already"):
        HookcbCallback(ActivationStats(), ActivationStats())
    with pytest.raises(ValueError, match=r"would overwrite HookcbCallback\.setup; .*name='my_setup'"):
        HookcbCallback(Callback(name="setup"))


def test_a_trainer_that_is_given_the_class_says_that_it_must_be_created():
    with pytest.raises(TypeError, match=r"must be created: callbacks=\[HookcbCallback\(Diagnose\(\)\)\]"):
        lightning_trainer(HookcbCallback).fit(CallsItself(), *loaders())


@pytest.mark.parametrize("error", [Planted, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize(
    "where", ["on_train_batch_start", "on_before_optimizer_step", "on_validation_batch_end", "on_train_end"]
)
def test_it_is_detached_after_an_exception_anywhere(where, error):
    class Saboteur(LightningCallback):
        pass

    def fail(self, *args, **kwargs):
        raise error

    setattr(Saboteur, where, fail)
    ended = noting(after_fit=lambda cb: len(cb.learn.seen))
    callback, module = HookcbCallback(ActivationStats, GradientHealth, ended), CallsItself()
    trainer = lightning_trainer(callback)
    trainer.callbacks.insert(0, Saboteur())
    with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
        trainer.fit(module, *loaders())
    assert_no_hooks(module)
    assert callback.running is None
    expected = 0 if where == "on_validation_batch_end" else 1  # there the sanity check fails, before the fit
    assert len(ended.seen["after_fit"]) == expected


def test_it_follows_one_fit_after_another_each_anew():
    callback = fit(CallsItself, ActivationStats, GradientHealth)
    first = repr(callback.activation_stats.table())
    again = lightning_trainer(callback)
    again.fit(CallsItself(), *loaders())
    assert repr(callback.activation_stats.table()) == first
    again.validate(callback.module, loaders()[1])  # no training: nothing is followed
    assert repr(callback.activation_stats.table()) == first


def test_accumulation_gives_a_batch_each_and_a_step_for_several():
    losses = noting(after_loss=lambda cb: (cb.training, cb.loss.item()))
    callback = fit(CallsItself, losses, GradientHealth, accumulate_grad_batches=2)
    seen = callback.coverage.seen
    assert seen["after_backward"] == EPOCHS * N_TRAIN
    assert seen["before_step"] == seen["after_step"] == EPOCHS * N_TRAIN // 2
    x, y = next(iter(loaders()[0]))
    first = loss_func(CallsItself()(x), y)
    assert losses.seen["after_loss"][0] == (True, first.item() / 2)  # as backward gets it


def test_a_step_that_overflows_counts_as_skipped():
    from lightning.pytorch.plugins.precision import MixedPrecision

    class Overflows(CallsItself):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (float("inf") if batch_idx == 1 else 1)

    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    precision = MixedPrecision("16-mixed", "cpu", scaler)
    callback = fit(Overflows, GradientHealth, plugins=precision, max_epochs=1, num_sanity_val_steps=0)
    assert callback.gradient_health.skipped == 1
    assert callback.gradient_health.step_series("scale") == [16.0, 16.0, 8.0, 8.0]
    assert callback.coverage.seen["after_step"] == N_TRAIN


def test_optimizers_that_are_stepped_by_hand_each_give_step_events():
    groups = noting(
        before_step=lambda cb: len(cb.opt.param_groups[0]["params"]), after_batch=lambda cb: cb.iter
    )
    callback = fit(TwoOptimizers, groups, GradientHealth, max_epochs=1, num_sanity_val_steps=0)
    assert groups.seen["before_step"] == [2] * 2 * N_TRAIN
    assert groups.seen["after_batch"] == [*range(N_TRAIN), *range(N_VALID)]
    assert len(callback.gradient_health.stats) == 2 * N_TRAIN


def test_lbfgs_has_batches_without_step_events():
    class ByLBFGS(CallsItself):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    callback = fit(ByLBFGS, ActivationStats, max_epochs=1)
    assert callback.coverage.seen["before_batch"] == N_TRAIN + N_VALID
    assert {"before_step", "after_step"} <= {*callback.coverage.missing}


@pytest.mark.parametrize("event", ["after_batch", "after_validate", "after_epoch"])
def test_a_fit_that_is_cancelled_stops_the_trainer(event):
    def cancel(cb):
        raise CancelFitException

    callback = fit(CallsItself, Callback(name="ends", **{event: cancel}), max_epochs=5)
    assert callback.stop_requested
    assert callback.trainer.current_epoch <= 1
    assert callback.trainer.global_step == (1 if event == "after_batch" else N_TRAIN)


def test_a_validation_in_the_middle_of_an_epoch_stays_in_it():
    epochs = noting(before_validate=lambda cb: (cb.epoch, cb.train_iter))
    fit(CallsItself, epochs, val_check_interval=2)
    assert epochs.seen["before_validate"] == [(0, 2), (0, 4), (1, 6), (1, 8)]


def test_it_can_be_pickled_with_its_readings():
    callback = fit(CallsItself, ActivationStats, max_epochs=1)
    del callback.module, callback.trainer
    copy = pickle.loads(pickle.dumps(callback))
    assert repr(copy.activation_stats.table()) == repr(callback.activation_stats.table())
    assert copy.followed is None


def test_watch_alone_follows_a_trainer_whose_module_calls_itself():
    module = CallsItself()
    with watch(module, None, ActivationStats, GradientHealth) as w:
        lightning_trainer(None, num_sanity_val_steps=0).fit(module, *loaders())
    ours = fit(CallsItself, ActivationStats, GradientHealth)
    assert repr(w.activation_stats.table()) != repr(ours.activation_stats.table())  # of one epoch, not told
    assert [[*record] for record in w.activation_stats.stats] == [[*r] for r in ours.activation_stats.stats]
    assert len(w.gradient_health.stats) == len(ours.gradient_health.stats)


WORKER = """
import json, os, sys
from tests.interop.trainers import quiet
with quiet():
    from hookcb import ActivationStats, Callback, GradientHealth
    from tests.interop.lightning_modules import CallsItself, CallsParts, fit
    found = {}
    for module in CallsItself, CallsParts:
        shapes = []
        look = Callback(name="look", after_pred=lambda cb: shapes.append(list(cb.pred.shape)))
        options = {"strategy": "ddp", "use_distributed_sampler": False, "max_epochs": 1}
        callback = fit(module, ActivationStats, GradientHealth, look, **options)
        found[module.__name__] = {
            "shapes": shapes,
            "names": list(callback.activation_stats.names),
            "means": [record[0]["mean"] for record in callback.activation_stats.stats],
            "norms": callback.gradient_health.step_series("total_norm"),
            "wrapped": type(callback.trainer.strategy.model).__name__,
        }
with open(sys.argv[1], "w") as f:
    json.dump(found, f)
    f.flush()
os._exit(0)  # gloo may abort at exit
"""


def test_a_module_inside_distributed_data_parallel_is_told_from_its_training_step(tmp_path):
    here = str(Path(__file__).parent)
    path = os.pathsep.join([here, str(Path(here).parents[1]), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    out = tmp_path / "found.json"
    done = subprocess.run([sys.executable, "-c", WORKER, out], env=env, capture_output=True, text=True)
    found = json.loads(out.read_text()) if out.exists() else done.stderr
    alone = fit(CallsItself, ActivationStats, GradientHealth, max_epochs=1)
    means = [record[0]["mean"] for record in alone.activation_stats.stats]
    for module in "CallsItself", "CallsParts":
        assert found[module]["names"] == ["net.0", "net.2"]
        assert found[module]["means"] == means
        assert found[module]["norms"] == pytest.approx(alone.gradient_health.step_series("total_norm"))
    assert found["CallsItself"]["shapes"] == [[6, 2]] * (N_TRAIN + N_VALID)
    assert found["CallsParts"]["shapes"] == []


def test_the_adapter_works_with_the_package_under_its_older_name():
    import pytorch_lightning

    class Module(pytorch_lightning.LightningModule):
        forward, training_step = CallsItself.forward, CallsItself.training_step
        configure_optimizers = CallsItself.configure_optimizers

        def __init__(self):
            super().__init__()
            self.net = CallsItself().net

    callback = HookcbCallback(ActivationStats, GradientHealth)
    off = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = pytorch_lightning.Trainer(max_epochs=EPOCHS, accelerator="cpu", callbacks=[callback], **off)
    trainer.fit(Module(), loaders()[0])
    ours = fit(CallsItself, ActivationStats, GradientHealth)
    assert repr(callback.activation_stats.table()) == repr(ours.activation_stats.table())
    assert repr(callback.gradient_health.table()) == repr(ours.gradient_health.table())


def test_a_callback_given_without_the_adapter_is_refused_with_its_name():
    with pytest.raises(AttributeError, match=r"hookcb\.adapters\.lightning\.HookcbCallback\(ActivationStats"):
        lightning_trainer(ActivationStats())


def test_the_callback_gives_the_verdict_and_what_it_rests_on():
    callback = HookcbCallback([Diagnose(show=False)], cbs=[Recorder])
    with pytest.raises(RuntimeError, match="nothing is recorded yet"):
        callback.diagnose()
    with pytest.raises(RuntimeError, match="nothing is recorded yet"):
        callback.report()
    for _ in range(2):
        trainer = lightning_trainer(callback)
        trainer.fit(CallsItself(), *loaders())
        assert callback.diagnose() is callback.diagnosis.verdict
        assert callback.report().data.headline == callback.diagnosis.verdict.headline
        assert callback.diagnose().coverage[0].startswith(f"{EPOCHS * N_TRAIN} batches")
        assert callback.activation_stats is callback.followed.activation_stats
        assert len(callback.recorder.losses) == EPOCHS * N_TRAIN


def test_what_the_reader_is_told_can_be_done_in_lightning():
    found = fit(HasNanLoss, Diagnose(show=False), max_epochs=1)
    (advice,) = found.diagnose().primary.next_steps
    assert advice == "Train with Trainer(detect_anomaly=True), which names the operation"
    with pytest.raises(RuntimeError, match="'ErfinvBackward0' returned nan values"):
        fit(HasNanLoss, max_epochs=1, detect_anomaly=True)
    notes = fit(CallsItself, ActivationStats(), max_epochs=1).report().data.notes
    told = " ".join([str(found.diagnose()), *found.diagnose().coverage, *notes])
    assert "HookcbCallback(GradientHealth()) records them" in told
    assert [word for word in (" w.", "learn.", "cbs=", "Learner") if word in told] == []


@pytest.mark.parametrize(
    ("cb", "hint"), [(GradientClip, "gradient_clip_val=…"), (NanTrace, "detect_anomaly")]
)
def test_a_callback_that_takes_part_is_refused_with_what_the_trainer_does_instead(cb, hint):
    with pytest.raises(TypeError, match=hint):
        fit(CallsItself, cb())


def test_a_watch_counts_each_batch_of_a_fit_that_accumulates():
    module = CallsItself()
    with watch(module, Diagnose(show=False)) as w:
        lightning_trainer(None, accumulate_grad_batches=2).fit(module, *loaders())
        assert w.diagnose().coverage[0].startswith(f"{EPOCHS * N_TRAIN} batches")
    assert w.facts.n_losses_found == EPOCHS * N_TRAIN


def test_an_argument_of_lightnings_trainer_is_answered_by_what_a_learner_has():
    of_the_framework = {"inference_mode", "barebones", "plugins", "enable_autolog_hparams", "model_registry"}
    unanswered = {"limit_test_batches", "limit_predict_batches", "reload_dataloaders_every_n_epochs"}
    given = {*inspect.signature(Trainer).parameters} - of_the_framework - unanswered
    for name in given:
        with pytest.raises(TypeError, match=rf"^Learner has no argument '{name}'; (use|did you mean) "):
            Learner(**{name: 1})
