"""Inputs, labels and the loss of guessing, against plain computations of the same."""

import math
import statistics

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, Learner, diagnose
from hookcb.diagnosis.measurements.loss import guess_of
from hookcb.diagnosis.measurements.loss_graph import LossGraph, read_loss
from hookcb.diagnosis.probes.batch import (
    MIN_BATCHES,
    input_numbers,
    observe_inputs,
    observe_labels,
    observe_scaled_labels,
)
from tests.support import fit

NAN = math.nan
N, C, T = 6, 5, 3


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 5, 5), (7,)])
def test_std_and_rms_of_a_batch_are_those_of_its_elements(dtype, shape):
    x = (numbers(*shape) * 300 + 20).to(dtype)
    values = x.double().flatten().tolist()
    std, rms, bad, differs = input_numbers((x,)).tolist()
    assert std == pytest.approx(statistics.pstdev(values), rel=1e-4)
    assert rms == pytest.approx(math.sqrt(statistics.fmean(v * v for v in values)), rel=1e-4)
    assert (bad, differs) == (0.0, 1.0)


def test_a_number_beside_the_inputs_has_no_scale():
    """Such as the number of items in the batch, which the Trainer of Hugging Face gives to the model."""
    ids = torch.arange(12).view(4, 3)
    assert math.isnan(input_numbers({"n": torch.tensor(16.0), "ids": ids})[0])
    assert input_numbers({"n": torch.tensor(16.0), "x": ids.float()})[0] > 3


def test_the_first_float_tensor_counts_wherever_it_is():
    x = 3 * numbers(4, 3)
    for xb in (
        (x,),
        {"ids": torch.ones(4, 2).long(), "x": x},
        ([torch.zeros(4, 1).bool(), x], numbers(4, 2)),
    ):
        assert input_numbers(xb)[0] == pytest.approx(float(x.std(correction=0)))


def test_indices_have_no_size_but_may_differ():
    std, rms, bad, differs = input_numbers((torch.arange(12).view(4, 3),)).tolist()
    assert math.isnan(std)
    assert math.isnan(rms)
    assert (bad, differs) == (0.0, 1.0)


@pytest.mark.parametrize("xb", [(), {}, ("text",), (torch.zeros(0, 3),), None, ([], {"n": 3})])
def test_a_batch_without_a_tensor_has_no_numbers(xb):
    assert input_numbers(xb) is None


def test_all_that_is_not_finite_is_counted_in_all_float_tensors():
    a, b = numbers(4, 3), numbers(4, 2)
    a[0, 0], a[1, 2], b[3, 1] = NAN, math.inf, -math.inf
    assert input_numbers((a, torch.arange(4), {"b": b}))[2] == 3


@pytest.mark.parametrize(
    ("xb", "differs"),
    [
        ((torch.ones(4, 3),), 0.0),
        ((torch.ones(4, 3) * torch.arange(3),), 0.0),  # columns differ, samples do not
        ((torch.ones(4, 3), torch.arange(4)), 1.0),
        ((torch.full((4, 2), 7),), 0.0),
        ((torch.tensor([True, False]),), 1.0),
        ((torch.ones(1, 3),), NAN),
        ((torch.zeros(4),), NAN),  # may be the features of one sample
        ((torch.arange(4.0),), 1.0),
        ((torch.tensor(1.0),), NAN),
        ((torch.ones(1, 3), torch.ones(2, 1)), 0.0),
    ],
)
def test_samples_differ_where_any_two_of_them_do(xb, differs):
    assert input_numbers(xb)[3].item() == pytest.approx(differs, nan_ok=True)


def test_samples_that_are_all_missing_alike_do_not_differ():
    x = torch.ones(4, 3)
    x[:, 1] = NAN
    assert input_numbers((x,))[3] == 0.0


def test_a_single_sample_with_several_elements_has_a_size():
    assert input_numbers((torch.tensor([[3.0, -3.0]]),))[:2].tolist() == [3.0, 3.0]


def rows(*differs, bad=()):
    return [[1.0, 1.0, float(dict(bad).get(i, 0)), d] for i, d in enumerate(differs)]


def seen(numbers, is_harmful=False):
    steps = [10 * i for i in range(len(numbers))]
    return [(s.code, s.severity, s.step, s.value) for s in observe_inputs(steps, numbers, is_harmful)]


def test_missing_numbers_are_a_note_unless_something_comes_of_them():
    given = rows(1, 1, 1, bad=[(1, 5), (2, 9)])
    assert seen(given) == [("input.nonfinite", "info", 10, 5.0)]
    assert seen(given, is_harmful=True) == [("input.nonfinite", "", 10, 5.0)]
    assert seen(rows(1, 1, 1), is_harmful=True) == []


