"""Schedules of the learning rate that do not fit the training."""

import pickle
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.optim.swa_utils import SWALR

from hookcb import Callback, Diagnose, Learner, Schedule, watch
from hookcb.cli.main import main
from hookcb.diagnosis.faults.steps.schedules import WrongSchedule
from hookcb.diagnosis.heard import heard, listen
from hookcb.diagnosis.measurements.schedules import Schedulers
from hookcb.diagnosis.run import Run, Skipped
from tests.diagnosis.faults.support import numbers, small_net
from tests.support import first, fit

N_EPOCHS, N_EACH = 4, 16
N = N_EPOCHS * N_EACH
REAL = vars(LRScheduler)["step"]


def told(verdict):
    return [x.severity for x in verdict.findings if x.code == "lr.schedule"]


def watched(make, per="batch", n_epochs=N_EPOCHS, before=False, opt=None):
    model = small_net()
    opt = SGD(model.parameters(), lr=1e-3)
    schedule = make(opt)
    if before:
        opt = SGD(model.parameters(), lr=1e-3)
    with watch(model, opt, cbs=Diagnose("ignore", show=False)) as w:
        for _ in range(n_epochs):
            for i in range(N_EACH):
                x = numbers(16, 4, seed=i)
                loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
                opt.zero_grad()
                loss.backward()
                opt.step()
                if per == "batch":
                    schedule.step()
            if per == "epoch":
                schedule.step()
            elif per == "plateau":
                schedule.step(loss.item())
    assert vars(LRScheduler)["step"] is REAL
    return told(w.diagnose())


def warm_cosine(n_warm, n):
    def make(opt):
        parts = [LinearLR(opt, 0.1, total_iters=n_warm), CosineAnnealingLR(opt, n - n_warm)]
        return SequentialLR(opt, parts, [n_warm])

    return make


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # of SequentialLR of torch 2.6 to itself
@pytest.mark.parametrize(
    ("make", "per"),
    first(
        [
            (lambda opt: OneCycleLR(opt, 1e-3, total_steps=N), "epoch"),
            (lambda opt: CosineAnnealingLR(opt, N), "epoch"),
            (lambda opt: CosineAnnealingLR(opt, N_EPOCHS), "batch"),
            (lambda opt: CosineAnnealingLR(opt, 40), "batch"),  # rises again, and ends there
            (lambda opt: MultiStepLR(opt, [2, 3, 4]), "batch"),
            (lambda opt: LinearLR(opt, 1.0, 1e-3, total_iters=N_EPOCHS), "batch"),
            (warm_cosine(1, N_EPOCHS), "batch"),
        ]
    ),
)
def test_a_schedule_that_counts_batches_as_epochs_or_the_reverse_is_told(make, per):
    assert watched(make, per) == ["warning"]


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # of SequentialLR of torch 2.6 to itself
@pytest.mark.parametrize(
    ("make", "per"),
    first(
        [
            (lambda opt: OneCycleLR(opt, 1e-3, total_steps=N), "batch"),
            (lambda opt: OneCycleLR(opt, 1e-3, total_steps=4 * N), "batch"),  # cut on purpose
            (lambda opt: CosineAnnealingLR(opt, N), "batch"),
            (lambda opt: CosineAnnealingLR(opt, N - 2), "batch"),
            (lambda opt: CosineAnnealingLR(opt, N_EPOCHS), "epoch"),
            (lambda opt: CosineAnnealingLR(opt, 100), "epoch"),  # stopped early
            (lambda opt: MultiStepLR(opt, [2, 3]), "epoch"),
            (lambda opt: MultiStepLR(opt, [40, 60]), "batch"),
            (lambda opt: LinearLR(opt, 0.1, total_iters=5), "batch"),
            (lambda opt: ConstantLR(opt, 0.1, total_iters=5), "batch"),
            (lambda opt: PolynomialLR(opt, N), "batch"),
            (warm_cosine(10, N), "batch"),
            (lambda opt: ChainedScheduler([LinearLR(opt), CosineAnnealingLR(opt, N)]), "batch"),
            (lambda opt: CosineAnnealingWarmRestarts(opt, 10), "batch"),
            (lambda opt: CyclicLR(opt, 1e-4, 1e-3, 5), "batch"),
            (lambda opt: LambdaLR(opt, lambda step: 1 - step / N), "batch"),
            (lambda opt: ExponentialLR(opt, 0.99), "batch"),
            (lambda opt: SWALR(opt, 1e-4), "batch"),
            (lambda opt: ReduceLROnPlateau(opt), "plateau"),
            (lambda opt: CosineAnnealingLR(opt, N), "never"),  # of a watch it is unknown when an epoch ends
        ]
    ),
)
def test_schedules_that_fit_or_are_cut_on_purpose_are_not(make, per):
    assert watched(make, per) == []


def test_the_steps_of_a_chain_are_counted():
    opt = SGD(small_net().parameters(), lr=0.1)
    end = listen([Schedulers])
    try:
        chain = ChainedScheduler([LinearLR(opt), CosineAnnealingLR(opt, N)])
        for _ in range(3):
            opt.step()
            chain.step()
        assert heard(Schedulers).failure is None
        found = heard(Schedulers).of(chain)
        assert (found.n, found.at, found.is_inner) == (3, 3, False)
    finally:
        end()


