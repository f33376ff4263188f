"""head.logits: scores of a cross-entropy that drift away from zero, all together."""

import math
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from hookcb.core import graph
from hookcb.core.batch import parts
from hookcb.core.text import as_layer
from hookcb.diagnosis.compiled_graphs import MAX_ROWS, SCORES
from hookcb.diagnosis.fault import Fault, Result, Site, fault, findings_of
from hookcb.diagnosis.faults.model.attention_logits import apart, is_rising
from hookcb.diagnosis.figure import over_steps
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.measurements.layer_rows import LayerRows
from hookcb.diagnosis.measurements.loss_terms import main_term, read_terms
from hookcb.diagnosis.rules import before, series_of
from hookcb.diagnosis.run import Passed, Run, Skipped
from hookcb.records.store import read_numbers

MAX_Z, FAR_TOO_LARGE = 100.0, 1e3
MAX_SPACING = 2**-8  # relative spacing of numbers of the dtype, above which scores of 100 are half apart
MIN_LOOKS = 6
TITLE = "size of the mean log-sum-exp of the scores"


@fault("head.logits", Site.LOSS, needs="batch loss", leads_to="loss.* grad.* nonfinite.*", subject="scores")
class DivergingLogits(Fault):
    """Scores of a cross-entropy that drift away from zero all together, which the loss does not see.

    Formula: z = log Σ exp(scores), the mean of up to 256 rows of an inspected batch, and of ranks. A softmax
    is the same for scores that are all shifted, so nothing holds z near ln C. Each of the last three |z|,
    before convergence or in bfloat16, of looks so far apart that the step of each is 1.5 times that of the
    one before, is 1.3 to 30 times the one before. Limit: 100 in bfloat16, whose numbers are a half apart
    there; in other types 1,000, and a note from 100 on, or if the loss diverges.

    Source: Chowdhery et al., "PaLM", 2022, for the z-loss; Wortsman et al., "Small-scale proxies for
    large-scale Transformer training instabilities", 2023, for the divergence of output logits.
    """

    headline = "The scores drift away from zero"
    uses = (Curves, LayerRows)

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[tuple[int, Tensor]] = []
        self._compiled: dict[int, list[Tensor]] = {}  # likewise, of all cross-entropies in compiled code
        self._sizes: set[tuple[float, ...]] = set()  # of scores of losses that are compiled alone
        self._dtype = torch.float32
        self._layer = ""
        self.z: list[tuple[int, float]] = []  # with its step

    def on_compiled_operation(
        self, run: Run, layer: str, what: str, xs: Sequence[Tensor] | None, numbers: Sequence[float]
    ) -> None:
        """Takes the scores of a loss in a compiled model, and notes the sizes of those of a compiled loss."""
        if what == SCORES and xs is None:
            self._sizes.add(tuple(numbers))
        elif what == SCORES and xs is not None:
            self._compiled.setdefault(run.step, []).append(self._mean(run, xs[0]))

    def on_loss(self, run: Run) -> None:
        scores = scores_of(run.loop.loss_node, run.loop.pred)
        if scores is None and run.step not in self._compiled:
            scores = scores_of_compiled(self._sizes, run.loop.pred)
        if scores is not None:
            self._compiled.pop(run.step, None)
            rows = scores.detach().flatten(0, -2)
            rows = rows[:: -(-len(rows) // MAX_ROWS)] if len(rows) > MAX_ROWS else rows
            self._kept.append((run.step, self._mean(run, rows)))

    def _mean(self, run: Run, rows: Tensor) -> Tensor:
        self._dtype, self._layer = rows.dtype, run.measured(LayerRows).last
        return rows.float().logsumexp(-1).mean()

    def tell(self, run: Run) -> None:
        # of several cross-entropies it is not known which one is of the scores
        of_one = [(step, zs[0]) for step, zs in self._compiled.items() if len(zs) == 1]
        kept = sorted([*self._kept, *of_one], key=lambda x: x[0])
        values = read_numbers([z for _, z in kept])
        self.z = [(step, z) for (step, _), z in zip(kept, values, strict=True)]

    def state(self, run: Run) -> tuple[Any, ...]:
        """The log-sum-exp of scores, if any is large, their dtype and layer."""
        return (self.z, self._dtype, self._layer) if any(abs(z) > MAX_Z for _, z in self.z) else ()

    def merge(self, run: Run, of_ranks: Sequence[tuple[Any, ...]], rank: int) -> None:
        """Takes the mean over ranks with large scores; of a pipeline, one of them may have the head."""
        by_step: dict[int, list[float]] = {}
        for known in filter(None, reversed(of_ranks)):
            of_rank, self._dtype, self._layer = known
            for step, z in of_rank:
                by_step.setdefault(step, []).append(z)
        if by_step:
            self.z = [(step, fmean(by_step[step])) for step in sorted(by_step)]

    def freeze(self) -> None:
        self._kept, self._compiled = [], {}

    def findings(self, run: Run) -> Iterator[Result]:
        is_coarse = torch.finfo(self._dtype).eps >= MAX_SPACING
        # once a training has converged its scores may grow, which does harm if their dtype is coarse
        z = before(series_of(self.z), math.inf if is_coarse else run.converged_at())
        if len(z) < MIN_LOOKS:
            yield Skipped("the scores of few batches were seen, or their loss is no cross-entropy")
            return
        looks = apart(series_of((step, abs(x)) for step, x in z))
        (end, last), (first, _) = looks[0], looks[-1]
        if last <= MAX_Z or not is_rising(looks):
            yield Passed(f"scores that drift away from zero (log-sum-exp {z.values[-1]:.3g})", last, MAX_Z)
            return
        is_cause = not findings_of("loss.diverging", run)  # else everything may grow
        limit = MAX_Z if is_coarse or last <= FAR_TOO_LARGE else FAR_TOO_LARGE
        yield self.finding(
            f"The scores of {as_layer(self._layer) or 'the model'} drift away from zero: the mean of their "
            f"log-sum-exp was {dict(z)[first]:.3g} at step {first} and is {z.values[-1]:.3g} at step {end} "
            f"(limit ±{limit:g}), in {str(self._dtype).removeprefix('torch.')}.",
            "warning" if is_cause and (is_coarse or last > FAR_TOO_LARGE) else "info",
            at=self._layer,
            when=(first, end),
            value=last,
            limit=limit,
            causes=(
                "nothing that holds the sum of the scores, as a softmax is the same for all shifts",
                "a z-loss of the wrong sign, or weights of the head that are not decayed",
            ),
            next_steps=(
                "Add a z-loss to the loss: 1e-4 * logits.logsumexp(-1).square().mean()",
                "Decay the weights of the head, and keep its scores in float32",
            ),
            figure=over_steps(TITLE, {TITLE: series_of((step, abs(x)) for step, x in z)}, limit),
        )


def scores_of_compiled(sizes: Iterable[tuple[float, ...]], pred: object) -> Tensor | None:
    """Output of a model, `(…, classes)`, with as many scores as a compiled loss takes; None without one."""
    outputs = [x for _, x in parts(pred) if isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 1]
    fits = [
        x
        for x in outputs
        for n, n_classes in sizes
        if x.shape[-1] == n_classes and n in (0, x.numel() / n_classes)
    ]
    return fits[0] if fits else None


def scores_of(node: object, pred: object) -> Tensor | None:
    """Output of a model, `(…, classes)`, that a cross-entropy gets as its scores; None if it gets another."""
    outputs = [x for _, x in parts(pred) if isinstance(x, Tensor) and x.grad_fn is not None]
    ends = {graph.peel(x.grad_fn): x for x in reversed(outputs)}
    terms = [term for term in read_terms(node) if term.given in ends and term.takes == "scores"]
    main = main_term(terms)
    if main is None or main.kind != "cross-entropy" or len(main.shape) < 2:
        return None
    scores, n_classes = ends[main.given], main.shape[1]
    if scores.ndim > 1 and scores.shape[-1] == n_classes:
        return scores
    return scores.movedim(1, -1) if scores.ndim > 2 and scores.shape[1] == n_classes else None
