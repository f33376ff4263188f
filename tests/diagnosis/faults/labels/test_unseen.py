"""Classes that no training label has ever had."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, Learner, watch
from hookcb.diagnosis.faults.labels.unseen import UnseenClasses
from hookcb.diagnosis.run import Run, Skipped
from tests.support import along, first, fit

N = 1280
Y = torch.arange(N) % 10
FEW = Y % 8  # of ten


def batches(y, size=32):
    x = torch.randn(len(y), 4, generator=torch.Generator().manual_seed(0))
    return list(zip(x.split(size), y.split(size), strict=True))


def make(n_out=10):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, n_out))


def by_learner(train, valid, n_out=10, loss_func=F.cross_entropy):
    learn = Learner((train, valid), make(n_out), loss_func, lr=1e-3)
    return fit(learn, 2, cbs=Diagnose("ignore", show=False)).diagnose()


def by_watch(train, valid, n_out=10, loss_func=F.cross_entropy):
    model = make(n_out)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    with watch(model, opt, Diagnose("ignore", show=False)) as w:
        for _ in range(2):
            for x, y in train:
                opt.zero_grad()
                loss_func(model(x), y).backward()
                opt.step()
            model.eval()
            with torch.no_grad():
                for x, y in valid:
                    F.cross_entropy(model(x), y)
            model.train()
        return w.diagnose()


def found(verdict):
    return [(x.severity, x.message) for x in verdict.findings if x.code == "label.unseen"]


@pytest.mark.parametrize("train", first([by_learner, by_watch]))
def test_classes_that_only_validations_have_are_found(train):
    ((severity, text),) = found(train(batches(FEW), batches(Y[:320])))
    assert severity == "warning"
    assert text.startswith("Classes 8, 9 were never a label in 2,")  # not all are read of a plain loop
    assert text.endswith(" samples of the training, but of 64 of the 320 samples of a validation.")


@pytest.mark.slow
@pytest.mark.parametrize("train", [by_learner, by_watch])
def test_classes_that_neither_has_are_a_note(train):
    ((severity, text),) = found(train(batches(FEW), batches(FEW[:320])))
    assert severity == "info"
    assert text.startswith("Classes 8, 9 were never a label in 2,")
    assert text.endswith(" samples; the scores have 10 classes.")


RIGHT = [
    (torch.cat([FEW[:64], Y[64:128]]), Y[:32], 10),
    (FEW, torch.where(torch.arange(320) < 7, 9, FEW[:320]), 200),  # seven may be there by chance
    (torch.where(torch.arange(N) == 500, 9, Y % 9), Y[:320], 10),  # one label suffices
    (FEW, FEW[:320], 200),  # a wide head
    (Y, Y[:320], 10),
]


@pytest.mark.parametrize(("train", "labels"), first(along([by_learner, by_watch], RIGHT)))
def test_other_labels_are_right(train, labels):
    y, valid, n_out = labels
    assert found(train(batches(y), batches(valid), n_out)) == []


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)

    def forward(self, x):
        return self.head(self.embed(x)).flatten(0, 1)


@pytest.mark.slow
def test_a_padded_vocabulary_is_right():
    torch.manual_seed(0)
    x = torch.randint(8, (1280, 6))
    data = [(part, part.roll(1).flatten()) for part in x.split(32)]
    learn = Learner((data, data[:4]), Tokens(), F.cross_entropy, lr=1e-3)
    assert found(fit(learn, 2, cbs=Diagnose("ignore", show=False)).diagnose()) == []


def test_labels_of_ranks_are_added_up():
    run, fault = Run(), UnseenClasses()
    own = [100, 0, 50], [10, 10, 10], 1
    fault.merge(run, [own, ([0, 100, 0], [10, 10, 10], 1)], 0)
    assert fault.counts == ([100, 100, 50], [20, 20, 20], 1)
    assert not fault.is_alone
    fault.merge(run, [own, ((), (), 1)], 0)
    assert fault.is_alone


def test_without_counts_nothing_is_known():
    (result,) = UnseenClasses().findings(Run())
    assert isinstance(result, Skipped)
