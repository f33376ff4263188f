"""Samples of the weights that optimizers hold, around steps and forwards."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, watch
from hookcb.diagnosis.measurements.held import HeldWeights
from hookcb.diagnosis.measurements.samples import COLUMNS, Group, Range, written
from tests.support import first, in_turn


def of(before, after, first=None):
    """Numbers of one parameter, before and after a write."""
    group = Group([before], [0])
    x, y = before.view(-1), after.view(-1)
    seen = Range(x if first is None else first.view(-1))
    seen.add(x)
    (row,) = written(group, x, y, seen).tolist()
    return dict(zip(COLUMNS, row, strict=True))


def test_numbers_of_a_write_are_those_of_the_changed_elements():
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    y = x.clone()
    y[0] = -x[0]
    row = of(x, y)
    assert (row["n"], row["n_changed"], row["n_smaller"], row["n_wild"], row["n_zero"]) == (30, 5, 0, 0, 0)
    size = float(x[0].square().sum())
    assert row["before"] == row["after"] == pytest.approx(size)
    assert (row["product"], row["change"]) == (pytest.approx(-size), pytest.approx(4 * size))


def test_smaller_earlier_first_zero_and_wild_values_are_counted():
    x = torch.linspace(1, 2, 8)
    assert of(x, x / 2)["n_smaller"] == 8
    assert of(x, torch.zeros(8))["n_zero"] == 8
    assert of(x, torch.full((8,), 100.0))["n_wild"] == 8
    assert of(x, torch.full((8,), float("nan")))["n_wild"] == 8
    row = of(x, x - 1, first=x - 1)
    assert (row["n_first"], row["n_earlier"], row["moved"]) == (8, 8, 8)


def test_equal_nans_are_no_change():
    x = torch.tensor([float("nan"), 1.0])
    assert of(x, x.clone())["n_changed"] == 0


@in_turn("shape", [(), (3,), (40, 300), (7, 3, 5, 5)])
def test_a_narrow_sample_has_up_to_32_elements_of_any_shape(shape):
    p = torch.randn(shape, dtype=torch.complex64 if shape == (3,) else None)
    x = Group([p], [0]).narrow()
    assert x.ndim == 1
    assert 1 <= len(x) <= 32


def seen(model, opt, n=40, loop=None):
    with watch(model, opt, Diagnose(show=False, on_sick="ignore")) as w:
        for i in range(n):
            opt.zero_grad()
            F.mse_loss(model(torch.randn(8, 4)), torch.randn(8, 1)).backward()
            opt.step()
            if loop is not None:
                loop(i)
        run = w.diagnosis.evidence()
    return run.measured(HeldWeights)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.parametrize("fused", first([False, True]))
def test_looks_see_that_steps_change_weights(fused):
    model = net()
    held = seen(model, torch.optim.SGD(model.parameters(), 0.1, fused=fused))
    looks = held.looks["0.weight"]
    assert all(look.n_changed > 20 and look.n_visible > 20 for look in looks)
    assert held.writes == []


@pytest.mark.slow
def test_fused_steps_have_no_version_and_are_looked_at_when_their_number_doubles():
    model = net()
    plain, fused = (
        seen(model, torch.optim.SGD(model.parameters(), 0.1, fused=fused), n=70).looks["0.weight"]
        for fused in (False, True)
    )
    assert len(fused) > len(plain)


@pytest.mark.parametrize(
    ("lr", "dtype"), [(0.0, torch.float32), (1e-4, torch.bfloat16), (1e-9, torch.float32)]
)
def test_an_update_below_the_resolution_is_not_visible(lr, dtype):
    model = net().to(dtype)
    opt = torch.optim.SGD(model.parameters(), lr)
    with watch(model, opt, Diagnose(show=False, on_sick="ignore")) as w:
        for _ in range(10):
            opt.zero_grad()
            model(torch.randn(8, 4).to(dtype)).float().square().mean().backward()
            opt.step()
        looks = w.diagnosis.evidence().measured(HeldWeights).looks["0.weight"]
    visible = sum(look.n_visible for look in looks)
    assert visible <= 0.1 * 32 * len(looks)


def test_nothing_of_the_user_is_kept_after_a_fit():
    model = net()
    opt = torch.optim.Adam(model.parameters(), 1e-2)
    refs = [weakref.ref(p) for p in model.parameters()]
    with watch(model, opt, Diagnose(show=False, on_sick="ignore")) as w:
        for _ in range(5):
            model(torch.randn(8, 4)).square().mean().backward()
            opt.step()
            opt.zero_grad()
    del model, opt
    gc.collect()
    assert not any(x() is not None for x in refs)
    assert w.diagnose() is not None


@pytest.mark.slow
def test_an_optimizer_for_each_weight_is_not_followed_and_that_is_said():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(10)])
    each = [torch.optim.SGD([p], 1e-2) for p in model.parameters()]
    with watch(model, each, Diagnose(show=False, on_sick="ignore")) as w:
        for _ in range(8):
            model.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            for opt in each:
                opt.step()
    (gap,) = [gap for gap in w.diagnose().gaps if "param.overwritten" in gap.codes]
    assert gap.reason == "more than 16 optimizers make steps"
