"""Exact checks that pass on what was seen as it happened, in `Evidence.sightings`."""

import math
from collections.abc import Iterator, Sequence

from hookcb.core.text import listed
from hookcb.diagnosis.checks.loss import flat_loss
from hookcb.diagnosis.evidence import Evidence, Param, Sighting
from hookcb.diagnosis.falling import falls_slowly
from hookcb.diagnosis.registry import Result, RuledOut, Site, Unable, check
from hookcb.diagnosis.verdict import Finding, Severity
from hookcb.hooks.coverage import NOT_CALLED, USED

EVERYTHING = ("act.*", "attn.*", "grad.*", "loss.*", "nonfinite.*", "unit.*", "update.*", "amp.*", "head.*")


@check("input.nonfinite", site=Site.INPUT, needs=("batch",), exact=True, leads_to=EVERYTHING)
def input_nonfinite(evidence: Evidence) -> Iterator[Result]:
    """NaN or infinity in the inputs of a batch.

    Formula: any element that is not finite, of the batches looked at and of one whose loss is not.
    """
    return passed_on(evidence, "input.nonfinite", "error", "NaN in the inputs", of="inputs")


@check("input.constant", site=Site.INPUT, needs=("batch",), exact=True, leads_to=EVERYTHING)
def input_constant(evidence: Evidence) -> Iterator[Result]:
    """All samples of a batch are the same, in each of at least three batches looked at.

    Formula: no element differs from that of the first sample; batches of one sample are left out.
    """
    return passed_on(evidence, "input.constant", "error", "constant inputs", of="samples that differ")


@check("label.out_of_range", site=Site.INPUT, needs=("batch",), exact=True, leads_to=EVERYTHING)
def label_out_of_range(evidence: Evidence) -> Iterator[Result]:
    """A class index at or above the number of classes, or below 0, that the loss has refused.

    Formula: the largest index ≥ C or the smallest < 0, of the batch whose loss torch has refused.

    Source: torch.nn.CrossEntropyLoss, targets are in [0, C) or `ignore_index`.
    """
    return passed_on(evidence, "label.out_of_range", "error", "labels out of range", of="loss or of steps")


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
            yield Unable("the loss falls too little to tell what is learned from labels learned by heart")
        elif isinstance(result, RuledOut):
            yield RuledOut(fine)  # a loss that falls follows from something
        elif isinstance(result, Unable):
            yield result
        else:
            yield Unable("no copy of the model was trained on one batch, or it did not learn that either")


@check(
    "init.symmetric",
    site=Site.MODULES,
    needs=("model",),
    exact=True,
    leads_to=(*EVERYTHING, "param.not_stepped"),
)
def init_symmetric(evidence: Evidence) -> Iterator[Result]:
    """Units of a hidden layer that begin equal, up to sign: they get equal gradients, and stay one unit.

    Formula: ≥ 99 % of pairs of rows of the weight are equal up to sign, fan-in and fan-out ≥ 4, in a linear
    or convolutional layer that is trained and is not the last.

    Source: Goodfellow, Bengio & Courville, Deep Learning, 2016, section 8.4.
    """
    return passed_on(evidence, "init.symmetric", "error", "symmetric initialisation")


@check(
    "mode.mismatch",
    site=Site.MODULES,
    needs=("batches", "model"),
    exact=True,
    leads_to=EVERYTHING,
    subject="modes",
)
def mode_mismatch(evidence: Evidence) -> Iterator[Result]:
    """A batch norm that is trained and is in eval mode, or that normalises by a single sample.

    Formula: in a training batch `training` is False and a parameter of it has `requires_grad`; or values per
    channel = 1, an error, or samples = 1 in nine of ten batches, a warning. One whose parameters are frozen
    is meant to be in eval mode, as in fine-tuning.

    Source: torch.nn.BatchNorm2d.
    """
    return passed_on(evidence, "mode.mismatch", "error", "train and eval modes", of="batches")


@check(
    "dropout.extreme",
    site=Site.MODULES,
    needs=("model",),
    exact=False,
    leads_to=("loss.flat", "unit.dead", "loss.init", "act.scale"),
    subject="dropout",
)
def dropout_extreme(evidence: Evidence) -> Iterator[Result]:
    """A dropout that drops nine in ten or more.

    Formula: p ≥ 0.9.

    Source: Srivastava et al., "Dropout", 2014, who drop 0.5 of the hidden units and 0.2 of the inputs.
    """
    return passed_on(evidence, "dropout.extreme", "warning", "extreme dropout")


