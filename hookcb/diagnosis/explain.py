"""Descriptions of checks, for `hookcb explain` and for docs/checks.md, which docs/checks.py generates."""

from collections.abc import Iterator

from hookcb.diagnosis.judge import SOURCES
from hookcb.diagnosis.registry import Check, check_of
from hookcb.diagnosis.verdict import link_to


def explain(code: str) -> str:
    """Section of docs/checks.md on a check, without the measured margins, which are not in the package.

    Raises:
        LookupError: If no check has that code; the message names similar ones.

    >>> from hookcb.diagnosis.explain import explain
    >>> print(explain("loss.detached"))
    loss.detached
    <BLANKLINE>
    Exact. Needs Diagnose, or a Learner with a batch to look at.
    <BLANKLINE>
    A loss that does not depend on any parameter.
    <BLANKLINE>
    Formula: it has no `grad_fn`.
    <BLANKLINE>
    May lead to: `param.*`, `loss.flat`, `loss.trivial`.
    <BLANKLINE>
    See also: docs/checks.md#loss.detached
    """
    return "\n\n".join([code, *paragraphs(check_of(code)), f"See also: {link_to(code)}"])


def paragraphs(check: Check, margins: str = "") -> Iterator[str]:
    """Paragraphs that describe a check, with its measured margins if given."""
    needs = " and ".join(dict.fromkeys(SOURCES[x] for x in check.needs)) or "Diagnose or GradientHealth"
    yield f"{kind(check).capitalize()}. Needs {needs}."
    yield check.doc
    if margins:
        yield margins
    if check.leads_to:
        yield f"May lead to: {', '.join(f'`{code}`' for code in check.leads_to)}."


def kind(check: Check) -> str:
    """Whether the check is "exact", without a threshold, or "statistical"."""
    return "exact" if check.exact else "statistical"
