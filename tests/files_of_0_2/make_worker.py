"""Writes the files beside it, with version 0.2.0 of hookcb on the path (commit 83ba89bb) and torch 2.13."""

import json

import torch
from torch import nn

from hookcb import ActivationStats, Checkpoint, Diagnose, GradientHealth, Learner

N_EPOCH = 4


def make_learner():
    torch.manual_seed(0)
    x = torch.randn(24, 6)
    batches = list(zip(x.split(8), (x[:, :3].sum(dim=1) > 0).long().split(8), strict=True))
    net = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    loss_func, opt_func = nn.functional.cross_entropy, torch.optim.AdamW
    return Learner((batches, batches[:1]), net, loss_func, opt_func=opt_func, lr=0.01)


def make_recorders():
    return [ActivationStats(with_hist=True), GradientHealth()]


if __name__ == "__main__":
    learn = make_learner()
    learn.fit(N_EPOCH, cbs=[*make_recorders(), Checkpoint(".", keep=9), Diagnose(show=False)])
    learn.activation_stats.save("activations.pt")
    learn.gradient_health.save("gradients.pt")
    learn.save("weights.pt")
    learn.report("run.html")
    numbers = {
        "mean": [record["0"]["mean"] for record in learn.activation_stats.stats],
        "norm": [record["0.weight"]["norm"] for record in learn.gradient_health.stats],
        "losses": [float(loss) for loss in learn.recorder.losses],
    }
    with open("numbers.json", "w") as file:
        json.dump(numbers, file, default=float)
