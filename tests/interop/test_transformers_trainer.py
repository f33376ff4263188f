"""Hugging Face's Trainer with our callback, on a tiny BERT made from a configuration."""

import gc
import weakref
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import Dataset

from hookcb import (
    ActivationStats,
    Callback,
    CancelFitException,
    DetectAnomaly,
    Diagnose,
    GradientAccumulation,
    GradientClip,
    GradientHealth,
    Learner,
    Recorder,
    assert_no_hooks,
    count_hooks,
)
from hookcb.diagnosis.reader import ADVICE
from tests.interop import trainers
from tests.interop.trainers import EPOCHS, N_TRAIN, LossNet, Planted, hf_trainer, quiet

with quiet():
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from hookcb.adapters.transformers import HookcbCallback


@pytest.fixture(autouse=True)
def leave_out_warnings_of_others():
    with quiet():
        yield


def bert():
    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=20,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BertForSequenceClassification(config)


class Sentences(Dataset):
    """Is there a high number in it?"""

    def __init__(self, n):
        self.ids = torch.randint(1, 50, (n, 8), generator=torch.Generator().manual_seed(n))
        self.labels = (self.ids > 44).any(1).long()

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.labels[i]}


class Batches(TrainerCallback):
    """Keeps what the model is called with in training."""

    def __init__(self):
        self.seen = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        def keep(module, args, kwargs):
            if module.training:
                self.seen.append({key: value.clone() for key, value in kwargs.items()})

        self.handle = model.register_forward_pre_hook(keep, with_kwargs=True)

    def on_train_end(self, *args, **kwargs):
        self.handle.remove()


def sgd(model):
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    return opt, torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0)


def bert_trainer(folder, model, callbacks, **options):
    defaults = {
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": 8,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "max_grad_norm": 0.0,
    }
    args = TrainingArguments(str(folder), **(defaults | options))
    return Trainer(model, args, train_dataset=Sentences(32), callbacks=callbacks, optimizers=sgd(model))


def exact(readings):
    return repr([readings.table(), [[*record] for record in readings.stats]])


@pytest.mark.parametrize("accumulation", [1, 2])
def test_records_of_a_bert_are_those_of_a_learner_on_the_same_batches(tmp_path, accumulation):
    model, batches = bert(), Batches()
    callback = HookcbCallback(ActivationStats(with_hist=True), GradientHealth)
    trainer = bert_trainer(tmp_path, model, [callback, batches], gradient_accumulation_steps=accumulation)
    trainer.model_accepts_loss_kwargs = False  # losses are divided by the number of batches, as ours
    trainer.train()
    again, n = bert(), len(batches.seen) // EPOCHS
    epochs = iter([batches.seen[:n], batches.seen[n:]])  # in the order of each
    learn = Learner(Each(epochs), again, opt_func=sgd(again)[0])
    with learn.no_logging():
        accumulate = [GradientAccumulation(accumulation)] if accumulation > 1 else []
        learn.fit(EPOCHS, cbs=[ActivationStats(with_hist=True), GradientHealth(), *accumulate])
    assert n == 4
    assert len(callback.activation_stats.stats) == EPOCHS * n
    assert len(callback.gradient_health.stats) == EPOCHS * n // accumulation
    assert exact(callback.activation_stats) == exact(learn.activation_stats)
    assert exact(callback.gradient_health) == exact(learn.gradient_health)
    assert all(map(torch.equal, model.parameters(), again.parameters()))


class Each:
    """Iterates over the next of several each time."""

    def __init__(self, several):
        self.several = several

    def __iter__(self):
        return iter(next(self.several))


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_weights_of_a_bert_are_those_without_us(tmp_path, clip):
    def trained(*callbacks):
        model = bert()
        bert_trainer(
            tmp_path, model, list(callbacks), max_grad_norm=clip, gradient_accumulation_steps=2
        ).train()
        return list(model.parameters())

    ours = trained(HookcbCallback(ActivationStats(with_hist=True), GradientHealth(activations=True)))
    assert all(map(torch.equal, ours, trained()))


