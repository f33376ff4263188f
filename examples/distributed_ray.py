"""Ray Train on two processes of this machine: pip install 'ray[train]', then python distributed_ray.py."""

import tempfile

import ray
import torch
from ray import train
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch import nn

from hookcb import Diagnose, watch
from hookcb.cli.demo import build_model, digits


def work():
    """What each process does: the loop is ours, Ray starts the processes and joins their group."""
    torch.manual_seed(0)
    model = prepare_model(build_model())  # in DistributedDataParallel
    loader = prepare_data_loader(digits(batch_size=32).train)  # with a DistributedSampler
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with watch(model, opt, Diagnose()):  # rank 0 prints one verdict
        for epoch in range(3):
            loader.sampler.set_epoch(epoch)
            for x, y in loader:
                nn.functional.cross_entropy(model(x), y).backward()
                opt.step()
                opt.zero_grad()


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    with tempfile.TemporaryDirectory() as folder:
        scaling = train.ScalingConfig(num_workers=2)
        TorchTrainer(work, scaling_config=scaling, run_config=train.RunConfig(storage_path=folder)).fit()
