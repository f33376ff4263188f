"""Checks that pass on what probes observed during the training, `Run.observations`."""

import math
from collections.abc import Iterator, Sequence

from hookcb.core.text import as_layer, join_names
from hookcb.diagnosis.fault import EVERYTHING, Result, Site
from hookcb.diagnosis.registry import check
from hookcb.diagnosis.rules import MIN_BATCHES, is_trivial
from hookcb.diagnosis.run import Absent, Observation, Passed, Run, Skipped
from hookcb.diagnosis.verdict import Finding, Severity


def passed_on(
    evidence: Run, code: str, severity: Severity, passed: str, requires: str = ""
) -> Iterator[Result]:
    """One finding per severity for all observations with a code: the first, with the places of the others.

    Args:
        evidence: has the observations.
        code: code of the observations.
        severity: severity of the finding, unless the observation has its own.
        passed: text of `Passed` if there is no observation.
        requires: key in `Run.observed` without which it is `Skipped`; alternatives separated by " or ".
    """
    observations = [x for x in evidence.observations if x.code == code]
    if not observations:
        if not requires or evidence.observed & set(requires.split(" or ")):
            yield Passed(passed)
        elif requires in evidence.absent:
            yield Absent(evidence.absent[requires])
        else:
            yield Skipped(evidence.missing.get(requires, f"too little was seen of the {requires}"))
        return
    for given in dict.fromkeys(x.severity for x in observations):
        first, *others = [x for x in observations if x.severity == given]
        yield _finding(evidence, first, others, given or severity)  # type: ignore[arg-type]


def _finding(evidence: Run, first: Observation, others: Sequence[Observation], severity: Severity) -> Finding:
    places = [
        as_layer(x.layer) or x.param
        for x in others
        if (x.layer or x.param) not in ("", first.layer, first.param)
    ]
    more = f" The same is true of {join_names(list(dict.fromkeys(places)), 4)}." if places else ""
    steps = [x.step for x in (first, *others) if x.step is not None]
    return Finding(
        first.code,
        severity,
        first.layer,
        first.param,
        first.step,
        first.value,
        math.nan,
        first.text + more,
        first.causes,
        first.next_steps,
        kind=_about(evidence, first),
        last_step=max(steps, default=None),
        ranks=first.ranks,
    )


def _about(evidence: Run, seen: Observation) -> str:
    """Type and sizes of the layer."""
    if seen.layer in evidence.layers:
        return evidence.layers[seen.layer].about
    params = (p for p in evidence.params.values() if seen.param == p.name or seen.layer == p.layer != "")
    return next((param.about for param in params), "")


def _row(
    code: str,
    site: Site,
    needs: tuple[str, ...],
    leads_to: tuple[str, ...],
    severity: Severity,
    passed: str,
    *,
    requires: str = "",
    subject: str = "",
    exact: bool = True,
    doc: str,
) -> None:
    """Registers a check that only passes on observations; see `passed_on` and `Check` for the arguments."""

    def pass_on(evidence: Run) -> Iterator[Result]:
        return passed_on(evidence, code, severity, passed, requires)

    pass_on.__name__, pass_on.__doc__ = code.replace(".", "_"), doc
    check(code, site=site, needs=needs, exact=exact, leads_to=leads_to, subject=subject)(pass_on)


_row("dropout.scores", Site.LOSS, ("batch", "graph"), ("loss.*", "update.*", "head.range"), "warning",
    "dropout before the loss", requires="input of the loss", doc="""
    A dropout after the last layer, whose output the loss gets.

    Exact: the node of the autograd graph before the loss, or before its softmax, sigmoid or ReLU: a dropout,
    or a product with a mask of 0 and 1 / (1 - p).

    Source: Srivastava et al., "Dropout", 2014, who drop inputs and hidden units, not outputs.
    """)  # fmt: skip

_row("dropout.in_eval", Site.MODULES, ("batches",), (), "warning", "dropout in eval mode",
    requires="calls in eval mode", doc="""
    Dropout that stays on in eval mode, so that the same input gets another answer each time.

    Exact: the first call in eval mode without gradients draws a mask of dropout. A note if three calls or
    more with the same inputs follow each other without a training batch between them, as Monte Carlo dropout
    makes on purpose.

    Source: Gal & Ghahramani, "Dropout as a Bayesian Approximation", 2016, for dropout that is meant.
    """)  # fmt: skip

_row("model.linear_stack", Site.MODULES, ("model",), (), "info", "linear layers in a row",
    requires="path from layer to layer", doc="""
    Linear layers that follow one another without a nonlinearity: a note, as one layer could compute the same.

    Exact: order of the modules of an nn.Sequential, dropout and identity left out, or a linear layer that
    alone gets the output of another, in the autograd graph of the first loss. An inner width below both ends
    is a low-rank factorization.
    """)  # fmt: skip


@check(
    "embed.scale",
    site=Site.MODULES,
    needs=("batches", "graph"),
    leads_to=("loss.trivial", "loss.flat"),
    subject="embeddings",
)
def embedding_scales(evidence: Run) -> Iterator[Result]:
    """An embedding that is lost in the sum, as a far larger one is added to it.

    Formula: RMS of one table / RMS of the other, of embeddings of tokens or positions whose outputs are added
    in the autograd graph of the first loss. Limit: 30, before the first step and at the end, if the model
    is no better than a constant: a warning where `loss.trivial` finds that, a note from 50 batches on. Tables
    that begin at zero are left out; healthy ones with positions of std 0.02 beside N(0, 1) end at 18.

    Source: Vaswani et al., "Attention Is All You Need", 2017, who scale embeddings beside positions.
    """
    passed = "embeddings on different scales"
    severity: Severity = "warning" if is_trivial(evidence) else "info"
    if is_trivial(evidence, MIN_BATCHES):
        yield from passed_on(evidence, "embed.scale", severity, passed, requires="sums in the graph")
    else:
        yield Passed(passed)


