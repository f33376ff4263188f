"""Checks of steps with little or no effect: gradient clipping, unmoved parameters, skipped steps."""

from collections.abc import Iterator
from itertools import takewhile

from hookcb.diagnosis.fault import Result, Site
from hookcb.diagnosis.registry import check
from hookcb.diagnosis.rules import (
    USUAL_UPDATE,
    before,
    finding,
    finite,
    has_learned,
    median,
    need_not_fall,
    rates,
    ratio,
    recent_updates,
    usual_update,
)
from hookcb.diagnosis.run import WINDOW, Passed, Run, Series, Skipped
from hookcb.diagnosis.verdict import Finding

UNCLIPPED, MAX_CLIPPED = 0.999, 0.95  # coefficient of a gradient that is not clipped; share of records
MIN_CLIPPED_TO, MIN_CLIPPED_TO_ANYWAY = 0.01, 1e-4  # median coefficient; the same if the loss falls
MIN_UNHARMED = USUAL_UPDATE / 10  # update ratio of weights whose steps are not too small
MIN_RATES, VANISHED, MAX_VANISHED = 50, 1e-3, 0.5  # batches; share of the largest rate; share of batches
MAX_NORM = 100.0  # of all gradients; they are usually clipped to 0.1 to 10
# share and number of skipped steps; a scaler that begins too high skips a few, as it should
MAX_SKIPPED, MAX_SKIPPED_STEPS = 0.1, 4


@check(
    "clip.always",
    site=Site.GRADIENTS,
    shown_by="run.clip_coef",
    needs=("gradients",),
    leads_to=("update.too_small", "loss.flat", "loss.trivial"),
)
def constant_clipping(evidence: Run) -> Iterator[Result]:
    """Gradient clipping that cuts almost every gradient to a small part, which only lowers the learning rate.

    Formula: share of records with clipped norm / norm below 1, and the median of that ratio. Limit: above
    95 % of at least ten records, and a median below 0.01. An error for optimizers like SGD, a warning for
    those like Adam, which divide by the size of gradients anyway; a note for these, and for a loss of an
    unknown kind, which need not fall, if steps change the median weight by 1e-4 of its size. No finding if
    the loss falls by a fifth and the model is better than a constant, unless the median is below 1e-4. In a
    loop that clips before hookcb reads the gradients, the ratio is that of one small gradient at the step and
    after the backward.

    Source: Pascanu et al., "On the difficulty of training recurrent neural networks", 2013, who set the limit
    by the mean norm over many updates.
    """
    coefs = before(evidence.steps.get("clip_coef", Series()), evidence.converged_at())
    if len(coefs) < WINDOW:
        yield Skipped(f"fewer than {WINDOW} records of clipping before convergence")
        return
    share, usual = sum(x < UNCLIPPED for x in coefs.values) / len(coefs), coefs.median()
    learns = has_learned(evidence, evidence.first_loss)
    if share <= MAX_CLIPPED or usual >= MIN_CLIPPED_TO or (learns and usual >= MIN_CLIPPED_TO_ANYWAY):
        yield Passed(f"clipping ({share:.0%} of steps, median ×{usual:.2g})", usual, MIN_CLIPPED_TO)
        return
    is_adaptive = any(p.is_adaptive for p in evidence.params.values())
    size, note = usual_update(recent_updates(evidence)), ""
    is_harmless = size >= MIN_UNHARMED and (is_adaptive or need_not_fall(evidence))
    if is_harmless:
        note = f" Steps still change the median weight by {size:.1e} of its size, so this does little harm."
    elif is_adaptive:
        note = " The optimizer divides by the size of gradients, so this may have little effect."
    yield finding(
        "clip.always",
        "info" if is_harmless else "warning" if is_adaptive or learns else "error",
        when=coefs,
        value=usual,
        limit=MIN_CLIPPED_TO,
        message=f"{share:.0%} of the gradients are clipped, to a median of {usual:.1e} of their norm (limit "
        f"{MIN_CLIPPED_TO:g}): the effective learning rate is lower by that factor.{note}",
        causes=("a clipping norm that is too low", "gradients that are summed rather than averaged"),
        next_steps=(_clip_advice(evidence),),
    )


def _clip_advice(evidence: Run) -> str:
    """Advice to clip near the median norm, unless that norm is what clipping protects from."""
    norm = median(evidence.steps.get("total_norm", Series()).values)
    if norm > MAX_NORM:
        return f"Find out why gradients have a norm of {norm:.2g}: a summed loss, or inputs on a large scale"
    usual = f"{norm:.2g}, the median" if norm > 0 else "the median of the gradients' norms"
    return f"Clip to a norm of {usual}, or do not clip"