def test_the_trainers_own_optimizer_is_followed_too(tmp_path):
    model, callback = bert(), HookcbCallback(GradientHealth)
    args = TrainingArguments(
        str(tmp_path), max_steps=3, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True
    )
    trainer = Trainer(model, args, train_dataset=Sentences(32), callbacks=[callback])
    trainer.train()
    assert type(callback.followed.opt).__name__ == "AdamW"
    assert len(callback.gradient_health.stats) == 3
    assert_no_hooks(model)


def after_an_exception(tmp_path, *cbs):
    model, callback = LossNet(fails_at=2), HookcbCallback(*cbs)
    trainer = hf_trainer(model, str(tmp_path), callback)
    with pytest.raises(Planted):
        trainer.train()
    return model, callback, trainer


def test_after_an_exception_close_takes_the_hooks_off(tmp_path):
    model, callback, _ = after_an_exception(tmp_path, ActivationStats, GradientHealth)
    assert count_hooks(model) > 0  # the trainer does not tell
    assert callback.running
    callback.close()
    callback.close()
    assert_no_hooks(model)
    assert not torch_optimizer._global_optimizer_pre_hooks
    assert len(callback.activation_stats.stats) == 2


def test_after_an_exception_the_next_training_begins_anew(tmp_path):
    model, callback, trainer = after_an_exception(tmp_path, ActivationStats, GradientHealth)
    model.fails_at = None
    trainer.train()
    assert_no_hooks(model)
    assert len(callback.activation_stats.stats) == len(callback.gradient_health.stats) == EPOCHS * N_TRAIN
    assert not torch_optimizer._global_optimizer_pre_hooks


def test_after_an_exception_hooks_go_with_the_model(tmp_path):
    model, callback, trainer = after_an_exception(tmp_path, ActivationStats, GradientHealth)
    gone = weakref.ref(model)
    del model, trainer
    gc.collect()
    assert gone() is None
    assert callback.running is None
    assert not torch_optimizer._global_optimizer_pre_hooks


def test_a_block_detaches_it_however_it_ends(tmp_path):
    model = LossNet(fails_at=2)
    with suppress(Planted), HookcbCallback(ActivationStats) as callback:
        hf_trainer(model, str(tmp_path), callback).train()
    assert_no_hooks(model)
    assert len(callback.activation_stats.stats) == 2


@pytest.mark.parametrize(
    ("event", "options", "steps"),
    [
        ("after_batch", {}, 1),
        ("after_step", {"gradient_accumulation_steps": 2}, 1),
        ("after_validate", {}, N_TRAIN),
        ("after_epoch", {}, N_TRAIN),
        ("after_epoch", {"eval_strategy": "no"}, N_TRAIN),
        ("after_train", {"eval_strategy": "steps", "eval_steps": 2}, 2),
    ],
)
def test_a_fit_that_is_cancelled_stops_the_trainer(tmp_path, event, options, steps):
    def cancel(cb):
        raise CancelFitException

    callback = HookcbCallback(Callback(name="ends", **{event: cancel}))
    trainer = hf_trainer(LossNet(), str(tmp_path), callback, **({"num_train_epochs": 5} | options))
    trainer.train()
    assert callback.stop_requested
    assert trainer.state.global_step == steps


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"eval_strategy": "epoch"}, [(0, 4), (1, 8)]),
        ({"eval_strategy": "steps", "eval_steps": 2}, [(0, 2), (0, 4), (1, 6), (1, 8)]),
        ({"eval_strategy": "steps", "eval_steps": 3}, [(0, 3), (1, 6), (1, 8)]),  # it ends with one
        ({"eval_strategy": "no"}, []),
    ],
)
def test_an_evaluation_belongs_to_the_epoch_it_is_made_in(tmp_path, options, expected):
    seen = []
    probe = Callback(name="probe", before_validate=lambda cb: seen.append((cb.epoch, cb.train_iter)))
    callback = HookcbCallback(probe)
    hf_trainer(LossNet(), str(tmp_path), callback, **options).train()
    assert seen == expected
    assert callback.coverage.seen["after_epoch"] == EPOCHS


