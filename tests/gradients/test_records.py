"""The records of GradientHealth: how they are read, copied, saved, and resumed."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F

from hookcb import (
    Checkpoint,
    GradientAccumulation,
    GradientClip,
    GradientHealth,
    GradientRecords,
    Learner,
    count_hooks,
)
from hookcb.gradients.flow import gradient_flow
from tests.gradients.support import (
    adam,
    at,
    batches,
    cnn,
    each_option,
    images,
    learner,
    mlp,
    seeded,
    sgd,
    spoiling,
)
from tests.hooks import support as zoo
from tests.support import Net, covering, everything, fit, make_batches, make_learner
from tests.training.checkpoint import support as resuming
from tests.training.checkpoint.support import RESULTS, check_resumes
from tests.training.checkpoint.support import learner as resuming_learner
from tests.training.support import equal

# ---- reading


def test_numbers_are_found_by_name_index_glob_slice_and_as_a_table():
    health = GradientHealth()
    learner(mlp(), None, health, n_epoch=2)
    assert health.steps() == list(range(8))
    norms = health.series("0.weight", "norm")
    assert norms == [record[0]["norm"] for record in health.stats] == health.series(0, "norm")
    assert health.series("0.*", "norm") == [norms, health.series("0.bias", "norm")]
    assert [s["norm"] for s in health.stats[3][1:3]] == [health.stats[3][i]["norm"] for i in (1, 2)]
    rows = [row for row in health.table() if row.layer == "2.bias" and row.stat == "update_ratio"]
    assert [row.value for row in rows] == health.series("2.bias", "update_ratio")
    assert [(row.epoch, row.step, row.phase) for row in rows[3:5]] == [(0, 3, "train"), (1, 4, "train")]
    for look in (lambda: health.series("9.weight", "norm"), lambda: health.series(0, "norms")):
        with pytest.raises(LookupError):
            look()
    with pytest.raises(LookupError, match="total_norm"):
        health.step_series("total")


CHOICES = {
    "glob": ("blocks.*.weight", ["blocks.0.0.weight", "blocks.1.0.weight"]),
    "globs": (["head.*", "scale"], ["head.weight", "head.bias", "scale"]),
    "predicate": (lambda name, p: p.dim() == 0, ["scale"]),
}


@pytest.mark.parametrize(("params", "names"), CHOICES.values(), ids=CHOICES)
def test_parameters_are_chosen_by_name_or_predicate(params, names):
    health = GradientHealth(params=params)
    learner(seeded(Net), make_batches(), health, lr=0.01)
    assert sorted(health.names) == sorted(names)
    assert {row.layer for row in health.table()} == set(names)


@pytest.mark.parametrize("params", ["body.*", ["head.*", "nothing"], lambda name, p: False])
def test_a_choice_of_nothing_is_refused_before_training_with_what_there_is(params):
    model = seeded(Net)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(LookupError, match=r"head\.weight"):
        learner(model, make_batches(), GradientHealth(params=params))
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_arguments_that_cannot_be_are_refused_at_once():
    wrong = [{"every": 0}, {"every": 1.5}, {"on_nonfinite": "ignore"}, {"on_nonfinite": None}, {"keep": 0}]
    for options in [*wrong, {"params": 3}, {"params": []}]:
        with pytest.raises((ValueError, TypeError), match=str(next(iter(options)))):
            GradientHealth(**options)


def test_records_stay_within_keep_and_the_newest_is_there():
    health = GradientHealth(keep=6)
    learner(mlp(), batches(5), health, n_epoch=9)
    assert len(health.stats) == len(health.step_stats) <= 6
    assert health.steps()[0] == 0
    assert health.steps()[-1] == 44
    assert all(math.isfinite(x) for x in health.step_series("total_norm") + health.series(0, "drift"))


# ---- again, elsewhere, later


@each_option
def test_a_second_fit_begins_anew(options):
    health = GradientHealth(**options)
    learn = learner(mlp(), None, health, n_epoch=2)
    first = health.table()
    model = mlp()
    again = Learner(batches(), model, F.mse_loss, sgd, lr=0.1)
    fit(again, 2, cbs=(learn.remove_cb(health), health)[1])
    assert equal(first, health.table())
    assert health.skipped == 0


@each_option
def test_copies_hold_the_same_readings_and_no_model(options):
    health = GradientHealth(**options)
    learner(mlp(), [*batches(3), (batches()[0][0] * 3, batches()[0][1])], health)
    for twin in (copy.deepcopy(health), pickle.loads(pickle.dumps(health))):
        assert equal(twin.table(), health.table())
        assert equal(list(twin.step_stats), list(health.step_stats))
        assert str(twin.report()) == str(health.report())
        assert list(twin.flow()) == list(health.flow())


def test_a_copy_in_the_middle_of_a_fit_is_whole():
    copies = []
    health = GradientHealth(activations=True)
    act = at("after_batch", lambda cb: copies.append(pickle.loads(pickle.dumps(health))), 9, "copying")
    learner(mlp(), None, health, act)
    assert [len(twin.stats) for twin in copies] == [1, 2, 3, 4]
    assert equal(copies[-1].table(), health.table())


def test_what_is_saved_is_read_back_and_holds_plain_values(tmp_path):
    health = GradientHealth(activations=True)
    learner(seeded(cnn), images(0)[:4], spoiling((1,), "0.weight"), health, lr=0.01, loss=F.cross_entropy)
    path = health.save(tmp_path / "health.pt")
    torch.load(path, weights_only=True)
    twin = GradientRecords.load(path)
    assert equal(GradientHealth.load(path).table(), twin.table())
    assert equal(twin.table(), health.table())
    assert equal(list(twin.step_stats), list(health.step_stats))
    assert equal(*([list(record) for record in h.buffer_stats] for h in (twin, health)))
    assert equal(twin.output_stats.table(), health.output_stats.table())
    assert str(twin.report()) == str(health.report())
    assert twin.names == health.names
    assert repr(twin.flow()) == repr(health.flow())
    state = health.records.state()
    del state["stores"]["buffers"]  # as of an older version
    state["stores"]["params"]["columns"][0] = "gone"
    older = GradientRecords.from_state(state)
    assert all(math.isnan(x) for x in older.series("0.weight", "norm"))
    assert equal(older.series("0.weight", "drift"), health.series("0.weight", "drift"))
    assert list(older.buffer_stats) == []
    with pytest.raises(FileNotFoundError):
        GradientHealth.load(tmp_path / "nothing.pt")
    (tmp_path / "torn.pt").write_bytes(path.read_bytes()[:500])
    with pytest.raises(ValueError, match=r"torn\.pt"):
        GradientHealth.load(tmp_path / "torn.pt")
    with pytest.raises(ValueError, match="not written by save"):
        GradientHealth.load(make_learner().save(tmp_path / "weights.pt"))


MORE = ("without_grad", "frozen", "tables")


class Tabled(GradientHealth):
    """With all that is read as one attribute."""

    @property
    def tables(self):
        outputs = self.output_stats
        rows = [*self.table(), *(outputs.table() if outputs else [])]
        steps = [[f"{value:.4g}" for value in step.values()] for step in self.step_stats]
        return [
            *steps,
            *([*row[:-1], f"{row.value:.4g}"] for row in rows),
        ]  # sums of more records round otherwise


@pytest.mark.parametrize(
    ("options", "others"),
    covering(
        [{}, {"activations": True}, {"every": 3}, {"on_nonfinite": "skip", "keep": 4}],
        [list, lambda: [GradientAccumulation(3), GradientClip(0.1)]],
        of=1,
    ),
)
def test_a_resumed_fit_ends_with_the_same_readings(options, others, tmp_path, monkeypatch):
    monkeypatch.setattr(resuming, "RESULTS", (*RESULTS, *MORE))
    check_resumes(lambda: resuming_learner(cbs=[Tabled(**options), *others()], opt_func=adam), tmp_path)


def test_a_checkpoint_holds_plain_values_of_it(tmp_path):
    learner(mlp(), None, GradientHealth(activations=True), Checkpoint(tmp_path))
    for file in tmp_path.glob("*.pt"):
        torch.load(file, weights_only=True)


def test_reading_the_flow_of_one_backward_changes_nothing():
    model = seeded(cnn)
    x, y = images(0)[0]
    F.cross_entropy(model(x), y).backward()
    before = everything(model)
    gradient_flow(model)
    after = everything(model)
    assert [k for k in before if not zoo.alike(before[k], after[k])] == []
    assert math.isfinite(gradient_flow(model)[0].mean)


def test_records_do_not_hold_the_model():
    health = GradientHealth()
    learn = fit(make_learner(cbs=health))
    assert count_hooks(learn.model) == 0
    learn.remove_cb(health)
    again = pickle.loads(pickle.dumps(health))
    assert again.table() == health.table() or any(map(math.isnan, [r.value for r in health.table()]))
    assert len(pickle.dumps(health)) < 200_000


def test_the_number_of_records_to_keep_is_checked():
    with pytest.raises(ValueError, match="keep must be a whole number of records, 2 or more, got 0"):
        GradientRecords(keep=0)
