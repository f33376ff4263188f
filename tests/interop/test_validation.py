"""Validations in other people's trainers: losses and accuracies are read there, and judged."""

import textwrap

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hookcb import Diagnose, watch
from hookcb.diagnosis.measurements.validations import Validations
from tests.interop.trainers import HF_ARGUMENTS, Samples, quiet
from tests.support import start

BS, LR, N_LONG, N_SHORT = 25, 1e-2, 20, 5


@pytest.fixture(autouse=True)
def leave_out_warnings_of_others():
    with quiet():
        yield


def sets(labels):
    """Samples for training and validation, whose labels are coin tosses, half hidden, or clear."""
    rng = torch.Generator().manual_seed(0)
    n = 600 if labels == "clear" else 100
    x = torch.randn(2 * n, 20, generator=rng)
    if labels == "noise":
        y = torch.randint(2, (2 * n,), generator=rng)
    else:
        hidden = 0.0 if labels == "clear" else 2.0
        y = (x[:, :3].sum(1) + hidden * torch.randn(2 * n, generator=rng) > 0).long()
    return TensorDataset(x[:n], y[:n]), TensorDataset(x[n:], y[n:])


def net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 2))


def epochs(labels):
    return N_SHORT if labels == "clear" else N_LONG


def by_torch(scores, y):
    return F.cross_entropy(scores, y)


def by_hand(scores, y):
    """Cross-entropy that no function of torch computes."""
    return -scores.log_softmax(1)[torch.arange(len(y)), y].mean()


def lightning(labels, callbacks=(), loss_func=by_torch, **options):
    from lightning.pytorch import LightningModule

    from hookcb.adapters.lightning import HookcbCallback
    from tests.interop.trainers import lightning_trainer

    class Lit(LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.logged, self.losses = net(), [], []

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, batch_idx):
            loss = loss_func(self(batch[0]), batch[1])
            self.log("loss", loss)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch, batch_idx):
            scores = self(batch[0])
            self.log("val_loss", loss_func(scores, batch[1]))
            self.log("val_acc", (scores.argmax(1) == batch[1]).float().mean())

        def on_validation_end(self):
            self.logged.append({name: float(x) for name, x in self.trainer.callback_metrics.items()})

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), LR)

    callback, model = HookcbCallback(Diagnose(show=False)), Lit()
    trainer = lightning_trainer(callback, max_epochs=epochs(labels), num_sanity_val_steps=0, **options)
    trainer.callbacks.extend(callbacks)
    trainer.fit(model, *(DataLoader(of, BS) for of in sets(labels)))
    callback.logged, n = model.logged, len(model.losses) // epochs(labels)
    callback.mean = sum(model.losses[:n]) / n  # of the first epoch
    return callback


def transformers(labels, folder, loss_func=by_torch, **options):
    from transformers import Trainer, TrainingArguments

    from hookcb.adapters.transformers import HookcbCallback

    class GivesLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, x, labels):
            scores = self.net(x)
            return {"loss": loss_func(scores, labels), "logits": scores}

    defaults = {
        "num_train_epochs": epochs(labels),
        "per_device_train_batch_size": BS,
        "per_device_eval_batch_size": BS,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        **HF_ARGUMENTS,
    }
    train, valid = sets(labels)
    callback = HookcbCallback(Diagnose(show=False))
    trainer = Trainer(
        GivesLoss(),
        TrainingArguments(str(folder), **(defaults | options)),
        train_dataset=Samples(train),
        eval_dataset=Samples(valid),
        compute_metrics=lambda of: {"accuracy": float((of.predictions.argmax(-1) == of.label_ids).mean())},
        callbacks=[callback],
    )
    with callback:
        trainer.train()
    callback.logged = [row for row in trainer.state.log_history if "eval_loss" in row]
    return callback


def accelerate(labels):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator, model = Accelerator(cpu=True), net()
    opt = torch.optim.Adam(model.parameters(), LR)
    loaders = [DataLoader(of, BS) for of in sets(labels)]
    model, opt, train, valid = accelerator.prepare(model, opt, *loaders)
    with watch(model, opt, Diagnose(show=False)) as w:
        for _ in range(epochs(labels)):
            model.train()
            for x, y in train:
                accelerator.backward(F.cross_entropy(model(x), y))
                opt.step()
                opt.zero_grad()
            model.eval()
            with torch.no_grad():
                for x, y in valid:
                    scores, y = accelerator.gather_for_metrics((model(x), y))
                    F.cross_entropy(scores, y)
    return w


def trained(trainer, labels, folder, **options):
    if trainer == "accelerate":
        return accelerate(labels)
    return lightning(labels, **options) if trainer == "lightning" else transformers(labels, folder, **options)


TRAINERS = ["lightning", "transformers", "accelerate"]


