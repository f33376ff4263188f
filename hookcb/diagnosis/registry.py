"""The registry of checks: each a pure function from evidence to findings."""

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from enum import IntEnum

from hookcb.diagnosis.evidence import Evidence
from hookcb.diagnosis.verdict import Finding


class Site(IntEnum):
    """Where in the flow of a training step something is; what is earlier can cause what is later.

    What the whole run comes to, time, memory and the course of the loss, is last: it is an outcome.
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
    """What a check has found to be fine, in words, with the number that says so: "dead units (0 %)".

    Attributes:
        text: the words.
        value: the number compared with the limit, in the unit of `Finding.value`; NaN where there was none.
        limit: that limit; of the one that is nearest, where there are several.
    """

    text: str
    value: float = math.nan
    limit: float = math.nan


@dataclass(frozen=True, slots=True)
class Skipped:
    """Why a check could not run: "fewer than 8 batches were looked at"."""

    reason: str


@dataclass(frozen=True, slots=True)
class Absent:
    """Why a check does not count: what it looks at is no part of this training, "there is no GradScaler"."""

    reason: str


Result = Finding | Passed | Skipped | Absent
CheckFunction = Callable[[Evidence], Iterator[Result]]


@dataclass(frozen=True, slots=True)
class Check:
    """A registered check.

    Attributes:
        code: of the findings it may give.
        site: where in the flow these are.
        exact: whether it has no threshold.
        needs: what must have been recorded, see `Evidence.sources`.
        function: what looks.
        subject: what it is about, if not every training has that, see `Evidence.absent`.
        leads_to: codes of findings that may follow from one of these; a trailing `*` stands for any ending.
    """

    code: str
    site: Site
    exact: bool
    needs: tuple[str, ...]
    function: CheckFunction
    leads_to: tuple[str, ...]
    subject: str = ""

    @property
    def doc(self) -> str:
        """What it looks at, its formula, source and limit."""
        return inspect.getdoc(self.function) or ""


CHECKS: dict[str, Check] = {}  # by code, in the order in which they are registered


def check(
    code: str,
    *,
    site: Site,
    needs: tuple[str, ...],
    exact: bool = False,
    leads_to: tuple[str, ...] = (),
    subject: str = "",
) -> Callable[[CheckFunction], CheckFunction]:
    """Registers a check; see `Check` for the arguments.

    Raises:
        ValueError: if there is a check of this code already.
    """
    if code in CHECKS:
        raise ValueError(
            f"there is a check {code!r} already, {CHECKS[code].function.__name__}; give another code"
        )

    def register(function: CheckFunction) -> CheckFunction:
        CHECKS[code] = Check(code, site, exact, needs, function, leads_to, subject)
        return function

    return register


def check_of(code: str) -> Check:
    """The check that gives findings of this code.

    Raises:
        LookupError: if there is none; the message names those with a code like it, or all.
    """
    if code not in CHECKS:
        told = code.strip().lower()
        near = [known for known in CHECKS if told and told in known] or get_close_matches(told, CHECKS)
        those = "near it are" if near else "there are"
        raise LookupError(f"there is no check {code!r}; {those} {', '.join(near or CHECKS)}")
    return CHECKS[code]
