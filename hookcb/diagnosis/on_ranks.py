"""One verdict of several ranks: what belongs to the training is averaged, what ranks find is put together."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from zlib import crc32

from hookcb.core.ranks import Ranks, name_ranks
from hookcb.diagnosis.evidence import Evidence, Observation, Series
from hookcb.diagnosis.verdict import Finding, Gap

MIN_COMPARED, N_COMPARED = 4, 8  # inspected batches whose inputs are compared
MAX_APART = 0.05  # relative difference between ranks of the loss of a guess, beyond which it is unknown
SEVERITIES = "error", "warning", "info"


def share_losses(evidence: Evidence, ranks: Ranks) -> None:
    """Replaces the losses of this rank by their means over all ranks, which is what they minimize together.

    The loss of the best constant is averaged too; it is unknown if ranks have very different targets.
    """
    series = [evidence.loss, evidence.penalty, *evidence.losses.values()]
    shape = [len(series), sum(map(len, series)), *map(len, series[:2])]
    if _differ(shape, ranks):
        evidence.notes.append("ranks have recorded different batches, so each rank judges its own losses")
        return
    merged = iter(ranks.sum([x for one in series for x in one.values]))
    means = [Series(one.steps, [next(merged) / ranks.world for _ in one.steps]) for one in series]
    evidence.loss, evidence.penalty, *losses = means
    evidence.losses = dict(zip(evidence.losses, losses, strict=True))
    evidence.guess = _agreed(evidence.guess, ranks)
    evidence.constant = _agreed(evidence.constant, ranks)


def compare_inputs(evidence: Evidence, ranks: Ranks, is_replica: bool) -> None:
    """Adds an observation if ranks train on the same batches, as without a DistributedSampler.

    Args:
        evidence: what this rank has recorded.
        ranks: all ranks call this together.
        is_replica: whether ranks train replicas, so that each needs batches of its own.
    """
    own = list(zip(evidence.input_std, evidence.input_rms.values, strict=False))[:N_COMPARED]
    n = -int(ranks.max([-len(own) if is_replica else 0])[0])
    if n < MIN_COMPARED:
        evidence.missing["batches of all ranks"] = "the inputs of ranks were not compared"
        return
    evidence.observed.add("batches of all ranks")
    by_rank = ranks.gather(own[:n])
    same = [rank for rank, x in enumerate(by_rank) if by_rank.count(x) > 1]
    if same:
        evidence.observations.append(
            Observation(
                "data.duplicated",
                step=0,
                value=float(len(same)),
                text=f"The inputs of {name_ranks(same)} have the same mean square and spread in each of the "
                f"first {n} inspected batches: they train on the same samples, and see no more than one.",
                causes=("a loader without a DistributedSampler", "a sampler that does not know the rank"),
                next_steps=("Give the training loader sampler=DistributedSampler(dataset)",),
            )
        )


def findings_of_all(
    found: Iterable[Finding], gaps: Sequence[Gap], ranks: Ranks
) -> tuple[list[Finding], list[Gap]]:
    """Findings of all ranks, each with the ranks that found it unless all did, and the gaps of any rank.

    Args:
        found: findings of this rank.
        gaps: checks that could not run on this rank.
        ranks: all ranks call this together.
    """
    found, own = list(found), sorted(code for gap in gaps for code in gap.codes)
    is_same = not _differ([crc32(repr(own).encode())], ranks)
    if not any(ranks.max([bool(found)])) and is_same:
        return [], list(gaps)
    of_all: list[tuple[list[Finding], Sequence[Gap]]] = ranks.gather((found, gaps))
    alike: dict[tuple[str, str, str], dict[int, Finding]] = {}
    for rank, (findings, _) in enumerate(of_all):
        for finding in findings:
            same = alike.setdefault((finding.code, finding.layer, finding.param), {})
            same.setdefault(rank, replace(finding, consequence_of=""))
    placed = {code for code, layer, param in alike if layer or param}
    merged = [
        _merged(by_rank, ranks.world)
        for (code, layer, param), by_rank in alike.items()
        if layer or param or code not in placed  # a rank that knows the place knows more
    ]
    return merged, [*of_all[0][1], *_later_gaps([gaps for _, gaps in of_all])]


def _merged(by_rank: dict[int, Finding], world: int) -> Finding:
    """The earliest of findings that are alike."""
    first = min(by_rank.values(), key=lambda finding: -1 if finding.step is None else finding.step)
    worst = min((finding.severity for finding in by_rank.values()), key=SEVERITIES.index)
    return replace(first, severity=worst, ranks=() if len(by_rank) == world else tuple(by_rank))


def _later_gaps(by_rank: Sequence[Sequence[Gap]]) -> Iterable[Gap]:
    """Gaps that rank 0 does not have."""
    known = {code for gap in by_rank[0] for code in gap.codes}
    for rank, gaps in enumerate(by_rank):
        for gap in gaps:
            if codes := tuple(code for code in gap.codes if code not in known):
                known.update(codes)
                yield Gap(codes, f"on rank {rank}, {gap.reason}")


def _differ(numbers: Sequence[float], ranks: Ranks) -> bool:
    """Whether ranks have different numbers."""
    extremes = ranks.max([*numbers, *(-x for x in numbers)])
    n = len(numbers)
    return any(high != -low for high, low in zip(extremes[:n], extremes[n:], strict=True))


def _agreed(number: float, ranks: Ranks) -> float:
    """Mean over ranks of a number, NaN if it is unknown on one or they are far apart."""
    known = math.inf if math.isnan(number) else number
    high, low = ranks.max([known, -known])
    low = -low
    return (high + low) / 2 if high - low <= MAX_APART * abs(high) and math.isfinite(high) else math.nan
