"""param.overwritten: weights that something other than the optimizer writes in the middle of a training."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from hookcb.core.text import join_names
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.held import HeldWeights, Write
from hookcb.diagnosis.measurements.samples import WILD
from hookcb.diagnosis.run import Param, Passed, Run, Skipped
from hookcb.diagnosis.verdict import Finding

MAX_ROUNDING = 1e-5  # relative change by rounding, as when weights are swapped and computed back
MIN_SHARE = 0.5  # of the sampled elements of a weight that are written if it is initialized or loaded
MAX_ALIKE = 0.5  # cosine of the old and the new values of these elements
BY_RULE = 0.9  # share of the written elements that explains a write, if all of them do one thing
MIN_REGULAR = 3  # writes, at equal distances
OFTEN = 0.5  # share of the compared steps; a loop that writes after so many of them means to
LINES = "Look for code in the loop that initializes, loads or copies weights, as load_state_dict() does"


@dataclass(frozen=True, slots=True)
class Kind:
    """Kind of a write: "new", "undone", "zeroed" or "wild"; "" if it may be as intended."""

    what: str = ""
    names: list[str] = field(default_factory=list)
    value: float = math.nan
    limit: float = math.nan


@fault(
    "param.overwritten",
    Site.OPTIMIZER,
    needs="batches",
    leads_to="update.* loss.* train.unfinished act.* grad.* unit.* param.restored",
    exact=True,
)
class Overwritten(Fault):
    """Weights that something other than the optimizer writes between a step and the next forward.

    Exact: a sampled element differs from what the step has left, and the same optimizer goes on with the same
    state. Up to 1,024 elements of each weight are compared in the first 64 steps, in inspected ones and in
    those after them, and 32 of each matrix in any other step after which a version counter has changed; a
    write through `.data` there is not seen. The first such change may be compared with values of up to 15
    steps before, which these steps have changed, too.

    Limit: half of the elements of a matrix, with a cosine of old and new values below 0.5, or back to what
    they were at the beginning, or all zero; or any element ten times as large as the largest was, or not
    finite. It is a note if the values are no larger than before, as with clipped or pruned weights, or are
    among those that the training has had, as with averaged or restored weights; if there are writes after
    half of all steps, or three at equal distances; or if the optimizer is a new one, or has another state
    afterwards, or another rate and all weights are written. Nothing is said of weights that are swapped and
    have their values back, or may have them: if the values of the step before are not known, and a validation
    came in between.
    """

    headline = "Weights are overwritten in mid-run"
    uses = (HeldWeights,)
    severity = "warning"

    def findings(self, run: Run) -> Iterator[Result]:
        held = run.measured(HeldWeights)
        writes = [write for write in held.writes if _is_write(write, run.params)]
        if not held.n_compared:
            yield Skipped("no weights were seen between an optimizer step and the next forward")
        elif not writes:
            yield Passed("weights that something other than the optimizer writes (0)")
        else:
            yield self._found(run, held.n_compared, writes)

    def _found(self, run: Run, n_compared: int, writes: list[Write]) -> Finding:
        kinds = [(write, kind_of(write, run.params)) for write in writes if write.goes_on]
        faulty = [(write, kind) for write, kind in kinds if kind.what]
        is_often = sum(write.is_wide for write in writes) >= max(MIN_REGULAR, OFTEN * n_compared)
        is_regular = all(kind.what in ("", "undone") for _, kind in faulty) and _is_regular(writes)
        if not faulty or is_often or is_regular:
            return self._note(writes)
        write, kind = faulty[0]
        others = [other.step for other, _ in faulty[1:]]
        again = f" So it is after {join_names([f'step {x}' for x in others], 3)}." if others else ""
        what, causes = TOLD[kind.what]
        weights = join_names(kind.names, 3)
        have, their = ("has", "its") if len(kind.names) == 1 else ("have", "their")
        old = "the old ones" if write.since == write.step else f"those after step {write.since}"
        what = what.format(value=kind.value, limit=kind.limit, their=their, old=old)
        return self.finding(
            f"Between step {write.step} and the next forward, something other than the optimizer wrote to "
            f"{weights}, which {have} {what}.{again}",
            at=run.params.get(kind.names[0], ""),
            param=kind.names[0],
            when=(write.step, others[-1] if others else write.step),
            value=kind.value,
            limit=kind.limit,
            causes=causes,
            next_steps=(LINES,),
        )

    def _note(self, writes: list[Write]) -> Finding:
        first, *_, last = (writes[0], *writes)
        names = list(dict.fromkeys(name for write in writes for name in write.rows))
        times = "once" if len(writes) == 1 else f"{len(writes)} times"
        return self.finding(
            f"Something other than the optimizer wrote to {join_names(names, 3)} {times} between a step and "
            "the next forward; this may be as intended.",
            "info",
            param=names[0],
            when=(first.step, last.step),
            value=float(len(writes)),
            causes=("weights that are clipped, averaged, pruned, restored, or set by the loop",),
            next_steps=(LINES,),
        )


TOLD = {
    "new": (
        "new values that are unrelated to {old} (cosine {value:.2f}, limit {limit:g})",
        ("weights are initialized again, or loaded, in the middle of the training",),
    ),
    "undone": (
        "the values of the beginning again, so that the training up to then is lost",
        ("the weights of the beginning are loaded again inside the loop",),
    ),
    "zeroed": ("only zeros now", ("weights are set to zero in the middle of the training",)),
    "wild": (
        "{value:.0f} elements now that are not finite, or more than {limit:g} times as large as {their} "
        "largest one",
        ("memory that something else writes to, or a computation with the weights outside of the optimizer",),
    ),
}


def kind_of(write: Write, params: Mapping[str, Param]) -> Kind:
    """Kind of a write, by most of the weights that it has changed."""
    rows = write.rows
    matrices = {name: row for name, row in rows.items() if name not in params or len(params[name].shape) > 1}
    whole = {name: row for name, row in matrices.items() if row["n_changed"] >= MIN_SHARE * row["n"]}
    if zeroed := [name for name, row in whole.items() if row["n_zero"] == row["n"] > 1]:
        return Kind("zeroed", zeroed)
    if whole and all(row["n_first"] == row["n_changed"] and row["moved"] for row in rows.values()):
        return Kind("undone", list(whole))
    for by in ("n_smaller", "n_earlier"):
        if sum(row[by] for row in rows.values()) >= BY_RULE * sum(row["n_changed"] for row in rows.values()):
            return Kind()
    new = {name: cosine for name, row in whole.items() if (cosine := _cosine(row)) < MAX_ALIKE}
    if new and 2 * len(new) >= len(matrices):
        return Kind("new", list(new), min(new.values()), MAX_ALIKE)
    wild = {name: row["n_wild"] for name, row in rows.items() if row["n_wild"] and row["before"]}
    return Kind("wild", list(wild), sum(wild.values()), WILD) if wild else Kind()


def _cosine(row: dict[str, float]) -> float:
    """Cosine of the old and the new values; 1 if it is undefined, as one of them is zero."""
    product = math.sqrt(row["before"]) * math.sqrt(row["after"])
    return row["product"] / product if 0 < product < math.inf else 1.0


def _is_write(write: Write, params: Mapping[str, Param]) -> bool:
    """Whether it has changed more than rounding does, and was not undone."""
    squares = [(row["change"], row["before"]) for row in write.rows.values()]
    is_more = any(not math.sqrt(change) <= MAX_ROUNDING * math.sqrt(x) for change, x in squares)
    return is_more and (not write.may_be_undone or bool(kind_of(write, params).what))


def _is_regular(writes: list[Write]) -> bool:
    gaps = {b.step - a.step for a, b in pairwise(writes)}
    return len(writes) >= MIN_REGULAR and max(gaps) - min(gaps) <= 1
