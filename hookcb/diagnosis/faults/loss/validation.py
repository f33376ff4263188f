"""valid.overfit, valid.trivial: the loss of the validations, beside that of the training."""

import math
from collections.abc import Iterator, Sequence

from hookcb.diagnosis import rules
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.figure import over_steps
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.validations import Validation, Validations
from hookcb.diagnosis.reader import also
from hookcb.diagnosis.run import Passed, Run, Skipped
from hookcb.diagnosis.verdict import Finding

MIN_RISING, MIN_TRIVIAL = 4, 3  # validations; fewer of the second kind are a note
MAX_LOST = 0.1  # of what the validation loss had fallen by
TRAIN_FALLS = 0.95  # of the training loss at the best validation
MAX_LEARNED = 0.5  # of the loss of a constant that is left in training
MAX_APART, N_FAR = 20.0, 2.0  # times the training loss, times a constant's
FAR_RISEN = 2.0  # times the best validation loss
LEARNS = 0.9  # of the loss of a constant; below it the validation has shown that the model learns
MEMORIZED = ("targets that do not follow from the inputs, or are shuffled, and are memorized",)


@fault("valid.overfit", Site.RUN, needs="loss", shown_by="run.loss")
class Overfit(Fault):
    """A validation loss that rises while the training loss falls.

    Formula: (smaller one of the last two validation losses - best one) / (loss at the beginning - best one),
    of four validations or more, two of them after the best one. The loss at the beginning is that of the best
    constant prediction if it is known, else of guessing, else the first ones; if no validation is above the
    best one, the rise is divided by that. If only an accuracy is known, its fall is judged likewise. Limit:
    0.1, while the training loss has fallen by 5 % since then. A warning; a note if the best weights are kept
    (`EarlyStopping`, `EMA`, Lightning's and transformers' own, or weights that were read by `state_dict` or
    `torch.save` after the best validation), if the share of
    correct classes is above that of guessing and as high as at the best one, as a model that is too sure of
    itself has a high loss where it is wrong, or if the rise is less than three times the noise:
    the median of |second differences| of the validation losses / 0.6745 √6, their standard deviation if they
    are independent and normally distributed around a line. No noise explains it if the training ends below
    half of the loss of a constant, the last validation and the median one after the best are above it, and
    that median is twice the best.

    Source: L. Prechelt, "Early Stopping - But When?", 1998, whose generalization loss is this rise; the limit
    is a choice.
    """

    headline = "The validation loss rises while the training loss falls"
    uses = (Curves, Loss, Validations)

    def findings(self, run: Run) -> Iterator[Result]:
        known = run.measured(Validations)
        found = [x for x in known.found if math.isfinite(x.loss)]
        if len(found) < MIN_RISING:
            yield from self._by_accuracy(run)
            return
        best, now = min(found, key=lambda x: x.loss), min(found[-2:], key=lambda x: x.loss)
        lost = _share_lost(best.loss, now.loss, _start(run, found))
        falls = found[-1].train < TRAIN_FALLS * best.train
        if best in found[-2:] or not (lost > MAX_LOST and falls):
            share = 0.0 if best in found[-2:] or math.isnan(lost) else lost
            yield Passed(f"overfitting ({share:.0%} of the fall in validation lost again)", share, MAX_LOST)
            return
        constant_loss = _far_above(run, best, found)
        why = _why_note(run, best, now, found, math.isfinite(constant_loss))
        loss = run.measured(Loss)
        learns = not (known.is_one_scale and best.loss * known.scale > LEARNS * loss.constant)
        constant = "" if learns else f"; {loss.constant_in_words(known.scale)}"
        if math.isfinite(constant_loss):
            constant += f"; it ends at {found[-1].loss:.3g}, worse than a constant ({constant_loss:.3g})"
        yield self.finding(
            f"The validation loss was best at {place_of(best, known)}, {best.loss:.3g}, and has risen to "
            f"{now.loss:.3g}, while the training loss fell from {best.train:.3g} to "
            f"{found[-1].train:.3g}{constant}{why}.",
            "info" if why else "warning",
            when=(best.step, found[-1].step),
            value=lost,
            limit=MAX_LOST,
            causes=(
                *(() if learns else MEMORIZED),
                "overfitting: the model learns what is true of the training data only",
            ),
            next_steps=_advice(known, best),
            figure=over_steps(
                "loss in training and in validation",
                {
                    "training": rules.series_of((x.step, x.train) for x in found),
                    "validation": rules.series_of((x.step, x.loss) for x in found),
                },
                best.loss + MAX_LOST * (now.loss - best.loss) / lost,
            ),
        )

    def _by_accuracy(self, run: Run) -> Iterator[Result]:
        """Judges the accuracy, if the loss is unknown."""
        known = run.measured(Validations)
        found = [x._replace(loss=1 - x.accuracy) for x in known.found if math.isfinite(x.accuracy)]
        if len(found) < MIN_RISING:
            yield Skipped(why_not_judged(run, MIN_RISING))
            return
        best, now = min(found, key=lambda x: x.loss), min(found[-2:], key=lambda x: x.loss)
        lost = rules.ratio(now.loss - best.loss, found[0].loss - best.loss)
        why = _why_note(run, best, now, found, False)
        if not (lost > MAX_LOST and found[-1].train < TRAIN_FALLS * best.train) or why:
            yield Passed("an accuracy in validation that falls again")
            return
        yield self.finding(
            f"The accuracy in validation was best at {place_of(best, known)}, {best.accuracy:.1%}, and has "
            f"fallen to {now.accuracy:.1%}, while the training loss fell from {best.train:.3g} to "
            f"{found[-1].train:.3g}.",
            "warning",
            when=(best.step, found[-1].step),
            value=lost,
            limit=MAX_LOST,
            causes=("overfitting: the model learns what is true of the training data only",),
            next_steps=_advice(known, best),
        )