@check(
    "lr.vanished",
    site=Site.OPTIMIZER,
    shown_by="run.lr",
    needs=("loss",),
    leads_to=("loss.flat", "loss.trivial", "update.too_small", "train.unfinished"),
)
def vanished_rate(evidence: Run) -> Iterator[Result]:
    """A learning rate that falls to almost nothing long before the end, while the model has learned nothing.

    Formula: share of the batches after the largest rate with one below a thousandth of it. Limit: half of all
    batches, 50 or more, if the loss has not fallen by a fifth or is no better than that of a constant. A
    cosine is below a thousandth in the last 2 % of its steps only.

    Source: Loshchilov & Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017, for the cosine;
    torch.optim.lr_scheduler, whose `step` counts its calls: of batches, or of epochs.
    """
    lr = rates(evidence)
    top = max(finite(lr.values), default=0.0)
    if len(lr) < MIN_RATES or not top:
        yield Skipped(f"the learning rate of fewer than {MIN_RATES} batches is known")
        return
    tiny = list(takewhile(lambda pair: pair[1] < VANISHED * top, reversed(list(lr))))
    share = len(tiny) / len(lr)
    if share <= MAX_VANISHED or has_learned(evidence, evidence.first_loss):
        yield Passed(f"a learning rate that vanishes ({share:.0%} of the batches)", share, MAX_VANISHED)
        return
    began = max(step for step, rate in lr if rate == top)  # of the fall
    since, last = tiny[-1][0], tiny[0]
    yield finding(
        "lr.vanished",
        "warning",
        when=(began, last[0]),
        value=share,
        limit=MAX_VANISHED,
        message=f"The learning rate has fallen from {top:.2g} to {last[1]:.2g}, and has been below a "
        f"thousandth of its largest value since step {since}, in {share:.0%} of the batches (limit "
        f"{MAX_VANISHED:.0%}){'' if need_not_fall(evidence) else ', before the model has learned anything'}.",
        causes=("a scheduler that is stepped in each batch, but counts epochs", "a decay that is too fast"),
        next_steps=("Call scheduler.step() once per epoch, or give the scheduler the number of batches",),
    )


@check(
    "amp.scale_collapse",
    site=Site.GRADIENTS,
    shown_by="run.scale",
    needs=("gradients",),
    exact=True,
    leads_to=("param.not_stepped", "update.too_small", "loss.flat", "loss.trivial"),
    subject="scaler",
)
def collapsed_scale(evidence: Run) -> Iterator[Result]:
    """A GradScaler that skips many steps or whose scale is below 1: gradients overflow at any scale.

    Formula: more than 10 % of steps and at least five are skipped (a scaler that begins too high skips a
    few), or the scale is below 1.

    Source: torch.amp.GradScaler, which begins at 65,536 and halves at each overflow.
    """
    scales = evidence.steps.get("scale", Series())
    low = next(((step, x) for step, x in scales if 0 <= x < 1), None)
    share = ratio(evidence.n_skipped, evidence.n_steps)
    if low:
        text = (
            f"The GradScaler's scale has fallen to {low[1]:.2g} (limit 1): gradients overflow at any scale."
        )
        yield _scale_collapse(low[0], low[1], 1.0, text)
    elif evidence.n_skipped > MAX_SKIPPED_STEPS and share > MAX_SKIPPED:
        skipped = next((step for step, x in evidence.steps.get("skipped", Series()) if x > 0), None)
        text = (
            f"The GradScaler has skipped {evidence.n_skipped:,} of {evidence.n_steps:,} steps ({share:.0%}; "
            f"limit {MAX_SKIPPED:.0%}), because gradients were NaN or infinite."
        )
        yield _scale_collapse(skipped, share, MAX_SKIPPED, text)
    elif evidence.n_steps or len(scales):
        yield Passed(f"skipped steps ({evidence.n_skipped:,})")
    else:
        yield Skipped("no step was inspected")


def _scale_collapse(step: int | None, value: float, limit: float, text: str) -> Finding:
    return finding(
        "amp.scale_collapse",
        "error",
        when=(step, None),
        value=value,
        limit=limit,
        message=text,
        causes=("activations or gradients above 65,504, the maximum of float16", "NaN in the loss"),
        next_steps=(
            "Use bfloat16, which has the range of float32",
            *(("Start with GradScaler(init_scale=2**12)",) if limit == MAX_SKIPPED else ()),
        ),
    )
