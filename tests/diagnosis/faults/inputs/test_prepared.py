"""Inputs of the validation that are prepared in another way than those of the training."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, Learner, watch
from hookcb.diagnosis.faults.inputs.prepared import OtherPreparation
from hookcb.diagnosis.run import Absent, Run
from hookcb.diagnosis.verdict import Finding
from tests.support import along, first, fit

CODE = "input.eval_scale"
G = torch.Generator().manual_seed(0)
IMAGES = torch.rand(160, 3, 8, 8, generator=G) * torch.tensor([1.0, 0.8, 0.5])[:, None, None]
IMAGES[:, :, 0, :2] = torch.tensor([0.0, 1.0])  # the ends of the range
TABLE = torch.randn(160, 6, generator=G)
COUNTS = torch.randint(17, (160, 1, 8, 8), generator=G).float()  # as of pixels, in no usual range
MEAN, STD = IMAGES.mean((0, 2, 3), keepdim=True), IMAGES.std((0, 2, 3), keepdim=True)
LABELS = torch.randint(3, (160,), generator=G)


def model_for(x):
    width = x[0].numel()
    return nn.Sequential(nn.Flatten(), nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 3))


def by_learner(train, valid):
    torch.manual_seed(0)
    dls = [list(zip(x.split(16), LABELS.split(16), strict=True)) for x in (train, valid)]
    learn = Learner(tuple(dls), model_for(train), F.cross_entropy, lr=1e-3)
    return fit(learn, 2, cbs=Diagnose("ignore", show=False)).diagnose()


def by_watch(train, valid):
    torch.manual_seed(0)
    model = model_for(train)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    with watch(model, opt, Diagnose("ignore", show=False)) as w:
        for _ in range(2):
            model.train()
            for x, y in zip(train.split(16), LABELS.split(16), strict=True):
                opt.zero_grad()
                F.cross_entropy(model(x), y).backward()
                opt.step()
            model.eval()
            with torch.no_grad():
                for x in valid.split(16):
                    model(x)
        return w.diagnose()


def found(verdict):
    return [finding for finding in verdict.findings if finding.code == CODE]


WRONG = {
    "not divided": (IMAGES, 255 * IMAGES),
    "divided twice": (IMAGES, IMAGES / 255),
    "not normalized": ((IMAGES - MEAN) / STD, IMAGES),
    "bytes": ((IMAGES - MEAN) / STD, (255 * IMAGES).round()),
    "normalized in validation only": (IMAGES, (IMAGES - MEAN) / STD),
    "BGR": ((IMAGES - MEAN.mean()) / STD.mean(), (IMAGES.flip(1) - MEAN.mean()) / STD.mean()),
    "table not divided": (TABLE, 100 * TABLE),
    "table not shifted": (TABLE, TABLE + 20),
    "one channel not normalized": ((COUNTS - COUNTS.mean()) / COUNTS.std(), COUNTS),
}


@pytest.mark.parametrize(("name", "train"), first(along(WRONG, [by_learner, by_watch])))
def test_another_preparation_is_found(name, train):
    (finding,) = found(train(*WRONG[name]))
    assert finding.severity == "warning"
    assert "validation" in finding.message


NOISE = torch.randn(IMAGES.shape, generator=G)
RIGHT = {
    "the same": (IMAGES, IMAGES),
    "noise": (IMAGES + 0.4 * NOISE, IMAGES),
    "mixed pairs": ((IMAGES + IMAGES.flip(0)) / 2, IMAGES),
    "erased parts": (IMAGES * (torch.arange(8) > 3), IMAGES),
    "brighter": (IMAGES.clamp(0.2, 1.0), IMAGES),
    "other classes": (IMAGES, IMAGES.pow(2)),
    "drift": (TABLE + torch.linspace(0, 3, 160)[:, None], TABLE + torch.linspace(3, 4.3, 160)[:, None]),
    "another variance": (TABLE, 3 * TABLE),
    "another variance of inputs that are not normalized": (5 * TABLE, 30 * TABLE),
    "another mean": (TABLE, TABLE + 3),
    "one column apart": (TABLE, TABLE + torch.tensor([1000.0, 0, 0, 0, 0, 0])),
    "a column that is constant": (TABLE * (torch.arange(6) > 0), TABLE * (torch.arange(6) > 0)),
}


@pytest.mark.parametrize("name", first(RIGHT))
def test_augmentation_and_drift_are_no_fault(name):
    verdict = by_watch(*RIGHT[name])
    assert found(verdict) == []
    assert CODE in verdict.ruled_out or any("scale of" in x or "validation" in x for x in verdict.ruled_out)


class Denoiser(nn.Module):
    """Is given the level of the noise too."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 6)

    def forward(self, x, level):
        return self.net(x / (1 + level[:, None].square()).sqrt())


def test_inputs_whose_scale_depends_on_a_level_are_not_judged():
    torch.manual_seed(0)
    model = Denoiser()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    with watch(model, opt, Diagnose("ignore", show=False)) as w:
        for x in TABLE.split(16):
            level = torch.rand(len(x)) + 0.1
            noise = torch.randn_like(x)
            opt.zero_grad()
            F.mse_loss(model(x + level[:, None] * noise, level), noise).backward()
            opt.step()
        model.eval()
        with torch.no_grad():
            for _ in range(4):
                model(80 * torch.randn(16, 6), torch.full((16,), 80.0))
        assert found(w.diagnose()) == []


def test_tokens_are_not_compared():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(1000, 8), nn.Flatten(), nn.Linear(32, 3))
    tokens = torch.randint(10, (160, 4))
    dls = [list(zip(x.split(16), LABELS.split(16), strict=True)) for x in (tokens, 90 * tokens)]
    learn = Learner(tuple(dls), model, F.cross_entropy, lr=1e-3)
    assert found(fit(learn, 1, cbs=Diagnose("ignore", show=False)).diagnose()) == []


def test_without_a_validation_there_is_nothing_to_compare():
    (result,) = OtherPreparation().findings(Run())
    assert isinstance(result, Absent)
    assert not isinstance(result, Finding)