_row("mask.blind", Site.MODULES, ("batches",), ("attn.*", "loss.*", "grad.*", "update.*", "act.*"), "warning",
    "masks that hide all other positions", requires="attention", subject="attention", doc="""
    Self-attention in which each position sees one position at most.

    Exact: in three batches, all weights but one of each query are zero, and the key that is left is the same
    in all samples and heads. Attention that is sharp because its scores are large differs between samples.
    """)  # fmt: skip

_row("attn.collapse", Site.MODULES, ("batches",), ("grad.*", "loss.*", "update.too_small"), "warning",
    "attention to a single position", requires="attention", subject="attention", exact=False, doc="""
    Attention heads that attend to a single position.

    Formula: mean entropy of the attention weights / ln T below 0.05 in more than half of the heads, in each
    of at least three inspected batches; T ≥ 4 keys.

    Source: Zhai et al., Stabilizing Transformer Training by Preventing Attention Entropy Collapse, 2023.
    """)  # fmt: skip


_row("head.activation", Site.LOSS, ("batch", "graph"),
    ("loss.*", "grad.*", "unit.*", "update.too_small", "act.collapse"), "error",
    "an activation before the loss", doc="""
    A softmax, sigmoid or ReLU before a loss that applies its own, or no activation before one that needs it.

    Formula: the nodes of the autograd graph next to the loss.

    Source: torch.nn.CrossEntropyLoss and BCEWithLogitsLoss take unnormalized logits, NLLLoss
    log-probabilities.
    """)  # fmt: skip

_row("head.axis", Site.LOSS, ("batch", "graph"), EVERYTHING, "error", "classes on another axis",
    requires="axis of the classes", doc="""
    A cross-entropy over another axis than that of the classes, as after a view in place of a permute.

    Exact: which output of the last layer is at each place of the tensor that the softmax before the loss
    gets, followed through views, permutes and slices of the first graph. Along the axis of the classes it
    must be the same outputs at all positions. Or a log_softmax over another axis than torch's loss takes.
    Tensors of up to 4 million scores are followed; an axis of positions, as of a softmax over an image, is
    not meant.

    Source: torch.nn.CrossEntropyLoss, "Shape"; torch.Tensor.view, which keeps the order of the elements.
    """)  # fmt: skip

_row("head.degenerate", Site.LOSS, ("batch",), EVERYTHING, "error", "a softmax over one number",
    requires="graph", doc="""
    A softmax or log_softmax over a dimension of size 1: its output is 1 whatever the weights are.

    Exact: length of that dimension, in the autograd graph between the loss and the last layer.

    Source: torch.nn.Softmax, whose outputs along `dim` sum to 1.
    """)  # fmt: skip

_row("head.range", Site.LOSS, ("batch", "graph"), EVERYTHING, "error", "targets out of the model's reach",
    requires="output beside its targets", doc="""
    Targets that the model's last operation cannot reach, of a squared, absolute or Huber error.

    Formula: share of the targets of the first batch outside the range of the softmax, sigmoid, tanh, ReLU or
    the like that the output comes from, scaled and shifted as it is. Limit: 5 %, as a few outliers may be
    out of range on purpose.
    """)  # fmt: skip

_row("label.range", Site.INPUT, ("batch", "graph"), EVERYTHING, "error", "targets of a binary cross-entropy",
    requires="output beside its targets", doc="""
    Targets of a binary cross-entropy below 0 or above 1: the loss then has no minimum.

    Exact: the smallest and the largest target of the first batch, with 0.001 for rounding.

    Source: torch.nn.BCEWithLogitsLoss, whose targets are numbers between 0 and 1.
    """)  # fmt: skip

_row("label.broadcast", Site.INPUT, ("batch", "graph"), EVERYTHING, "error", "targets that are broadcast",
    requires="output beside its targets", doc="""
    One output and one target per sample whose shapes differ, so the loss compares all pairs of samples.

    Exact: shapes of the output and the targets where the loss subtracts them, such as (N, 1) and (N), which
    have the same sizes apart from dimensions of 1 and are broadcast to more elements than either has.

    Source: torch.nn.MSELoss, whose targets have the shape of the input.
    """)  # fmt: skip


@check(
    "loss.of_values",
    site=Site.LOSS,
    needs=("batch", "graph"),
    exact=True,
    leads_to=("loss.trivial", "loss.flat"),
)
def loss_of_values(evidence: Run) -> Iterator[Result]:
    """Classes, as 0 and 1 or one-hot, in a loss for values: a note.

    Exact: the targets of the first batch, one per sample or rows with a single 1, in a squared, absolute or
    Huber error. A warning if the training ends no better than a constant.

    Source: Goodfellow, Bengio & Courville, Deep Learning, 2016, section 6.2.2, on units that saturate.
    """
    severity: Severity = "warning" if is_trivial(evidence) else "info"
    passed, seen = "a loss for values given classes", "output beside its targets"
    yield from passed_on(evidence, "loss.of_values", severity, passed, requires=seen)


_row("loss.detached", Site.LOSS, ("batch",), ("param.*", "loss.flat", "loss.trivial"), "error",
    "a loss without gradients", requires="loss", doc="""
    A loss that does not depend on any parameter.

    Formula: it has no `grad_fn`.
    """)  # fmt: skip
