"""The batches of a watched loop in which a diagnosis sleeps: it knows of them what it would know awake."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hookcb import Diagnose, watch
from hookcb.diagnosis import recorder
from tests.diagnosis.test_attached import facts

N = 200


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def batches(n=N):
    generator = torch.Generator().manual_seed(0)
    for _ in range(n):
        yield torch.randn(64, 6, generator=generator), torch.randint(0, 3, (64,), generator=generator)


class Loop:
    """A plain loop, with what it does beside its steps.

    Attributes:
        n_asleep: number of batches that were only noted.
    """

    n_asleep = 0

    def __init__(self, act=lambda loop, i: None, begin=lambda loop, i: None, report=False, ends=None):
        self.act, self.begin, self.report, self.ends = act, begin, report, ends
        self.model = make_model()
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def run(self, *cbs):
        with contextlib.suppress(KeyboardInterrupt), watch(self.model, self.opt, cbs) as self.w:
            for i, (x, y) in enumerate(batches()):
                self.begin(self, i)
                loss = F.cross_entropy(self.model(x), y)
                if self.report:
                    self.w.report_loss(loss)
                if i == self.ends:
                    raise KeyboardInterrupt
                loss.backward()
                if self.act(self, i) != "no step":
                    self.opt.step()
                    self.opt.zero_grad()
                self.n_asleep += bool(cbs) and self.w.diagnosis._is_asleep
        return self


def evidence_of(monkeypatch, sleeps, **options):
    monkeypatch.setattr(recorder, "MAX_ASLEEP", 31 if sleeps else 0)
    loop = Loop(**options).run(Diagnose(on_sick="ignore", show=False))
    return loop, loop.w.diagnosis.evidence()


def scale_rate(loop, i):
    loop.opt.param_groups[0]["lr"] = 0.05 / (1 + i)


def skip_some(loop, i):
    return "no step" if i in (90, 91, 120, 140) else None


def validate(loop, i):
    if i in (100, 130):
        loop.model.eval()
        with torch.no_grad():
            loop.model(torch.zeros(4, 6))
        loop.model.train()


def add_optimizer(loop, i):
    if i == 120:
        loop.opt = torch.optim.SGD(loop.model.parameters(), lr=0.01)


@pytest.mark.parametrize(
    ("options", "but"),
    [
        ({}, ()),
        pytest.param({"report": True}, (), marks=pytest.mark.slow),
        pytest.param({"begin": scale_rate}, (), marks=pytest.mark.slow),
        pytest.param({"act": validate}, (), marks=pytest.mark.slow),
        # one batch earlier, as a step that is missing is noticed late
        pytest.param({"act": skip_some}, ("looks",), marks=pytest.mark.slow),
        pytest.param({"act": add_optimizer}, (), marks=pytest.mark.slow),
        ({"ends": 140}, ("waits",)),  # of the batch that is not over
    ],
    ids=["plain", "reported", "rates", "validation", "skipped steps", "another optimizer", "interrupted"],
)
def test_a_diagnosis_that_sleeps_knows_what_one_that_does_not_knows(monkeypatch, options, but):
    loop, asleep = evidence_of(monkeypatch, True, **options)
    awake_loop, awake = evidence_of(monkeypatch, False, **options)
    assert loop.n_asleep > 10
    assert not awake_loop.n_asleep
    known, expected = ({k: x for k, x in facts(e).items() if k not in but} for e in (asleep, awake))
    assert known == expected
    assert set(asleep.batches.steps) == set(awake.batches.steps)


def test_weights_are_the_same_and_nothing_is_left(monkeypatch):
    loop, _ = evidence_of(monkeypatch, True)
    plain = Loop().run()
    for p, q in zip(loop.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(p, q)
    assert loop.w.batch_notes.owner is loop.w.batch_notes.stepper is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in loop.model.modules())


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_number_that_is_not_finite_wakes_it_in_its_batch(monkeypatch, what):
    def spoil(loop, i):
        if i == 150 and what == "gradient":  # as by a hook of the user, in the backward
            loop.model[0].bias.register_hook(lambda grad: grad * torch.nan)
        if i == 150 and what == "loss":
            loop.model[2].bias.data[0] = torch.nan

    loop, evidence = evidence_of(monkeypatch, True, act=spoil)
    assert loop.n_asleep > 60
    found = [x for x in evidence.observations if x.code.startswith("nonfinite")]
    assert [x.step for x in found] == [151]


def test_it_does_not_sleep_in_a_loop_that_accumulates(monkeypatch):
    loop, evidence = evidence_of(monkeypatch, True, act=lambda loop, i: None if i % 2 else "no step")
    assert not loop.n_asleep
    assert (evidence.n_batches, evidence.n_steps) == (N, N // 2)
