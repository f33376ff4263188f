"""Labels that are all the same."""

import pytest
import torch
import torch.nn.functional as F

from hookcb import Diagnose, Learner, watch
from hookcb.diagnosis.faults.labels.single_class import SingleClass
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.loss_graph import LossGraph
from hookcb.diagnosis.measurements.targets import Targets
from hookcb.diagnosis.run import Run
from tests.support import along, each, in_turn

SCORES = LossGraph("cross-entropy", True, 1.0, applies="softmax", is_raw=True)
LOGITS = LossGraph("binary cross-entropy", True, 1.0, applies="sigmoid", is_raw=True)
THREES = torch.full((640,), 3)


def told(y, graph, size=64, is_of_output=True):
    run, fault = Run(), SingleClass()
    targets = run.measured(Targets)
    for part in y.split(size):
        targets.add_batch((part,))
    targets.is_of_output, run.measured(Loss).graph_of_one = is_of_output, graph
    fault.tell(run)
    return [x.message for x in fault.seen]


def test_labels_of_one_class_are_counted():
    (text,) = told(THREES, SCORES)
    assert text.startswith("All 640 labels read from 10 batches are 3,")
    for bits in (torch.zeros(640, 2), torch.ones(640, 1)):
        assert len(told(bits, LOGITS)) == 1
    ignored = torch.where(torch.arange(640) % 2 == 0, -100, 3)
    assert told(ignored, SCORES)[0].startswith("All 320 labels")


@in_turn(
    ("y", "graph"),
    [
        (torch.where(torch.arange(640) == 639, 2, THREES), SCORES),
        (torch.full((640,), -100), SCORES),
        (torch.full((640, 1), 0.5), LOGITS),  # smoothed, or soft targets
        (torch.full((640, 1), 3.0), LossGraph("mse", True, 1.0, is_raw=True)),
        (THREES, SCORES._replace(is_pure=False)),
        (torch.zeros(640).long(), SCORES._replace(is_raw=False)),  # similarities, whose first is the positive
    ],
)
def test_other_targets_are_not_of_one_class(y, graph):
    assert told(y, graph) == []


def test_few_labels_and_those_of_another_model_do_not_count():
    assert told(THREES, SCORES, size=128) == []  # five batches
    assert told(THREES[:500], SCORES, size=50) == []
    assert told(THREES, SCORES, is_of_output=False) == []
    targets = Targets()
    for part in THREES.split(64):
        targets.add_batch((part, part))  # the loss may compare either
    targets.is_of_output = True
    assert targets.classes(SCORES) is None


def trained_on(y, loss_func=F.cross_entropy):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    learn = Learner([(torch.randn(len(part), 4), part) for part in y.split(64)], model, loss_func)
    with learn.no_logging():
        learn.fit(1, cbs=Diagnose(show=False))
    return learn.diagnose()


def test_a_training_with_one_class_is_warned_and_others_pass():
    found = {x.code: x.severity for x in trained_on(torch.ones(3200).long()).findings}
    assert found["label.single_class"] == "warning"
    verdict = trained_on(torch.arange(3200) % 3)
    assert "label.single_class" not in [x.code for x in verdict.findings]
    assert "labels of a single class" in verdict.ruled_out


# ---- batches of a single class in turn

DIGITS = torch.arange(10).repeat_interleave(70)
SHUFFLED = DIGITS[torch.randperm(700, generator=torch.Generator().manual_seed(0))]
BITS = (DIGITS > 4).long()


def by_learner(batches, n_out=10, loss_func=F.cross_entropy, n_epoch=2):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, n_out))
    learn = Learner([(torch.randn(y.numel(), 4), y) for y in batches], model, loss_func, lr=1e-3)
    with learn.no_logging():
        learn.fit(n_epoch, cbs=Diagnose("ignore", show=False))
    return learn.diagnose()


def by_watch(batches, n_out=10, loss_func=F.cross_entropy, n_epoch=2):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, n_out))
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    with watch(model, opt, Diagnose("ignore", show=False)) as w:
        for y in batches * n_epoch:
            opt.zero_grad()
            loss_func(model(torch.randn(len(y), 4)), y).backward()
            opt.step()
        return w.diagnose()


def test_a_target_of_no_dimension_is_left_alone():
    verdict = by_learner([torch.tensor(0.5)] * 10, 1, lambda pred, y: F.mse_loss(pred.mean(), y))
    assert not [note for note in verdict.looked if "failed" in note]


def of_sorted(verdict):
    return [x.severity for x in verdict.findings if x.code == "label.sorted"]


@pytest.mark.slow
@pytest.mark.parametrize(("train", "n_epoch"), along([by_learner, by_watch], [1, 3]))
def test_sorted_labels_are_found(train, n_epoch):
    assert of_sorted(train(list(DIGITS.split(16)), n_epoch=n_epoch)) == ["warning"]


def bits_loss(scores, y):
    return F.binary_cross_entropy_with_logits(scores[:, 0], y.float())


@pytest.mark.slow
def test_sorted_labels_of_two_classes_are_found():
    assert of_sorted(by_learner(list(BITS.split(16)), n_out=2)) == ["warning"]
    assert of_sorted(by_watch(list(BITS.split(16)), n_out=1, loss_func=bits_loss)) == ["warning"]


@pytest.mark.slow
def test_classes_in_turn_are_found():
    assert of_sorted(by_learner([torch.full((16,), i % 10) for i in range(40)])) == ["warning"]


EACH = [DIGITS[i == DIGITS] for i in range(10)]
PAIRS = [torch.cat(EACH[i : i + 2])[torch.randperm(140)] for i in range(0, 10, 2)]
NOT_SORTED = {
    "shuffled": SHUFFLED.split(16),
    "tasks of two classes": [y for pair in PAIRS for y in pair.split(16)],
    "few classes in each batch": [torch.tensor([i % 10, (i + 3) % 10, (i + 4) % 10] * 6) for i in range(40)],
    "rare classes": torch.where(SHUFFLED == 0, 1, 0).split(16),
    "batches of two": SHUFFLED.split(2),
    "batches of one": SHUFFLED[:200].split(1),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "train"), each(3, along(NOT_SORTED, [by_learner, by_watch])))
def test_other_orders_are_not_sorted(name, train):
    assert of_sorted(train(list(NOT_SORTED[name]))) == []


@pytest.mark.slow
def test_batches_that_alternate_are_on_purpose():
    assert of_sorted(by_learner([torch.full((16,), i % 2) for i in range(40)], n_out=2)) == []


@pytest.mark.slow
def test_one_class_after_the_other_is_a_note():
    batches = [y for own in EACH for y in own.split(16)]
    assert of_sorted(by_learner(batches, n_epoch=1)) == ["info"]


@pytest.mark.slow
def test_all_labels_of_a_long_training_count():
    batches = list(DIGITS.repeat_interleave(10).split(16))  # 438, of which few are inspected
    verdict = by_learner(batches, n_epoch=2)
    assert of_sorted(verdict) == ["warning"]
    (trivial,) = [x for x in verdict.findings if x.code == "loss.trivial"]
    assert "shares of the classes would give 2.3" in trivial.message  # and not 1.4
    assert "labels of a single class" in verdict.ruled_out
