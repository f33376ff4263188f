"""Exact checks that pass on what was seen as it happened, in `Evidence.sightings`."""

import math
from collections.abc import Iterator, Sequence

from hookcb.core.text import join_names
from hookcb.diagnosis.checks.finding import finding
from hookcb.diagnosis.checks.loss import flat_loss
from hookcb.diagnosis.evidence import Evidence, Observation, Param, Series
from hookcb.diagnosis.falling import falls_slowly
from hookcb.diagnosis.registry import Passed, Result, Site, Skipped, check
from hookcb.diagnosis.verdict import Finding, Severity
from hookcb.hooks.coverage import NOT_CALLED, USED

EVERYTHING = ("act.*", "attn.*", "grad.*", "loss.*", "nonfinite.*", "unit.*", "update.*", "amp.*", "head.*")


def passed_on(evidence: Evidence, code: str, severity: Severity, fine: str, of: str = "") -> Iterator[Result]:
    """One finding of all sightings with this code: of the first, with the number of the others.

    Args:
        evidence: where they are.
        code: whose.
        severity: of the finding, where the sighting has none of its own.
        fine: what is ruled out where there is none.
        of: what must have been there to look at, see `Evidence.observed`.
    """
    sightings = [sighting for sighting in evidence.sightings if sighting.code == code]
    if not sightings:
        is_there = not of or bool(evidence.observed & set(of.split(" or of ")))
        yield (
            Passed(fine)
            if is_there
            else Skipped(evidence.missing.get(of, f"too little was seen of the {of}"))
        )
        return
    for own in dict.fromkeys(sighting.severity for sighting in sightings):
        first, *others = [sighting for sighting in sightings if sighting.severity == own]
        yield _finding(evidence, first, others, own or severity)  # type: ignore[arg-type]


def _finding(
    evidence: Evidence, first: Observation, others: Sequence[Observation], severity: Severity
) -> Finding:
    places = [
        x.layer or x.param for x in others if (x.layer or x.param) not in ("", first.layer, first.param)
    ]
    more = f" The same of {join_names(list(dict.fromkeys(places)), 4)}." if places else ""
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
    )


def _about(evidence: Evidence, sighting: Observation) -> str:
    if sighting.layer in evidence.layers:
        return evidence.layers[sighting.layer].about
    of = (p for p in evidence.params.values() if sighting.param == p.name or sighting.layer == p.layer != "")
    return next((param.about for param in of), "")


def _row(
    code: str,
    site: Site,
    needs: tuple[str, ...],
    leads_to: tuple[str, ...],
    severity: Severity,
    fine: str,
    *,
    of: str = "",
    subject: str = "",
    exact: bool = True,
    doc: str,
) -> None:
    """Registers a check that only passes on what was seen; see `passed_on` and `Check` for the arguments."""

    def look(evidence: Evidence) -> Iterator[Result]:
        return passed_on(evidence, code, severity, fine, of)

    look.__name__, look.__doc__ = code.replace(".", "_"), doc
    check(code, site=site, needs=needs, exact=exact, leads_to=leads_to, subject=subject)(look)


_row("input.nonfinite", Site.INPUT, ("batch",), EVERYTHING, "error", "NaN in the inputs", of="inputs",
    doc="""
    NaN or infinity in the inputs of a batch.

    Formula: any element that is not finite, of the batches looked at and of one whose loss is not.
    """)  # fmt: skip

_row("input.constant", Site.INPUT, ("batch",), EVERYTHING, "error", "constant inputs",
    of="samples that differ", doc="""
    All samples of a batch are the same, in each of at least three batches looked at.

    Formula: no element differs from that of the first sample; batches of one sample are left out.
    """)  # fmt: skip

_row("label.out_of_range", Site.INPUT, ("batch",), EVERYTHING, "error", "labels out of range",
    of="loss or of steps", doc="""
    A class index at or above the number of classes, or below 0, that the loss has refused.

    Formula: the largest index ≥ C or the smallest < 0, of the batch whose loss torch has refused.

    Source: torch.nn.CrossEntropyLoss, targets are in [0, C) or `ignore_index`.
    """)  # fmt: skip


