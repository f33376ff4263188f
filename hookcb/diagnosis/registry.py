"""Registry of checks, each a pure function from evidence to findings."""

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from hookcb.diagnosis.run import Run
from hookcb.diagnosis.verdict import Finding


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


@dataclass(frozen=True, slots=True)
class Passed:
    """Fault that a check has ruled out.

    Attributes:
        text: the fault, with the number that rules it out: "dead units (0 %)".
        value: number compared with the limit, in the unit of `Finding.value`; NaN if there is none.
        limit: the limit; if there are several, the nearest one.
    """

    text: str
    value: float = math.nan
    limit: float = math.nan


@dataclass(frozen=True, slots=True)
class Skipped:
    """Reason why a check could not run: "fewer than 8 batches were inspected"."""

    reason: str


@dataclass(frozen=True, slots=True)
class Absent:
    """Reason why a check does not apply to this training: "there is no GradScaler"."""

    reason: str


Result = Finding | Passed | Skipped | Absent
CheckFunction = Callable[[Run], Iterator[Result]]


@dataclass(frozen=True, slots=True)
class Check:
    """A registered check.

    Attributes:
        code: code of its findings.
        site: stage of the training step that its findings belong to.
        exact: whether it has no threshold.
        needs: sources of evidence it requires, see `Run.sources`.
        function: yields findings, or what was ruled out or skipped.
        leads_to: codes of findings that may follow from one of these, as `fnmatch` patterns.
        subject: what it checks, if some trainings do not have it, see `Run.absent`.
        shown_by: the series that shows its findings, "run.loss" of the whole run, "layers.std" of the layer
            or "params.norm" of the parameter; "" if none does.
        draws_limit: whether `Finding.limit` is in the unit of that series.
    """

    code: str
    site: Site
    exact: bool
    needs: tuple[str, ...]
    function: CheckFunction
    leads_to: tuple[str, ...]
    subject: str = ""
    shown_by: str = ""
    draws_limit: bool = False

    @property
    def doc(self) -> str:
        """Description, formula, source and limit."""
        return inspect.getdoc(self.function) or ""


CHECKS: dict[str, Check] = {}  # by code, in the order of registration


def check(
    code: str,
    *,
    site: Site,
    needs: tuple[str, ...],
    exact: bool = False,
    leads_to: tuple[str, ...] = (),
    subject: str = "",
    shown_by: str = "",
    draws_limit: bool = False,
) -> Callable[[CheckFunction], CheckFunction]:
    """Registers a check; see `Check` for the arguments.

    Raises:
        ValueError: If there is already a check with this code.
    """
    if code in CHECKS:
        raise ValueError(
            f"there is already a check {code!r}, {CHECKS[code].function.__name__}; choose another code"
        )

    def register(function: CheckFunction) -> CheckFunction:
        CHECKS[code] = Check(code, site, exact, needs, function, leads_to, subject, shown_by, draws_limit)
        return function

    return register
