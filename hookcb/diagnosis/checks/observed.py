"""Checks that pass on what probes observed during the training, `Run.observations`."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hookcb.core.text import as_layer, join_names
from hookcb.diagnosis.checks.loss import flat_loss
from hookcb.diagnosis.fault import Result, Site
from hookcb.diagnosis.registry import check
from hookcb.diagnosis.rules import falls_slowly, is_trivial, loss_left
from hookcb.diagnosis.run import Absent, Observation, Passed, Run, Skipped
from hookcb.diagnosis.verdict import Finding, Severity

EVERYTHING = ("act.*", "attn.*", "grad.*", "loss.*", "nonfinite.*", "unit.*", "update.*", "amp.*", "head.*")
COPIED = 0.05  # share of the first loss


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


_row("input.nonfinite", Site.INPUT, ("batch",), EVERYTHING, "error", "NaN in the inputs", requires="inputs",
    doc="""
    NaN or infinity in the inputs of a batch.

    Formula: any element that is not finite, in an inspected batch or in one whose loss is not finite.
    """)  # fmt: skip

_row("input.constant", Site.INPUT, ("batch",), EVERYTHING, "error", "constant inputs",
    requires="samples that differ", doc="""
    All samples of a batch are identical, in each of at least three inspected batches.

    Formula: no element differs from that of the first sample; batches of one sample are left out.
    """)  # fmt: skip

_row("label.out_of_range", Site.INPUT, ("batch",), EVERYTHING, "error", "labels out of range",
    requires="loss or steps", doc="""
    A class index below 0 or not below the number of classes, for which the loss raised an error.

    Formula: largest index ≥ C or smallest < 0, in the batch for which torch's loss raised an error.

    Source: torch.nn.CrossEntropyLoss, targets are in [0, C) or `ignore_index`.
    """)  # fmt: skip


_row("label.form", Site.INPUT, ("batch",), EVERYTHING, "error", "targets that the loss refuses",
    requires="loss or steps", doc="""
    Targets whose shape or type a loss of torch refuses, such as one-hot rows in place of class indices.

    Exact: the error that torch's loss has raised.

    Source: torch.nn.CrossEntropyLoss and torch.nn.BCEWithLogitsLoss, "Shape".
    """)  # fmt: skip


_row("label.scaled", Site.INPUT, ("batch",), ("head.*", "loss.*", "update.*", "unit.*"), "warning",
    "labels that were scaled as the inputs", requires="targets", doc="""
    Class indices that were divided by 255 together with the pixels.

    Exact: all inputs and targets of the first batch are multiples of 1/255 in 0 to 1, with one target per
    sample; the largest target is below 100/255, and not 0, while the largest input is above a half.
    """)  # fmt: skip


_row("label.single_class", Site.INPUT, ("batch", "graph"), ("loss.*", "grad.*", "update.too_small", "unit.*"),
    "warning", "labels of a single class", requires="labels of a classifier", doc="""
    All labels that a classifier is trained with are one class.

    Exact: no label of the inspected batches differs from the others; 512 samples in 8 batches or more. Read
    if the loss is a cross-entropy of the model's raw scores, or of their sigmoid or softmax, and there is one
    optimizer.
    """)  # fmt: skip


@check("data.labels", site=Site.INPUT, needs=("loss",), exact=False, leads_to=("loss.flat", "loss.trivial"))
def data_labels(evidence: Run) -> Iterator[Result]:
    """The model can overfit a single batch but learns nothing: the labels do not follow from the inputs.

    Formula: a flat loss and no other finding, and 60 steps of a copy of the model on one batch bring its loss
    below half of its first value there, but no faster, by three standard deviations, than with the labels in
    nine shuffled orders; orders are compared only for classes that occur several times in a batch. A note; a
    warning if the loss falls by less than 5 % and is near guessing, as it does if labels are memorized.

    Source: A. Karpathy, "A Recipe for Training Neural Networks", 2019, "overfit one batch"; Arpit et al., "A
    Closer Look at Memorization in Deep Networks", 2017: real labels are fitted faster than random ones.
    """
    passed = "labels that do not follow from the inputs"
    if any(observation.code == "data.labels" for observation in evidence.observations):
        yield from passed_on(evidence, "data.labels", "info", passed)
        return
    for result in flat_loss(evidence):
        if falls_slowly(evidence):
            yield Skipped("the loss falls too little to tell learning from memorized labels")
        elif isinstance(result, Passed):
            yield Passed(passed)  # a loss that falls has something to learn from
        elif isinstance(result, Skipped):
            yield result
        else:
            yield Skipped("no copy of the model was trained on a single batch, or it could not overfit that")


@check(
    "label.copies_input",
    site=Site.INPUT,
    needs=("batches", "graph"),
    exact=True,
    leads_to=("loss.*", "update.*"),
    subject="tokens",
)
def copied_inputs(evidence: Run) -> Iterator[Result]:
    """Targets that are the tokens which the model embeds at the same position.

    Exact: all targets of a cross-entropy, in three batches, at least 64. A note, as they are in an
    autoencoder. A warning if no position attends to later ones, as in a model that predicts the next token,
    and the loss has fallen below a twentieth, as it does if only the input must be copied.
    """
    code, passed = "label.copies_input", "targets that are not shifted"
    has_copied = loss_left(evidence, evidence.first_loss) < COPIED
    seen = [x for x in evidence.observations if x.code == code]
    if seen and not (has_copied and not seen[0].severity):
        seen = [replace(seen[0], severity="info")]
    yield from (_finding(evidence, x, (), x.severity or "warning") for x in seen)  # type: ignore[arg-type]
    if not seen:
        yield from passed_on(evidence, code, "warning", passed, "tokens that are targets")


_row("init.symmetric", Site.MODULES, ("model",), (*EVERYTHING, "param.not_stepped"), "error",
    "symmetric initialization", doc="""
    Units of a hidden layer that begin equal up to sign: they get equal gradients and act as one unit.

    Formula: ≥ 99 % of pairs of rows of the weight are equal up to sign, fan-in and fan-out ≥ 4, in a linear
    or convolutional layer that is trained and is not the last.

    Source: Goodfellow, Bengio & Courville, Deep Learning, 2016, section 8.4.
    """)  # fmt: skip

_row("mode.mismatch", Site.MODULES, ("batches", "model"), EVERYTHING, "error", "train and eval modes",
    requires="batches", subject="modes", doc="""
    A batch norm that is trained in eval mode, or that normalizes with a single sample.

    Formula: in a training batch, `training` is False and one of its parameters has `requires_grad`; or there
    is one value per channel, an error, or one sample in nine of ten batches, a warning. A batch norm with
    frozen parameters may be in eval mode, as in fine-tuning. A note if a watched loop calls a model with
    dropout or batch norm in train mode without gradients, at least three times, and never in eval mode.

    Source: torch.nn.BatchNorm2d.
    """)  # fmt: skip

_row("param.unregistered", Site.MODULES, ("batches",), ("param.not_in_optimizer", "loss.*", "update.*"),
    "error", "parameters that the model does not have", requires="graph of the output", doc="""
    Parameters that the forward uses and that are not in `model.parameters()`, so no optimizer gets them.

    Exact: an nn.Parameter in the autograd graph of the output, up to the inputs, which is neither the model's
    nor in any optimizer, and has not changed in twenty steps, as in a layer in a plain list; or three graphs,
    each with other such parameters than the one before, as of a layer that is created in forward; or one from
    which an attribute of the model was computed, if torch's error of a second backward ended the training.

    Source: torch.nn.Module, "Submodules assigned in this way will be registered"; torch.nn.ModuleList.
    """)  # fmt: skip

_row("param.frozen", Site.MODULES, ("batches",), EVERYTHING, "error", "a model that is frozen as a whole",
    requires="backward", doc="""
    A model without a parameter that requires a gradient, whose loss has a graph, say, to the inputs.

    Exact: `requires_grad` of all parameters is False after the backwards and at the end.
    """)  # fmt: skip


_row("dropout.extreme", Site.MODULES, ("model",),
    ("loss.flat", "loss.trivial", "unit.dead", "loss.init", "act.scale"), "warning",
    "extreme dropout", subject="dropout", exact=False, doc="""
    A dropout layer that drops nine in ten elements or more.

    Formula: p ≥ 0.9.

    Source: Srivastava et al., "Dropout", 2014, who drop 0.5 of the hidden units and 0.2 of the inputs.
    """)  # fmt: skip

_row("embed.single_index", Site.MODULES, ("batches",), (), "info", "embeddings that get a single index",
    requires="indices of embeddings", subject="embeddings", doc="""
    An embedding that gets the same index at all positions of all inspected batches.

    Exact: smallest and largest index in three batches, of an embedding with as many rows as positions, eight
    or more. A warning for an embedding with "pos" or "wpe" in its name, as positions then cannot be told
    apart; else a note, as an id that all samples share may be intended.
    """)  # fmt: skip


_row("mask.future", Site.MODULES, ("batches", "graph"), ("loss.*", "update.*", "attn.*", "grad.*"), "error",
    "masks that show the next token", requires="masks of the tokens", subject="tokens", doc="""
    A model that predicts the next token, and attends to it.

    Exact: in three batches, each target of a cross-entropy is the token that the model embeds one position
    later, and in all layers with self-attention, attention weights to later positions are above 1e-6 at more
    than half of the positions with a target. Not judged beside recurrent layers, as a model may encode a
    whole sequence on purpose, to decode it again.
    """)  # fmt: skip

_row("label.padding", Site.INPUT, ("batches", "graph"), ("loss.*",), "warning", "padding among the targets",
    requires="padding of the tokens", subject="tokens", doc="""
    Targets that are padding, and count in the loss of a language model.

    Exact: share of the targets that are the embedding's `padding_idx` after another padding, in three
    batches; the loss is a mean cross-entropy without weights, with another `ignore_index`. Limit: 5 %.
    """)  # fmt: skip

_row("gate.shut", Site.MODULES, ("batches", "model"),
    ("grad.*", "loss.*", "act.collapse", "update.too_small"), "error", "closed gates", subject="gates",
    exact=False, doc="""
    A gate of an LSTM or GRU that its bias keeps closed.

    Formula: median over units of sigmoid(bias) below 0.03; above 0.97 for the update gate of a GRU. A large
    positive bias of the forget gate, which keeps it open, is usual.

    Source: Jozefowicz et al., An Empirical Exploration of Recurrent Network Architectures, 2015.
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

