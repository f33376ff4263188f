"""dropout.in_eval: dropout that stays on in eval mode."""

from collections.abc import Iterator

from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.operations import Operations
from hookcb.diagnosis.run import Run

N_MEANT = 3  # evaluations of a batch in a row of validations, as for a mean over masks of dropout


@fault(
    "dropout.in_eval",
    headline="Dropout stays on in eval mode",
    site=Site.MODULES,
    needs=("batches",),
    exact=True,
)
class DropoutInEval(Fault):
    """Dropout that stays on in eval mode, so that the same input gets another answer each time.

    Exact: the first call in eval mode without gradients draws a mask of dropout. A note if three calls or
    more with the same inputs follow each other without a training batch between them, as Monte Carlo dropout
    makes on purpose.

    Source: Gal & Ghahramani, "Dropout as a Bayesian Approximation", 2016, for dropout that is meant.
    """

    severity = "warning"
    passed = "dropout in eval mode"
    uses = (Operations,)

    def findings(self, run: Run) -> Iterator[Result]:
        operations = run.measured(Operations)
        is_meant = (n := operations.n_alike) >= N_MEANT
        often = f" It evaluates the same batch {n} times, as Monte Carlo dropout does." if is_meant else ""
        seen = [
            self.finding(
                f"{f'Layer {layer}' if layer else 'The model'} applies dropout in eval mode, so it gives "
                f"different answers for one input, and validations are noisier and worse than it is.{often}",
                "info" if is_meant else "warning",
                at=layer,
                when=step,
                causes=("F.dropout(x, p), or dropout_p of an attention, without training=self.training",),
                next_steps=(
                    "Pass training=self.training to F.dropout, and dropout_p=p if self.training else 0.0 to "
                    "an attention",
                ),
            )
            for layer, step in operations.dropping.items()
        ]
        unless = "" if operations.has_evaluated else "too little was seen of the calls in eval mode"
        yield from self.told(run, seen, unless)
