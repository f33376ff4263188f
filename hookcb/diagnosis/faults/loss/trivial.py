"""loss.trivial: a model that is no better than a constant."""

import math
from collections.abc import Iterator

from hookcb.diagnosis import rules
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.opponents import Opponents
from hookcb.diagnosis.run import Passed, Run, Skipped
from hookcb.diagnosis.verdict import Finding


@fault("loss.trivial", Site.RUN, needs="loss", leads_to="loss.flat", shown_by="run.loss")
class TrivialLoss(Fault):
    """A model that is no better than the best constant prediction, which ignores the input.

    Formula: mean loss of the last tenth of 50 batches or more / loss of the best constant for the targets
    seen: their variance for squares, their mean absolute deviation for absolute values, the entropy of the
    class shares for cross-entropy; from both the loss of a perfect prediction is subtracted, which is above 0
    for soft or smoothed targets. Limit: 0.98. Nothing is said before 50 batches at the full learning rate,
    after a warmup (200 if each token has a target, as language models learn the shares of tokens first); if
    the targets vary so much between batches that the standard error of the ratio is above 0.2; or if the loss
    falls so fast that as many batches again would bring it below the limit, by its slope over the last half,
    less three standard deviations. Nor is a loss of a game judged, which stays there in balance.

    Source: A. Karpathy, "A Recipe for Training Neural Networks", 2019, "input-independent baseline".
    """

    headline = "The model is no better than a constant"
    uses = (Curves, Loss, Opponents)

    def findings(self, run: Run) -> Iterator[Result]:
        known, (last, ratio) = run.measured(Loss), rules.loss_of_constant(run)
        if math.isnan(last):
            yield Skipped(f"fewer than {rules.batches_to_learn(run)} batches at the full learning rate")
        elif math.isnan(ratio):
            yield Skipped(rules.why_unknown(run, "the loss of the best constant prediction is unknown"))
        elif ratio <= rules.MAX_OF_CONSTANT:
            text = f"no better than a constant (loss {ratio:.2g} of that)"
            yield Passed(text, ratio, rules.MAX_OF_CONSTANT)
        elif why := run.measured(Opponents).why:
            yield Skipped(f"{why}: in a game a loss may stay at that of guessing")
        elif rules.is_noisy(run):
            yield Skipped("the targets vary too much from batch to batch to compare with a constant")
        elif rules.may_become_better(run, last):
            yield Skipped("the loss still falls, and may soon be below that of a constant")
        else:
            yield self._trivial(run, known, last, ratio)

    def _trivial(self, run: Run, known: Loss, last: float, ratio: float) -> Finding:
        better = "better" if ratio < 1 else "worse"
        far = f"{abs(ratio - 1):.0%} {better} than" if abs(ratio - 1) > 0.005 else "as good as"
        without = "without its penalty " if len(known.penalty) else ""
        return self.finding(
            f"After {len(run.loss):,} batches the loss {without}is {last:.3g}; "
            f"{known.constant_in_words()}. The model is {far} a constant that ignores its input.",
            "warning",
            when=(run.loss.steps[-rules.n_last(len(run.loss))], run.loss.steps[-1]),
            value=ratio,
            limit=rules.MAX_OF_CONSTANT,
            causes=(
                "a head or loss that does not suit the targets",
                "inputs on a bad scale, or that do not belong to the targets",
                "a learning rate that is far too high or too low",
            ),
            next_steps=(
                "Try to overfit a single batch; if that fails, the model, its head or the loss is at fault",
                "Print one batch as the model gets it: inputs scaled to a std of 1, targets beside them",
            ),
        )
