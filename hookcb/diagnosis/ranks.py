"""One verdict of several ranks: what parts have measured is merged, what ranks find is put together."""

import socket
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any
from zlib import crc32

from hookcb.core.alone import ALONE, Ranks
from hookcb.diagnosis.dispatcher import Dispatcher
from hookcb.diagnosis.fault import key_of
from hookcb.diagnosis.run import Run
from hookcb.diagnosis.verdict import Finding, Gap, Verdict
from hookcb.processes.board import Board
from hookcb.processes.groups import name_ranks
from hookcb.processes.patience import PATIENCE

SEVERITIES = "error", "warning", "info"
MAX_ASKED = 10  # batches after a check in which rank 0 asks for the notes of ranks that are behind
States = dict[str, Any]  # what parts have measured, by their keys
Results = tuple[Sequence[Finding], Sequence[Gap]]


# ---- from what each rank gives


def states_of(run: Run, dispatcher: Dispatcher) -> States:
    """Numbers that the parts of this rank give to a run of all ranks."""
    parts = {key_of(kind): part for kind, part in run.parts.items() if hasattr(part, "merge")}
    states = {key: dispatcher.guarded(part, part.state, run) for key, part in parts.items()}
    return {key: state for key, state in states.items() if state is not None}


def of_all(run: Run, of_ranks: Mapping[int, States], together: "Together", dispatcher: Dispatcher) -> Run:
    """A run of all ranks from that of this rank, which stays as it is, and what each rank gives.

    Unless all ranks have given something, it is that of this rank.
    """
    merged = replace(run, parts=dict(run.parts), notes=list(run.notes), _kept={})
    if len(of_ranks) == together.world:
        merged.notes.insert(0, f"{together.world} ranks")  # a line of notes may be cut at its end
        for kind, part in run.parts.items():
            states = [of_ranks[rank].get(key_of(kind)) for rank in range(together.world)]
            if hasattr(part, "merge") and None not in states:  # else the part of a rank has failed
                merged.parts[kind] = part = copy(part)
                part.freeze()
                dispatcher.guarded(part, part.merge, merged, states, together.rank)
    merged.add_failures(dispatcher.run)
    return merged


def findings_of_all(of_ranks: Mapping[int, Results], world: int) -> tuple[list[Finding], list[Gap]]:
    """Findings of all ranks, each with the ranks that found it unless all did, and the gaps of any rank."""
    alike: dict[tuple[str, str, str], dict[int, Finding]] = {}
    for rank, (findings, _) in sorted(of_ranks.items()):
        for finding in findings:
            same = alike.setdefault((finding.code, finding.layer, finding.param), {})
            same.setdefault(rank, replace(finding, consequence_of=""))
    placed = {code for code, layer, param in alike if layer or param}
    merged = [
        _merged(by_rank, world)
        for (code, layer, param), by_rank in alike.items()
        if layer or param or code not in placed  # a rank that knows the place knows more
    ]
    return merged, list(_gaps_of_all({rank: gaps for rank, (_, gaps) in sorted(of_ranks.items())}))


def _merged(by_rank: dict[int, Finding], world: int) -> Finding:
    """The earliest of findings that are alike; of several, that of a rank which it is about."""
    _, first = min(
        by_rank.items(),
        key=lambda pair: (-1 if pair[1].step is None else pair[1].step, pair[0] not in pair[1].ranks),
    )
    worst = min((finding.severity for finding in by_rank.values()), key=SEVERITIES.index)
    ranks = first.ranks or tuple(by_rank)
    return replace(first, severity=worst, ranks=() if len(ranks) == world else ranks, n_ranks=world)


def _gaps_of_all(by_rank: Mapping[int, Sequence[Gap]]) -> Iterable[Gap]:
    """Gaps of rank 0, and those that it does not have."""
    yield from by_rank.get(0, ())
    known = {code for gap in by_rank.get(0, ()) for code in gap.codes}
    for rank, gaps in by_rank.items():
        for gap in gaps:
            if codes := tuple(code for code in gap.codes if code not in known):
                known.update(codes)
                yield Gap(codes, f"on rank {rank}, {gap.reason}")


# ---- how ranks give it


