"""What GradientHealth reads in trainings of parameters of every kind and fate."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from hookcb import Freeze, GradientHealth
from tests.gradients.support import (
    assert_matches,
    at,
    batches,
    by_hand,
    close,
    learner,
    mlp,
    norm_of,
    ratio,
    seeded,
)
from tests.support import fit, notice_waits

sgd, adam = torch.optim.SGD, torch.optim.Adam

# ---- which parameters


class Odd(nn.Module):
    """Parameters of every shape and fate."""

    def __init__(self):
        super().__init__()
        self.body, self.tied = nn.Linear(3, 3), nn.Linear(3, 3)
        self.tied.weight = self.body.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.tensor([0.5]))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Parameter(torch.ones(4))
        self.fixed = nn.Parameter(torch.ones(2), requires_grad=False)
        self.whole = nn.Parameter(torch.ones(5, dtype=torch.int8), requires_grad=False)
        self.eighth = nn.Parameter(torch.ones(5).to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x):
        x = self.tied(self.body(x).tanh()) * self.scale + self.one
        return x.sum(1, keepdim=True) + self.empty.sum()


def test_odd_shaped_tied_frozen_and_unused_parameters():
    steps = by_hand(seeded(Odd), batches())
    health = GradientHealth()
    learn = learner(seeded(Odd), None, health)
    names = ["scale", "one", "body.weight", "body.bias", "tied.bias"]
    for k, step in enumerate(steps):
        for stat in ("norm", "clipped_norm", "update_ratio", "drift", "weight_norm"):
            for name in names:
                one = health.stats[k][name]
                assert math.isfinite(one[stat])
        for name in names:
            assert close(health.stats[k][name]["norm"], norm_of(step.grads[name]))
        assert close(health.step_series("total_norm")[k], math.hypot(*map(norm_of, step.grads.values())))
    for name in names:
        assert close(
            health.stats[1][name]["update_ratio"], ratio(steps[1].after[name], steps[1].before[name])
        )
    assert "tied.weight" not in health.names
    assert list(health.without_grad) == ["unused"]
    assert sorted(health.frozen) == ["eighth", "fixed", "whole"]
    assert not {"fixed", "whole", "eighth"} & {f.param for f in learn.diagnose().findings}


def test_a_parameter_without_gradient_has_nan_and_one_that_gets_none_later_too():
    class Switch(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.n = nn.Linear(3, 1), nn.Linear(3, 1), 0

        def forward(self, x):
            self.n += 1
            return self.a(x) if self.n % 2 else self.b(x)

    health = GradientHealth()
    learner(seeded(Switch), None, health)
    for k in range(4):
        on, off = ("a", "b") if k % 2 == 0 else ("b", "a")
        assert health.stats[k][f"{on}.weight"]["norm"] > 0
        assert math.isnan(health.stats[k][f"{off}.weight"]["norm"])
        assert close(
            health.step_series("total_norm")[k],
            math.hypot(health.stats[k][f"{on}.weight"]["norm"], health.stats[k][f"{on}.bias"]["norm"]),
        )
    assert sorted(health.without_grad) == ["a.bias", "a.weight"]


@pytest.mark.parametrize("n", [(10, 4), (500, 40)], ids=["small", "large"])
def test_sparse_gradients_are_read_coalesced(n):
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.fc = nn.Embedding(*n, sparse=True), nn.Linear(n[1], 1)

        def forward(self, i):
            return self.fc(self.emb(i).mean(1))

    g = torch.Generator().manual_seed(0)  # few rows, each several times
    data = [(torch.randint(0, 6, (5, 7), generator=g), torch.randn(5, 1, generator=g)) for _ in range(3)]
    steps = by_hand(seeded(Bag), data)
    health = GradientHealth(detail_every=1)
    learner(seeded(Bag), data, health)
    sampled = ("update_ratio", "drift") if n[0] == 500 else ()
    assert_matches(health, steps, skip=sampled)
    assert health.stats[0]["emb.weight"]["zero_rows"] > 0.3


@pytest.mark.parametrize("size", [(4, 3), (40, 50)], ids=["small", "large"])
def test_complex_parameters_count_by_their_magnitude(size):
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(*size, dtype=torch.complex64))
            self.real = nn.Parameter(torch.randn(size[1]))

        def forward(self, x):
            return ((x.to(torch.complex64) @ self.w).abs() * self.real).sum(1, keepdim=True)

    steps = by_hand(seeded(Complex), batches(d=size[0]), lr=1e-3)
    health = GradientHealth(detail_every=1)
    learner(seeded(Complex), batches(d=size[0]), health, lr=1e-3)
    assert_matches(health, steps, skip=("update_ratio", "drift") if size[0] == 40 else ())


@pytest.mark.parametrize("bad", [complex(float("nan"), 1), complex(0, float("inf"))])
def test_a_complex_element_that_is_not_finite_is_one(bad):
    model = nn.Linear(2, 2, bias=False, dtype=torch.complex64)

    def put(cb):
        cb.model.weight.grad[0, 1] = bad

    health = GradientHealth()
    data = [torch.ones(3, 2, dtype=torch.complex64)]
    learner(model, data, at("after_backward", put), health, lr=0.0, loss=lambda p: p.abs().sum())
    assert health.stats[0]["weight"]["nonfinite"] == 1


def test_groups_and_parameters_outside_the_optimizer_have_updates_of_their_own():
    def make(params, lr):
        params = list(params)
        return sgd([{"params": params[:1], "lr": lr}, {"params": params[2:3], "lr": lr * 10}], lr=lr)

    health, totals = GradientHealth(), ("total_norm", "clipped_total_norm", "mean_norm")
    learner(mlp(), None, health, opt=make, lr=0.01)
    # of what the optimizer does not know gradients add up, as nobody resets them
    steps = by_hand(mlp(), batches(), make, lr=0.01)
    assert_matches(health, steps, names=["0.weight", "2.weight"], skip_step=totals)
    for name in ("0.bias", "2.bias"):
        assert health.series(name, "update_ratio") == [0.0] * 4


def test_thawed_parameters_appear_from_then_on():
    health = GradientHealth()
    learn = learner(mlp(), batches(3), Freeze("0", until=1), health, n_epoch=2)
    norms = health.series("0.weight", "norm")
    assert all(math.isnan(x) for x in norms[:3])
    assert all(x > 0 for x in norms[3:])
    assert all(x > 0 for x in health.series("0.weight", "update_ratio")[3:])
    assert all(x > 0 for x in health.series("2.weight", "norm"))
    assert list(health.frozen) == list(health.without_grad) == []
    assert len(health.flow()) == 2
    fit(learn, cbs=Freeze("0", name="again"))
    assert sorted(health.frozen) == ["0.bias", "0.weight"]
    assert list(health.without_grad) == []


# ---- elsewhere


@pytest.mark.cuda
@pytest.mark.parametrize(
    "options", [{"capturable": True}, {"capturable": True, "foreach": True}, {"fused": True}]
)
def test_optimizers_for_graphs_of_a_gpu_are_read_without_a_wait(options):
    def strict(on):
        return lambda cb: notice_waits("error" if on else "default")

    health = GradientHealth(detail_every=1)
    guards = [
        at(e, strict(order < 0), order, f"{e}_{order < 0}")
        for e in ("before_step", "after_step")
        for order in (-1, 1)
    ]
    learner(mlp(hidden=500), None, health, *guards, opt=partial(adam, **options), lr=0.01, device="cuda")
    skip = ("update_ratio", "drift")
    assert_matches(health, by_hand(mlp(hidden=500), batches(), adam, lr=0.01), skip=skip, rel=5e-3)


def test_a_layer_made_in_the_first_forward_and_one_put_in_later_are_read():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.head = nn.Linear(3, 5), None

        def forward(self, x):
            x = self.trunk(x)
            if self.head is None:
                self.head = nn.Linear(5, 1)
            return self.head(x)

    model = seeded(Late)
    opt, health, new = sgd(model.parameters(), 0.01), GradientHealth(), nn.Linear(5, 1)

    def replace(learn):
        if learn.train_iter == 6:
            learn.model.head = new
            learn.opt.add_param_group({"params": new.parameters()})

    learner(model, batches(12), at("before_batch", replace), health, opt=opt)
    assert health.names == ["trunk.weight", "trunk.bias", "head.weight", "head.bias"]
    read = [i for i, norm in enumerate(health.series("head.weight", "norm")) if norm > 0]
    assert read == [
        0,
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        8,
        9,
        10,
        11,
    ]  # looked for before 0, 1, 2, 4, 8, and as the optimizer grew
    drift, update = (health.series("head.weight", stat) for stat in ("drift", "update_ratio"))
    assert drift[:6] == update[:6] == [0] * 6  # no optimizer had it
    assert drift[6] == update[6] > 0
    assert drift[-1] > drift[6]
