"""Probes of the inputs, targets and outputs of a batch."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookcb.activations.stats import has_stats
from hookcb.core.batch import parts
from hookcb.diagnosis.run import Observation

COLUMNS = ("std", "rms", "nonfinite", "differs")  # `differs`: whether any two samples do
REFUSED = re.compile(r"Target (-?\d+) is out of bounds")  # error of cross-entropy
MIN_BRIGHTEST, MAX_SCALED_CLASSES = 0.5, 100  # of the pixels beside them; classes divided by 255
MIN_BATCHES = 3  # that must be constant
MAX_COLUMNS = 256  # of a table; the columns of wider inputs, as pixels and counts of words, are mostly alike


def input_numbers(xb: Any) -> Tensor | None:
    """`COLUMNS` of the inputs of a batch, float32 `(4,)` on their device; None without tensors.

    Standard deviation and root mean square of the first float tensor that is not 0-d, NaN if there is none;
    number of non-finite elements in all tensors; whether samples differ, NaN for a single sample, and if all
    that is alike are floats in one dimension, which may be the features of one.
    """
    tensors = [x.detach() for _, x in parts(xb) if isinstance(x, Tensor) and has_stats(x) and x.numel()]
    if not tensors:
        return None
    floats = [x for x in tensors if x.is_floating_point()]
    nothing = torch.full((), math.nan, device=tensors[0].device)
    std = rms = nothing
    bad = torch.zeros((), device=tensors[0].device)
    if floats:
        first = next((x for x in floats if x.ndim), None)  # a 0-d tensor has no scale
        if first is not None:
            std, rms = _scale(first)
        n_bad = [_count_nonfinite(x).to(bad.device) for x in floats]
        bad = torch.stack(n_bad).sum().float()
    several = [x for x in tensors if x.ndim and len(x) > 1]
    differs = nothing
    if several:
        any_differs = torch.stack([_differs(x).to(bad.device) for x in several]).any()
        has_samples = any(x.ndim > 1 or not x.is_floating_point() for x in several)
        differs = any_differs.float() if has_samples else torch.where(any_differs, 1.0, nothing)
    return torch.stack([std, rms, bad, differs])


def column_squares(xb: Any) -> Tensor | None:
    """Mean square of each column of the first float input, if that is a table `(N, F)`; else None."""
    x = next((x for _, x in parts(xb) if isinstance(x, Tensor) and x.is_floating_point() and x.ndim), None)
    is_table = x is not None and has_stats(x) and x.ndim == 2 and len(x) and 1 < x.shape[1] <= MAX_COLUMNS
    return x.detach().float().square().mean(0) if x is not None and is_table else None


def _scale(x: Tensor) -> tuple[Tensor, Tensor]:
    """Standard deviation and root mean square of all elements, float32; of equal elements the first is 0."""
    flat, root = x.reshape(-1).float(), math.sqrt(x.numel())
    differences = flat - flat[0]
    differences = differences - differences.mean()
    # norms take a fraction of the time of `std`
    return torch.linalg.vector_norm(differences) / root, torch.linalg.vector_norm(flat) / root


def _count_nonfinite(x: Tensor) -> Tensor:
    """Number of elements that are NaN or infinite."""
    if x.is_cpu and math.isfinite(float(x.sum())):  # one pass instead of three
        return torch.zeros((), dtype=torch.int64, device="cpu")
    return x.isfinite().logical_not().sum()


def _differs(x: Tensor) -> Tensor:
    """Whether any sample differs from the first; NaN equals NaN."""
    first = x[:1]
    if x.is_cpu and bool((x[1] > x[0]).any()):  # the usual case; a complex number would need the rest
        return torch.ones((), dtype=torch.bool, device="cpu")
    return ((x != first) & ~((x != x) & (first != first))).any()


def observe_inputs(steps: list[int], numbers: list[list[float]], is_harmful: bool) -> Iterator[Observation]:
    """Non-finite or constant inputs in the inspected batches.

    NaN has severity "info" unless `is_harmful`, because a model may handle NaN as a missing value.
    """
    bad = [(step, row[2]) for step, row in zip(steps, numbers, strict=True) if row[2] > 0]
    if bad:
        step, n = bad[0]
        observation = nonfinite_input(step, n)
        yield observation if is_harmful else replace(observation, severity="info")
    known = [(step, row[3]) for step, row in zip(steps, numbers, strict=True) if not math.isnan(row[3])]
    if len(known) >= MIN_BATCHES and not any(differs for _, differs in known):
        yield Observation(
            "input.constant",
            step=known[0][0],
            value=0.0,
            text=f"All samples of a batch are identical, in each of the {len(known)} inspected batches, so "
            "the model cannot tell them apart.",
            causes=(
                "the dataset returns the same item each time, or inputs are overwritten or scaled to zero",
            ),
            next_steps=("Print two samples of your dataset, and follow them through your transforms",),
        )


def nonfinite_input(step: int, n: float) -> Observation:
    """Observation of `n` non-finite numbers in the inputs of a batch."""
    return Observation(
        "input.nonfinite",
        step=step,
        value=n,
        text=f"The inputs of batch {step} contain {n:,.0f} NaN or infinite number{'s' * (n != 1)}.",
        causes=("missing values in the data, or a division by zero in a transform",),
        next_steps=("Find these samples with torch.isfinite(x), then fill or drop them",),
    )


def observe_labels(pred: Any, yb: Any, error: BaseException, step: int) -> Iterator[Observation]:
    """Class indices without a score, if the loss has raised an IndexError.

    Without that error they are fine: a loss may ignore indices that are out of range, as 255 in segmentation.

    Args:
        pred: scores, `(N, C, …)`.
        yb: targets; the first integer tensor is used.
        error: exception that ended the training.
        step: number of the batch.
    """
    if not isinstance(error, IndexError):
        return
    refused = REFUSED.search(str(error))
    n_scores, high = _range_of(pred, yb)
    worst = int(refused[1]) if refused else high
    if worst is None or not (refused or (n_scores is not None and worst >= n_scores)):
        return
    valid = f"; the model has {n_scores} scores, so valid labels are 0 to {n_scores - 1}" if n_scores else ""
    yield Observation(
        "label.out_of_range",
        step=step,
        value=float(worst),
        text=f"A label of batch {step} is {worst}, which has no score{valid}.",
        causes=("labels that count from 1, or a last layer with too few outputs",),
        next_steps=(
            f"Give the last layer {worst + 1} outputs, or map the labels to the outputs it has"
            if worst >= 0
            else "Map the labels to 0 and above, or pass ignore_index to the loss",
        ),
    )


def observe_scaled_labels(xb: Any, yb: Any, step: int) -> Iterator[Observation]:
    """Class indices that were divided by 255, as the pixels were."""
    floats = [[x.detach() for _, x in parts(b) if isinstance(x, Tensor)] for b in (xb, yb)]
    if not all(len(x) == 1 and x[0].is_floating_point() and x[0].numel() > 1 for x in floats):
        return
    pixels, y = floats[0][0], floats[1][0]
    if y.numel() != len(y) or float(pixels.max()) < MIN_BRIGHTEST or not (_is_255th(pixels) and _is_255th(y)):
        return
    largest = round(float(y.max()) * 255)
    if 0 < largest < MAX_SCALED_CLASSES:
        yield Observation(
            "label.scaled",
            step=step,
            value=float(y.max()),
            text=f"The targets are whole numbers from 0 to {largest}, divided by 255 as the inputs are.",
            causes=("class indices that are scaled together with the pixels",),
            next_steps=("Divide the inputs alone by 255",),
        )


def _is_255th(x: Tensor) -> bool:
    """Whether all numbers are 0/255, 1/255 … 255/255."""
    whole = 255 * x.float()
    is_near = ((whole - whole.round()).abs() < 1e-2).all()
    return bool(is_near & (x >= 0).all() & (x <= 1).all())


class Refusal(NamedTuple):
    """A form of targets that a loss of torch refuses.

    Attributes:
        error: pattern of torch's message.
        takes: what the loss takes.
        next_steps: how to give it that.
        is_of_integers: whether it is about integer targets; None if it may be about others.
    """

    error: str
    takes: str
    next_steps: tuple[str, ...]
    is_of_integers: bool | None = None


REFUSALS = (
    Refusal(
        r"class probabilities, got",
        "Cross-entropy takes class indices of shape (N), or float probabilities of shape (N, C)",
        ("For one-hot targets, pass y.argmax(1)",),
    ),
    Refusal(
        r"multi-target not supported",
        "This loss takes class indices of shape (N)",
        ("For indices of shape (N, 1), pass y.squeeze(1)", "For one-hot targets, pass y.argmax(1)"),
    ),
    Refusal(
        r"expected (target dtype to be|scalar type) Long",
        "Cross-entropy takes class indices as integers",
        ("Pass y.long(); for probabilities, give them the shape of the scores",),
        is_of_integers=False,
    ),
    Refusal(
        r"Target size .* must be the same as input size|target size .* different to the input size",
        "Binary cross-entropy takes a target for each output, in the same shape",
        ("For one output, pass y.unsqueeze(1)", "For class indices, use nn.CrossEntropyLoss"),
    ),
    Refusal(
        r"can't be cast to the desired output type (Long|Int)|Found dtype (Long|Int) but expected Float",
        "This loss takes floats as targets",
        ("Pass y.float(); for class indices, use nn.CrossEntropyLoss",),
        is_of_integers=True,
    ),
    Refusal(
        r"Expected target size",
        "Cross-entropy takes scores of shape (N, C, …), with the classes in dim 1",
        ("Pass scores.transpose(1, 2), or flatten both: scores.flatten(0, 1) and y.flatten()",),
    ),
)


def observe_refusal(yb: Any, error: BaseException, step: int) -> Iterator[Observation]:
    """Targets in a form that a loss of torch refuses, in words, if it has raised an error."""
    y = next((y for _, y in parts(yb) if isinstance(y, Tensor)), None)
    is_of_integers = None if y is None else not (y.is_floating_point() or y.is_complex())
    for refusal in REFUSALS:
        fits = refusal.is_of_integers in (None, is_of_integers)
        if isinstance(error, RuntimeError | ValueError) and fits and re.search(refusal.error, str(error)):
            about = "" if y is None else f"; the targets are {y.dtype} of shape {tuple(y.shape)}"
            yield Observation(
                "label.form",
                step=step,
                text=f"{refusal.takes}{about}. PyTorch says: {str(error).splitlines()[0]:.120}",
                causes=("targets in the form of another loss",),
                next_steps=refusal.next_steps,
            )
            return


def _range_of(pred: Any, yb: Any) -> tuple[int | None, int | None]:
    """Number of classes that have a score, and the largest label; None if unknown."""
    from hookcb.diagnosis.measurements.loss import n_classes_of, scores_of

    scores = scores_of(pred)
    labels = next((y for _, y in parts(yb) if isinstance(y, Tensor) and y.dtype == torch.int64), None)
    if scores is None or labels is None or not labels.numel():
        return None, None
    return n_classes_of(scores, labels), int(labels.max())