class Together:
    """Ranks that judge together: they call its methods in this order, and get what all have given.

    Ranks of a `Learner` do so by collectives, all at the same points.

    Args:
        ranks: the ranks.
    """

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.rank, self.world, self._ranks = ranks.rank, ranks.world, ranks

    def states(self, own: States) -> Mapping[int, States]:
        """States of the parts of each rank."""
        return dict(enumerate(self._ranks.gather(own)))  # the only place where ranks send these

    def told(self, own: Sequence[Finding]) -> Sequence[Finding]:
        """Errors that were told during the training, which all ranks of a Learner have told alike."""
        return own

    def results(self, found: Sequence[Finding], gaps: Sequence[Gap]) -> Mapping[int, Results]:
        """Findings and gaps of each rank."""
        ranks, everyone = self._ranks, range(self.world)
        of_gaps = crc32(repr(sorted(code for gap in gaps for code in gap.codes)).encode())
        most, least = ranks.max([of_gaps, -of_gaps])
        if not any(ranks.max([bool(found)])) and most == -least:
            return dict.fromkeys(everyone, ((), gaps))
        own_text, of_main = repr((found, gaps)), ranks.of_main(lambda: (found, gaps))
        # most ranks find what rank 0 finds, and need not send it
        given = ranks.gather(None if own_text == repr(of_main) else (found, gaps))
        return {rank: of_main if x is None else x for rank, x in zip(everyone, given, strict=True)}

    def verdict(self, own: Verdict) -> Verdict:
        """The verdict of rank 0."""
        return self._ranks.of_main(lambda: own)


@dataclass(frozen=True)
class Note:
    """Message of one rank of a watched loop to the others, on its training so far.

    Attributes:
        kind: class of the model.
        n_batches: number of its training batches.
        states: what its parts have measured.
        found, gaps: what it finds by itself.
        told: errors that it has told.
        ended: the error that has ended it, "" if there was none; None if it has not ended.
        host: name of its machine.
    """

    kind: str
    n_batches: int
    states: States
    found: Sequence[Finding]
    gaps: Sequence[Gap]
    told: Sequence[Finding]
    ended: str | None = None
    host: str = field(default_factory=socket.gethostname)