@check(
    "attn.collapse",
    site=Site.MODULES,
    needs=("batches",),
    exact=False,
    leads_to=("grad.*", "loss.*", "update.too_small"),
    subject="attention",
)
def attn_collapse(evidence: Evidence) -> Iterator[Result]:
    """Attention that looks at one place only.

    Formula: mean entropy of the attention weights / ln T below 0.05 in more than half of the heads, in each
    of at least three batches looked at; T ≥ 4 keys.

    Source: Zhai et al., Stabilizing Transformer Training by Preventing Attention Entropy Collapse, 2023.
    """
    return passed_on(
        evidence, "attn.collapse", "warning", "attention that looks at one place", of="attention"
    )


@check(
    "gate.shut",
    site=Site.MODULES,
    needs=("batches", "model"),
    exact=False,
    leads_to=("grad.*", "loss.*", "act.collapse", "update.too_small"),
    subject="gates",
)
def gates_shut(evidence: Evidence) -> Iterator[Result]:
    """A gate of an LSTM or GRU that its bias shuts.

    Formula: median over units of sigmoid(bias) below 0.03, of a GRU's update gate above 0.97. A large
    positive bias of the forget gate, which keeps it open, is usual.

    Source: Jozefowicz et al., An Empirical Exploration of Recurrent Network Architectures, 2015.
    """
    return passed_on(evidence, "gate.shut", "error", "gates that are shut")


