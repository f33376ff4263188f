"""Files of version 0.2 are read; `files_of_0_2/make_worker.py` has written them with it."""

import json
from pathlib import Path

import pytest
import torch

from hookcb import ActivationRecords, GradientRecords, load_report
from tests.files_of_0_2.make_worker import N_EPOCH, make_learner, make_recorders

FILES = Path(__file__).parent / "files_of_0_2"
NUMBERS = json.loads((FILES / "numbers.json").read_text())


@pytest.fixture(scope="module")
def resumed():
    """The learner of then, whose checkpoint goes on to the end."""
    learn = make_learner()
    learn.fit(N_EPOCH, cbs=make_recorders(), resume=FILES / "epoch-0002.pt")
    return learn


def test_records():
    acts = ActivationRecords.load(FILES / "activations.pt")
    assert [float(record["0"]["mean"]) for record in acts.stats] == pytest.approx(NUMBERS["mean"])
    assert acts.layer_hist("0").sum(dim=1).tolist() == pytest.approx([32.0] * len(acts.stats))
    assert torch.isnan(torch.tensor([record["0"]["kurtosis"] for record in acts.stats])).all()
    grads = GradientRecords.load(FILES / "gradients.pt")
    assert [float(record["0.weight"]["norm"]) for record in grads.stats] == pytest.approx(NUMBERS["norm"])


def test_a_checkpoint_goes_on_as_it_would_have_then(resumed):
    assert resumed.recorder.losses == pytest.approx(NUMBERS["losses"])
    assert len(resumed.activation_stats.stats) == len(NUMBERS["mean"])


def test_weights(resumed):
    learn = make_learner()
    learn.load(FILES / "weights.pt")
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
