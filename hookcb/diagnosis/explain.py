"""Words on what a check looks for: for `hookcb explain` and, by docs/checks.py, for docs/checks.md."""

from collections.abc import Iterator

from hookcb.diagnosis.judge import SOURCES
from hookcb.diagnosis.registry import Check, check_of
from hookcb.diagnosis.verdict import link_to


def explain(code: str) -> str:
    """Section of docs/checks.md on a check, without the margins, which were measured in a checkout.

    Raises:
        LookupError: if there is no such check; the message names those with a code like it.

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
    May lead to: `param.*`, `loss.flat`.
    <BLANKLINE>
    See also: docs/checks.md#loss.detached
    """
    return "\n\n".join([code, *paragraphs(check_of(code)), f"See also: {link_to(code)}"])


def paragraphs(check: Check, margins: str = "") -> Iterator[str]:
    """What there is to say of a check, with what is known of its margins."""
    needs = " and ".join(dict.fromkeys(SOURCES[x] for x in check.needs)) or "Diagnose or GradientHealth"
    yield f"{kind(check).capitalize()}. Needs {needs}."
    yield check.doc
    if margins:
        yield margins
    if check.leads_to:
        yield f"May lead to: {', '.join(f'`{code}`' for code in check.leads_to)}."


def kind(check: Check) -> str:
    """Whether it has no threshold, in a word."""
    return "exact" if check.exact else "statistical"