@check("hook.silent", site=Site.MODULES, needs=("activations",), exact=True)
def hook_silent(evidence: Evidence) -> Iterator[Result]:
    """Layers that were not called in any batch looked at, so that nothing is known of their outputs: a note.

    Formula: number of calls = 0, and no parameter of the layer had a gradient. A layer whose parameters had
    one is used in another way than by a call; of a frozen one that cannot be known; and some kinds of layers
    are never called by themselves. No note is made of these, nor of layers without parameters if another
    layer is used without a call.
    """
    if not evidence.layers:
        yield Unable("no call of any layer was seen")
        return
    unused = [
        name for name, why in evidence.silent.items() if why == NOT_CALLED and _is_unused(evidence, name)
    ]
    if not unused:
        yield RuledOut("layers that are not used")
        return
    first, *others = unused
    more = f", nor {'were' if len(others) > 1 else 'was'} {listed(others, 3)}" if others else ""
    # of a layer without parameters the forward may read the settings, which nobody can see
    may_be_read = not {p.layer for p in evidence.params.values()}.issuperset(unused)
    reads = ("a forward that reads only its settings, as in F.dropout(x, self.dropout.p)",)
    yield Finding(
        "hook.silent",
        "info",
        first,
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


@check("nonfinite.first", site=Site.MODULES, needs=("batch",), exact=True, leads_to=EVERYTHING)
def nonfinite_first(evidence: Evidence) -> Iterator[Result]:
    """The first module that makes NaN or infinity of finite inputs, or of finite gradients.

    Formula: the batch is run again, see `hookcb.nans.search`.
    """
    is_named = any(sighting.code == "nonfinite.first" for sighting in evidence.sightings)
    step = None if is_named else _not_finite(evidence)
    if step is None:
        yield from passed_on(evidence, "nonfinite.first", "error", "NaN and infinities", of="backward")
    else:
        yield Unable(f"step {step} was not finite, and where that began was not looked for")


def _not_finite(evidence: Evidence) -> int | None:
    """The first step whose loss or, without a GradScaler, whose gradients are known not to be finite."""
    steps = [step for step, x in evidence.loss if not math.isfinite(x)]
    if "scaler" in evidence.absent:
        bad = (step for p in evidence.params.values() for step, n in p.series("nonfinite") if n > 0)
        steps.extend(bad)
    return min(steps, default=None)


@check("nonfinite.contained", site=Site.BACKWARD, needs=("gradients",), exact=True)
def nonfinite_contained(evidence: Evidence) -> Iterator[Result]:
    """The gradient of a layer's output is NaN or infinite, and those of all parameters are finite.

    Formula: elements of the gradient of an output that are NaN or infinite > 0, of parameters = 0, at one
    step.

    Known where `GradientHealth(activations=True)` records gradients of outputs.
    """
    known = [layer for layer in evidence.layers.values() if "grad_nonfinite" in layer.stats]
    if not known:
        yield Unable("gradients of outputs are recorded by GradientHealth(activations=True)")
        return
    bad = {step for p in evidence.params.values() for step, n in p.series("nonfinite") if n > 0}
    found = [(step, n, x) for x in known for step, n in x.series("grad_nonfinite") if n > 0]
    found = [of for of in found if of[0] not in bad]
    if not found:
        yield RuledOut("NaN inside the backward")
        return
    step, n, layer = min(found, key=lambda of: of[0])
    yield Finding(
        "nonfinite.contained",
        "warning",
        layer.name,
        step=step,
        value=n,
        limit=0.0,
        message=f"the gradient of the output of {layer.name} has {n:,.0f} NaN or infinite numbers at step "
        f"{step}, while those of all parameters are finite.",
        causes=("an operation whose slope is infinite, behind a mask or a choice of elements",),
        next_steps=("mask the input of that operation rather than its output",),
        kind=layer.about,
    )


@check(
    "head.activation",
    site=Site.LOSS,
    needs=("batch", "graph"),
    exact=True,
    leads_to=("loss.*", "grad.*", "unit.*", "update.too_small", "act.collapse"),
)
def head_activation(evidence: Evidence) -> Iterator[Result]:
    """A softmax, sigmoid or ReLU whose output goes to a loss that applies its own.

    Formula: the nodes of the autograd graph next to the loss.

    Source: torch.nn.CrossEntropyLoss and BCEWithLogitsLoss take unnormalised scores, NLLLoss logarithms.
    """
    return passed_on(evidence, "head.activation", "error", "an activation before the loss")


@check("loss.detached", site=Site.LOSS, needs=("batch",), exact=True, leads_to=("param.*", "loss.flat"))
def loss_detached(evidence: Evidence) -> Iterator[Result]:
    """A loss that does not depend on any parameter.

    Formula: it has no `grad_fn`.
    """
    return passed_on(evidence, "loss.detached", "error", "a loss without gradients", of="loss")


@check("grad.stale", site=Site.GRADIENTS, needs=("batches", "steps"), exact=True, leads_to=EVERYTHING)
def grad_stale(evidence: Evidence) -> Iterator[Result]:
    """Gradients of a step are still there when the next ones are added to them, step after step.

    Formula: at no backward between two steps of an optimizer were its gradients zero or None, each time.
    """
    return passed_on(
        evidence,
        "grad.stale",
        "error",
        "gradients left over from the step before",
        of="time before a backward",
    )


@check(
    "param.duplicated",
    site=Site.OPTIMIZER,
    needs=("batch", "optimizers"),
    exact=True,
    leads_to=("update.*", "loss.*"),
)
def param_duplicated(evidence: Evidence) -> Iterator[Result]:
    """A parameter that is in the optimizers' groups more than once: it gets several updates a step.

    Formula: number of times that a parameter is in the groups of all optimizers > 1.
    """
    return passed_on(
        evidence,
        "param.duplicated",
        "error",
        "parameters twice in the optimizer",
        of="groups of the optimizer",
    )


@check(
    "update.swallowed",
    site=Site.OPTIMIZER,
    needs=("steps",),
    exact=True,
    leads_to=("param.not_stepped", "loss.flat", "update.too_small"),
    subject="low precision",
)
def update_swallowed(evidence: Evidence) -> Iterator[Result]:
    """Weights in low precision whose updates are smaller than the distance to the next number.

    Formula: share of weights with a gradient that a step has not changed by a bit > 0.5, in each of
    three steps looked at or more.

    Source: Micikevicius et al., Mixed Precision Training, 2018, section 3.1.
    """
    return passed_on(
        evidence, "update.swallowed", "error", "updates lost to rounding", of="weights around a step"
    )


@check(
    "replica.diverged",
    site=Site.OPTIMIZER,
    needs=("batches",),
    exact=True,
    leads_to=("loss.*",),
    subject="replicas",
)
def replica_diverged(evidence: Evidence) -> Iterator[Result]:
    """Replicas of DistributedDataParallel whose parameters differ.

    Formula: sum and norm of all parameters, gathered from all ranks at the end of an epoch.
    """
    return passed_on(
        evidence, "replica.diverged", "error", "replicas that differ", of="replicas at the end of an epoch"
    )


@check("memory.graphs_kept", site=Site.RUN, needs=("batches",), exact=True, leads_to=("memory.growth",))
def graphs_kept(evidence: Evidence) -> Iterator[Result]:
    """The graphs of past batches stay in memory, one more each batch.

    Formula: the nodes of the last 58 losses are all alive, but those of the last two.
    """
    return passed_on(
        evidence, "memory.graphs_kept", "warning", "graphs that are kept", of="graphs of 60 losses"
    )


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
            RuledOut(fine)
            if is_there
            else Unable(evidence.missing.get(of, f"too little was seen of the {of}"))
        )
        return
    for own in dict.fromkeys(sighting.severity for sighting in sightings):
        first, *others = [sighting for sighting in sightings if sighting.severity == own]
        yield _finding(evidence, first, others, own or severity)  # type: ignore[arg-type]


def _finding(evidence: Evidence, first: Sighting, others: Sequence[Sighting], severity: Severity) -> Finding:
    places = [
        x.layer or x.param for x in others if (x.layer or x.param) not in ("", first.layer, first.param)
    ]
    more = f" The same of {listed(list(dict.fromkeys(places)), 4)}." if places else ""
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


def _about(evidence: Evidence, sighting: Sighting) -> str:
    if sighting.layer in evidence.layers:
        return evidence.layers[sighting.layer].about
    of = (p for p in evidence.params.values() if sighting.param == p.name or sighting.layer == p.layer != "")
    return next((param.about for param in of), "")
