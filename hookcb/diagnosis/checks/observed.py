"""Checks that pass on what probes observed during the training, `Run.observations`."""

import math
from collections.abc import Iterator, Sequence

from hookcb.core.text import as_layer, join_names
from hookcb.diagnosis.fault import Result, Site
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
