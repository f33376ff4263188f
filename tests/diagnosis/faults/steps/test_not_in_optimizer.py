"""Parameters with gradients that no optimizer has."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, watch


def watched(model, opts, given):
    """Verdict on a training by several optimizers, of which a watch was given some."""
    x = torch.randn(64, 8)
    with watch(model, given, Diagnose("ignore", show=False)) as w:
        for _ in range(24):
            model.zero_grad()
            F.mse_loss(model(x), x[:, :1]).backward()
            for opt in opts:
                opt.step()
    return w.diagnose()


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def sgd(*parts):
    return torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.05)


@pytest.mark.filterwarnings("ignore:the given optimizer has no parameter")
@pytest.mark.parametrize("which", ["all", "a part"])
def test_an_optimizer_of_a_copy_is_named_as_such(which):
    model = two_layers()
    before = copy.deepcopy(model)
    opt = sgd(before) if which == "all" else sgd(before[0], model[2])
    primary = watched(model, [opt], opt).primary
    assert (primary.code, primary.severity, primary.layer) == ("param.not_in_optimizer", "error", "0")
    assert "others of the same shapes, which are not the model's" in primary.message
    assert "was copied or created anew" in primary.causes[0]


@pytest.mark.slow
def test_an_optimizer_of_a_part_is_not_said_to_be_of_a_copy():
    model = two_layers()
    opt = sgd(model[2])
    primary = watched(model, [opt], opt).primary
    assert primary.code == "param.not_in_optimizer"
    assert "same shapes" not in primary.message


def test_parameters_that_an_optimizer_outside_the_watch_updates_are_fine():
    model = two_layers()
    opts = sgd(model[0]), sgd(model[2])
    assert watched(model, opts, opts[0]).status == "healthy"
