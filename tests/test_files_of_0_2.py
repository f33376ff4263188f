"""Files of version 0.2 are read; `files_of_0_2/make_worker.py` has written them with it."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from hookcb import ActivationRecords, ActivationStats, GradientHealth, GradientRecords, Learner, load_report

FILES = Path(__file__).parent / "files_of_0_2"
NUMBERS = json.loads((FILES / "numbers.json").read_text())


def of_then():
    """The learner of `make_worker.py`."""
    torch.manual_seed(0)
    x = torch.randn(24, 6)
    batches = list(zip(x.split(8), (x[:, :3].sum(dim=1) > 0).long().split(8), strict=True))
    net = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    loss_func, opt_func = nn.functional.cross_entropy, torch.optim.AdamW
    return Learner((batches, batches[:1]), net, loss_func, opt_func=opt_func, lr=0.01, cbs=[])


def test_records():
    acts = ActivationRecords.load(FILES / "activations.pt")
    assert [float(record["0"]["mean"]) for record in acts.stats] == pytest.approx(NUMBERS["mean"])
    assert acts.layer_hist("0").sum(dim=1).tolist() == pytest.approx([32.0] * len(acts.stats))
    assert torch.isnan(torch.tensor([record["0"]["kurtosis"] for record in acts.stats])).all()
    grads = GradientRecords.load(FILES / "gradients.pt")
    assert [float(record["0.weight"]["norm"]) for record in grads.stats] == pytest.approx(NUMBERS["norm"])


def test_a_checkpoint_goes_on_as_it_would_have_then():
    learn = of_then()
    cbs = [ActivationStats(with_hist=True), GradientHealth()]
    learn.fit(4, cbs=cbs, resume=FILES / "epoch-0002.pt")
    assert learn.recorder.losses == pytest.approx(NUMBERS["losses"])
    assert len(learn.activation_stats.stats) == len(NUMBERS["mean"])


def test_weights():
    learn, resumed = of_then(), of_then()
    learn.load(FILES / "weights.pt")
    resumed.fit(4, cbs=[ActivationStats(with_hist=True), GradientHealth()], resume=FILES / "epoch-0002.pt")
    for own, other in zip(learn.model.parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(own, other)


def test_a_page():
    page = load_report(FILES / "run.html")
    assert page.n_batches == 12
    assert page.run["loss"].values == pytest.approx(NUMBERS["losses"], rel=1e-3)
    hist = page.layers["0"].hist
    assert len(hist.edges) == len(hist.bins) - 1
    assert [sum(column) for column in zip(*(own.values for own in hist.bins), strict=True)] == pytest.approx(
        [32] * len(hist.bins[0].values), rel=0.02
    )
