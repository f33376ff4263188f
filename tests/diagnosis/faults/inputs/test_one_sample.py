"""Data of one sample that is given to all samples of a batch, and what is shared on purpose."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

from hookcb import Diagnose, Learner, watch
from hookcb.diagnosis.faults.inputs.one_sample import OneSample
from hookcb.diagnosis.measurements.collating import shapes_of_one
from hookcb.diagnosis.run import Run, Skipped
from tests.support import along, each, first, fit

N, D = 16, 6


class Net(nn.Module):
    """Takes an input and a condition of any shape that broadcasts."""

    def __init__(self):
        super().__init__()
        self.x, self.c, self.head = nn.Linear(D, 16), nn.Linear(D, 16), nn.Linear(16, 1)

    def forward(self, x, c):
        return self.head(torch.tanh(self.x(x) + self.c(c)))


def batches(condition, n=24, target=lambda y: y):
    g = torch.Generator().manual_seed(0)
    for _ in range(n):
        x, c = torch.randn(N, D, generator=g), torch.randn(N, D, generator=g)
        yield x, condition(c), target((x + c).sum(1, keepdim=True))


def by_learner(condition, target=lambda y: y):
    torch.manual_seed(0)
    learn = Learner(list(batches(condition, target=target)), Net(), F.mse_loss, lr=1e-2)
    return fit(learn, 1, cbs=Diagnose("ignore", show=False)).diagnose()


def by_watch(condition, target=lambda y: y):
    torch.manual_seed(0)
    model = Net()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    with watch(model, opt, Diagnose("ignore", show=False)) as w:
        for x, c, y in batches(condition, target=target):
            opt.zero_grad()
            F.mse_loss(model(x, c), y).backward()
            opt.step()
        return w.diagnose()


def found(verdict):
    return [x.message.partition(" has")[0] for x in verdict.findings if x.code == "input.one_sample"]


WRONG = {"first": lambda c: c[:1], "fourth": lambda c: c[3][None], "expanded": lambda c: c[:1].expand(N, -1)}


@pytest.mark.parametrize("name", first(WRONG))
def test_one_sample_for_all_is_found(name):
    assert found(by_learner(WRONG[name])) == ["Input [1]"]
    assert found(by_watch(WRONG[name])) == ["Input [1]"]


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_target_of_one_sample_is_found():
    assert found(by_learner(lambda c: c, target=lambda y: y[:1])) == ["The target"]


GRID = torch.linspace(0, 1, D)[None]
RIGHT = {
    "each its own": lambda c: c,
    "a grid": lambda c: GRID,
    "a row of a grid": lambda c: GRID.expand(N, -1),
    "one condition for the batch": lambda c: c.mean(0, keepdim=True),
    "a condition that all have": lambda c: c.mean(0).expand(N, D).contiguous()[:1],
    "a copy": lambda c: c[:1].clone(),
}


@pytest.mark.parametrize(("name", "train"), first(along(RIGHT, [by_learner, by_watch])))
def test_what_is_shared_on_purpose_is_right(name, train):
    verdict = train(RIGHT[name])
    assert found(verdict) == []
    assert "data of one sample that is given to all" in verdict.ruled_out


@pytest.mark.slow
def test_a_sample_that_others_are_compared_with_is_right():
    torch.manual_seed(0)
    model = Net()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    with watch(model, opt, Diagnose("ignore", show=False)) as w:
        for x, _, y in batches(lambda c: c):
            opt.zero_grad()
            F.mse_loss(model(x, x[:1]), y).backward()
            opt.step()
        assert found(w.diagnose()) == []


class Conditions(Dataset):
    """An input, a condition and the target of each sample."""

    def __init__(self, condition=lambda i: None):
        g = torch.Generator().manual_seed(0)
        self.x, self.c = torch.randn(400, D, generator=g), torch.randn(400, D, generator=g)
        self.condition = condition

    def __len__(self):
        return 400

    def __getitem__(self, i):
        c = self.condition(i)
        return self.x[i], self.c[i] if c is None else c, (self.x[i] + self.c[i]).sum()[None]


def collated(condition, data=None, model=None):
    """Findings of a loop over a DataLoader whose `collate_fn` makes the condition of the samples."""

    def collate(samples):
        x, _, y = default_collate(samples)
        return x, condition(samples), y

    torch.manual_seed(0)
    model = model or Net()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    with watch(model, opt, Diagnose("ignore", show=False)) as w:
        for x, c, y in DataLoader(data or Conditions(), N, shuffle=True, collate_fn=collate):
            opt.zero_grad()
            F.mse_loss(model(x, c), y).backward()
            opt.step()
        return found(w.diagnose())


def row(k):
    return lambda samples: samples[k][1].unsqueeze(0)


def stacked(samples):
    return torch.stack([c for _, c, _ in samples])


@pytest.mark.slow
@pytest.mark.parametrize("k", [0, 3])
def test_a_collate_function_that_takes_one_sample_for_all_is_found(k):
    assert collated(row(k)) == ["Input [1]"]
    numpy = Conditions(lambda i: torch.full((D,), float(i)).numpy())
    assert collated(lambda samples: torch.from_numpy(samples[k][1])[None], numpy) == ["Input [1]"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "condition",
    each(
        2,
        [
            stacked,
            lambda samples: stacked(samples).mean(0, keepdim=True),
            lambda samples: torch.randn(1, D),  # a style that all share
            lambda samples: torch.full((1, D), float(samples[0][1][0])),  # one number, as a temperature
            lambda samples: torch.arange(D)[None] / D,
        ],
    ),
)
def test_a_collate_function_that_makes_one_condition_for_all_is_right(condition):
    assert collated(condition) == []


@pytest.mark.slow
def test_what_all_samples_have_in_common_may_be_collated_once():
    assert collated(row(0), Conditions(lambda i: torch.linspace(0, 1, D))) == []


class Anchored(Net):
    def forward(self, x, c):
        return super().forward(x, c[0]) + self.c(c[1]).mean()


def test_a_collated_sample_to_which_the_others_are_compared_is_right():
    assert collated(lambda samples: (stacked(samples), row(0)(samples)), model=Anchored()) == []


def test_samples_of_any_kind_are_collated_as_before():
    samples = [({"a": "text", "b": [1, 2]}, None, i) for i in range(3)]
    assert shapes_of_one(samples, torch.zeros(1, 3)) == frozenset()
    ragged = [(torch.ones(3),), (torch.ones(3), torch.ones(3))]
    assert shapes_of_one(ragged, torch.ones(1, 3)) == frozenset()
    assert shapes_of_one([torch.arange(2.0), torch.ones(3)], [torch.ones(1, 3)]) == frozenset()


def test_without_batches_it_is_not_ruled_out():
    (result,) = OneSample().findings(Run())
    assert isinstance(result, Skipped)
