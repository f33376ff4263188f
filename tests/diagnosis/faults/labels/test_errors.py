"""Class indices for which there is no score."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, Learner
from hookcb.diagnosis.faults.labels.errors import LabelsOutOfRange
from hookcb.diagnosis.run import Run
from tests.support import fit, in_turn

N, C, T = 6, 5, 3


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def told(pred, y, error):
    fault = LabelsOutOfRange()
    fault.on_error(Run(loop=SimpleNamespace(pred=pred, yb=y, train_iter=3)), error)
    return fault.seen


def labels(pred, y, error):
    return [(x.code, x.step, x.value) for x in told(pred, y, error)]


def of(n, *shape, last=None):
    """Labels from 0 to n - 1, the last one `last`."""
    y = torch.arange(math.prod(shape)).view(shape) % n
    if last is not None:
        y.view(-1)[-1] = last
    return y


def refusal(pred, y):
    """Error that torch raises for these labels; scores of classes may come last."""
    with pytest.raises(IndexError) as info:
        F.cross_entropy(pred, y)
    return info.value


OTHER = IndexError("index out of range")  # as a loss of one's own may put it


@in_turn("bad", [C, 99, -3])
@in_turn(
    ("shape", "of_labels"),
    [((N, C), (N,)), ((N, C, T), (N, T)), ((N, C, 4, 7), (N, 4, 7)), ((N, C, C), (N, C))],
)
def test_a_label_that_torch_has_refused_is_told(shape, of_labels, bad):
    pred, y = numbers(*shape), of(C, *of_labels, last=bad)
    error = refusal(pred, y)
    for given in (pred, {"logits": pred}):
        assert labels(given, (y,), error) == [("label.out_of_range", 3, bad)]
    assert labels(None, (), error) == [("label.out_of_range", 3, bad)]  # of a loop whose labels are not known


@in_turn(
    ("shape", "of_labels"),
    [((N, C), (N,)), ((N, C, T), (N, T)), ((N, T, C), (N, T)), ((N, C, 4, 7), (N, 4, 7))],
)
def test_a_label_without_a_score_is_told_where_an_index_was_wrong(shape, of_labels):
    pred = numbers(*shape)
    assert labels(pred, of(C, *of_labels), OTHER) == []
    assert labels(pred, of(C, *of_labels, last=C), OTHER) == [("label.out_of_range", 3, C)]


def test_its_advice_is_the_number_of_outputs_that_would_do():
    pred, y = numbers(N, C), of(C, N, last=7)
    (found,) = told(pred, y, refusal(pred, y))
    assert "is 7" in found.message
    assert f"labels are 0 to {C - 1}" in found.message
    assert found.next_steps[0].startswith("Give the last layer 8 outputs")


def test_advice_for_a_label_below_zero_is_not_to_have_fewer_outputs():
    pred, y = numbers(N, C), of(C, N, last=-7)
    (found,) = told(pred, y, refusal(pred, y))
    assert "is -7" in found.message
    assert "outputs" not in found.next_steps[0]


@in_turn(
    ("pred", "y"),
    [
        (numbers(N, C), numbers(N, C)),  # no classes
        (numbers(N, 1), torch.full((N, 1), 50)),  # numbers to predict
        (numbers(N), torch.full((N,), 50)),
        (numbers(N, C), torch.full((N + 1,), 50)),  # of something else
        (numbers(N, C), torch.zeros(0).long()),
        (numbers(0, C), torch.zeros(0).long()),
        (None, of(C, N)),
        (numbers(N, C), ()),
        ("text", ("text",)),
    ],
)
def test_what_are_no_class_indices_is_no_finding(pred, y):
    assert labels(pred, y, OTHER) == []


@pytest.mark.parametrize(
    "error", [RuntimeError("disk is full"), ValueError("Target 5 is out of bounds."), KeyError(9)]
)
def test_other_errors_are_not_the_labels_fault(error):
    assert labels(numbers(N, C), of(C, N, last=255), error) == []


def test_labels_that_the_loss_ignores_are_not_the_reason_of_another_error():
    """Such as 255 in segmentation; the exception has another cause."""
    data = [(numbers(4, 3), torch.tensor([0, 1, 255, 1])) for _ in range(3)]

    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("disk is full")

    loss = nn.CrossEntropyLoss(ignore_index=255)
    learn = Learner((data, None), nn.Linear(3, 2), loss, Broken, lr=0.1)
    with pytest.raises(RuntimeError, match="disk is full"):
        fit(learn, cbs=Diagnose(show=False))
    assert "label.out_of_range" not in {f.code for f in learn.diagnose().findings}
