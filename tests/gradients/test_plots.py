"""Flow and updates as pictures."""

import math

import pytest
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
)
from tests.support import Net, make_batches


def test_the_figures_have_their_scales_legends_and_lines():
    Figure = pytest.importorskip("matplotlib.figure").Figure

    health = GradientHealth()
    learner(seeded(Net), make_batches(5), health, lr=0.01)
    (axes,) = health.plot_flow().axes
    assert axes.get_yscale() == "log"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["mean", "largest"]
    assert [bar.get_height() for bar in axes.patches] == [layer.max for layer in health.flow()]
    (axes,) = health.plot_updates().axes
    assert any(list(line.get_ydata()) == [-3, -3] for line in axes.lines)
    drawn = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    want = [math.log10(x) for x in health.series("head.weight", "update_ratio")]
    assert all(map(close, drawn["head.weight"], want))
    axes = Figure().subplots()
    assert health.plot_flow(ax=axes) is axes.figure
    assert health.plot_updates(ax=Figure().subplots()).axes
    assert gradient_flow_of_one_batch().plot().axes[0].get_yscale() == "log"
    assert len(health.plot_updates(params=slice(None)).axes[0].lines) == 1 + len(health.names)
    with pytest.raises(ValueError, match="recorded"):
        GradientHealth().plot_flow()


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
    assert len(health.flow()) == 2
