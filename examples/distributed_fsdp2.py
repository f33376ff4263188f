"""Train a model sharded over two processes: torchrun --nproc_per_node 2 distributed_fsdp2.py."""

import torch
from torch import nn

from hookcb import Distributed, GradientHealth, Learner, accuracy
from hookcb.cli.demo import digits


class Transformer(nn.Sequential):
    def forward(self, x):  # an image of 8 by 8 is a sequence of 8 rows
        return super().forward(x.flatten(0, 1)).mean(1)


torch.manual_seed(0)
blocks = [nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(2)]
learn = Learner(
    digits(),
    Transformer(nn.Linear(8, 32), *blocks, nn.Linear(32, 10)),
    nn.functional.cross_entropy,
    torch.optim.AdamW,  # a class, as it gets the shards
    metrics=accuracy,
    cbs=[Distributed("fsdp2", shard=nn.TransformerEncoderLayer)],
)
learn.fit(2, cbs=GradientHealth())
if learn.ranks.is_main:
    print(learn.gradient_health.report())  # of the whole parameters