def test_samples_that_are_all_the_same_are_told_after_three_batches():
    assert MIN_BATCHES == 3
    assert seen(rows(0, 0)) == []
    assert seen(rows(0, 0, 0)) == [("input.constant", "", 0, 0.0)]
    assert seen(rows(NAN, 0, NAN, 0, 0)) == [("input.constant", "", 10, 0.0)]


@pytest.mark.parametrize("given", [[], rows(1, 1, 1), rows(0, 0, 0, 1), rows(*[NAN] * 9), rows(0, 0, NAN)])
def test_batches_that_differ_or_do_not_tell_are_no_finding(given):
    assert seen(given) == []


# ---- labels


def labels(pred, y, error):
    return [(s.code, s.step, s.value) for s in observe_labels(pred, y, error, 3)]


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


@pytest.mark.parametrize("bad", [C, 99, -3])
@pytest.mark.parametrize(
    ("shape", "of_labels"),
    [((N, C), (N,)), ((N, C, T), (N, T)), ((N, C, 4, 7), (N, 4, 7)), ((N, C, C), (N, C))],
)
def test_a_label_that_torch_has_refused_is_told(shape, of_labels, bad):
    pred, y = numbers(*shape), of(C, *of_labels, last=bad)
    error = refusal(pred, y)
    for given in (pred, {"logits": pred}):
        assert labels(given, (y,), error) == [("label.out_of_range", 3, bad)]
    assert labels(None, (), error) == [("label.out_of_range", 3, bad)]  # of a loop whose labels are not known


@pytest.mark.parametrize(
    ("shape", "of_labels"),
    [((N, C), (N,)), ((N, C, T), (N, T)), ((N, T, C), (N, T)), ((N, C, 4, 7), (N, 4, 7))],
)
def test_a_label_without_a_score_is_told_where_an_index_was_wrong(shape, of_labels):
    pred = numbers(*shape)
    assert labels(pred, of(C, *of_labels), OTHER) == []
    assert labels(pred, of(C, *of_labels, last=C), OTHER) == [("label.out_of_range", 3, C)]


def test_its_advice_is_the_number_of_outputs_that_would_do():
    pred, y = numbers(N, C), of(C, N, last=7)
    (found,) = observe_labels(pred, y, refusal(pred, y), 0)
    assert "is 7" in found.text
    assert f"labels are 0 to {C - 1}" in found.text
    assert found.next_steps[0].startswith("Give the last layer 8 outputs")


def test_advice_for_a_label_below_zero_is_not_to_have_fewer_outputs():
    pred, y = numbers(N, C), of(C, N, last=-7)
    (found,) = observe_labels(pred, y, refusal(pred, y), 0)
    assert "is -7" in found.text
    assert "outputs" not in found.next_steps[0]


