"""Layers that compute in float32 although the loop has opened autocast."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, watch
from hookcb.diagnosis.faults.numbers import autocast
from hookcb.diagnosis.faults.numbers.autocast import OutsideAutocast
from tests.diagnosis.faults.support import numbers
from tests.support import each

ENTER = vars(torch.autocast)["__enter__"]


class InFloat32(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.inner(x.float())


class CastsBack(nn.Linear):
    def forward(self, x):
        return super().forward(x).float()


def net(body=None, head=None, norm=None):
    torch.manual_seed(0)
    parts = nn.Linear(8, 16), nn.ReLU(), body or nn.Linear(16, 16), norm or nn.ReLU()
    return nn.Sequential(*parts, head or nn.Linear(16, 8))


def bf16(enabled=True):
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


def watched(model, model_in=True, loss_in=True, n=12):
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    with watch(model, opt, cbs=Diagnose("ignore", show=False)) as w:
        for i in range(n):
            x = numbers(16, 8, seed=i)
            with bf16(model_in):
                pred = model(x)
            with bf16(loss_in):
                loss = F.mse_loss(pred.float(), x)
            opt.zero_grad()
            loss.backward()
            opt.step()
    assert vars(torch.autocast)["__enter__"] is ENTER
    assert pickle.loads(pickle.dumps(w.diagnosis.evidence().measured(OutsideAutocast)))
    return [(x.severity, x.layer) for x in w.diagnose().findings if x.code == "amp.outside"]


def test_a_large_part_in_float32_is_told_and_a_head_is_noted():
    assert watched(net(InFloat32(nn.Linear(16, 16)))) == [("warning", "2.inner")]
    assert watched(net(CastsBack(16, 16))) == [("warning", "2")]
    assert watched(net(head=InFloat32(nn.Linear(16, 8)))) == [("info", "4.inner")]
    assert watched(net(nn.Linear(16, 64), CastsBack(64, 8), nn.Sequential(nn.ReLU(), nn.Linear(64, 64)))) == [
        ("info", "4")
    ]


class InBfloat16(nn.Linear):
    def forward(self, x):
        with bf16():
            return super().forward(x)


def test_a_model_that_opens_autocast_for_a_part_by_itself_is_a_note():
    assert watched(net(head=InBfloat16(16, 8)), model_in=False, loss_in=False) == [("info", "0")]


def test_autocast_around_the_loss_only_is_told(monkeypatch):
    monkeypatch.setattr(autocast, "compile_counts", lambda what: {})  # of tests before
    assert watched(net(), model_in=False) == [("warning", "")]
    assert watched(net(), model_in=False, loss_in=False) == []


@pytest.mark.slow
@pytest.mark.parametrize("norm", each(2, [nn.LayerNorm(16), nn.BatchNorm1d(16), nn.Softmax(-1)]))
def test_norms_and_softmax_are_in_float32_by_autocast_itself(norm):
    assert watched(net(norm=norm)) == []
    assert watched(net(norm=norm), loss_in=False) == []


@pytest.mark.slow
def test_weights_in_low_precision_and_frozen_layers_are_left_out():
    assert watched(net().bfloat16()) == []
    frozen = InFloat32(nn.Linear(16, 16).requires_grad_(False))
    assert watched(net(frozen)) == []


class Cast(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.to(self.dtype)


def doubled(inner):
    return nn.Sequential(Cast(torch.float64), inner.double(), Cast(torch.float32))


@pytest.mark.slow
def test_a_layer_in_float64_is_told_wherever_it_is():
    assert watched(net(doubled(nn.Linear(16, 16)))) == [("warning", "2.1")]
    assert watched(net(head=doubled(nn.Linear(16, 8)))) == [("warning", "4.1")]
    assert watched(net(doubled(nn.Linear(16, 16))), model_in=False, loss_in=False) == []
    assert watched(net(doubled(nn.Linear(16, 16).requires_grad_(False)))) == []


class InFloat64(InFloat32):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.inner(x.double()).float()


def test_float64_where_autocast_is_switched_off_is_on_purpose():
    assert watched(net(head=InFloat64(nn.Linear(16, 8).double()))) == []
