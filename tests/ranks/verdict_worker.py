"""One of several ranks; trains with Diagnose, and with faults of its own: `verdict_worker.py FOLDER`."""

import contextlib
import io
import sys
import warnings

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from hookcb import Callback, Diagnose, Learner, watch
from hookcb.diagnosis.measurements.loss import Loss
from tests.ranks.support import digest, join_group, run_cases

RANK, WORLD = 0, 1
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))


def make(spoil=lambda x, y: (x, y), net=None, wrap=DistributedDataParallel, lr=0.1):
    """A learner of 320 samples a rank; `spoil` changes them."""
    x = torch.randn(320 * WORLD, 4, generator=torch.Generator().manual_seed(0))[RANK::WORLD]
    x, y = spoil(x, (x.sum(1) > 0).long())
    loader = DataLoader(TensorDataset(x, y), 8, shuffle=True)
    return Learner((loader, None), wrap(net or model()), cross_entropy, torch.optim.SGD, lr=lr)


def judged(learn, n=2, cbs=(), **options):
    """The verdict of a fit with Diagnose, what it printed and warned, and the weights."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        learn.fit(n, cbs=[*cbs, Diagnose(**options)])
    verdict = learn.diagnosis.verdict
    return {
        "verdict": verdict.to_json(),
        "headline": verdict.headline,
        "findings": [[f.code, f.layer or f.param, list(f.ranks), f.consequence_of] for f in verdict.findings],
        "looked": verdict.looked,
        "printed": "Inspected:" in out.getvalue(),
        "warnings": [str(w.message) for w in caught if "  " in str(w.message)],
        "weights": digest(learn.model),
        "n": len(learn.recorder.losses),
        "of_ranks": [x.values for x in learn.diagnosis.evidence().measured(Loss).of_ranks],
        "loss": learn.diagnosis.evidence().loss.values,
    }


@case
def healthy():
    return judged(make(), 3)


@case
def without():
    learn = make()
    with learn.no_logging():
        learn.fit(3)
    return digest(learn.model)


@case
def inputs_of_one_rank():
    return judged(make(lambda x, y: (x * 1e4 if RANK == 1 else x, y)), 1)


@case
def labels_of_one_rank():
    def shuffled(x, y):
        return x, y[torch.randperm(len(y), generator=torch.Generator().manual_seed(3))] if RANK == 1 else y

    return judged(make(shuffled), 6)


class SpoilBatch(Callback):
    order = -10

    def before_batch(self):
        if self.training and self.iter == 3 and RANK == 1:
            self.learn.xb = (self.x * float("nan"),)


@case
def nan_in_the_batch_of_one_rank():
    return judged(make(), 1, [SpoilBatch()])


class LogOfOne(nn.Module):
    n = 0

    def forward(self, x):
        return x.log() if RANK == 1 and self.n > 5 else x


class Count(Callback):
    def before_batch(self):
        LogOfOne.n = self.train_iter


@case
def nan_in_a_layer_of_one_rank_stops_all():
    net = model()
    net.insert(1, LogOfOne())
    return judged(make(net=net), 1, [Count()], on_sick="stop")


class MoveOne(Callback):
    def after_step(self):
        if RANK == 1:
            with torch.no_grad():
                self.model.module[2].bias += 1e-6


@case
def the_same_batches():
    torch.manual_seed(5)  # in which the loader shuffles
    x = torch.randn(320, 4)
    learn = make()
    learn.dls = type(learn.dls)(DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), 8), None)
    return judged(learn, 1)


@case
def replicas_that_diverge():
    return judged(make(), 1, [MoveOne()])


@case
def a_function_is_called_on_main():
    told = []
    learn = make(lambda x, y: (x * 1e5, y), lr=10.0)
    judged(learn, 1, on_sick=lambda verdict: told.append(verdict.status), show=False)
    return told


@case
def sharded():
    from torch.distributed.fsdp import fully_shard

    def shard(net):
        fully_shard(net[0])
        return fully_shard(net)

    learn = make(wrap=shard)
    learn.fit(1, cbs=Diagnose(show=False))
    verdict = learn.diagnosis.verdict
    return {"verdict": verdict.to_json(), "status": verdict.status, "coverage": verdict.coverage}


@case
def asked_by_one_rank_in_a_fit():
    class Ask(Callback):
        def after_batch(self):
            if self.iter == 30 and RANK == 0:
                self.learn.asked = self.learn.diagnose().status

    learn = make()
    with learn.no_logging():
        learn.fit(1, cbs=[Diagnose(show=False), Ask()])
    return getattr(learn, "asked", None)


HEALED = [0.02, *[3.0 * 0.9**i for i in range(79)]]  # losses of a run resumed without its optimizer


def healed_loss():
    """A loss function with these losses, and the gradient of a cross-entropy."""
    left = iter(HEALED)
    return lambda pred, y: (loss := cross_entropy(pred, y)) * (next(left) / loss.detach())


@case
def healed_in_a_fit():
    learn = make(lr=0.001)
    learn.loss_func = healed_loss()
    return judged(learn, 2)


@case
def healed_in_own_loops():
    wrapped, loss_func = DistributedDataParallel(model()), healed_loss()
    opt, loader = torch.optim.SGD(wrapped.parameters(), lr=0.01), make().dls.train
    with warnings.catch_warnings(action="ignore"), watch(wrapped, opt, cbs=Diagnose(show=False)) as w:
        for (x, y), _ in zip([*loader, *loader], HEALED, strict=False):
            loss_func(wrapped(x), y).backward()
            opt.step()
            opt.zero_grad()
    return w.diagnose().headline


@case  # no watch comes after it, as loops of the two ranks would not have the same number
def watched_by_one_rank():
    wrapped = DistributedDataParallel(model())
    opt = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    learn = make()

    def train():
        for x, y in learn.dls.train:
            cross_entropy(wrapped(x), y).backward()
            opt.step()
            opt.zero_grad()

    if RANK == 0:
        with watch(wrapped, opt, cbs=Diagnose(show=False)) as w:
            train()
        return w.diagnose().coverage
    return train()


@case
def an_error_on_one_rank():
    class Fail(Callback):
        def after_pred(self):
            if self.iter == 9 and RANK == 1:
                raise ValueError("my error")

    learn, out = make(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            learn.fit(1, cbs=[Fail(), Diagnose()])
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error), "looked": learn.diagnosis.verdict.looked}


def main():
    global RANK, WORLD
    RANK, WORLD = join_group()
    run_cases(CASES, sys.argv[1])


if __name__ == "__main__":
    main()
