"""Labels that are all the same."""

import pytest
import torch
import torch.nn.functional as F

from hookcb import Diagnose, Learner
from hookcb.diagnosis.faults.labels.single_class import SingleClass
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.loss_graph import LossGraph
from hookcb.diagnosis.measurements.targets import Targets
from hookcb.diagnosis.run import Run

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
    assert text.startswith("All 640 labels read from 10 inspected batches are 3,")
    for bits in (torch.zeros(640, 2), torch.ones(640, 1)):
        assert len(told(bits, LOGITS)) == 1
    ignored = torch.where(torch.arange(640) % 2 == 0, -100, 3)
    assert told(ignored, SCORES)[0].startswith("All 320 labels")


@pytest.mark.parametrize(
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
