"""One tiny training in six loops: by hand, and by the trainers that hookcb follows.

Each function trains the same net on the same batches in the same order, two epochs with a validation each. It
returns `(model, followed)`: the net and what `cbs` were attached to; without `cbs` hookcb has no part in it.
"""

import logging
import tempfile
import warnings
from contextlib import nullcontext

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hookcb import watch

BS, N_TRAIN, N_VALID, EPOCHS = 6, 4, 2, 2
SCALE = 2.0**10
GENERATOR = torch.Generator().manual_seed(1)
X = torch.randn(BS * (N_TRAIN + N_VALID), 4, generator=GENERATOR)
Y = (X[:, 0] > X[:, 1]).long()
N = BS * N_TRAIN
SETS = TensorDataset(X[:N], Y[:N]), TensorDataset(X[N:], Y[N:])
loss_func = nn.functional.cross_entropy
HF_ARGUMENTS = {  # of a quiet Trainer, which writes no file
    "eval_strategy": "epoch",
    "save_strategy": "no",
    "logging_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "remove_unused_columns": False,
}


class Planted(Exception):
    """What goes wrong on purpose."""


class Net(nn.Module):
    """Two layers; `fails_at` is the index of the training call that raises."""

    def __init__(self, fails_at=None):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.fails_at, self.n_calls = fails_at, 0

    def forward(self, x):
        if self.training and self.n_calls == self.fails_at:
            raise Planted
        self.n_calls += self.training
        return self.net(x)


def loaders():
    return [DataLoader(of, batch_size=BS) for of in SETS]


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def scaler_for(scaled):
    return torch.amp.GradScaler("cpu", init_scale=SCALE) if scaled else None


def watched(model, opt, cbs, scaler=None):
    return nullcontext() if cbs is None else watch(model, opt, *cbs, scaler=scaler)


def plain(cbs, clip=None, scaled=False, early=False, fails_at=None):
    """A loop by hand; with `early` it tells of a step before clipping."""
    model = Net(fails_at)
    opt, scaler = optimizer(model), scaler_for(scaled)
    train, valid = loaders()
    with watched(model, opt, cbs, scaler) as w:
        for _ in range(EPOCHS):
            for x, y in train:
                loss = loss_func(model(x), y)
                if w:
                    w.report_loss(loss)
                (scaler.scale(loss) if scaler else loss).backward()
                if scaler:
                    scaler.unscale_(opt)
                if w and early:
                    w.begin_step(opt)
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                scaler.step(opt) if scaler else opt.step()
                if scaler:
                    scaler.update()
                opt.zero_grad()
                if w and w.stop_requested:
                    return model, w
            model.eval()
            with torch.no_grad():
                for x, y in valid:
                    loss = loss_func(model(x), y)
                    if w:
                        w.report_loss(loss)
            model.train()
            if w:
                w.end_epoch()
    return model, w


def lightning(cbs, clip=None, scaled=False, early=False, fails_at=None, **options):
    """Lightning's Trainer, with our callback."""
    with quiet():
        from lightning.pytorch import LightningModule, Trainer
        from lightning.pytorch.plugins.precision import MixedPrecision

        from hookcb.adapters.lightning import HookcbCallback

        class Lit(LightningModule, Net):
            def __init__(self):
                LightningModule.__init__(self)
                net = Net()
                self.net, self.fails_at, self.n_calls = net.net, fails_at, 0

            def training_step(self, batch, batch_idx):
                return loss_func(self(batch[0]), batch[1])

            validation_step = training_step
            forward = Net.forward

            def configure_optimizers(self):
                return optimizer(self)

        if scaled:
            options["plugins"] = MixedPrecision("16-mixed", "cpu", scaler_for(scaled))
        model, callback = Lit(), None if cbs is None else HookcbCallback(*cbs)
        trainer = lightning_trainer(callback, gradient_clip_val=clip, **options)
        assert isinstance(trainer, Trainer)
        trainer.fit(model, *loaders())
    return model, callback


def lightning_trainer(callback, **options):
    from lightning.pytorch import Trainer

    off = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    options = {"max_epochs": EPOCHS, "accelerator": "cpu", "devices": 1} | off | options
    return Trainer(callbacks=[] if callback is None else [callback], **options)


def transformers(cbs, clip=None, scaled=False, early=False, fails_at=None, **options):
    """Hugging Face's Trainer, with our callback."""
    with quiet():
        from hookcb.adapters.transformers import HookcbCallback

        model, callback = LossNet(fails_at), None if cbs is None else HookcbCallback(*cbs)
        with tempfile.TemporaryDirectory() as folder, callback or nullcontext():
            trainer = hf_trainer(model, folder, callback, max_grad_norm=clip or 0.0, **options)
            if scaled:
                trainer.accelerator.scaler = scaler_for(scaled)  # which it makes for a GPU alone
            trainer.train()
    return model, callback


