"""Gradients of each layer after one backward, or of one record of a fit."""

import pytest
import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hookcb import (
    GradientHealth,
)
from hookcb.gradients.flow import gradient_flow
from tests.gradients.support import (
    at,
    close,
    learner,
    seeded,
    wide,
)
from tests.support import Net, make_batches, make_model


@pytest.mark.parametrize("of_fit", [True, False])
def test_flow_is_mean_and_largest_magnitude_of_each_layer_in_order(of_fit):
    model, data, grads = seeded(Net), make_batches(3), []
    note = at("before_step", lambda cb: grads.append({n: wide(p.grad) for n, p in model.named_parameters()}))
    health = GradientHealth()
    learner(model, data, health, note, lr=0.01)
    if of_fit:
        flows = [(health.flow(record=k), grads[k]) for k in range(3)] + [
            (health.flow(), grads[2]),
            (health.flow(-1), grads[2]),
        ]
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
    with pytest.raises(IndexError):
        health.flow(record=99)


def test_flow_needs_a_model_and_a_backward():
    model = make_model()
    with pytest.raises(ValueError, match="backward"):
        gradient_flow(model)
    x, y = make_batches()[0]
    F.mse_loss(model(x), y).backward()
    assert [layer for layer, *_ in gradient_flow(model)] == ["0", "2"]
    with pytest.raises(TypeError, match=r"must be an nn\.Module, got 'resnet'"):
        gradient_flow("resnet")


@pytest.fixture
def mesh():
    """That of two ranks, of which this process is the second, and no other exists."""
    distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield init_device_mesh("cpu", (2,))
    distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("placement", "flow"),
    [(Shard(0), [("layer", 5.5, 7.0)]), (Replicate(), [("layer", 5.5, 7.0)]), (Partial(), [])],
    ids=["divided", "whole", "summands"],
)
def test_a_gradient_is_divided_as_its_parameter_as_far_as_nothing_is_sent(mesh, placement, flow):
    whole = torch.arange(8.0).view(4, 2)
    part = whole[2:] if placement == Shard(0) else whole
    model = nn.ModuleDict({"layer": nn.Linear(2, 4, bias=False)})
    model["layer"].weight = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)]))
    model["layer"].weight.grad = DTensor.from_local(part, mesh, [placement])
    assert gradient_flow(model) == flow
