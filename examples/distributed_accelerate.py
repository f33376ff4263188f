"""An Accelerator as the engine, torchrun --nproc_per_node 2 distributed_accelerate.py, or by plain python."""

import torch
from accelerate import Accelerator
from torch import nn

from hookcb import Diagnose, Distributed, Learner, accuracy
from hookcb.cli.demo import build_model, digits

torch.manual_seed(0)
# its precision, accumulation, DDP or FSDP; the Learner has the loaders, the optimizer and the checkpoints
engine = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
learn = Learner(
    digits(batch_size=16),  # the batches of each process
    build_model(),
    nn.functional.cross_entropy,
    torch.optim.AdamW,
    lr=1e-3,
    metrics=accuracy,
    cbs=[Distributed(engine=engine)],
)
learn.fit(3, cbs=[Diagnose()])  # prints one table, and one verdict
predictions, targets = learn.get_preds()  # of all samples, on all processes
