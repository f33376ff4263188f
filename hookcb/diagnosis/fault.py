"""Fault: what can be wrong with a training, seen at its events and judged; Measurement: what faults share."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any, ClassVar, TypeVar

from hookcb.core.text import as_layer, join_names
from hookcb.diagnosis.figure import Figure
from hookcb.diagnosis.heard import Ear
from hookcb.diagnosis.run import Absent, Layer, Param, Passed, Run, Series, Skipped, Span
from hookcb.diagnosis.verdict import Finding, Severity

F = TypeVar("F", bound="type[Fault]")
Result = Finding | Passed | Skipped | Absent
Unknown = str | Skipped | Absent  # why a fault is not ruled out; a string is that of `Skipped`, "" if it is
When = Span | Series | int | tuple[int | None, int | None]

# what a fault at the beginning of a training may lead to
EVERYTHING = "act.* attn.* grad.* loss.* nonfinite.* unit.* update.* amp.* head.* valid.*"

EVERY = math.inf  # cadence: each batch
NOTES = -1  # batches of `Run.noting`
LOOKS = 0  # inspected batches only; a number n: also all batches until n steps were made

HANDLERS = (
    "on_model",  # before the first batch
    "on_batch",  # a batch begins
    "on_output",  # a layer has an output: (run, name, module, output)
    "on_compiled_output",  # one in compiled code has one, which is None in a CUDA graph: likewise
    "on_compiled_operation",  # compiled code has attention, …: (run, layer, kind, tensors or None, numbers)
    "on_prediction",  # the model has an output
    "on_first_graph",  # the first loss is there, and not yet shown to `on_loss`
    "on_loss",  # a loss is there
    "on_backward",  # a backward begins
    "on_gradients",  # a backward has ended
    "on_step",  # a step begins
    "on_between",  # a step has ended; also one that was cancelled
    "on_batch_end",  # a batch has ended
    "on_validation",  # a validation begins
    "on_validated",  # a validation has ended, and the loop has reported what it measured
    # one of the first batches of a validation begins, or has an output; any has a loss, if that is seen
    *("on_eval_batch", "on_eval_prediction", "on_eval_loss"),
    "on_epoch",  # the training of an epoch has ended
    "on_cancel",  # a level was cancelled: (run, "batch", "backward" or "step")
    "on_error",  # an error ends the training: (run, error)
    "on_end",  # the training has ended
    "on_doubt",  # it has been judged: (run, findings); True if this has found something more
)
RARE = (  # those at which the cadence does not matter
    *("on_model", "on_first_graph", "on_validation", "on_validated", "on_epoch", "on_cancel"),
    *("on_error", "on_end", "on_eval_batch", "on_eval_prediction", "on_eval_loss", "on_doubt"),
)


class Site(IntEnum):
    """Stage of a training step; a fault at an earlier stage can cause one at a later stage.

    The stage of the whole run (time, memory and the course of the loss) is last, as these are outcomes.
    """

    INPUT = 0
    MODULES = 1
    LOSS = 2
    BACKWARD = 3
    GRADIENTS = 4
    OPTIMIZER = 5
    RUN = 6


class Part:
    """Base of measurements and faults; each fit makes new ones.

    Its methods that are named as in `HANDLERS` are called at these events of a training, with the `Run`; one
    returns True if it has seen what should be told at once. An error in one costs the faults that depend on
    it, and nothing else.

    For one verdict of several ranks, each part that has them sends what `state(run)` returns, plain and
    small. A frozen copy of the part, for the run of all ranks, then takes that of each by `merge(run,
    of_ranks, rank)`, which may change this run; see `ranks.of_all`.

    Attributes:
        cadence: the batches in which it is called: `EVERY`, `NOTES`, `LOOKS`, or a number of steps.
        cadences: those of single handlers, if they differ.
        uses: measurements that it depends on, which are called before it.
        hears: what it reads by `heard`; see `Ear`.
        done: whether it has seen enough, and is called no more.
        failure: the first error outside of these methods, as in a hook of its own.
    """

    cadence: float = LOOKS
    cadences: ClassVar[Mapping[str, float]] = {}
    failure: Exception | None = None
    uses: ClassVar[tuple[type["Measurement"], ...]] = ()
    hears: ClassVar[tuple[type[Ear], ...]] = ()
    done = False

    def failed(self, error: Exception) -> None:
        """Keeps the first error outside of these methods."""
        self.failure = self.failure or error

    def tell(self, run: Run) -> None:
        """Tells a run, which is to be judged, what was measured so far; a live run is left as it is."""

    def close(self, run: Run) -> None:
        """Removes its hooks; called once at the end, whatever has failed."""

    def freeze(self) -> None:
        """Keeps plain numbers only, at the end of a fit."""


class Measurement(Part):
    """A part that several faults read: `run.measured(Inputs)`."""


class Fault(Part):
    """Something that can be wrong with a training; its docstring has formula, source, limit and margin.

    Attributes:
        code: code of its findings.
        headline: what is wrong, in plain English.
        site: stage of the training step that its findings belong to.
        exact: whether it has no threshold.
        needs: sources of the run that it requires, see `Run.sources`.
        leads_to: codes of findings that may follow from one of these, as `fnmatch` patterns.
        subject: what it checks, if some trainings do not have it, see `Run.lack`.
        shown_by: the series that shows its findings, "run.loss" of the whole run, "layers.std" of the layer
            or "params.norm" of the parameter; "" if none does.
        draws_limit: whether `Finding.limit` is in the unit of that series.
        severity: of what its handlers have seen.
        passed: the fault, in the list of those that were ruled out.
        unless: if nothing was seen, the reason why it is not ruled out, "" if it is.
        seen: findings of its handlers.
    """

    code: ClassVar[str]
    headline: ClassVar[str] = ""
    site: ClassVar[Site]
    exact: ClassVar[bool]
    needs: ClassVar[tuple[str, ...]]
    leads_to: ClassVar[tuple[str, ...]]
    subject: ClassVar[str]
    shown_by: ClassVar[str]
    draws_limit: ClassVar[bool]
    severity: ClassVar[Severity] = "error"
    passed: ClassVar[str] = ""
    unless: Unknown = ""

    def __init__(self) -> None:
        self.seen: list[Finding] = []

    def findings(self, run: Run) -> Iterator[Result]:
        """Findings, or what was ruled out, or why that is unknown; has no effects, and needs no event."""
        yield from self.told(run, self.seen, self.unless)

    def told(self, run: Run, seen: Iterable[Finding], unless: Unknown = "") -> Iterator[Result]:
        """One finding per severity of all that was seen, with the places of the others.

        Args:
            run: the training.
            seen: findings of this fault.
            unless: if there are none, the reason why the fault is not ruled out, "" if it is.
        """
        found = list(seen)
        if not found:
            unseen = Skipped(unless) if isinstance(unless, str) else unless
            yield unseen if unless else Passed(self.passed)
        for severity in dict.fromkeys(finding.severity for finding in found):
            yield _one_of(run, [finding for finding in found if finding.severity == severity])

    def finding(
        self,
        message: str,
        severity: Severity | None = None,
        *,
        at: Layer | Param | str | None = None,
        param: str = "",
        when: When = (None, None),
        value: float = math.nan,
        limit: float = math.nan,
        causes: tuple[str, ...] = (),
        next_steps: tuple[str, ...] = (),
        ranks: tuple[int, ...] = (),
        figure: Figure | None = None,
    ) -> Finding:
        """A finding of this fault.

        Args:
            message: a sentence with the number and its limit.
            severity: by default that of the fault.
            at: layer or parameter, or the name of a layer if nothing else is known.
            param: name of the parameter, if `at` is a name.
            when: first and last step: a run of records, a whole series, two steps, or a single one.
            value: see `Finding`, as for the others.
            limit: likewise.
            causes: likewise.
            next_steps: likewise.
            ranks: likewise.
            figure: likewise.
        """
        layer, kind = at or "", ""
        if isinstance(at, Param):
            layer, param, kind = at.layer, at.name, at.about
        elif isinstance(at, Layer):
            layer, kind = at.name, at.about
        first, last = _steps(when)
        return Finding(
            self.code, severity or self.severity, str(layer), param, first, value, limit, message, causes,
            next_steps, "", kind, last, ranks, headline=self.headline,
            figure=figure,
        )  # fmt: skip

    def see(self, message: str, severity: Severity | None = None, **about: Any) -> None:
        """Keeps a finding of what a handler has seen; see `finding`."""
        self.seen.append(self.finding(message, severity, **about))


def _steps(when: When) -> tuple[int | None, int | None]:
    if isinstance(when, Span):
        return when.first, when.last
    if isinstance(when, Series):
        return when.steps[0], when.steps[-1]
    return (when, when) if isinstance(when, int) else when


def _one_of(run: Run, found: Sequence[Finding]) -> Finding:
    """The first of findings of one severity, with the places of the others and the last of their steps."""
    first, *others = found
    places = [
        as_layer(x.layer) or x.param
        for x in others
        if (x.layer or x.param) not in ("", first.layer, first.param)
    ]
    more = f" The same is true of {join_names(list(dict.fromkeys(places)), 4)}." if places else ""
    steps = [x.step for x in found if x.step is not None]
    about = first.kind or run.about(first.layer, first.param)
    return replace(first, message=first.message + more, kind=about, last_step=max(steps, default=None))


FAULTS: dict[str, type[Fault]] = {}  # by code, in the order of registration


def fault(
    code: str,
    site: Site,
    *,
    needs: str = "",
    leads_to: str = "",
    subject: str = "",
    exact: bool = False,
    shown_by: str = "",
    draws_limit: bool = False,
) -> Callable[[F], F]:
    """Registers a fault; see `Fault` for the arguments, of which `needs` and `leads_to` are words here.

    Raises:
        ValueError: If there is already a fault with this code.
    """
    if code in FAULTS:
        raise ValueError(f"there is already a fault {code!r}, {FAULTS[code].__name__}; choose another code")

    def register(kind: F) -> F:
        kind.code, kind.site, kind.subject, kind.exact = code, site, subject, exact
        kind.needs, kind.leads_to = tuple(needs.split()), tuple(leads_to.split())
        kind.shown_by, kind.draws_limit = shown_by, draws_limit
        FAULTS[code] = kind
        return kind

    return register


def doc_of(kind: type[Fault]) -> str:
    """Description of a fault: formula, source and limit."""
    return inspect.getdoc(kind) or ""


def findings_of(code: str, run: Run) -> list[Finding]:
    """Findings of another fault, on which one depends; judged once in each run."""
    if code not in run._kept:
        results = run.measured(FAULTS[code]).findings(run)
        run._kept[code] = [result for result in results if isinstance(result, Finding)]
    found: list[Finding] = run._kept[code]
    return found


def key_of(kind: type[Part]) -> str:
    """Key of a part in `Run.reasons`."""
    return kind.code if issubclass(kind, Fault) else kind.__name__


def parts_for(kinds: Iterable[type[Part]]) -> list[type[Part]]:
    """These parts and all measurements that they use, each after what it uses."""
    found: dict[type[Part], None] = {}

    def add(kind: type[Part]) -> None:
        for used in kind.uses:
            add(used)
        found.setdefault(kind)

    for kind in kinds:
        add(kind)
    return list(found)
