"""attn.logits: attention logits that grow without end."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from torch import Tensor

from hookcb.core.text import as_layer
from hookcb.diagnosis.fault import Result, Site, fault
from hookcb.diagnosis.faults.model.attention import OfCalls
from hookcb.diagnosis.figure import over_steps
from hookcb.diagnosis.measurements.operations import Operations
from hookcb.diagnosis.rules import format_factor
from hookcb.diagnosis.run import Passed, Run, Series
from hookcb.diagnosis.verdict import Finding

MAX_LOGIT, FAR_TOO_LARGE = 100.0, 1e3
APART, N_RISING = 1.5, 3  # ratio of the steps of looks, and how many are compared
MIN_RISE, MAX_RISE = 1.3, 30.0  # ratios of their logits
MORE_FROM = 16  # step from which each inspected batch is looked at
TITLE = "largest attention logit"


@fault(
    "attn.logits",
    Site.MODULES,
    needs="batches",
    leads_to="attn.collapse loss.* grad.* nonfinite.* train.unfinished",
    subject="attention",
)
class GrowingLogits(OfCalls):
    """Attention logits that grow without end, which makes attention sharp and the training unstable.

    Formula: the largest logit, q·k times the scale, that the mask leaves, of up to 32 queries of each head
    and sample, in inspected batches of all ranks. It is 1.3 times what it was, or more, in each of the last
    three looks that are so far apart that the step of each is 1.5 times that of the one before; or in each of
    the last two looks, whatever their distance, while no other attention's has. Limit: 1,000, and from 100 on
    a note. A large logit that does not grow is no finding, nor, unless it is of one attention alone, one that
    is 30 times what it was: then everything diverges.

    Source: Dehghani et al., "Scaling Vision Transformers to 22 Billion Parameters", 2023; Wortsman et al.,
    "Small-scale proxies for large-scale Transformer training instabilities", 2023. The limits are those of
    Kimi Team, "Kimi K2", 2025: QK-Clip holds logits at 100, and without it they rose above 1,000.
    """

    headline = "Attention logits grow without end"
    passed = "attention logits that grow"
    is_under_way = False  # whether `Operations` is to measure each inspected batch

    def on_batch(self, run: Run) -> None:
        super().on_batch(run)
        self.is_under_way = run.step >= MORE_FROM

    def see_logits(self, layer: str, largest: Tensor) -> None:
        """Keeps the largest logit of a call."""
        self.keep(layer, largest)

    def state(self, run: Run) -> dict[str, list[tuple[int, float]]]:
        """The largest logits of layers in which any is large."""
        series = self._series().items()
        return {layer: list(x) for layer, x in series if max(x.values, default=0.0) > MAX_LOGIT}

    def merge(self, run: Run, of_ranks: Sequence[dict[str, list[tuple[int, float]]]], rank: int) -> None:
        """Takes the calls of these layers on all ranks, as if one rank had made them."""
        layers = dict.fromkeys(layer for numbers in of_ranks for layer in numbers)
        of_all = {layer: [x for numbers in of_ranks for x in numbers.get(layer, ())] for layer in layers}
        self.numbers = self.numbers | {layer: sorted(numbers) for layer, numbers in of_all.items()}

    def findings(self, run: Run) -> Iterator[Result]:
        found = sorted(self._found(), key=lambda x: -x.value)
        last = (series.values[-1] for series in self._series().values() if len(series))
        if found or not run.measured(Operations).has_attention:
            yield from super().told(run, found, run.why_not("attention"))
        else:
            yield Passed(self.passed, max(last, default=math.nan), MAX_LOGIT)

    def _series(self) -> dict[str, Series]:
        """The largest logit of each layer by step."""
        of_layers: dict[str, Series] = {}
        for layer, numbers in self.numbers.items():
            largest: dict[int, float] = {}
            for step, x in numbers:
                if math.isfinite(x):
                    largest[step] = max(x, largest.get(step, x))
            of_layers[layer] = Series([*largest], [*largest.values()])
        return of_layers

    def _found(self) -> Iterator[Finding]:
        of_layers = self._series()
        for layer, series in of_layers.items():
            others = [x for other, x in of_layers.items() if other != layer]
            looks = apart(series)
            if not is_rising(looks):
                looks = alone(series, others)
            last = looks[0][1] if looks else 0.0
            if last <= MAX_LOGIT:
                continue
            limit = FAR_TOO_LARGE if last > FAR_TOO_LARGE else MAX_LOGIT
            (first, low), (end, _) = looks[-1], looks[0]
            yield self.finding(
                f"The largest attention logit of {as_layer(layer) or 'the model'} has grown from {low:.3g} "
                f"at step {first} to {format_factor(last)} at step {end} (limit {limit:g}), and still grows.",
                "warning" if last > FAR_TOO_LARGE else "info",
                at=layer,
                when=(first, end),
                value=last,
                limit=limit,
                causes=("queries and keys that grow together", "a learning rate that is high for this width"),
                next_steps=(
                    "Normalize queries and keys of each head (QK-norm), or cap the logits",
                    "Lower the learning rate, or lengthen its warmup; decay the weights of queries and keys",
                ),
                figure=over_steps(TITLE, {TITLE: series}, limit),
            )


def apart(series: Series) -> list[tuple[int, float]]:
    """The last look, and two before it that are each at most at 1/1.5 of its step; the last one first."""
    looks: list[tuple[int, float]] = []
    for step, x in zip(reversed(series.steps), reversed(series.values), strict=True):
        if not looks or step <= looks[-1][0] / APART:
            looks.append((step, x))
        if len(looks) == N_RISING:
            break
    return looks


def is_rising(looks: list[tuple[int, float]]) -> bool:
    """Whether each of three looks, the last one first, has 1.3 to 30 times the number of the one before."""
    rises = [MIN_RISE * early < late < MAX_RISE * early for (_, late), (_, early) in pairwise(looks)]
    return len(looks) == N_RISING and all(rises) and looks[-1][1] > 0


def alone(series: Series, others: Sequence[Series]) -> list[tuple[int, float]]:
    """The last three looks, the last one first, if only this attention rises in each; else none."""
    looks = list(series)[-N_RISING:]
    if len(looks) < N_RISING or not others or not all(MIN_RISE * a < b for (_, a), (_, b) in pairwise(looks)):
        return []
    known = [dict(other) for other in others]
    are_seen = all(step in other for other in known for step, _ in looks)
    are_calm = are_seen and all(other[looks[-1][0]] <= MIN_RISE * other[looks[0][0]] for other in known)
    return looks[::-1] if are_calm and looks[0][1] > 0 else []
