"""How the readings of GradientHealth are chosen, found and kept."""

import copy
import math

import pytest
import torch

from hookcb import GradientHealth
from tests.gradients.support import (
    batches,
    learner,
    mlp,
    seeded,
)
from tests.support import Net, make_batches

# ---- reading


def test_numbers_are_found_by_name_index_glob_slice_and_as_a_table():
    health = GradientHealth()
    learner(mlp(), None, health, n_epoch=2)
    assert health.steps() == list(range(8))
    norms = health.series("0.weight", "norm")
    assert norms == [record[0]["norm"] for record in health.stats] == health.series(0, "norm")
    assert health.series("0.*", "norm") == [norms, health.series("0.bias", "norm")]
    assert [s["norm"] for s in health.stats[3][1:3]] == [health.stats[3][i]["norm"] for i in (1, 2)]
    rows = [row for row in health.table() if row.layer == "2.bias" and row.stat == "update_ratio"]
    assert [row.value for row in rows] == health.series("2.bias", "update_ratio")
    assert [(row.epoch, row.step, row.phase) for row in rows[3:5]] == [(0, 3, "train"), (1, 4, "train")]
    for look in (lambda: health.series("9.weight", "norm"), lambda: health.series(0, "norms")):
        with pytest.raises(LookupError):
            look()
    with pytest.raises(LookupError, match="total_norm"):
        health.step_series("total")


CHOICES = {
    "glob": ("blocks.*.weight", ["blocks.0.0.weight", "blocks.1.0.weight"]),
    "globs": (["head.*", "scale"], ["head.weight", "head.bias", "scale"]),
    "predicate": (lambda name, p: p.dim() == 0, ["scale"]),
}


@pytest.mark.parametrize(("params", "names"), CHOICES.values(), ids=CHOICES)
def test_parameters_are_chosen_by_name_or_predicate(params, names):
    health = GradientHealth(params=params)
    learner(seeded(Net), make_batches(), health, lr=0.01)
    assert sorted(health.names) == sorted(names)
    assert {row.layer for row in health.table()} == set(names)


@pytest.mark.parametrize("params", ["body.*", ["head.*", "nothing"], lambda name, p: False])
def test_a_choice_of_nothing_is_refused_before_training_with_what_there_is(params):
    model = seeded(Net)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(LookupError, match=r"head\.weight"):
        learner(model, make_batches(), GradientHealth(params=params))
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_arguments_that_cannot_be_are_refused_at_once():
    wrong = [{"every": 0}, {"every": 1.5}, {"on_nonfinite": "ignore"}, {"on_nonfinite": None}, {"keep": 0}]
    for options in [*wrong, {"params": 3}, {"params": []}]:
        with pytest.raises((ValueError, TypeError), match=str(next(iter(options)))):
            GradientHealth(**options)


def test_records_stay_within_keep_and_the_newest_is_there():
    health = GradientHealth(keep=6)
    learner(mlp(), batches(5), health, n_epoch=9)
    assert len(health.stats) == len(health.step_stats) <= 6
    assert health.steps()[0] == 0
    assert health.steps()[-1] == 44
    assert all(math.isfinite(x) for x in health.step_series("total_norm") + health.series(0, "drift"))
