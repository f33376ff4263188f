"""The choice of inspected batches depends on their number alone, and on no clock."""

import itertools
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Callback, Diagnose, GradientAccumulation, watch
from hookcb.diagnosis.schedule import EACH, N_NOTED, Schedule
from tests.support import each, fit, in_turn, make_learner, make_model

GROWING = [0, 1, 2, 3, 4, 5, 7, 10, 14, 19, 26, 36, 49, 67, 91, 123, 167, 226, 306, 414, 559, 755]
DOUBLING = [0, 1, 2, 3, 4, 5, 7, 10, 14, 19, 38, 76, 152, 304, 608]


def looks(n, budget=0.02):
    """Batches looked at of n."""
    schedule = Schedule(budget)
    return [i for i in range(n) if schedule.is_due()]


def test_the_first_six_batches_are_looked_at_then_one_whenever_35_percent_more_have_passed():
    found = looks(800, budget=1.0)
    assert found == GROWING
    for last, due in itertools.pairwise(found[5:]):
        assert due - 1 < 1.35 * last <= due


@pytest.mark.parametrize("budget", [0.0, 1e-9])
def test_without_a_budget_it_looks_whenever_the_batches_have_doubled(budget):
    assert looks(800, budget) == DOUBLING


@pytest.mark.parametrize("budget", [0.0, 0.02, 1.0])
def test_up_to_batch_20_it_looks_whatever_the_budget(budget):
    assert looks(20, budget) == [i for i in GROWING if i < 20]


@in_turn("budget", [0.005, 0.02, 0.03, 0.05, 0.5])
def test_the_budget_is_kept_but_for_what_it_does_at_least(budget):
    later = [due for due in looks(20_000, budget) if due >= 20]
    for i, (last, due) in enumerate(itertools.pairwise([19, *later]), start=1):
        assert i <= budget * due or due == 2 * last
        assert due <= 2 * last


def test_a_higher_budget_never_looks_less():
    counts = [len(looks(5_000, budget)) for budget in (0.0, 0.005, 0.01, 0.02, 0.05, 0.2, 1.0)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


def test_looks_that_the_budget_thins_come_back_when_the_training_has_gone_on_for_long():
    gaps = [b / a for a, b in itertools.pairwise(looks(20_000)) if a >= 19]
    assert max(gaps) == 2.0
    assert gaps[-1] == pytest.approx(1.35, rel=0.01)


def test_the_rule_is_told_once_it_has_thinned_looks():
    schedule = Schedule(0.02)
    rules = [schedule.rule for _ in range(40) if schedule.is_due() or True]
    assert set(rules[:20]) == {""}
    assert set(rules[20:]) == {"from batch 20 on about 2% of them"}


def test_slow_facts_are_noted_in_the_first_64_batches_and_then_in_one_of_each_8_whatever_their_period():
    schedule = Schedule()
    found = [i for i in range(4_000) if (schedule.is_due() or True) and schedule.is_noted()]
    later = [i for i in found if i >= N_NOTED]
    assert found[:N_NOTED] == list(range(N_NOTED))
    assert [i // EACH for i in later] == list(range(N_NOTED // EACH, 4_000 // EACH))
    for period in (2, 4, 5, EACH):
        assert {i % period for i in later} == set(range(period))


# ---- in a training


class Clock:
    """Goes on by what is next in turn, whatever the machine does."""

    def __init__(self, *seconds):
        self.now, self.seconds = 0.0, itertools.cycle(seconds)

    def __call__(self):
        self.now += next(self.seconds)
        return self.now


CLOCKS = {"quick": (1e-6,), "slow": (60.0,), "busy": (1e-3, 50.0, 1e-5, 0.2, 7.0)}


def trained(name, monkeypatch, *cbs, n=180):
    """Verdict on a training with a ReLU layer that dies at batch 30, inspected batches, and final weights."""
    clock = Clock(*CLOCKS[name])
    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr("hookcb.core.clock.perf_counter", clock)
    monkeypatch.setattr("hookcb.core.fetches.perf_counter", clock, raising=False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))
    learn = make_learner(n, 0, model=model, lr=0.01)

    def kill(cb):
        if cb.train_iter == 30:
            nn.init.constant_(model[0].bias, -50.0)

    fit(learn, 1, cbs=[Diagnose(show=False), Callback(before_batch=kill), *cbs])
    steps = learn.activation_stats.steps()
    return learn.diagnose(), steps, [p.tolist() for p in model.parameters()]


@pytest.mark.filterwarnings("ignore:ERROR  :UserWarning")
@pytest.mark.parametrize("accumulates", each(2, [False, True]), ids=["", "accumulation"])
def test_the_verdict_is_the_same_whatever_the_clock_says(monkeypatch, accumulates):
    found = []
    for name in CLOCKS:
        cbs = [GradientAccumulation(2)] if accumulates else []
        verdict, steps, weights = trained(name, monkeypatch, *cbs)
        told = verdict.to_dict()
        del told["status"], told["primary"]  # which findings of time may be
        of_machine = "waiting for data", "growing memory", "time spent", "a layer that", "garbage", "growing"
        told["ruled_out"] = [x for x in told["ruled_out"] if not x.startswith(of_machine)]
        told["findings"] = [f for f in told["findings"] if not f["code"].startswith("time.")]
        told["coverage"] = [text for text in told["coverage"] if "time." not in text]
        found.append((told, steps, weights))
    assert found[0] == found[1] == found[2]
    assert not accumulates or len(found[0][1]) > 10
    assert accumulates or found[0][1] == looks(180)
    assert any(f["code"] == "unit.dead" for f in found[0][0]["findings"])


@pytest.mark.slow
def test_the_verdict_says_by_which_rule_later_batches_were_looked_at():
    learn = make_learner(30, 0, lr=0.01)
    verdict = fit(learn, 1, cbs=Diagnose(show=False, budget=0.5)).diagnose()
    rule = "from batch 20 on about 50% of them"
    assert verdict.coverage[0] == f"30 batches, 11 closely ({rule})"
    short = fit(make_learner(12, 0, lr=0.01), 1, cbs=Diagnose(show=False)).diagnose()
    assert short.coverage[0] == "12 batches, 8 closely"


def test_a_watch_looks_at_the_same_batches_as_a_learner():
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, opt, Diagnose(show=False)) as w:
        for _ in range(60):
            w.report_loss(F.mse_loss(model(torch.randn(4, 2)), torch.zeros(4, 1))).backward()
            opt.step()
            opt.zero_grad()
    assert w.activation_stats.steps() == looks(60)