def place_of(found: Validation, known: Validations) -> str:
    """Step of a validation, and its epoch or place among the others."""
    n = len(known.found)
    if known.found[-1].epoch:
        return f"step {found.step} (epoch {found.epoch + 1} of {known.found[-1].epoch + 1})"
    places = [x.step for x in known.found]
    return f"step {found.step} (validation {places.index(found.step) + 1} of {n})"


def _advice(known: Validations, best: Validation) -> tuple[str, ...]:
    keep = "Use" if known.why_kept or best.is_kept else "Keep"
    return (
        f"{keep} the weights of step {best.step}, and end the training there",
        "Use more data, augmentation, dropout or weight decay",
    )


def _share_lost(best: float, now: float, start: float) -> float:
    """Share of the fall of a loss that is lost again; of the loss itself if it has not fallen."""
    return rules.ratio(now - best, start - best if start > best else abs(best))


def _start(run: Run, found: Sequence[Validation]) -> float:
    """Loss of a model that has learned nothing, on the scale of the validations."""
    known, of = run.measured(Loss), run.measured(Validations)
    losses = (known.constant, known.guess, run.first_loss) if of.is_one_scale else ()
    start = next((x / of.scale for x in losses if math.isfinite(x)), -math.inf)
    return max(start, found[0].loss)


def _good_share(loss: Loss) -> float:
    """Share of correct classes that guessing cannot have: twice that of the classes, or halfway to 1."""
    entropy = (loss.constant if math.isfinite(loss.constant) else loss.guess) / loss.scale
    chance = math.exp(-entropy) if loss.kind == "cross-entropy" and math.isfinite(entropy) else 0.5
    return min(2 * chance, (1 + chance) / 2)


def _far_above(run: Run, best: Validation, found: Sequence[Validation]) -> float:
    """Loss of a constant, if the validation ends above it, far above its best, and the training far below."""
    known, of = run.measured(Loss), run.measured(Validations)
    constant = next((x / of.scale for x in (known.constant, known.guess) if math.isfinite(x)), math.nan)
    later = rules.median([x.loss for x in found if x.step > best.step])
    is_above = min(later, found[-1].loss) > constant and later >= FAR_RISEN * best.loss
    is_far = is_above and found[-1].train < MAX_LEARNED * constant
    return constant if is_far and of.is_one_scale else math.nan


def _why_note(run: Run, best: Validation, now: Validation, found: Sequence[Validation], is_far: bool) -> str:
    known = run.measured(Validations)
    noise = _noise([x.loss for x in found])
    if not is_far and now.loss - best.loss < rules.CONFIDENCE * noise:
        return f"; the rise is within the noise of validations, whose deviation is {noise:.2g}"
    if known.why_kept or best.is_kept:
        return f"; {known.why_kept or 'the weights were read then, as they are to be kept'}"
    if now.accuracy >= max(best.accuracy, _good_share(run.measured(Loss))):
        return f"; but {now.accuracy:.1%} of the classes are correct now, and {best.accuracy:.1%} were then"
    return ""


