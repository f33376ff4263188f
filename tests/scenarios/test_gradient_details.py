"""Details of large gradients, which are read in every n-th record only."""

import math

import pytest
import torch
from torch import nn

from hookcb import Diagnose, GradientHealth, JSONLLogger, Log, WarmupCosine
from hookcb.gradients.stats import GRAD_STATS
from hookcb.report.collect import collect
from tests.gradients.support import batches, close, learner, seeded, spoiling
from tests.support import in_turn

D = 40


def large(seed=0):
    return seeded(lambda: nn.Sequential(nn.Linear(D, 50), nn.Tanh(), nn.Linear(50, 1)), seed)


def trained(n=25, *cbs, **options):
    health = GradientHealth(**options)
    learn = learner(large(), batches(n, d=D), health, *cbs, lr=0.01)
    return learn, health


def read(health, name="0.weight"):
    return [i for i, x in enumerate(health.series(name, "abs_max")) if not math.isnan(x)]


@in_turn(
    ("options", "records"),
    [
        ({}, [0, 10, 20]),
        ({"detail_every": 7}, [0, 7, 14, 21]),
        ({"detail_every": 1}, list(range(25))),
        ({"every": 2, "detail_every": 5}, [0, 5, 10]),
    ],
)
def test_details_are_read_in_every_nth_record(options, records):
    _, health = trained(**options)
    assert read(health) == health.records.detailed("0.weight") == records
    assert read(health, "0.bias") == list(range(len(health.stats)))  # small ones always have them


def test_all_other_numbers_are_the_same():
    _, health = trained(detail_every=1)
    _, seldom = trained(detail_every=10)
    for name in health.names:
        for stat in set(GRAD_STATS) - {"abs_max"}:
            numbers = torch.tensor([seldom.series(name, stat), health.series(name, stat)])
            torch.testing.assert_close(*numbers, rtol=0, atol=0, equal_nan=True)
        for i in seldom.records.detailed(name):
            assert seldom.series(name, "abs_max")[i] == health.series(name, "abs_max")[i]


def test_a_gradient_that_is_not_finite_has_its_details_at_once():
    _, health = trained(8, spoiling([3], "0.weight"))
    assert health.series("0.weight", "nonfinite")[3] == 1
    assert read(health)[:2] == [0, 3]
    assert health.records.first_bad["0.weight"] == (3, 1)


def test_a_gradient_of_zeros_needs_no_details():
    model = large()
    health = GradientHealth()
    learner(model, batches(4, d=D), health, loss=lambda pred, y: pred.sum() * 0)
    assert health.series("0.weight", "norm") == [0] * 4
    assert health.series("0.weight", "zero_rows") == [1] * 4
    assert read(health) == [0]


def test_the_flow_is_that_of_the_last_record_with_details():
    _, health = trained()
    assert [x.mean for x in health.flow()] == [x.mean for x in health.flow(20)]
    assert all(x.mean > 0 and x.max > 0 for x in health.flow())
    assert math.isnan(health.flow(-1)[0].mean)
    _, short = trained(5)
    assert [x.mean for x in short.flow()] == [x.mean for x in short.flow(0)]


def test_the_report_says_from_which_step_the_largest_elements_are():
    _, health = trained()
    text = str(health.report())
    assert f"{health.series('0.weight', 'abs_max')[20]:.2g}" in text
    assert "some of the largest elements are those at step 20" in text
    _, always = trained(detail_every=1)
    assert "largest elements" not in str(always.report())


@pytest.mark.slow
def test_what_was_not_read_is_neither_logged_nor_drawn(tmp_path):
    path = tmp_path / "log.jsonl"
    learn, health = trained(25, Log(JSONLLogger(path), every=1))
    assert 'abs_max": "NaN"' not in path.read_text()
    assert path.read_text().count('"gradients/0.weight/abs_max"') == 3
    series = collect(learn).params["0.weight"].stats["abs_max"]
    assert series.steps == [0, 10, 20]
    assert close(series.values[2], health.series("0.weight", "abs_max")[20], rel=1e-3)


def test_a_scheduled_training_that_moves_is_not_said_to_stand_still():
    """Without its largest element nobody knows whether a gradient is spread over the weight."""
    learn, _ = trained(60, WarmupCosine())
    assert "param.not_stepped" not in {finding.code for finding in learn.diagnose().findings}


@pytest.mark.slow
def test_a_diagnosis_has_details_in_all_its_records():
    learn = learner(large(), batches(40, d=D), Diagnose(show=False), lr=0.01)
    records = learn.gradient_health.records
    assert records.detailed("0.weight") == list(range(len(records.stats)))
    assert len(records.stats) > 5


@pytest.mark.slow
def test_a_large_weight_that_no_step_moves_is_named():
    class Stuck(torch.optim.SGD):
        def step(self, closure=None):
            before = self.param_groups[0]["params"][0].detach().clone()
            super().step(closure)
            self.param_groups[0]["params"][0].data.copy_(before)

    model = large()
    learn = learner(model, batches(60, d=D), Diagnose(show=False, on_sick="ignore"), opt=Stuck, lr=0.05)
    found = [finding for finding in learn.diagnose().findings if finding.code == "param.not_stepped"]
    assert [finding.param for finding in found] == ["0.weight"]


@in_turn("wrong", [0, -1, 2.5, True, "10"])
def test_a_distance_that_cannot_be_is_refused(wrong):
    with pytest.raises((TypeError, ValueError), match="detail_every"):
        GradientHealth(detail_every=wrong)
