"""One of several ranks, trained by an engine once for each case: `ranks_worker.py ENGINE WAY CASES`.

In the case "scaled" the inputs of rank 1 are 255 times as large, in "healthy" nothing is wrong. By the way
"adapter" hookcb's callback is in the trainer, by "script" nothing here knows of hookcb.
"""

import os
import sys
import tempfile
from contextlib import nullcontext

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

N, N_FEATURES, N_CLASSES, BS, EPOCHS = 320, 16, 4, 8, 2


class Points(Dataset):
    """Points around the centers of their classes; if scaled, those that rank 1 reads are too large."""

    def __init__(self, is_scaled):
        torch.manual_seed(0)
        self.y = torch.randint(0, N_CLASSES, (N,))
        self.x = torch.randn(N_CLASSES, N_FEATURES)[self.y] + torch.randn(N, N_FEATURES)
        self.is_scaled = is_scaled

    def __len__(self):
        return N

    def __getitem__(self, i):
        return self.x[i] * (255 if self.is_scaled and distributed.get_rank() == 1 else 1), self.y[i]


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(N_FEATURES, 32), nn.ReLU(), nn.Linear(32, N_CLASSES))


def transformers(data, has_adapter):
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, x, labels):
            logits = self.net(x)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    def collated(pairs):
        x, y = zip(*pairs, strict=True)
        return {"x": torch.stack(x), "labels": torch.stack(y)}

    options = {"save_strategy": "no", "logging_strategy": "no", "report_to": [], "disable_tqdm": True}
    options |= {"use_cpu": True, "remove_unused_columns": False, "learning_rate": 0.01}
    options |= {"num_train_epochs": EPOCHS, "per_device_train_batch_size": BS}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, **options)
        trainer = Trainer(Model(), arguments, data_collator=collated, train_dataset=data)
        if has_adapter:
            from hookcb import Diagnose
            from hookcb.adapters.transformers import HookcbCallback

            trainer.add_callback(HookcbCallback(Diagnose()))
        trainer.train()


def lightning(data, has_adapter):
    from lightning.pytorch import LightningModule, Trainer

    class Classifier(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, i):
            x, y = batch
            return nn.functional.cross_entropy(self(x), y)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    cbs = []
    if has_adapter:
        from hookcb import Diagnose
        from hookcb.adapters.lightning import HookcbCallback

        cbs = [HookcbCallback(Diagnose())]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False}
    trainer = Trainer(max_epochs=EPOCHS, accelerator="cpu", devices=2, strategy="ddp", callbacks=cbs, **quiet)
    trainer.fit(Classifier(), DataLoader(data, BS, shuffle=True))


def deepspeed(data, is_watched):
    """ZeRO-1: each rank has a part of the optimizer's state."""
    import deepspeed

    from hookcb import Diagnose, watch

    # its operator for shared memory takes minutes to compile; gloo does what that does
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    adam = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
    config = {"train_micro_batch_size_per_gpu": BS, "zero_optimization": {"stage": 1}, "optimizer": adam}
    model = net()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    sampler = DistributedSampler(data)
    with watch(engine, Diagnose()) if is_watched else nullcontext():
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            for x, y in DataLoader(data, BS, sampler=sampler):
                engine.backward(nn.functional.cross_entropy(engine(x), y))
                engine.step()


def ray(data, has_adapter):
    """Its processes are not those that call this; a loop of ours runs in each of them."""
    import ray
    from ray import train
    from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model

    from hookcb import Diagnose, watch

    def work():
        model, loader = prepare_model(net()), prepare_data_loader(DataLoader(data, BS, shuffle=True))
        opt = torch.optim.AdamW(model.parameters(), lr=0.01)
        with watch(model, opt, Diagnose()):
            for epoch in range(EPOCHS):
                loader.sampler.set_epoch(epoch)
                for x, y in loader:
                    nn.functional.cross_entropy(model(x), y).backward()
                    opt.step()
                    opt.zero_grad()

    ray.init(num_cpus=2, include_dashboard=False, ignore_reinit_error=True)
    with tempfile.TemporaryDirectory() as folder:
        run, scaling = train.RunConfig(storage_path=folder), train.ScalingConfig(num_workers=2)
        TorchTrainer(work, scaling_config=scaling, run_config=run).fit()


ENGINES = {"transformers": transformers, "lightning": lightning, "deepspeed": deepspeed, "ray": ray}


def main():
    engine, way, cases = sys.argv[1:]
    for case in cases.split(","):
        if os.environ.get("RANK", "0") == "0":  # Ray has none here
            sys.stdout.write(f"== {case}\n")
            sys.stdout.flush()
        ENGINES[engine](Points(case == "scaled"), way == "adapter")


if __name__ == "__main__":
    main()