def test_an_evaluation_outside_a_training_is_not_followed(tmp_path):
    model, callback = LossNet(), HookcbCallback(ActivationStats(on_valid=True))
    trainer = hf_trainer(model, str(tmp_path), callback)
    trainer.evaluate()
    assert callback.followed is None
    trainer.train()
    n = len(callback.activation_stats.valid_stats)
    trainer.evaluate()
    assert len(callback.activation_stats.valid_stats) == n
    assert_no_hooks(model)


def test_a_model_without_a_loss_in_its_output_has_no_loss_event(tmp_path):
    class Plain(trainers.Net):
        def forward(self, x, labels=None):
            return {"logits": super().forward(x)}

    class OwnLoss(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            logits = model(inputs["x"])["logits"]
            loss = nn.functional.cross_entropy(logits, inputs["labels"])
            return (loss, {"logits": logits}) if return_outputs else loss

    callback = HookcbCallback([GradientHealth], cbs=Recorder)
    trainer = hf_trainer(Plain(), str(tmp_path), callback, eval_strategy="no")
    trainer.__class__ = type("Both", (type(trainer), OwnLoss), {"compute_loss": OwnLoss.compute_loss})
    trainer.train()
    assert callback.followed.facts.n_losses_found == len(callback.recorder.losses) == EPOCHS * N_TRAIN
    assert len(callback.gradient_health.stats) == EPOCHS * N_TRAIN


@pytest.mark.parametrize("given", [ActivationStats, ActivationStats()])
def test_a_callback_given_without_the_adapter_is_refused_with_its_name(given, tmp_path):
    message = r"hookcb\.adapters\.transformers\.HookcbCallback\(ActivationStats"
    with pytest.raises(AttributeError, match=message):
        bert_trainer(tmp_path, bert(), [given])


def test_the_callback_gives_the_verdict_and_what_it_rests_on(tmp_path):
    callback = HookcbCallback(Diagnose(show=False))
    with pytest.raises(RuntimeError, match="nothing is recorded yet"):
        callback.diagnose()
    with pytest.raises(RuntimeError, match="nothing is recorded yet"):
        callback.report()
    trainer = hf_trainer(LossNet(), str(tmp_path), callback, eval_strategy="no")
    trainer.train()
    assert callback.diagnose() is callback.diagnosis.verdict
    assert callback.report().data.headline == callback.diagnosis.verdict.headline
    assert callback.diagnose().coverage[0].startswith(f"{EPOCHS * N_TRAIN} batches")
    assert callback.activation_stats is callback.followed.activation_stats
    assert len(callback.gradient_health.stats) > 0


def test_what_the_reader_is_told_can_be_done_in_transformers(tmp_path):
    def train(callback):
        trainer = hf_trainer(LossNet(), str(tmp_path), callback, eval_strategy="no")
        trainer.compute_loss = lambda model, inputs, **given: (-1 - model(**inputs)["loss"]).sqrt()
        with callback:
            trainer.train()

    found = HookcbCallback(Diagnose(show=False))
    train(found)
    assert found.diagnose().primary.next_steps == (ADVICE["NaN"]["transformers"],)
    with pytest.raises(RuntimeError, match="'SqrtBackward0' returned nan values"):
        train(HookcbCallback(DetectAnomaly()))
    outputs = HookcbCallback(ActivationStats())
    train(outputs)
    told = [
        str(found.diagnose()),
        *found.diagnose().coverage,
        *found.coverage.notes,
        *outputs.report().data.notes,
    ]
    assert "HookcbCallback(GradientHealth()) records them" in " ".join(told)
    assert [word for word in (" w.", "learn.", "cbs=", "Learner") if word in " ".join(told)] == []


def test_a_callback_that_takes_part_is_refused_with_what_the_trainer_does_instead(tmp_path):
    trainer = hf_trainer(LossNet(), str(tmp_path), HookcbCallback(GradientClip()), eval_strategy="no")
    with pytest.raises(TypeError, match="max_grad_norm=…"):
        trainer.train()


def test_a_trainer_that_is_given_the_class_warns_that_nothing_is_recorded(tmp_path):
    trainer = hf_trainer(LossNet(), str(tmp_path), HookcbCallback)  # it makes an instance
    with pytest.warns(UserWarning, match=r"records nothing; HookcbCallback\(Diagnose\(\)\) gives a verdict"):
        trainer.train()
