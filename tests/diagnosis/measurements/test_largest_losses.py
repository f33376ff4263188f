"""The samples of inspected batches with the largest losses."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hookcb import Diagnose, load_report, watch


def trained(loss_func, y, x=None, n_out=2):
    torch.manual_seed(0)
    x = torch.randn(320, 8) if x is None else x
    model = nn.Linear(8, n_out)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model, opt, cbs=Diagnose(show=False, budget=1.0)) as w:
        for i in range(0, 320, 32):
            loss_func(model(x[i : i + 32]), y[i : i + 32]).backward()
            opt.step()
            opt.zero_grad()
    return w


def test_a_sample_with_a_wrong_label_comes_first_with_its_place(tmp_path):
    x = torch.randn(320, 8, generator=torch.Generator().manual_seed(1))
    y = (x[:, 0] > 0).long()
    x[100] *= 30
    y[100] = 1 - (x[100, 0] > 0).long()
    path = tmp_path / "run.html"
    data = trained(F.cross_entropy, y, x).report(path).data
    first = data.samples[0]
    assert (first.step, first.index) == (3, 4)
    assert first.loss > 5 > 2 * first.usual
    assert [one.loss for one in data.samples] == sorted([one.loss for one in data.samples], reverse=True)
    assert load_report(path).samples == data.samples
    assert "Samples with the largest losses" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("loss_func", "y", "n_out"),
    [(F.l1_loss, torch.randn(320, 2), 2), (lambda p, y: (p - y).abs().mean(), torch.randn(320, 2), 2)],
)
def test_a_loss_that_is_not_known_has_none(loss_func, y, n_out):
    assert trained(loss_func, y, n_out=n_out).report().data.samples == []
