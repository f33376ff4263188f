"""Under which layers a batch is recorded."""

import pytest
import torch
from torch import nn

from hookcb import ActivationStats, Learner
from tests.activations.support import Around, numbered, randn, steps, tags
from tests.hooks import support as zoo
from tests.support import fit, make_batches


def test_layers_of_another_model_take_the_place_of_the_former_ones():
    stats, on = ActivationStats(), ActivationStats(append=True, name="on")
    learn = fit(numbered(2, 0, [stats, on], nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))))
    assert list(stats.names) == ["0", "1"]
    learn.model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    fit(learn)
    assert list(stats.names) == ["0", "2"]
    assert list(on.names) == ["0", "1", "2"]
    fired = [[value == value for value in on.series(name, "mean")] for name in on.names]
    assert fired == [[True] * 4, [True, True, False, False], [False, False, True, True]]


def test_a_layer_that_stops_firing_or_begins_late_is_nan_in_the_other_records():
    class Changes(Around):
        def forward(self, x):
            k = int(x[0, 0])
            if k < 2:
                self.odd(x)
            return self.late(x) if k > 2 else self.fc(x)

    model = Changes(nn.Linear(2, 3))
    model.late = nn.Linear(2, 1)
    stats = ActivationStats(with_hist=True)
    fit(numbered(5, 0, stats, model))
    assert sorted(stats.names) == ["fc", "late", "odd"]
    assert all(len(record) == len(list(record)) == 3 for record in stats.stats)
    fired = {name: [value == value for value in stats.series(name, "nonfinite")] for name in stats.names}
    assert fired == {
        "odd": [True, True, False, False, False],
        "fc": [True, True, True, False, False],
        "late": [False, False, False, True, True],
    }
    assert all(value != value for value in stats.stats[4]["odd"].values())
    rows = {(row.record, row.layer) for row in stats.table()}
    assert rows == {(k, name) for name, marks in fired.items() for k, mark in enumerate(marks) if mark}


@pytest.mark.parametrize("name", ["shared", "recursive"])
def test_each_call_of_a_layer_in_a_batch_has_its_own_entry(name):
    x = randn(4, 4)
    model = zoo.make(name)
    with torch.no_grad():
        outs = [model.fc(x)]
        outs.append(model.fc(outs[0].tanh()))
    stats = ActivationStats(keep=4)
    fit(Learner([x] * 9, model, torch.mean, torch.optim.SGD, lr=0.0, cbs=stats))
    assert list(stats.names) == ["fc#0", "fc#1"]
    for k, out in enumerate(outs):
        assert stats.stats[-1][f"fc#{k}"]["mean"] == pytest.approx(out.mean().item(), abs=1e-6)
        assert stats.series(f"fc#{k}", "max") == pytest.approx([out.max().item()] * len(stats.stats))


def test_a_module_that_calls_itself_is_recorded_by_call():
    stats = ActivationStats(modules="net")
    model = zoo.Plain(lambda s, x: s.net(x), net=zoo.Recursive())
    fit(Learner([randn(4, 4)] * 3, model, torch.mean, torch.optim.SGD, lr=0.0, cbs=stats))
    assert sorted(stats.names) == ["net#0", "net#1", "net#2"]
    assert len(stats.stats) == 3


@pytest.mark.parametrize("counts", [(1, 2, 1), (2, 1, 3), (3, 0, 1)])
def test_a_number_of_calls_that_changes_loses_none_of_them(counts):
    def several(s, x):
        k = int(x[0, 0])
        for call in range(counts[k]):
            s.tag(x + 10 * (call + 1))
        return s.fc(x)

    stats = tags(modules=["tag", "fc"])
    fit(numbered(3, 0, stats, zoo.Plain(several, tag=nn.Identity(), fc=nn.Linear(2, 1))))
    for k, record in enumerate(stats.stats):
        of_tag = [one["mean"] for name, one in zip(stats.names, record, strict=True) if name != "fc"]
        means = sorted(mean for mean in of_tag if mean == mean)
        assert means == [k + 10.0 * (call + 1) for call in range(counts[k])]


@pytest.mark.parametrize("name", ["checkpoint", "reentrant_checkpoint", "nested_checkpoint"])
@pytest.mark.parametrize("every", [1, 2])
def test_recomputation_under_checkpointing_is_not_counted(name, every):
    torch.manual_seed(0)
    stats = ActivationStats(include_paramless=True, every=every)
    batches = [randn(4, 4, seed=k).requires_grad_() for k in range(4)]
    fit(Learner(batches, zoo.make(name), torch.mean, torch.optim.SGD, cbs=stats))
    assert not [name for name in stats.names if "#" in name]
    assert steps(stats.stats) == list(range(0, 4, every))
    assert all(value == value for name in stats.names for value in stats.series(name, "mean"))


def test_the_whole_model_goes_by_its_class_and_a_shared_layer_by_its_first_name():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model.again, model.end = model[0], nn.Linear(2, 1)
    stats = ActivationStats(modules=[model, model.again])
    fit(Learner(make_batches(2), model, nn.functional.mse_loss, torch.optim.SGD, cbs=stats))
    assert sorted(stats.names) == ["0#0", "0#1", "Sequential"]
    assert len(stats.stats) == 2
