"""One verdict of several ranks: what parts have measured is merged, what ranks find is put together."""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace
from zlib import crc32

from hookcb.core.alone import Ranks
from hookcb.diagnosis.dispatcher import Dispatcher
from hookcb.diagnosis.fault import key_of
from hookcb.diagnosis.run import Run
from hookcb.diagnosis.verdict import Finding, Gap

SEVERITIES = "error", "warning", "info"


def of_all(run: Run, ranks: Ranks, dispatcher: Dispatcher) -> Run:
    """A run of all ranks, which call this together, from that of this rank, which stays as it is."""
    merged = replace(run, parts=dict(run.parts), notes=[*run.notes, f"{ranks.world} ranks"], _kept={})
    parts = {key_of(kind): part for kind, part in run.parts.items() if hasattr(part, "merge")}
    own = {key: dispatcher.guarded(part, part.state, run) for key, part in parts.items()}
    of_ranks = ranks.gather(own)  # the only place where ranks send these
    for key, part in parts.items():
        states = [states.get(key) for states in of_ranks]
        if None not in states:  # else the part of a rank has failed
            merged.parts[type(part)] = part = copy(part)
            part.freeze()
            dispatcher.guarded(part, part.merge, merged, states, ranks.rank)
    merged.add_failures(dispatcher.run)
    return merged


def findings_of_all(
    found: Iterable[Finding], gaps: Sequence[Gap], ranks: Ranks
) -> tuple[list[Finding], list[Gap]]:
    """Findings of all ranks, each with the ranks that found it unless all did, and the gaps of any rank.

    All ranks call this together, with their own findings and gaps.
    """
    found, own = list(found), sorted(code for gap in gaps for code in gap.codes)
    of_gaps = crc32(repr(own).encode())
    most, least = ranks.max([of_gaps, -of_gaps])
    if not any(ranks.max([bool(found)])) and most == -least:
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