_row("layer.batch_first", Site.MODULES, ("batches",), EVERYTHING, "warning",
    "samples taken for steps of a sequence", requires="order of samples and steps", subject="sequences",
    doc="""
    A recurrent or attention layer that takes the samples of a batch for the steps of a sequence.

    Exact: shapes in three inspected batches, with one target for each sample: a layer of torch without
    `batch_first` gets as many steps as there are samples, and another number of samples.

    Source: torch.nn.LSTM and torch.nn.MultiheadAttention, `batch_first`.
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

_row("grad.stale", Site.GRADIENTS, ("batches", "steps"), EVERYTHING, "error",
    "gradients left over from the step before", requires="time before a backward", doc="""
    Gradients that are never zeroed, so each step adds to those of the step before.

    Formula: between any two steps of an optimizer, no backward began with gradients that were zero or None.
    A note if no optimizer has them and the loop moves their weights, but not along the gradients (a cosine of
    -0.1 to 0.9), as those of a target network: nothing uses these gradients.
    """)  # fmt: skip

_row("accum.divisor", Site.GRADIENTS, ("batches", "steps"), (), "info",
    "accumulated losses that are not divided", requires="divisor of the loss", subject="accumulation", doc="""
    Losses of several backwards that are summed to one step: a note, as they may be losses of their own.

    Exact: each step of the only optimizer adds up the same number of backwards, two or more, and gradients
    are neither cleared nor changed, as by clipping, between them and before the step; backward is called on a
    mean over samples that is not divided. Read from the graph of a watched loop's loss; if that was reported,
    from its gradient. Not for optimizers like Adam, which undo the factor.
    """)  # fmt: skip

_row("param.duplicated", Site.OPTIMIZER, ("batch", "optimizers"), ("update.*", "loss.*"), "error",
    "parameters twice in the optimizer", requires="groups of the optimizer", doc="""
    A parameter that is in the optimizers' groups more than once, so each step updates it several times.

    Formula: number of occurrences of a parameter in the groups of all optimizers > 1.
    """)  # fmt: skip

_row("update.lost_to_rounding", Site.OPTIMIZER, ("steps",),
    ("param.not_stepped", "loss.flat", "loss.trivial", "update.too_small"), "error",
    "updates lost to rounding",
    requires="weights around a step", subject="low precision", doc="""
    Low-precision weights whose updates are smaller than the spacing of their numbers, so rounding drops them.

    Formula: share of weights with a gradient that are bit-identical after a step > 0.5, in each of at least
    three inspected steps.

    Source: Micikevicius et al., Mixed Precision Training, 2018, section 3.1.
    """)  # fmt: skip

_row("replica.diverged", Site.OPTIMIZER, ("batches",), ("loss.*",), "error", "replicas that differ",
    requires="replicas at the end of an epoch", subject="replicas", doc="""
    Replicas of DistributedDataParallel whose parameters differ.

    Formula: 64-bit hashes of the bits of each parameter, and the learning rates, compared between ranks at
    the end of an epoch of a Learner's fit.
    """)  # fmt: skip

_row("replica.buffers", Site.OPTIMIZER, ("batches",), ("loss.*",), "warning", "buffers that differ",
    requires="buffers of each replica", subject="buffers", exact=False, doc="""
    Buffers of DistributedDataParallel's replicas that differ, if it has `broadcast_buffers=False`.

    Formula: 64-bit hashes of the saved buffers, compared between ranks at the end of an epoch. Running
    statistics of batch norms differ by chance: a note. A warning if they are far apart: the median over
    channels of the distance of the mean from that of the other ranks, in standard deviations, or of the
    difference of the logarithms of the standard deviations. Limit: 0.5. With `broadcast_buffers=True`, all
    replicas have those of rank 0 at each forward, and are not compared.

    Source: PyTorch, DistributedDataParallel, `broadcast_buffers`; Ioffe & Szegedy, "Batch Normalization",
    2015, for the statistics that a model is validated with.
    """)  # fmt: skip

_row("data.duplicated", Site.INPUT, ("batches",), (), "warning", "ranks with the same batches",
    requires="batches of all ranks", subject="replicas", doc="""
    Ranks that train replicas on the same batches.

    Formula: 64-bit hashes of the inputs, of 4,096 elements of each tensor at most, which are the same on two
    ranks in each of the first 4 to 8 batches. Ranks that shuffle the same samples, each in an order of its
    own, are not seen.
    """)  # fmt: skip

_row("data.repeated", Site.INPUT, ("batches",), ("loss.*",), "warning", "a rank whose batches repeat",
    requires="batches of all ranks", subject="replicas", doc="""
    A rank whose batches repeat within an epoch, though those of other ranks do not.

    Formula: hashes of inputs and targets of the first 20 batches of an epoch, in the first four epochs. Half
    or more of them have come before.
    """)  # fmt: skip

_row("data.same_order", Site.INPUT, ("batches",), (), "warning", "epochs in the same order",
    requires="order of two epochs", subject="replicas", doc="""
    Epochs with the same batches in the same order, as if `set_epoch` of a DistributedSampler is not called.

    Formula: hashes of the inputs, or of the targets if inputs are augmented, of the first 4 to 20 batches,
    which all differ, are the same in each of the first two to four epochs. A warning if the loader has a
    DistributedSampler that shuffles; else a note, as the order may be meant. Not checked in one process.

    Source: PyTorch, torch.utils.data.distributed.DistributedSampler, on `set_epoch`.
    """)  # fmt: skip

_row("random.duplicated", Site.MODULES, ("batches",), (), "info", "ranks with the same random numbers",
    requires="random numbers of all ranks", subject="replicas", doc="""
    Replicas that draw the same random numbers, for dropout or noise: a note.

    Exact: the state of torch's generator on the device of the model, which is the same on two ranks before
    the forward, and another after it, in each of 4 to 8 inspected batches.

    Source: PyTorch, "Reproducibility", on torch.manual_seed.
    """)  # fmt: skip
