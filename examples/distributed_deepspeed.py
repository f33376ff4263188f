"""DeepSpeed, ZeRO-1, on two processes: torchrun --nproc_per_node 2 distributed_deepspeed.py.

`pip install deepspeed setuptools`; on GPUs leave out what is said of gloo.
"""

import deepspeed
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, DistributedSampler

from hookcb import Diagnose, watch
from hookcb.cli.demo import build_model, digits

torch.manual_seed(0)
# its operator for the shared memory of CPUs takes minutes to compile
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
model, data = build_model(), digits().train.dataset
adam = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
config = {"train_micro_batch_size_per_gpu": 32, "zero_optimization": {"stage": 1}, "optimizer": adam}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
sampler = DistributedSampler(data)
with watch(engine, Diagnose()):  # rank 0 prints one verdict; its optimizer has flat parts of the weights
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, 32, sampler=sampler):
            engine.backward(nn.functional.cross_entropy(engine(x), y))
            engine.step()
distributed.destroy_process_group()
