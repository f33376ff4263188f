"""Train on two processes, torchrun --nproc_per_node 2 distributed_ddp.py, or alone, by plain python."""

import torch
from torch import nn

from hookcb import Diagnose, Distributed, EarlyStopping, Learner, accuracy
from hookcb.cli.demo import build_model, digits

torch.manual_seed(0)
learn = Learner(
    digits(batch_size=32),  # the batches of each process
    build_model(),
    nn.functional.cross_entropy,
    torch.optim.AdamW,
    lr=1e-3,
    metrics=accuracy,
    cbs=[Distributed()],
)
learn.fit(3, cbs=[Diagnose(), EarlyStopping()])  # prints one table, and one verdict
predictions, targets = learn.get_preds()  # of all samples, on all processes
