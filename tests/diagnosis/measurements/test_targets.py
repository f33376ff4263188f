"""The loss of the best constant prediction, against a search for that constant."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from hookcb import Diagnose, Learner
from hookcb.diagnosis.measurements.loss_graph import LossGraph, read_loss
from hookcb.diagnosis.measurements.targets import MAX_BATCHES, MAX_ELEMENTS, Targets, compares_output

G = torch.Generator().manual_seed(0)
VALUES = torch.randn(200, 3, generator=G) * torch.tensor([1.0, 5.0, 0.2]) + 4
CLASSES = torch.tensor([0, 0, 0, 1, 2]).repeat(40)
WEIGHTS, ODDS = torch.tensor([0.1, 1.0, 3.0]), torch.zeros(2, requires_grad=True)
BITS = (torch.rand(200, 2, generator=G) < 0.2).float()
CASES = {
    "mse": (F.mse_loss, VALUES, VALUES.shape[1:]),
    "mae": (F.l1_loss, VALUES, VALUES.shape[1:]),
    "bits": (F.binary_cross_entropy_with_logits, BITS, BITS.shape[1:]),
    "classes": (F.cross_entropy, CLASSES, (3,)),
    "soft classes": (F.cross_entropy, F.one_hot(CLASSES, 3).float(), (3,)),
    "weighted classes": (partial(F.cross_entropy, weight=WEIGHTS), CLASSES, (3,)),
    "smoothed classes": (partial(F.cross_entropy, label_smoothing=0.1), CLASSES, (3,)),
    "weighted and smoothed": (
        partial(F.cross_entropy, weight=WEIGHTS, label_smoothing=0.2), CLASSES, (3,),
    ),
    "smoothed, class 2 ignored": (
        partial(F.cross_entropy, label_smoothing=0.3, ignore_index=2), CLASSES, (3,),
    ),
    "weighted bits": (
        partial(F.binary_cross_entropy_with_logits, pos_weight=torch.tensor([4.0, 0.5])), BITS, (2,),
    ),
    "half of squares": (lambda p, y: 0.5 * F.mse_loss(p, y), VALUES, VALUES.shape[1:]),
}  # fmt: skip


def collected(y, size=50):
    targets = Targets()
    for part in y.split(size):
        targets.add_batch((part,))
    return targets


@pytest.mark.parametrize("name", CASES)
def test_no_constant_is_better(name):
    loss_func, y, shape = CASES[name]
    constant = torch.zeros(shape, requires_grad=True)
    opt = torch.optim.Adam([constant], lr=0.05)
    for _ in range(300):
        loss = loss_func(constant.expand(len(y), *shape), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    graph = read_loss(loss_func(constant.expand(len(y), *shape), y).grad_fn)
    if name == "soft classes":
        graph = graph._replace(scale=1.0, is_pure=True)
    assert collected(y).losses(graph)[0] == pytest.approx(loss.item(), rel=0.02)


@pytest.mark.parametrize(
    "graph",
    [
        LossGraph(),
        LossGraph("mse"),
        LossGraph("mse", True),
        LossGraph("nll", True, 1.0),
        LossGraph("kl", True, 1.0),
    ],
)
def test_of_other_losses_it_is_unknown(graph):
    assert math.isnan(collected(VALUES).losses(graph)[0])


def test_of_values_that_drift_it_is_unknown():
    graph, drifting = LossGraph("mse", True, 1.0), VALUES + torch.linspace(0, 20, 200)[:, None]
    assert math.isnan(collected(drifting).losses(graph)[0])
    assert collected(drifting[torch.randperm(200, generator=G)]).losses(graph)[0] > 0


def test_without_targets_it_is_unknown():
    targets = Targets()
    for nothing in (
        (),
        None,
        "text",
        torch.zeros(()),
        torch.zeros(0, 3),
        torch.zeros(3, dtype=torch.complex64),
    ):
        targets.add_batch(nothing)
    assert not targets.is_known
    assert math.isnan(targets.losses(LossGraph("mse", True, 1.0))[0])


@pytest.mark.parametrize("ignored", [-100, 255, 2])
def test_ignored_classes_do_not_count(ignored):
    y, others = torch.cat([CLASSES, torch.full((400,), ignored)]), CLASSES[ignored != CLASSES]
    scores = torch.zeros(len(y), 3, requires_grad=True)
    graph = read_loss(F.cross_entropy(scores, y, ignore_index=ignored).grad_fn)
    plain = read_loss(F.cross_entropy(scores[: len(others)], others).grad_fn)
    assert collected(y).losses(graph)[0] == pytest.approx(collected(others, 40).losses(plain)[0])


def test_with_weights_of_elements_it_is_unknown():
    bits, weight = BITS, torch.rand(2)
    graph = read_loss(F.binary_cross_entropy_with_logits(ODDS.expand(200, 2), bits, weight=weight).grad_fn)
    assert math.isnan(collected(BITS).losses(graph)[0])


def test_copies_are_bounded_and_are_no_views_of_the_user_s_tensors():
    targets, y = Targets(), torch.arange(4.0 * MAX_ELEMENTS).view(-1, 4)
    for _ in range(MAX_BATCHES + 5):
        targets.add_batch(y)
    assert len(targets._batches) == MAX_BATCHES
    assert all(x.numel() <= MAX_ELEMENTS for x in targets._batches)
    before = targets.losses(LossGraph("mse", True, 1.0))[0]
    y.zero_()
    assert targets.losses(LossGraph("mse", True, 1.0))[0] == before > 0


# ---- labels of one class

SCORES = LossGraph("cross-entropy", True, 1.0, applies="softmax", is_raw=True)
LOGITS = LossGraph("binary cross-entropy", True, 1.0, applies="sigmoid", is_raw=True)
THREES = torch.full((640,), 3)


def told(y, graph, size=64, is_of_output=True):
    targets = collected(y, size)
    targets.is_of_output = is_of_output
    return [x.text for x in targets.observe_single_class(graph)]


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


def test_the_loss_compares_the_output_its_log_softmax_or_something_else():
    x = torch.randn(8, 5) @ torch.randn(5, 3).requires_grad_()
    y = torch.zeros(8).long()
    assert compares_output(F.cross_entropy(x, y).grad_fn, x)
    assert compares_output(F.nll_loss(logs := x.log_softmax(1), y).grad_fn, logs)
    assert compares_output(F.mse_loss(x.view(-1), torch.zeros(24)).grad_fn, {"x": x})
    assert not compares_output(F.cross_entropy(x @ torch.randn(3, 4), y).grad_fn, x)  # of a second model
    assert not compares_output(x.sum().grad_fn, x)
    assert not compares_output(None, x)


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
