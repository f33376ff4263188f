"""One verdict of several ranks: what belongs to the training is averaged, what ranks find is put together."""

import math
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Any
from zlib import crc32

from hookcb.core.ranks import Ranks, name_ranks
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.rules import median
from hookcb.diagnosis.run import Observation, Run, Series
from hookcb.diagnosis.verdict import Finding, Gap

MIN_COMPARED, N_COMPARED = 4, 8  # batches that are compared
MAX_APART = 0.05  # relative difference between ranks of the loss of a guess, beyond which it is unknown
MAX_SHOWN, N_SHOWN = 64, 100  # ranks, and losses of each, that are kept one by one
SEVERITIES = "error", "warning", "info"


def share_losses(evidence: Run, ranks: Ranks) -> None:
    """Replaces the losses of this rank by their means over all ranks, which is what they minimize together.

    The loss of the best constant is averaged too; it is unknown if ranks have very different targets.
    """
    # a copy, as the measurement goes on
    evidence.parts = evidence.parts | {Loss: (loss := copy(evidence.measured(Loss)))}
    series = [evidence.loss, loss.penalty, *evidence.losses.values()]
    shape = [len(series), sum(map(len, series)), *map(len, series[:2])]
    if _differ(shape, ranks):
        evidence.notes.append("ranks have recorded different batches, so each rank judges its own losses")
        return
    merged = iter(ranks.sum([x for one in series for x in one.values]))
    means = [Series(one.steps, [next(merged) / ranks.world for _ in one.steps]) for one in series]
    evidence.loss, loss.penalty, *losses = means
    evidence.losses = dict(zip(evidence.losses, losses, strict=True))
    loss.guess, loss.constant = _agreed(loss.guess, ranks), _agreed(loss.constant, ranks)


def keep_losses(evidence: Run, ranks: Ranks) -> None:
    """Keeps some losses of each of up to 64 ranks, for pages."""
    if ranks.world <= MAX_SHOWN:
        every = max(1, math.ceil(len(evidence.loss) / N_SHOWN))
        own = evidence.loss.steps[::every], evidence.loss.values[::every]
        evidence.losses_of_ranks = [Series(*found) for found in ranks.gather(own)]


def compare_batches(evidence: Run, ranks: Ranks, is_replica: bool) -> None:
    """Adds observations if ranks have the same batches or random numbers, or the batches of one repeat.

    Args:
        evidence: what this rank has recorded.
        ranks: all ranks call this together.
        is_replica: whether ranks train replicas, so that each needs batches of its own.
    """
    hashes = [batch for epoch in evidence.batch_hashes for batch in epoch if batch[0] is not None]
    n, n_drawn = (
        -int(x) for x in ranks.max([-len(own) * is_replica for own in (hashes, evidence.random_states)])
    )
    evidence.observed |= {"batches of all ranks"} if n >= MIN_COMPARED else set()
    evidence.observed |= {"random numbers of all ranks"} if n_drawn >= MIN_COMPARED else set()
    evidence.missing["batches of all ranks"] = "the batches of ranks were not compared"
    evidence.missing["random numbers of all ranks"] = "no random numbers were drawn in the forward"
    if max(n, n_drawn) < MIN_COMPARED:
        return
    n_repeated = max(len(epoch) - len(set(epoch)) for epoch in [*evidence.batch_hashes, []])
    own = [x for x, _ in hashes[:n][:N_COMPARED]], evidence.random_states[:n_drawn][:N_COMPARED]
    batches, states, repeated = zip(*ranks.gather((*own, n_repeated)), strict=True)
    if n >= MIN_COMPARED:
        evidence.observations += _observe_same_batches(batches)
        evidence.observations += _observe_repeats(repeated, evidence, ranks.rank)
    if n_drawn >= MIN_COMPARED:
        evidence.observations += _observe_same_numbers(states)


def share_inputs(evidence: Run, ranks: Ranks) -> None:
    """Sets the spread of the inputs to that on all ranks, as activations are merged; compares their scale.

    Their root mean squares stay those of this rank, as a rank may have inputs on another scale.
    """
    steps, rms = evidence.input_std.steps, median(evidence.input_rms.values)
    if _differ([len(steps), sum(steps)], ranks):
        return
    log = math.log(rms) if rms > 0 else math.nan
    total, *squares = ranks.sum([log, *(x * x for x in evidence.input_std.values)])
    evidence.input_std = Series(steps, [math.sqrt(x / ranks.world) for x in squares])
    evidence.rms_of_others = math.exp((total - log) / (ranks.world - 1))


def _alike(by_rank: Sequence[Any]) -> list[int]:
    """Ranks that have what another one has, too."""
    return [rank for rank, x in enumerate(by_rank) if by_rank.count(x) > 1]


def _observe_same_batches(batches: Sequence[Any]) -> Iterator[Observation]:
    if same := _alike(batches):
        yield Observation(
            "data.duplicated",
            step=0,
            value=float(len(same)),
            text=f"The inputs of {name_ranks(same)} are the same in each of the first {len(batches[0])} "
            "batches: they train on the same samples, and see no more than one.",
            causes=("a loader without a DistributedSampler", "a sampler that does not know the rank"),
            next_steps=("Give the training loader sampler=DistributedSampler(dataset)",),
            ranks=tuple(same),
        )


def _observe_repeats(n_repeated: Sequence[int], evidence: Run, rank: int) -> Iterator[Observation]:
    """Observes on a rank that its own batches repeat, unless all ranks do so, as in overfitting a batch."""
    n = max(map(len, evidence.batch_hashes), default=0)
    if 2 * n_repeated[rank] >= n and not all(2 * x >= n for x in n_repeated):
        yield Observation(
            "data.repeated",
            step=0,
            value=float(n_repeated[rank]),
            text=f"{n_repeated[rank]} of the first {n} batches of an epoch have come before in it, on "
            f"rank {rank} of {len(n_repeated)}; those of other ranks do not repeat.",
            causes=(
                "a shard with few samples that is read again and again",
                "a reader that does not advance",
            ),
            next_steps=("Print the indices or files that this rank reads",),
            ranks=(rank,),
        )


def _observe_same_numbers(states: Sequence[Any]) -> Iterator[Observation]:
    if same := _alike(states):
        yield Observation(
            "random.duplicated",
            step=0,
            value=float(len(same)),
            text=f"{name_ranks(same).capitalize()} draw the same random numbers in the forward, as for "
            f"dropout, in each of {len(states[0])} inspected batches: their masks or noise are no more "
            "diverse than those of one rank.",
            causes=("the same seed on all ranks",),
            next_steps=("Call torch.manual_seed(seed + rank) once the model is made",),
            ranks=tuple(same),
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
    own_text, of_main = repr((found, gaps)), ranks.of_main(lambda: (found, gaps))
    # most ranks find what rank 0 finds, and need not send it
    given = ranks.gather(None if own_text == repr(of_main) else (found, gaps))
    of_all: list[tuple[list[Finding], Sequence[Gap]]] = [of_main if x is None else x for x in given]
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
    ranks = first.ranks or tuple(by_rank)
    return replace(first, severity=worst, ranks=() if len(ranks) == world else ranks, n_ranks=world)


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