def _noise(values: Sequence[float]) -> float:
    """Standard deviation of numbers around a curve, by their second differences."""
    bends = [abs(a - 2 * b + c) for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    return rules.median(bends) * rules.SIGMA / math.sqrt(6)


@fault("valid.trivial", Site.RUN, needs="loss", leads_to="valid.overfit", shown_by="run.loss")
class TrivialValidation(Fault):
    """A model that learns in training, and is never better than a constant in validation.

    Formula: smallest validation loss / loss of the best constant prediction for the targets of the training,
    less the loss of a perfect prediction each; see loss.trivial. Limit: 0.98, while the training loss is
    below it. If all validation losses, from the first one on, are twice that of the constant, and the last
    one is 20 times the training loss, the model or its inputs are others in validation. A warning of three
    validations or more, if the training loss since the last but one is below 0.5 of that of the constant;
    else a note. Also a note if it is not so far off, and the share of correct classes is above twice that of
    guessing: a model may be too sure of itself.

    Source: C. Zhang et al., "Understanding deep learning requires rethinking generalization", 2017, for
    labels that are memorized; the limits are choices.
    """

    headline = "Validation is no better than a constant"
    uses = (Curves, Loss, Validations)

    def findings(self, run: Run) -> Iterator[Result]:
        known, loss = run.measured(Validations), run.measured(Loss)
        found = [x for x in known.found if math.isfinite(x.loss)]
        if not found:
            yield Skipped(why_not_judged(run, 1))
            return
        if not known.is_one_scale or len(loss.penalty):
            yield Skipped("the losses of training and validation are not on one scale, or of unknown kinds")
            return
        best = min(found, key=lambda x: x.loss)
        losses = (best.loss * known.scale, found[-1].train * known.scale)
        ratio, left = (rules.ratio_to_constant(run, x) for x in losses)
        if math.isnan(ratio) or math.isnan(left):
            yield Skipped(rules.why_unknown(run, "the loss of the best constant prediction is unknown"))
        elif left <= rules.MAX_OF_CONSTANT < ratio:
            is_sure = left < MAX_LEARNED and len(found) >= MIN_TRIVIAL
            yield self._trivial(run, found, best, ratio, is_sure)
        else:
            yield Passed(
                f"a useless validation (loss {ratio:.2g} of a constant's)", ratio, rules.MAX_OF_CONSTANT
            )

    def _trivial(
        self, run: Run, found: Sequence[Validation], best: Validation, ratio: float, is_sure: bool
    ) -> Finding:
        known, loss = run.measured(Validations), run.measured(Loss)
        is_apart = found[-1].loss >= MAX_APART * found[-1].train and ratio >= N_FAR
        is_better = not is_apart and best.accuracy > _good_share(loss)
        times = found[-1].loss / found[-1].train if found[-1].train > 0 else math.inf
        since = " and far off from the first one on" if is_apart else ""
        right = f"; but {best.accuracy:.0%} of the classes are correct" if is_better else ""
        other: tuple[str, ...] = (
            "inputs or targets that are prepared differently for the validation",
            "batch norm whose averages do not follow, or another difference between train and eval mode",
            "a copy of the model that does not follow the training",
        )
        return self.finding(
            f"The loss is {found[-1].train:.3g} in training but {found[-1].loss:.3g} in validation, "
            f"{rules.format_factor(times)} times as much{since}; {loss.constant_in_words(known.scale)}, and "
            f"no validation was better than {best.loss:.3g}, at {place_of(best, known)}{right}.",
            "warning" if is_sure and not is_better else "info",
            when=(0, found[-1].step),
            value=ratio,
            limit=rules.MAX_OF_CONSTANT,
            causes=other if is_apart else (*MEMORIZED, *other[:2]),
            next_steps=(
                "Evaluate a batch of the training as you evaluate the validation: the loss must be as low",
                "Train for fewer epochs, or use more data, augmentation or weight decay",
            ),
        )


def why_not_judged(run: Run, least: int) -> str:
    """Why the validation is not judged, and what to do."""
    known = run.measured(Validations)
    if known.found:
        return f"validation not judged: fewer than {least} validations"
    if known.is_seen:
        why = "validation not judged: no loss was seen in it, of torch.nn.functional or as reported"
    else:
        why = "validation not judged: none was seen, so nothing is known about new data"
    return f"{why}{also('validation', run.reader)}"
