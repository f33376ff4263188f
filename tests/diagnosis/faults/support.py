"""Runs of made-up loops, whose handlers tests call themselves; and a small training."""

from contextlib import contextmanager
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, Learner, watch
from hookcb.diagnosis.fault import parts_for
from hookcb.diagnosis.heard import EARS, listen
from hookcb.diagnosis.run import Param, Run
from tests.diagnosis.support import series
from tests.support import fit


def followed(kind, model, **loop):
    """A part that has seen this model at the beginning, and the run of a loop with it."""
    run = Run(looking=True)
    run.loop = SimpleNamespace(model=model, train_iter=0, is_external=False, xb=(), yb=(), opt=None, **loop)
    for part in map(run.measured, parts_for([kind])):
        if hasattr(part, "on_model"):
            part.on_model(run)
    return run.measured(kind), run


def told(run, kind, **fields):
    """Findings of a fault after all parts have told a run, as in a verdict; fields are of that run."""
    judged = Run(parts=run.parts, sources=set(kind.needs), n_batches=run.n_batches, **fields)
    for part in map(run.measured, parts_for([kind])):
        part.tell(judged)
    return list(judged.measured(kind).findings(judged))


def plain_weight(name, **stats):
    stats = {stat: series(values) for stat, values in stats.items()}
    return Param(f"{name}.weight", name, "Linear", "Linear 8→8", 0, (8, 8), stats=stats)


def found_by(kind, given):
    return list(kind().findings(given))


def trained(model, cbs=()):
    g = torch.Generator().manual_seed(0)
    batches = [(x := torch.randn(16, 4, generator=g), x.sum(1, keepdim=True)) for _ in range(30)]
    learn = Learner(batches, model, F.mse_loss, torch.optim.SGD, lr=0.05)
    return fit(learn, 1, cbs=[Diagnose(show=False), *cbs]).diagnose()


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stepped(model, params, n=5, lr=0.1, opt=torch.optim.SGD, d=8):
    opt = opt(params, lr=lr)
    for i in range(n):
        loss = F.mse_loss(model(numbers(32, d, seed=i)), numbers(32, 3, seed=100 + i))
        opt.zero_grad()
        loss.backward()
        opt.step()


@contextmanager
def from_start():
    """As under the command, which hears a program from its start."""
    end = listen(EARS, from_start=True)
    try:
        yield
    finally:
        end()


def found_in_loop(model, opt, code, n=30, each=lambda step: None, end=lambda: None):
    """Severities and messages of findings of a code in a plain loop; `end` is called after its last step."""
    with watch(model, opt, Diagnose(show=False, on_sick="ignore")) as w:
        for step in range(n):
            x = numbers(32, 4, seed=step)
            loss = w.report_loss(F.mse_loss(model(x), x.sum(1, keepdim=True)))
            opt.zero_grad()
            loss.backward()
            opt.step()
            each(step + 1)
        end()
    return [(x.severity, x.message) for x in w.diagnose().findings if x.code == code]
