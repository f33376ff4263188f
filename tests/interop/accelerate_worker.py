"""Trains with Accelerate on each of two processes, watched and alone; writes what was seen to a file each."""

import json
import os
import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from hookcb import ActivationStats, Callback, GradientHealth, count_hooks
from tests.interop.trainers import BS, EPOCHS, SETS, Net, loss_func, optimizer, watched
from tests.scenarios import support


def train(cbs, accelerator):
    net = Net()
    loader = DataLoader(SETS[0], batch_size=BS // 2)  # of each process
    model, opt, loader = accelerator.prepare(net, optimizer(net), loader)
    with watched(model, opt, cbs) as w:
        for _ in range(EPOCHS):
            for x, y in loader:
                with accelerator.accumulate(model):
                    loss = loss_func(model(x), y)
                    accelerator.backward(loss)
                    opt.step()
                    opt.zero_grad()
    return net, model, w


def main(folder):
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    seen = []
    probe = Callback(name="probe", before_step=lambda cb: seen.append(cb.train_iter))
    alone, _, _ = train(None, accelerator)
    net, model, w = train([ActivationStats(), GradientHealth(), probe], accelerator)
    torch.manual_seed(accelerator.process_index)
    verdict = support.check_watched(accelerator.prepare(support.Net()))
    found = {
        "verdict": verdict.status,
        "wrapped": type(model).__name__,
        "names": list(w.activation_stats.names),
        "means": [record["net.0"]["mean"] for record in w.activation_stats.stats],
        "norms": w.gradient_health.step_series("total_norm"),
        "steps": seen,
        "missing": dict(w.coverage.missing),
        "same weights": all(map(torch.equal, net.parameters(), alone.parameters())),
        "hooks": count_hooks(net) - count_hooks(alone),
    }
    with open(os.path.join(folder, f"{accelerator.process_index}.json"), "w") as f:
        json.dump(found, f)
        f.flush()
        os.fsync(f.fileno())
    accelerator.wait_for_everyone()
    sys.stdout.flush()
    os._exit(0)  # gloo may abort at exit


if __name__ == "__main__":
    main(sys.argv[1])