@check("data.labels", site=Site.INPUT, needs=("loss",), exact=False, leads_to=("loss.flat",))
def data_labels(evidence: Evidence) -> Iterator[Result]:
    """Nothing is learned although one batch by itself can be: the labels do not follow from the inputs.

    Formula: a flat loss and no other finding, and 60 steps of a copy of the model on one batch bring its loss
    there below 0.5 of what it was, no faster, by three standard deviations, than with the labels in nine
    other orders; these are compared only of classes that come several times in a batch. A warning if that is
    so of a loss that falls by less than 5 % and is near guessing, as it does if labels are learned by heart.

    Source: A. Karpathy, "A Recipe for Training Neural Networks", 2019, "overfit one batch"; Arpit et al., "A
    Closer Look at Memorization in Deep Networks", 2017: real labels are fitted faster than random ones.
    """
    fine = "labels that do not follow from the inputs"
    if any(sighting.code == "data.labels" for sighting in evidence.sightings):
        yield from passed_on(evidence, "data.labels", "info", fine)
        return
    for result in flat_loss(evidence):
        if falls_slowly(evidence):
            yield Skipped("the loss falls too little to tell what is learned from labels learned by heart")
        elif isinstance(result, Passed):
            yield Passed(fine)  # a loss that falls follows from something
        elif isinstance(result, Skipped):
            yield result
        else:
            yield Skipped("no copy of the model was trained on one batch, or it did not learn that either")


_row("init.symmetric", Site.MODULES, ("model",), (*EVERYTHING, "param.not_stepped"), "error",
    "symmetric initialisation", doc="""
    Units of a hidden layer that begin equal, up to sign: they get equal gradients, and stay one unit.

    Formula: ≥ 99 % of pairs of rows of the weight are equal up to sign, fan-in and fan-out ≥ 4, in a linear
    or convolutional layer that is trained and is not the last.

    Source: Goodfellow, Bengio & Courville, Deep Learning, 2016, section 8.4.
    """)  # fmt: skip

_row("mode.mismatch", Site.MODULES, ("batches", "model"), EVERYTHING, "error", "train and eval modes",
    of="batches", subject="modes", doc="""
    A batch norm that is trained and is in eval mode, or that normalises by a single sample.

    Formula: in a training batch `training` is False and a parameter of it has `requires_grad`; or values per
    channel = 1, an error, or samples = 1 in nine of ten batches, a warning. One whose parameters are frozen
    is meant to be in eval mode, as in fine-tuning.

    Source: torch.nn.BatchNorm2d.
    """)  # fmt: skip

_row("dropout.extreme", Site.MODULES, ("model",), ("loss.flat", "unit.dead", "loss.init", "act.scale"),
    "warning", "extreme dropout", subject="dropout", exact=False, doc="""
    A dropout that drops nine in ten or more.

    Formula: p ≥ 0.9.

    Source: Srivastava et al., "Dropout", 2014, who drop 0.5 of the hidden units and 0.2 of the inputs.
    """)  # fmt: skip

_row("attn.collapse", Site.MODULES, ("batches",), ("grad.*", "loss.*", "update.too_small"), "warning",
    "attention that looks at one place", of="attention", subject="attention", exact=False, doc="""
    Attention that looks at one place only.

    Formula: mean entropy of the attention weights / ln T below 0.05 in more than half of the heads, in each
    of at least three batches looked at; T ≥ 4 keys.

    Source: Zhai et al., Stabilizing Transformer Training by Preventing Attention Entropy Collapse, 2023.
    """)  # fmt: skip

_row("gate.shut", Site.MODULES, ("batches", "model"),
    ("grad.*", "loss.*", "act.collapse", "update.too_small"), "error", "gates that are shut", subject="gates",
    exact=False, doc="""
    A gate of an LSTM or GRU that its bias shuts.

    Formula: median over units of sigmoid(bias) below 0.03, of a GRU's update gate above 0.97. A large
    positive bias of the forget gate, which keeps it open, is usual.

    Source: Jozefowicz et al., An Empirical Exploration of Recurrent Network Architectures, 2015.
    """)  # fmt: skip


