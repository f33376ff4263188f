"""`hookcb compare`: runs beside one another, and conditions on them for a CI job."""

from collections.abc import Sequence
from pathlib import Path

from hookcb.core.console import show, show_error
from hookcb.report.compare import compare

HOLDS, FAILS, WRONG, INCONCLUSIVE = 0, 1, 2, 3


def compare_runs(runs: Sequence[str], output: Path | None = None, conditions: Sequence[str] = ()) -> int:
    """Shows the comparison of runs, writes it as a page, and checks conditions.

    Args:
        runs: files and folders.
        output: file for a page.
        conditions: conditions that are not to be met, on the ratio of the last run to the first.

    Returns:
        Exit code: 1 if a condition is met, else 3 if the noise does not allow to say, else 0; 2 if a run or
        condition cannot be read, or the page cannot be written.
    """
    try:
        found = compare(*runs)
        outcomes = [found.check(condition) for condition in conditions]
        written = None if output is None else found.save(output)
    except (OSError, ValueError, LookupError) as error:
        show_error(f"hookcb compare: {error.args[0] if isinstance(error, LookupError) else error}")
        return WRONG
    if not conditions:
        show(found)
    if written is not None:
        show(f"written to {written}", highlight=False, markup=False, soft_wrap=True)
    for outcome in outcomes:
        word = {True: "fails", False: "holds", None: "inconclusive"}[outcome.is_met]
        show(f"{word}: {outcome.why}", highlight=False, markup=False, soft_wrap=True)
    met = [outcome.is_met for outcome in outcomes]
    return FAILS if True in met else INCONCLUSIVE if None in met else HOLDS