class LossNet(Net):
    """Gives its loss, as models of transformers do."""

    def forward(self, x, labels):
        logits = super().forward(x)
        return {"loss": loss_func(logits, labels), "logits": logits}


class Samples(Dataset):
    """Samples as the Trainer wants them."""

    def __init__(self, of):
        self.of = of

    def __len__(self):
        return len(self.of)

    def __getitem__(self, i):
        x, y = self.of[i]
        return {"x": x, "labels": y}


def hf_trainer(model, folder, callback, **options):
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):
        def get_train_dataloader(self):
            batches = DataLoader(self.train_dataset, batch_size=BS, collate_fn=self.data_collator)
            return self.accelerator.prepare(batches)

    defaults = {
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": BS,
        "per_device_eval_batch_size": BS,
        **HF_ARGUMENTS,
    }
    opt = optimizer(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0)
    return InOrder(
        model,
        TrainingArguments(folder, **(defaults | options)),
        train_dataset=Samples(SETS[0]),
        eval_dataset=Samples(SETS[1]),
        optimizers=(opt, schedule),
        callbacks=[] if callback is None else [callback],
    )


def accelerate(cbs, clip=None, scaled=False, early=False, fails_at=None):
    """A loop by hand with Accelerate, watched."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    if scaled:
        accelerator.scaler = scaler_for(scaled)  # which it makes for a GPU alone
    net = Net(fails_at)
    model, opt, train, valid = accelerator.prepare(net, optimizer(net), *loaders())
    with watched(model, opt, cbs, accelerator.scaler) as w:
        for _ in range(EPOCHS):
            for x, y in train:
                loss = loss_func(model(x), y)
                if w:
                    w.report_loss(loss)
                accelerator.backward(loss)
                if w and early:
                    w.begin_step(opt)
                if clip:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                opt.step()
                opt.zero_grad()
                if w and w.stop_requested:
                    return net, w
            model.eval()
            with torch.no_grad():
                for x, y in valid:
                    loss = loss_func(model(x), y)
                    if w:
                        w.report_loss(loss)
            model.train()
            if w:
                w.end_epoch()
    return net, w


def ignite(cbs, clip=None, scaled=False, early=False, fails_at=None):
    """Ignite's engines, watched."""
    from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
    from ignite.metrics import Loss

    model = Net(fails_at)
    opt, scaler = optimizer(model), scaler_for(scaled)
    train, valid = loaders()
    with watched(model, opt, cbs, scaler) as w:

        def told(pred, y):
            loss = loss_func(pred, y)
            return w.report_loss(loss) if w else loss

        def clipping(engine, batch):
            model.train()
            told(model(batch[0]), batch[1]).backward()
            if w and early:
                w.begin_step(opt)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step()
            opt.zero_grad()

        amp = {"amp_mode": "amp", "scaler": scaler} if scaled else {}
        trainer = Engine(clipping) if clip else create_supervised_trainer(model, opt, told, **amp)
        evaluator = create_supervised_evaluator(model, {"loss": Loss(told)})
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(valid))
        if w:
            trainer.add_event_handler(Events.EPOCH_COMPLETED, w.end_epoch)
            trainer.add_event_handler(
                Events.ITERATION_COMPLETED, lambda: trainer.terminate() if w.stop_requested else None
            )
        trainer.run(train, max_epochs=EPOCHS)
    return model, w


def skorch(cbs, clip=None, scaled=False, early=False, fails_at=None):
    """skorch's NeuralNet, watched."""
    from skorch import NeuralNet
    from skorch.callbacks import Callback, GradientNormClipping
    from skorch.dataset import Dataset
    from skorch.helper import predefined_split

    class Told(NeuralNet):
        def get_loss(self, *args, **kwargs):
            loss = super().get_loss(*args, **kwargs)
            return w.report_loss(loss) if w else loss

    class Epochs(Callback):
        def on_grad_computed(self, net, **kwargs):
            if w and early:
                w.begin_step(net.optimizer_)

        def on_epoch_end(self, net, **kwargs):
            if w:
                w.end_epoch()

        def on_batch_end(self, net, **kwargs):
            if w and w.stop_requested:
                raise KeyboardInterrupt  # skorch's own way to stop

    net = Told(
        Net,
        module__fails_at=fails_at,
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.SGD,
        lr=0.1,
        optimizer__momentum=0.9,
        batch_size=BS,
        max_epochs=EPOCHS,
        train_split=predefined_split(Dataset(*SETS[1].tensors)),
        callbacks=[Epochs()] + [GradientNormClipping(clip)] * bool(clip),
        verbose=0,
    ).initialize()
    with watched(net.module_, net.optimizer_, cbs) as w:
        net.partial_fit(*SETS[0].tensors)
    return net.module_, w


class quiet:  # reads as a word
    """Leaves out what the packages themselves warn of; ours is an error."""

    def __enter__(self):
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        self.caught = warnings.catch_warnings()
        self.caught.__enter__()
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", module=r"hookcb")

    def __exit__(self, *error):
        return self.caught.__exit__(*error)
