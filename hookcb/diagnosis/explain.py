"""Explanations of the checks, sections of docs/checks.md, for `hookcb explain`."""

import json
from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path

FILE = Path(__file__).with_name("explained.json")  # by docs/checks.py, so that no check is imported here


def explain(code: str) -> str:
    """Section of docs/checks.md on a check, without the measured margins.

    Raises:
        LookupError: If no check has that code; the message names similar ones, or all of them.

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
    texts = _texts()
    if code not in texts:
        raise _unknown(code, texts)
    return texts[code]


def check_codes(pattern: str) -> str:
    """Returns the code of a check, or a `fnmatch` pattern of several, `time.*`.

    Raises:
        LookupError: If it matches no code; the message names similar ones, or all of them.
    """
    texts = _texts()
    if not any(fnmatchcase(code, pattern) for code in texts):
        raise _unknown(pattern, texts)
    return pattern


def _texts() -> dict[str, str]:
    texts: dict[str, str] = json.loads(FILE.read_text("utf-8"))
    return texts


def _unknown(code: str, texts: Iterable[str]) -> LookupError:
    wanted = code.strip().lower()
    similar = [known for known in texts if wanted and wanted in known]
    similar = similar or get_close_matches(wanted, texts)
    choices = f"similar: {', '.join(similar)}" if similar else f"available: {', '.join(texts)}"
    return LookupError(f"there is no check {code!r}; {choices}")
