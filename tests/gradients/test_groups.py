"""Statistics of several parameters together."""

import math

import pytest
import torch

from hookcb import GradientHealth
from hookcb.gradients.groups import ADDED, merged_series
from tests.gradients.support import at, learner, mlp


def flat_gradient(model):
    return torch.cat([p.grad.flatten() for name, p in model.named_parameters() if name.endswith("weight")])


def test_parameters_that_match_a_pattern_are_described_as_one():
    health, grads = GradientHealth(), []
    model = mlp()
    keeps = at("before_step", lambda cb: grads.append(flat_gradient(cb.model)), order=-60)
    learner(model, None, health, keeps)
    for i, whole in enumerate(grads):
        assert health.merged("*.weight", "norm").values[i] == pytest.approx(whole.norm().item(), rel=1e-5)
        rms = whole.square().mean().sqrt().item()
        assert health.merged("*.weight", "rms").values[i] == pytest.approx(rms, rel=1e-5)
        assert health.merged("*.weight", "abs_max").values[i] == pytest.approx(
            whole.abs().max().item(), rel=1e-6
        )
        assert health.merged("*.weight", "nonfinite").values[i] == 0
    assert health.merged("*", "norm").values == pytest.approx(health.step_series("total_norm"), rel=1e-5)
    assert health.merged("*", "norm").steps == health.steps()


def test_a_parameter_without_a_gradient_adds_nothing_and_nan_shows():
    nan = math.nan
    norms = torch.tensor([[3.0, nan, nan], [4.0, 2.0, nan]])
    columns = {"norm": norms, "nonfinite": norms * 0}
    assert merged_series("norm", columns, [5, 5]).tolist() == pytest.approx([5, 2, nan], nan_ok=True)
    bad = {"norm": torch.tensor([[nan], [4.0]]), "nonfinite": torch.tensor([[1.0], [0.0]])}
    assert math.isnan(merged_series("norm", bad, [5, 5])[0])


def test_what_does_not_follow_from_each_parameter_is_refused():
    health = GradientHealth()
    learner(mlp(), None, health, n_epoch=1)
    with pytest.raises(ValueError, match=f"drift of several parameters does not follow.*{', '.join(ADDED)}"):
        health.merged("*", "drift")
    with pytest.raises(LookupError, match=r"0\.weight"):
        health.merged("blocks.*", "norm")