@check("hook.silent", site=Site.MODULES, needs=("activations",), exact=True)
def hook_silent(evidence: Evidence) -> Iterator[Result]:
    """Layers that were not called in any batch looked at, so that nothing is known of their outputs: a note.

    Formula: number of calls = 0, and no parameter of the layer had a gradient. A layer whose parameters had
    one is used in another way than by a call; of a frozen one that cannot be known; and some kinds of layers
    are never called by themselves. No note is made of these, nor of layers without parameters if another
    layer is used without a call.
    """
    if not evidence.layers:
        yield Skipped("no call of any layer was seen")
        return
    unused = [
        name for name, why in evidence.silent.items() if why == NOT_CALLED and _is_unused(evidence, name)
    ]
    if not unused:
        yield Passed("layers that are not used")
        return
    first, *others = unused
    more = f", nor {'were' if len(others) > 1 else 'was'} {join_names(others, 3)}" if others else ""
    # of a layer without parameters the forward may read the settings, which nobody can see
    may_be_read = not {p.layer for p in evidence.params.values()}.issuperset(unused)
    reads = ("a forward that reads only its settings, as in F.dropout(x, self.dropout.p)",)
    yield finding(
        "hook.silent",
        "info",
        at=first,
        value=float(len(unused)),
        limit=0.0,
        message=f"the layer {first} was not called in any of the {evidence.n_looked} batches looked at"
        f"{more}.",
        causes=("a layer that the forward leaves out, always or in most batches", *reads[: int(may_be_read)]),
        next_steps=(
            "if it is meant to take part, call it in forward; if not"
            f"{', and its settings are not read there,' if may_be_read else ','} take it away",
        ),
    )


def _is_unused(evidence: Evidence, layer: str) -> bool:
    """Whether a layer that was not called is in no other use either, as far as its parameters tell."""
    if params := [p for p in evidence.params.values() if p.layer == layer]:
        is_known = "gradients" in evidence.sources  # else its hook has looked for a gradient, once
        return not is_known or (any(p.n_without for p in params) and not any(map(_has_gradient, params)))
    used = {p.layer for p in evidence.params.values() if _has_gradient(p)} & evidence.silent.keys()
    return not used and USED not in evidence.silent.values()


def _has_gradient(param: Param) -> bool:
    return any(x > 0 for x in param.series("norm").values)


@check("nonfinite.first", site=Site.MODULES, needs=(), exact=True, leads_to=EVERYTHING)
def nonfinite_first(evidence: Evidence) -> Iterator[Result]:
    """The first module that makes NaN or infinity from finite inputs, or from finite gradients.

    Formula: the batch is run again, see `hookcb.nans.search`. Without `Diagnose`: the parameters whose
    gradient has NaN or infinite elements, at the first step with such gradients. Steps that a GradScaler with
    a scale above 1 has skipped are left out.
    """
    is_named = any(sighting.code == "nonfinite.first" for sighting in evidence.sightings)
    bad = {} if is_named else _nonfinite_gradients(evidence)
    step = next((step for step, x in evidence.loss if not math.isfinite(x)), None)
    if bad:
        yield _nonfinite(evidence, bad)
    elif step is not None and not is_named:
        yield Skipped(f"the loss of step {step} was not finite; its origin was not searched for")
    elif evidence.is_one_backward:
        yield Passed("NaN and infinite gradients")
    elif "batch" in evidence.sources:
        yield from passed_on(evidence, "nonfinite.first", "error", "NaN and infinities", of="backward")
    else:
        yield Skipped("needs Diagnose, or a Learner with a batch to look at")


def _nonfinite_gradients(evidence: Evidence) -> dict[str, int]:
    """By parameter, its first step with a NaN or infinite gradient that is not a GradScaler's to handle."""
    scale, skipped = (dict(evidence.steps.get(stat, Series())) for stat in ("scale", "skipped"))
    bad = {}
    for p in evidence.params.values():
        steps = [step for step, n in p.series("nonfinite") if n > 0]
        steps = [step for step in steps if not (skipped.get(step, 0) > 0 and scale.get(step, 1) > 1)]
        if p.first_bad is not None or steps:
            bad[p.name] = steps[0] if p.first_bad is None else p.first_bad
    return bad


def _nonfinite(evidence: Evidence, bad: dict[str, int]) -> Finding:
    step = min(bad.values())
    first, *others = [evidence.params[name] for name, at in bad.items() if at == step]
    n = dict(first.series("nonfinite")).get(step, math.nan)
    number = "" if math.isnan(n) else f"{n:,.0f} "
    more = f", as have {join_names([p.name for p in others], 3)}" if others else ""
    return finding(
        "nonfinite.first",
        "error",
        at=first,
        when=(step, None),
        value=n,
        limit=0.0,
        message=f"The gradient of {first.name} has {number}NaN or infinite element{'s' * (n != 1)} at step "
        f"{step}{more}.",
        causes=("an operation in the forward or backward that is not defined for its input, such as 0/0",),
        next_steps=("Find the module where it began: train with cbs=NanTrace()",),
    )