@pytest.mark.slow
def test_a_cosine_that_goes_up_and_down_over_epochs_is_a_note():
    assert watched(lambda opt: CosineAnnealingLR(opt, N_EACH), n_epochs=6) == ["info"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_scheduler_of_another_optimizer_is_told():
    assert watched(lambda opt: CosineAnnealingLR(opt, N), before=True) == ["warning"]


def fitted(cbs=(), make=None):
    model = small_net()
    opt = SGD(model.parameters(), lr=1e-3)
    batches = [(x, x.sum(1, keepdim=True)) for x in (numbers(16, 4, seed=i) for i in range(N_EACH))]
    learn = Learner(batches, model, F.mse_loss, opt)
    kept = make(opt) if make else None
    learn = fit(learn, N_EPOCHS, cbs=[Diagnose("ignore", show=False), *cbs])
    assert kept is None or kept.last_epoch == 0
    return learn


@pytest.mark.slow
def test_schedules_of_a_learner_are_heard_and_nothing_is_kept():
    learn = fitted([Schedule(lambda opt: CosineAnnealingLR(opt, N))])
    assert told(learn.diagnose()) == []
    assert pickle.loads(pickle.dumps(learn.diagnosis.evidence().measured(WrongSchedule)))
    assert pickle.loads(pickle.dumps(learn.diagnosis))
    assert told(fitted([Schedule(lambda opt: CosineAnnealingLR(opt, N_EPOCHS))]).diagnose()) == ["warning"]


@pytest.mark.slow
def test_without_a_scheduler_nothing_is_ruled_out():
    assert told(fitted().diagnose()) == []
    assert [type(x) for x in WrongSchedule().findings(Run())] == [Skipped]


@pytest.mark.slow
def test_a_scheduler_that_is_never_stepped_is_told():
    assert told(fitted(make=lambda opt: CosineAnnealingLR(opt, N)).diagnose()) == []  # made before the fit

    class Made(Callback):
        def before_fit(self):
            self.schedule = CosineAnnealingLR(self.learn.opt, N)

    assert told(fitted([Made()]).diagnose()) == ["warning"]


SCRIPT = """
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
schedule = CosineAnnealingLR(opt, T_max={length})
for epoch in range(4):
    for _ in range(20):
        x = torch.randn(16, 4)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        opt.zero_grad()
        loss.backward()
        {before}
        opt.step()
        {after}
    with torch.no_grad():
        model.eval()(x)
        model.train()
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(
    ("length", "before", "found"),
    [(80, "", ""), (4, "", "WARNING"), (80, "schedule.step()", "INFO")],
)
def test_the_command_hears_a_script(length, before, found, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(length=length, before=before, after="" if before else "schedule.step()"))
    assert main(["diagnose", str(script)]) == (found == "WARNING")
    out = capsys.readouterr().out
    assert ("(lr.schedule" in out) == bool(found)
    assert not found or f"\n{found}  " in out


def of_two(make_first, make_second, every=1, per_epoch=False):
    """Severities of a training in which the second optimizer makes one step in `every` batches."""
    model = small_net()
    opts = [SGD(m.parameters(), lr=1e-3) for m in (model[0], model[-1])]
    schedules = [make(opt) for make, opt in zip((make_first, make_second), opts, strict=True)]
    with watch(model, opts, cbs=Diagnose("ignore", show=False)) as w:
        for i in range(N):
            x = numbers(16, 4, seed=i)
            model.zero_grad()
            F.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            for opt, schedule in list(zip(opts, schedules, strict=True))[: 1 + (i % every == 0)]:
                opt.step()
                if schedule is not None and not (per_epoch and opt is opts[1]):
                    schedule.step()
            if per_epoch and (i + 1) % N_EACH == 0:
                schedules[1].step()
    return told(w.diagnose())


def constant(opt):
    return None


@pytest.mark.slow
def test_of_several_optimizers_each_schedule_is_compared_with_the_steps_of_its_own():
    def whole(opt):
        return CosineAnnealingLR(opt, N)

    def half(opt):
        return CosineAnnealingLR(opt, N // 2)

    assert of_two(whole, half, every=2) == []
    assert of_two(constant, half, every=2) == []
    assert of_two(whole, half) == ["warning"]  # it rises again, and ends at its top
    assert of_two(whole, whole, per_epoch=True) == ["warning"]
    assert of_two(constant, lambda opt: MultiStepLR(opt, [2, 3, 4])) == ["warning"]
    assert of_two(whole, lambda opt: CosineAnnealingLR(opt, N_EPOCHS), per_epoch=True) == []


@pytest.mark.slow
@pytest.mark.parametrize("n_stepped", [1, 2])
def test_of_several_optimizers_a_schedule_that_is_never_stepped_is_told(n_stepped):
    model = small_net()
    opts = [SGD(m.parameters(), lr=1e-3) for m in (model[0], model[-1])]
    with watch(model, opts, cbs=Diagnose("ignore", show=False)) as w:
        schedules = [ExponentialLR(opt, 0.9) for opt in opts]
        for i in range(N):
            x = numbers(16, 4, seed=i)
            model.zero_grad()
            F.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            for opt in opts:
                opt.step()
            if i % N_EACH == N_EACH - 1:
                model.eval()
                with torch.no_grad():
                    model(x)
                model.train()
                for schedule in schedules[:n_stepped]:
                    schedule.step()
    assert told(w.diagnose()) == ["info"] * (2 - n_stepped)
