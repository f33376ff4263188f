"""How the readings of GradientHealth are chosen, found, drawn and kept."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from hookcb import GradientHealth
from hookcb.gradients.flow import gradient_flow
from tests.gradients.support import (
    INF,
    NAN,
    at,
    batches,
    close,
    learner,
    mlp,
    seeded,
    wide,
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


@pytest.mark.parametrize("of_fit", [True, False])
def test_flow_is_mean_and_largest_magnitude_of_each_layer_in_order(of_fit):
    model, data, grads = seeded(Net), make_batches(3), []
    note = at("before_step", lambda cb: grads.append({n: wide(p.grad) for n, p in model.named_parameters()}))
    health = GradientHealth()
    learner(model, data, health, note, lr=0.01)
    if of_fit:
        flows = [(health.flow(record=k), grads[k]) for k in range(3)] + [(health.flow(), grads[2])]
    else:
        F.mse_loss(model(data[0][0]), data[0][1]).backward()
        flows = [(gradient_flow(model), {n: wide(p.grad) for n, p in model.named_parameters()})]
    for flow, true in flows:
        layers = {x.layer: x for x in flow}
        assert [x for x in layers if x not in ("", "scale")] == ["stem", "blocks.0.0", "blocks.1.0", "head"]
        for layer in ("stem", "blocks.0.0", "blocks.1.0", "head"):
            values = torch.cat([true[f"{layer}.weight"].flatten(), true[f"{layer}.bias"]]).abs()
            assert close(layers[layer].mean, values.mean().item())
            assert close(layers[layer].max, values.max().item())


def test_the_figures_have_their_scales_legends_and_lines():
    from matplotlib.figure import Figure

    health = GradientHealth()
    learner(seeded(Net), make_batches(5), health, lr=0.01)
    (axes,) = health.plot_flow().axes
    assert axes.get_yscale() == "log"
    assert len(axes.get_legend().get_texts()) == 2
    (axes,) = health.plot_updates().axes
    assert any(list(line.get_ydata()) == [-3, -3] for line in axes.lines)
    drawn = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    want = [math.log10(x) for x in health.series("head.weight", "update_ratio")]
    assert all(map(close, drawn["head.weight"], want))
    axes = Figure().subplots()
    assert health.plot_flow(ax=axes) is axes.figure
    assert health.plot_updates(ax=Figure().subplots()).axes
    assert gradient_flow_of_one_batch().plot().axes[0].get_yscale() == "log"


def gradient_flow_of_one_batch():
    model = mlp()
    x, y = batches()[0]
    F.mse_loss(model(x), y).backward()
    return gradient_flow(model)


@pytest.mark.parametrize("spoil", [NAN, INF, 0.0])
def test_the_figures_are_drawn_of_gradients_that_are_zero_or_not_finite(spoil):

    def spoiled(cb):
        for p in cb.model.parameters():
            p.grad.fill_(spoil)

    health = GradientHealth()
    learner(mlp(), None, at("after_backward", spoiled), health, lr=0.0)
    assert health.plot_flow().axes
    assert health.plot_updates().axes
    assert str(health.check())
    assert len(health.flow()) == 2