@check("nonfinite.contained", site=Site.BACKWARD, needs=("gradients",), exact=True)
def nonfinite_contained(evidence: Evidence) -> Iterator[Result]:
    """The gradient of a layer's output is NaN or infinite, and those of all parameters are finite.

    Formula: elements of the gradient of an output that are NaN or infinite > 0, of parameters = 0, at one
    step.

    Known where `GradientHealth(activations=True)` records gradients of outputs.
    """
    known = [layer for layer in evidence.layers.values() if "grad_nonfinite" in layer.stats]
    if not known:
        yield Skipped("gradients of outputs are recorded by GradientHealth(activations=True)")
        return
    bad = {step for p in evidence.params.values() for step, n in p.series("nonfinite") if n > 0}
    found = [(step, n, x) for x in known for step, n in x.series("grad_nonfinite") if n > 0]
    found = [of for of in found if of[0] not in bad]
    if not found:
        yield Passed("NaN inside the backward")
        return
    step, n, layer = min(found, key=lambda of: of[0])
    yield finding(
        "nonfinite.contained",
        "warning",
        at=layer,
        when=(step, None),
        value=n,
        limit=0.0,
        message=f"the gradient of the output of {layer.name} has {n:,.0f} NaN or infinite numbers at step "
        f"{step}, while those of all parameters are finite.",
        causes=("an operation whose slope is infinite, behind a mask or a choice of elements",),
        next_steps=("mask the input of that operation rather than its output",),
    )


_row("head.activation", Site.LOSS, ("batch", "graph"),
    ("loss.*", "grad.*", "unit.*", "update.too_small", "act.collapse"), "error",
    "an activation before the loss", doc="""
    A softmax, sigmoid or ReLU whose output goes to a loss that applies its own.

    Formula: the nodes of the autograd graph next to the loss.

    Source: torch.nn.CrossEntropyLoss and BCEWithLogitsLoss take unnormalised scores, NLLLoss logarithms.
    """)  # fmt: skip

_row("loss.detached", Site.LOSS, ("batch",), ("param.*", "loss.flat"), "error",
    "a loss without gradients", of="loss", doc="""
    A loss that does not depend on any parameter.

    Formula: it has no `grad_fn`.
    """)  # fmt: skip

_row("grad.stale", Site.GRADIENTS, ("batches", "steps"), EVERYTHING, "error",
    "gradients left over from the step before", of="time before a backward", doc="""
    Gradients of a step are still there when the next ones are added to them, step after step.

    Formula: at no backward between two steps of an optimizer were its gradients zero or None, each time.
    """)  # fmt: skip

_row("param.duplicated", Site.OPTIMIZER, ("batch", "optimizers"), ("update.*", "loss.*"), "error",
    "parameters twice in the optimizer", of="groups of the optimizer", doc="""
    A parameter that is in the optimizers' groups more than once: it gets several updates a step.

    Formula: number of times that a parameter is in the groups of all optimizers > 1.
    """)  # fmt: skip

_row("update.lost_to_rounding", Site.OPTIMIZER, ("steps",),
    ("param.not_stepped", "loss.flat", "update.too_small"), "error", "updates lost to rounding",
    of="weights around a step", subject="low precision", doc="""
    Weights in low precision whose updates are smaller than the distance to the next number.

    Formula: share of weights with a gradient that a step has not changed by a bit > 0.5, in each of
    three steps looked at or more.

    Source: Micikevicius et al., Mixed Precision Training, 2018, section 3.1.
    """)  # fmt: skip

_row("replica.diverged", Site.OPTIMIZER, ("batches",), ("loss.*",), "error", "replicas that differ",
    of="replicas at the end of an epoch", subject="replicas", doc="""
    Replicas of DistributedDataParallel whose parameters differ.

    Formula: sum and norm of all parameters, gathered from all ranks at the end of an epoch.
    """)  # fmt: skip

_row("memory.graphs_kept", Site.RUN, ("batches",), ("memory.growth",), "warning", "graphs that are kept",
    of="graphs of 60 losses", doc="""
    The graphs of past batches stay in memory, one more each batch.

    Formula: the nodes of the last 58 losses are all alive, but those of the last two.
    """)  # fmt: skip