def about_validation(verdict):
    return {x.code: x for x in verdict.findings if x.code.startswith("valid.")}


def read(followed):
    return followed.diagnosis.evidence().measured(Validations).found


@pytest.mark.parametrize("trainer", TRAINERS)
def test_memorized_noise_is_a_warning_that_says_when_validation_was_best(trainer, tmp_path):
    followed = trained(trainer, "noise", tmp_path)
    verdict = followed.diagnose()
    assert (verdict.status, verdict.primary.code) == ("suspect", "valid.trivial")
    best = min(read(followed), key=lambda x: x.loss)
    place = f"validation {best.step // 4}" if trainer == "accelerate" else f"epoch {best.epoch + 1}"
    assert f"at step {best.step} ({place} of 20)" in verdict.primary.message
    assert "the shares of the classes would give 0.69" in verdict.primary.message


@pytest.mark.parametrize("trainer", TRAINERS)
def test_overfitting_is_a_warning(trainer, tmp_path):
    found = about_validation(trained(trainer, "hidden", tmp_path).diagnose())
    assert found["valid.overfit"].severity == "warning"
    assert " of 20)" in found["valid.overfit"].message


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_healthy_validation_is_judged_and_not_told(trainer, tmp_path):
    verdict = trained(trainer, "clear", tmp_path).diagnose()
    assert verdict.status == "healthy"
    assert not about_validation(verdict)
    assert any("useless validation" in x for x in verdict.ruled_out)
    assert any("overfitting" in x for x in verdict.ruled_out)


@pytest.mark.parametrize("loss_func", [by_torch, by_hand])
@pytest.mark.parametrize("trainer", ["lightning", "transformers"])
def test_losses_and_accuracies_are_those_that_the_trainer_logs(trainer, loss_func, tmp_path):
    followed = trained(trainer, "clear", tmp_path, loss_func=loss_func)
    prefix = ("val_loss", "val_acc") if trainer == "lightning" else ("eval_loss", "eval_accuracy")
    for i, name in enumerate(prefix):
        logged = [row[name] for row in followed.logged]
        assert [(x.loss, x.accuracy)[i] for x in read(followed)] == pytest.approx(logged, rel=1e-3)


def test_best_weights_that_lightning_keeps_are_a_note(tmp_path):
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    kept = lightning(
        "hidden", [ModelCheckpoint(tmp_path, monitor="val_loss")], default_root_dir=tmp_path
    ).diagnose()
    assert about_validation(kept)["valid.overfit"].severity == "info"
    assert "ModelCheckpoint keeps the best" in about_validation(kept)["valid.overfit"].message
    stopped = lightning("hidden", [EarlyStopping("val_loss", patience=8)]).diagnose()
    assert about_validation(stopped)["valid.overfit"].severity == "info"


def test_checkpoints_of_the_last_epoch_are_not_the_best_ones(tmp_path):
    latest = lightning("noise", enable_checkpointing=True, default_root_dir=tmp_path).diagnose()
    assert about_validation(latest)["valid.overfit"].severity == "warning"


def test_best_weights_that_transformers_brings_back_are_a_note(tmp_path):
    best = {"save_strategy": "epoch", "load_best_model_at_end": True, "save_total_limit": 1}
    found = about_validation(transformers("hidden", tmp_path, **best).diagnose())
    assert found["valid.overfit"].severity == "info"
    assert "load_best_model_at_end" in found["valid.overfit"].message


def test_accumulated_losses_are_compared_on_the_scale_of_the_validation():
    followed = lightning("clear", accumulate_grad_batches=4)
    assert followed.diagnose().status == "healthy"
    assert read(followed)[0].train == pytest.approx(followed.mean, rel=1e-5)


def test_the_command_judges_a_script_of_accelerate(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch
            from accelerate import Accelerator
            from torch.nn import functional as F

            torch.manual_seed(1)
            x, y = torch.randn(200, 20), torch.randint(2, (200,))
            model = torch.nn.Sequential(torch.nn.Linear(20, 128), torch.nn.ReLU(), torch.nn.Linear(128, 2))
            accelerator = Accelerator(cpu=True)
            model, opt = accelerator.prepare(model, torch.optim.Adam(model.parameters(), 1e-2))
            for epoch in range(20):
                model.train()
                for a, b in zip(x[:100].split(25), y[:100].split(25)):
                    accelerator.backward(F.cross_entropy(model(a), b))
                    opt.step()
                    opt.zero_grad()
                model.eval()
                with torch.no_grad():
                    F.cross_entropy(model(x[100:]), y[100:])
            """
        )
    )
    process = start("-m", "hookcb", "diagnose", script, log=tmp_path / "log")
    process.join()
    shown = (tmp_path / "log").read_text(encoding="utf-8")
    assert "valid." in shown, shown
    assert " of 20)" in shown
    assert process.exitcode == 1
