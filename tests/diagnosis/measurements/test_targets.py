"""The loss of the best constant prediction, against a search for that constant."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, Learner, watch
from hookcb.diagnosis.measurements.loss_graph import LossGraph, read_loss
from hookcb.diagnosis.measurements.loss_terms import main_term, read_terms
from hookcb.diagnosis.measurements.targets import (
    MAX_BATCHES,
    MAX_ELEMENTS,
    Targets,
    compares_output,
    losses_of_bits,
    losses_of_classes,
    recovered_target,
)
from tests.support import along, each, in_turn

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


@pytest.mark.parametrize("name", each(3, CASES))
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


@in_turn(
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


def test_the_loss_compares_the_output_its_log_softmax_or_something_else():
    x = torch.randn(8, 5) @ torch.randn(5, 3).requires_grad_()
    y = torch.zeros(8).long()
    assert compares_output(F.cross_entropy(x, y).grad_fn, x)
    assert compares_output(F.nll_loss(logs := x.log_softmax(1), y).grad_fn, logs)
    assert compares_output(F.mse_loss(x.view(-1), torch.zeros(24)).grad_fn, {"x": x})
    assert not compares_output(F.cross_entropy(x @ torch.randn(3, 4), y).grad_fn, x)  # of a second model
    assert not compares_output(x.sum().grad_fn, x)
    assert not compares_output(None, x)


INPUTS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
LABELS, ONES, SUMS = (
    torch.tensor([0, 2, 1, 2, 0, 1]),
    torch.tensor([[0.0], [1.0]] * 3),
    INPUTS.sum(1, keepdim=True),
)


def recovered(loss_func, y, n_out, *last, scores=lambda x: x):
    """Targets as recovered when the gradient of the model's output arrives."""
    torch.manual_seed(0)
    pred = scores(nn.Sequential(nn.Linear(4, n_out), *last)(INPUTS))
    loss, found = loss_func(pred, y), []

    def recover(grad):  # when the graph has freed its saved tensors
        found.append(recovered_target(main_term(read_terms(loss.grad_fn)), pred, grad, loss.detach()))

    pred.register_hook(recover)
    loss.backward()
    return found[0]


@in_turn(
    ("loss_func", "y", "n_out", "last"),
    [
        (F.mse_loss, SUMS, 1, ()),
        (lambda p, y: ((p - y) ** 2).mean(), 40 + 3 * SUMS, 1, (nn.Tanh(),)),
        (F.cross_entropy, LABELS, 3, ()),
        (lambda p, y: F.cross_entropy(p, y, ignore_index=2), LABELS, 3, ()),
        (F.nll_loss, LABELS, 3, (nn.LogSoftmax(-1),)),
        (F.binary_cross_entropy_with_logits, ONES, 1, ()),
        (F.binary_cross_entropy_with_logits, 2 * ONES - 1, 1, ()),
        (F.binary_cross_entropy, ONES, 1, (nn.Sigmoid(),)),
    ],
)
def test_targets_are_recovered_from_a_mean(loss_func, y, n_out, last):
    found = recovered(loss_func, y, n_out, *last)
    known = found != -100
    torch.testing.assert_close(found[known], y[known], rtol=1e-4, atol=1e-4)


def test_targets_of_a_sequence_are_recovered():
    y = torch.tensor([[0, 2, 1], [1, 1, 0]])

    def loss_func(pred, y):
        return F.cross_entropy(pred.flatten(0, 1), y.flatten())

    found = recovered(loss_func, y, 3, scores=lambda x: x.view(2, 3, 3))
    assert torch.equal(found, y)


@in_turn(
    ("loss_func", "y", "n_out"),
    [
        (F.l1_loss, SUMS, 1),
        (lambda p, y: F.mse_loss(p, y, reduction="sum"), SUMS, 1),
        (lambda p, y: F.cross_entropy(p, y, weight=torch.tensor([1.0, 2.0, 5.0])), LABELS, 3),
        (lambda p, y: F.cross_entropy(p, y, label_smoothing=0.2), LABELS, 3),
        (lambda p, y: F.mse_loss(p, y) + p.mean(), SUMS, 1),
        (lambda p, y: F.mse_loss(p.sigmoid(), y), SUMS, 1),
    ],
)
def test_what_is_not_certain_is_unknown(loss_func, y, n_out):
    assert recovered(loss_func, y, n_out) is None


