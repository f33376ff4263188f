"""average.slow, average.statistics: averages of the weights that are evaluated, and lag behind the model."""

from collections.abc import Iterator

from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.copies import Copies
from hookcb.diagnosis.run import Passed, Run, Skipped

MAX_LEFT_BEHIND = 0.2  # of the distance that the model has moved
MIN_STEPS = 20
N_IN_AVERAGE = 10  # times that an average is to be renewed in the training


@fault("average.slow", Site.OPTIMIZER, needs="model", leads_to="valid.*")
class SlowAverage(Fault):
    """An average of the weights that is evaluated, and still consists of the initial weights.

    Formula: ‖average - start‖ / ‖weights - start‖ over up to 1,024 elements of each parameter. Limit: 0.2.
    The average is a second model of the same class and shapes, as the model or the one module in it that has
    all its parameters, that changes, is called without gradients at no
    more than a quarter of the batches, and is never trained. With a decay d, a share d^n of it is left of the
    initial weights after n steps: 0.97 of a decay of 0.9999 and 350 steps.

    Source: Tarvainen & Valpola, "Mean teachers are better role models", 2017, whose decay is lower at first;
    `torch.optim.swa_utils`. The limit is a choice.
    """

    headline = "The averaged weights are still near their start"
    uses = (Copies,)
    severity = "warning"

    def findings(self, run: Run) -> Iterator[Result]:
        moved, n = run.measured(Copies).moved, run.n_steps
        if n < MIN_STEPS or not run.measured(Copies).n_scans:
            yield Skipped(f"fewer than {MIN_STEPS} steps were seen")
            return
        if not moved:
            yield Passed("an average of the weights that is left behind")
            return
        least, n_called = min(moved)
        if least >= MAX_LEFT_BEHIND:
            yield Passed(
                f"an average of the weights that is left behind ({least:.0%} of the way)",
                least,
                MAX_LEFT_BEHIND,
            )
            return
        yield self.finding(
            f"A copy of the model that was evaluated at {n_called} batches is an average that is still near "
            f"the initial weights: in {n:,} steps it has moved by {least:.1%} of the distance that the model "
            "has.",
            when=(0, run.n_batches - 1),
            value=least,
            limit=MAX_LEFT_BEHIND,
            causes=(
                f"a decay of the average that is too high for {n:,} steps",
                "an average that is updated once an epoch, with a decay meant for each step",
            ),
            next_steps=(
                f"Lower the decay: {1 - N_IN_AVERAGE / n:.3g} averages over a tenth of these steps",
                "Let the decay grow: min(decay, (1 + step) / (10 + step))",
            ),
        )


@fault("average.statistics", Site.OPTIMIZER, needs="model", leads_to="valid.*", exact=True)
class StaleStatistics(Fault):
    """An average of the weights that is evaluated with the batch-norm statistics of its start.

    Exact: the running means of all batch norms of a copy that is evaluated in eval mode are bit-identical to
    those when it was found, in an early batch, and differ from those of the model, while its weights have
    changed. The copy is one of `average.slow`.

    Source: torch.optim.swa_utils, whose AveragedModel copies buffers or averages them, and `update_bn`.
    """

    headline = "The averaged weights are evaluated with old batch-norm statistics"
    uses = (Copies,)
    severity = "warning"
    passed = "an average of the weights with the batch-norm statistics of its start"

    def findings(self, run: Run) -> Iterator[Result]:
        copies = run.measured(Copies)
        if run.n_steps < MIN_STEPS or not copies.n_scans:
            yield Skipped(f"fewer than {MIN_STEPS} steps were seen")
            return
        found = []
        if copies.stale:
            n, n_called = max(copies.stale)
            found.append(
                self.finding(
                    f"A copy of the model with averaged weights was evaluated at {n_called} batches, but the "
                    f"running means of its {n} batch norm{'s' * (n > 1)} are bit-identical to those near the "
                    "beginning: its activations are normalized by statistics of other weights.",
                    when=(0, run.n_batches - 1),
                    value=0.0,
                    limit=0.0,
                    causes=("an average of the parameters that leaves out the buffers",),
                    next_steps=(
                        "Copy the buffers of the model as well, or use torch.optim.swa_utils.AveragedModel",
                        "Or call torch.optim.swa_utils.update_bn(loader, average) before it is evaluated",
                    ),
                )
            )
        yield from self.told(run, found)