class Posted(Together):
    """Ranks of a loop that hookcb does not run, which judge together by notes, without a collective.

    At checks rank 0 judges what the others have posted by then, and waits for nobody. At the end it gathers
    what all have measured, lets each judge its own run beside that, and posts one verdict. A rank that does
    not come in time is not waited for: the verdict says so, and does not cover it.

    Args:
        board: the board of the loop.
        kind: class of its model.
    """

    def __init__(self, board: Board, kind: str) -> None:
        self.rank, self.world, self._board, self.kind = board.rank, board.world, board, kind
        self._others = [rank for rank in range(self.world) if rank != self.rank]
        self.notes: dict[int, Note] = {}  # the latest that are known
        self._here: set[int] = set()
        self._found: dict[int, Results] = {}  # of ranks that have judged beside what all have measured
        self._answer: Future[dict[int, Note]] | None = None
        self.asks = 0  # how often to ask for notes yet
        self._is_end = False
        board.post("here", True)

    # ---- checks

    def post(self, note: Note) -> None:
        """Posts what this rank knows; rank 0 then asks for that of the others, see `has_news`."""
        self.notes[self.rank], self._answer = note, None
        if self.rank:
            self._board.post("note", note)
        else:
            self.asks = MAX_ASKED

    def has_news(self) -> bool:
        """Whether, since the last check, notes of other ranks have come; asks for them, at no cost."""
        if self._answer is None:
            self._answer = self._board.read("note", self._others)
        if not self._answer.done():
            return False
        self.notes |= self._answer.result()
        self._answer, self.asks = None, self.asks - 1
        at = self.notes[self.rank].n_batches
        if all(rank in self.notes and self.notes[rank].n_batches >= at for rank in self._others):
            self.asks = 0
        return not self.asks and len(self.notes) > 1

    # ---- the end

    def end(self, note: Note) -> None:
        """Begins the end: from now on, ranks wait for each other, for as long as `PATIENCE` lasts."""
        self.notes[self.rank], self._is_end, self.asks = note, True, 0
        self._found = {}
        if self.rank:
            self._board.post("end", note)
            return
        self._here = set(self._board.wait_patiently("here", self._others, 1 / 3))
        ended = self._board.wait_patiently("end", self._here, 2 / 3)
        late = [rank for rank in self._others if rank not in ended]
        with PATIENCE.waiting() as seconds:
            self.notes |= self._board.there("note", late, seconds) | ended

    def _known(self) -> dict[int, Note]:
        """Notes on the model that this rank trains."""
        return {rank: note for rank, note in sorted(self.notes.items()) if note.kind == self.kind}

    def states(self, own: States) -> Mapping[int, States]:
        """See `Together`; only its own if rank 0 does not come."""
        if not self.rank:
            of_all = {rank: note.states for rank, note in self._known().items()} | {0: own}
            if self._is_end:
                self._board.post("all", of_all)
            return of_all
        given: dict[int, Any] = self._board.wait_patiently("all", [0]).get(0, {}) if self._is_end else {}
        return given if self.rank in given else {self.rank: own}

    def told(self, own: Sequence[Finding]) -> Sequence[Finding]:
        """Errors that any rank has told, with those that have."""
        of_ranks: dict[int, Results] = {rank: (note.told, ()) for rank, note in self._known().items()}
        return findings_of_all(of_ranks | {self.rank: (own, ())}, self.world)[0]

    def results(self, found: Sequence[Finding], gaps: Sequence[Gap]) -> Mapping[int, Results]:
        """See `Together`; of ranks that do not judge beside the others, what they find by themselves."""
        if self.rank:
            self._board.post("found", (found, gaps))
            return {self.rank: (found, gaps)}
        known = self._known()
        if self._is_end:
            self._found = self._board.wait_patiently("found", [rank for rank in self._ended() if rank], 0.5)
        by_themselves: dict[int, Results] = {
            rank: ([f for f in note.found if f.severity != "info"], ()) for rank, note in known.items()
        }
        return by_themselves | self._found | {0: (found, gaps)}

    def verdict(self, own: Verdict) -> Verdict:
        """The verdict of rank 0 if it comes and covers this rank; else that of this rank only."""
        verdict: Verdict
        if self.rank:
            verdict, covered = self._board.wait_patiently("verdict", [0]).get(0, (own, ()))
            self._board.post("read", True)
            with PATIENCE.waiting() as seconds:
                self._board.flush(seconds)
            if self.rank in covered:
                return verdict
            late = "had not ended" if verdict is own else "had judged before this rank had ended"
            return self._with_notes(own, [self.rank], [f"of rank {self.rank} only; rank 0 {late}"])
        covered = [0, *self._found] if self._is_end else list(self._known())
        verdict = self._with_notes(own, covered, list(self._remarks()))
        if self._is_end:
            self._board.post("verdict", (verdict, covered))
            self._board.wait_patiently(
                "read", [rank for rank in self._ended() if rank]
            )  # this process may host the store
        return verdict

    def _with_notes(self, verdict: Verdict, covered: Sequence[int], notes: list[str]) -> Verdict:
        looked = (*verdict.looked[:2], *notes, *verdict.looked[2:])
        of_rank = "" if len(covered) == self.world else name_ranks(sorted(covered))
        return replace(verdict, of_rank=of_rank, looked=looked)

    def _ended(self) -> list[int]:
        return [rank for rank, note in self._known().items() if note.ended is not None]

    def _remarks(self) -> Iterable[str]:
        """Sentences on what is not known of other ranks, and how they have ended."""
        if not self._is_end:
            return
        if self._board.failure:
            yield self._board.failure
        own = self.notes[0]
        for rank in self._others:
            note, name = self.notes.get(rank), f"rank {rank}"
            if note is not None and note.host != own.host:
                name = f"rank {rank} on {note.host}"
            if note is None and rank in self._here:
                yield f"{name} had begun, and posted nothing since: it has not ended, or is gone"
            elif note is None:
                yield f"{name} posted nothing: it does not run hookcb, or ended before its first batch"
            elif note.kind != self.kind:
                yield f"{name} trains a {note.kind}, and not a {self.kind}: it is not judged here"
            elif note.ended is None:
                yield f"{name} had not ended, or is gone; it last posted after {note.n_batches} batches"
            elif note.ended:
                yield f"{name} was ended by {note.ended}, after {note.n_batches} batches"
            elif rank not in self._found:
                yield f"{name} has ended, but has not told what it finds beside the others"