@pytest.mark.slow
def test_a_plain_loop_is_judged_like_a_learner():
    torch.manual_seed(0)
    x = torch.randn(256, 4)
    batches = list(zip(x.split(32), (20 + 5 * x.sum(1, keepdim=True)).split(32), strict=True)) * 8
    codes = []
    for run in (by_learner, by_watch):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1), nn.Tanh())
        verdict = run(model, torch.optim.Adam(model.parameters()), batches)
        codes.append((verdict.status, verdict.primary.code, verdict.primary.message))
    assert codes[0] == codes[1]
    assert codes[0][:2] == ("sick", "head.range")


def by_learner(model, opt, batches):
    learn = Learner(batches, model, F.mse_loss, opt)
    with learn.no_logging():
        learn.fit(1, cbs=Diagnose(show=False, on_sick="ignore"))
    return learn.diagnose()


def by_watch(model, opt, batches):
    with watch(model, opt, Diagnose(show=False, on_sick="ignore")) as w:
        for x, y in batches:
            F.mse_loss(model(x), y).backward()
            opt.step()
            opt.zero_grad()
    return w.diagnose()


# ---- cross-entropy of constants and of perfect predictions, against torch's losses

BATCHES = [torch.tensor([0, 0, 1, 2]), torch.tensor([0, 1, 1, 1])]
SOFT = [F.one_hot(y, 3) * 0.7 + 0.1 for y in BATCHES]
GRAPH = LossGraph("cross-entropy", True, 1.0, n_classes=3)
THREE_WEIGHTS = torch.tensor([1.0, 2.0, 0.5])


def own_loss(**how):
    """Smallest loss of predictions that know each label."""
    scores = torch.zeros(3, 3, requires_grad=True)
    opt = torch.optim.LBFGS([scores], max_iter=200, line_search_fn="strong_wolfe")

    def mean_loss():
        opt.zero_grad()
        loss = sum(F.cross_entropy(scores[y], y, **how) for y in BATCHES) / len(BATCHES)
        loss.backward()
        return loss

    opt.step(mean_loss)
    return mean_loss().item()


@pytest.mark.parametrize(("smoothing", "weights"), along([0.1, 0.5], [None, THREE_WEIGHTS]))
def test_a_perfect_prediction_of_smoothed_labels_has_a_loss(weights, smoothing):
    graph = GRAPH._replace(class_weights=weights, has_weights=weights is not None, smoothing=smoothing)
    expected = own_loss(weight=weights, label_smoothing=smoothing)
    assert losses_of_classes(BATCHES, graph).perfect == pytest.approx(expected, rel=1e-3)


def test_a_perfect_prediction_of_hard_labels_has_none():
    assert losses_of_classes(BATCHES, GRAPH).perfect == pytest.approx(0, abs=1e-6)
    assert losses_of_bits([torch.tensor([0.0, 1.0])], LossGraph()).perfect == 0


def test_soft_targets_have_their_own_entropy():
    found = losses_of_classes(SOFT, GRAPH)
    assert found.perfect == pytest.approx(-(0.8 * math.log(0.8) + 2 * 0.1 * math.log(0.1)), rel=1e-5)
    assert found.perfect < found.constant < math.log(3)
    bits = losses_of_bits([torch.tensor([[0.25], [0.75]])], LossGraph())
    assert bits.constant == pytest.approx(math.log(2))
    assert bits.perfect == pytest.approx(
        F.binary_cross_entropy(torch.tensor(0.25), torch.tensor(0.25)).item()
    )


def test_the_noise_is_that_of_a_constant_from_batch_to_batch():
    found = losses_of_classes(BATCHES, GRAPH)
    p = torch.tensor([3 / 8, 4 / 8, 1 / 8]).log()
    each = torch.stack([F.nll_loss(p.expand(4, 3), y) for y in BATCHES])
    assert found.constant == pytest.approx(each.mean().item())
    assert found.noise == pytest.approx(each.std(correction=0).item())
    assert losses_of_classes([BATCHES[0]] * 3, GRAPH).noise == pytest.approx(0, abs=1e-6)


def test_what_does_not_fit_is_unknown():
    weighted = GRAPH._replace(has_weights=True, class_weights=THREE_WEIGHTS)
    assert math.isnan(losses_of_classes(SOFT, weighted).constant)
    assert math.isnan(losses_of_classes([torch.tensor([5])], weighted).constant)
    assert math.isnan(losses_of_classes([torch.tensor([-100])], GRAPH).constant)