@pytest.mark.parametrize(
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


# ---- the loss of guessing


def zeros(*shape):
    return torch.zeros(*shape, requires_grad=True)


TOKENS, BITS = of(C, N, T), (numbers(N, C) > 0).float()
GUESSES = {
    "cross-entropy": (zeros(N, C), of(C, N), F.cross_entropy),
    "weighted": (zeros(N, C), of(C, N), lambda p, y: F.cross_entropy(p, y, torch.arange(1.0, C + 1))),
    "of sequences": (zeros(N, C, T), TOKENS, F.cross_entropy),
    "of flattened ones": (zeros(N, T, C), TOKENS, lambda p, y: F.cross_entropy(p.view(-1, C), y.view(-1))),
    "of images": (zeros(N, C, 2, 2), of(C, N, 2, 2), F.cross_entropy),
    "ignored": (zeros(N, C), of(C, N), lambda p, y: F.cross_entropy(p, y, ignore_index=1)),
    "soft": (zeros(N, C), numbers(N, C).softmax(1), F.cross_entropy),
    "smoothed": (zeros(N, C), of(C, N), lambda p, y: F.cross_entropy(p, y, label_smoothing=0.1)),
    "summed": (zeros(N, C), of(C, N), lambda p, y: F.cross_entropy(p, y, reduction="sum")),
    "scaled": (zeros(N, C), of(C, N), lambda p, y: 0.25 * F.cross_entropy(p, y)),
    "by hand": (zeros(N, C), of(C, N), lambda p, y: F.cross_entropy(p, y, reduction="none").mean()),
    "two of them": (zeros(N, C), of(C, N), lambda p, y: F.cross_entropy(p, y) + F.cross_entropy(p, y)),
    "binary": (zeros(N, C), BITS, F.binary_cross_entropy_with_logits),
    "binary, positives weigh": (
        zeros(N, C),
        BITS,
        lambda p, y: F.binary_cross_entropy_with_logits(p, y, pos_weight=torch.tensor(10.0)),
    ),
    "binary, samples weigh": (
        zeros(N, C),
        BITS,
        lambda p, y: F.binary_cross_entropy_with_logits(p, y, weight=torch.full((N, 1), 5.0)),
    ),
    "binary of chances": (zeros(N, C), BITS, lambda p, y: F.binary_cross_entropy(p.sigmoid(), y)),
    "binary of chances, samples weigh": (
        zeros(N, C),
        BITS,
        lambda p, y: F.binary_cross_entropy(p.sigmoid(), y, weight=torch.full((N, 1), 5.0)),
    ),
    "mse": (zeros(N, 2), numbers(N, 2) + 3, F.mse_loss),
    "mse, summed": (zeros(N, 2), numbers(N, 2), lambda p, y: F.mse_loss(p, y, reduction="sum")),
    "mse, doubled": (zeros(N, 2), numbers(N, 2), lambda p, y: 2 * F.mse_loss(p, y)),
    "l1": (zeros(N, 2), numbers(N, 2), F.l1_loss),
    "of something else": (zeros(N, C), of(C, N), lambda p, y: p.square().mean() + 1),
}


@pytest.mark.parametrize("name", GUESSES)
def test_the_loss_of_guessing_is_that_of_scores_that_are_all_alike_or_not_known(name):
    pred, y, loss_func = GUESSES[name]
    loss = loss_func(pred, y)
    guess = guess_of(read_loss(loss.grad_fn), pred, (y,))
    assert math.isnan(guess) or guess == pytest.approx(loss.item())


KNOWN = ["cross-entropy", "weighted", "of sequences", "of flattened ones", "of images", "binary", "mse"]


@pytest.mark.parametrize("name", KNOWN)
def test_of_usual_losses_it_is_known(name):
    pred, y, loss_func = GUESSES[name]
    assert guess_of(read_loss(loss_func(pred, y).grad_fn), pred, (y,)) > 0


def test_without_labels_it_is_known_where_scores_are_of_classes():
    graph = LossGraph("cross-entropy", True, 1.0, "softmax", "")
    assert guess_of(graph, zeros(N, C), ()) == pytest.approx(math.log(C))
    assert math.isnan(guess_of(graph, zeros(N, T, C), ()))
    assert math.isnan(guess_of(graph, None, ()))
    assert math.isnan(guess_of(LossGraph("mse", True, 1.0), zeros(N, C), ()))


# ---- labels divided by 255

PIXELS = torch.randint(0, 256, (32, 1, 4, 4), generator=torch.Generator().manual_seed(0)).float()
DIGITS = torch.arange(32).remainder(10).float()


def scaled(x, y):
    return [found.text for found in observe_scaled_labels((x,), (y,), 0)]


@pytest.mark.parametrize("y", [DIGITS / 255, DIGITS[:, None] / 255])
def test_labels_divided_by_255_with_the_pixels_are_named(y):
    (text,) = scaled(PIXELS / 255, y)
    assert "whole numbers from 0 to 9" in text


def test_scaled_labels_are_a_warning_before_training():
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 1))
    verdict = diagnose(net, (PIXELS / 255, DIGITS[:, None] / 255), F.mse_loss)
    assert (verdict.primary.code, verdict.status) == ("label.scaled", "suspect")


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (PIXELS / 255, DIGITS),
        (PIXELS / 255, DIGITS.long()),
        (PIXELS, DIGITS / 255),
        (PIXELS / 256, DIGITS / 256),
        (PIXELS / 255, DIGITS * 0),
        (PIXELS / 255, PIXELS.mean((1, 2, 3)) / 255),  # brightness
        (PIXELS / 255, PIXELS[:, :, 0, 0] / 255),  # of a pixel
        (PIXELS / 255, PIXELS / 255),
    ],
)
def test_other_targets_are_not_scaled_labels(x, y):
    assert scaled(x, y) == []


# ---- guessing under weights


def test_guessing_counts_the_weights_of_ones():
    x, y = torch.zeros(4, 1, requires_grad=True), torch.tensor([[1.0], [0.0], [0.0], [0.0]])
    loss = F.binary_cross_entropy_with_logits(x, y, pos_weight=torch.tensor([9.0]))
    assert guess_of(read_loss(loss.grad_fn), x, (y,)) == pytest.approx(loss.item())
