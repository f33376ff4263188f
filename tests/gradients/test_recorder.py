"""The readings of GradientHealth in a second fit, in copies, in files and in resumed fits."""

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
    Learner,
    count_hooks,
)
from hookcb.gradients.flow import check_gradients, gradient_flow
from tests.gradients.support import NAN, at, batches, cnn, images, learner, mlp, seeded, sgd
from tests.hooks import support as zoo
from tests.support import everything, fit, make_learner
from tests.training.checkpoint import support as resuming
from tests.training.checkpoint.support import RESULTS, check_resumes
from tests.training.checkpoint.support import learner as resuming_learner
from tests.training.support import equal

adam = torch.optim.Adam


OPTIONS = {
    "default": {},
    "outputs": {"activations": True},
    "seldom": {"every": 3, "keep": 2},
    "skipping": {"on_nonfinite": "skip"},
    "raising": {"on_nonfinite": "raise", "activations": True},
}


each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def spoiling(steps, name="2.weight", bad=NAN):
    def act(cb):
        if cb.train_iter in steps:
            dict(cb.model.named_parameters())[name].grad.flatten()[1] = bad

    return at("after_backward", act, order=-50, name="spoiling")


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
        assert str(twin.check()) == str(health.check())
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
    twin = GradientHealth.load(path)
    assert equal(twin.table(), health.table())
    assert equal(list(twin.step_stats), list(health.step_stats))
    assert equal(*([list(record) for record in h.buffer_stats] for h in (twin, health)))
    assert equal(twin.output_stats.table(), health.output_stats.table())
    assert str(twin.check()) == str(health.check())
    assert twin.names == health.names
    assert repr(twin.flow()) == repr(health.flow())
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
    "options", [{}, {"activations": True}, {"every": 3}, {"on_nonfinite": "skip", "keep": 4}]
)
@pytest.mark.parametrize("others", [list, lambda: [GradientAccumulation(3), GradientClip(0.1)]])
def test_a_resumed_fit_ends_with_the_same_readings(options, others, tmp_path, monkeypatch):
    monkeypatch.setattr(resuming, "RESULTS", (*RESULTS, *MORE))
    check_resumes(
        lambda: resuming_learner(cbs=[Tabled(**options), *others()], opt_func=adam), tmp_path, files=(0, 4, 8)
    )


def test_a_checkpoint_holds_plain_values_of_it(tmp_path):
    learner(mlp(), None, GradientHealth(activations=True), Checkpoint(tmp_path))
    for file in tmp_path.glob("*.pt"):
        torch.load(file, weights_only=True)


def test_functions_of_one_backward_change_nothing():
    model = seeded(cnn)
    x, y = images(0)[0]
    F.cross_entropy(model(x), y).backward()
    before = everything(model)
    gradient_flow(model)
    check_gradients(model)
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
