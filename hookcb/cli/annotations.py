"""Findings as annotations of a GitHub workflow."""

from collections.abc import Iterator

from hookcb.diagnosis.verdict import Finding, Verdict

LEVELS = {"error": "error", "warning": "warning", "info": "notice"}
# what may not stand in a value, and in the text; "%" first, as the others are spelled with it
IN_TEXT = (("%", "%25"), ("\r", "%0D"), ("\n", "%0A"))
IN_VALUE = (*IN_TEXT, (":", "%3A"), (",", "%2C"))


def annotations(verdict: Verdict, title: str, file: str) -> Iterator[str]:
    """Workflow commands that GitHub shows beside a run and at a file: one per cause, or for a healthy model.

    Source: docs.github.com, "Workflow commands for GitHub Actions".

    Args:
        verdict: the verdict on a model.
        title: what the model is called.
        file: the script.
    """
    if not verdict.alarms:
        yield _command("notice" if verdict else "warning", title, f"{verdict.headline}", file)
    for finding in verdict.alarms:
        yield _command(LEVELS[finding.severity], finding.summary, _text(finding), file)


def _text(finding: Finding) -> str:
    steps = f"\nNext: {finding.next_steps[0]}." if finding.next_steps else ""
    return f"{finding.message}{steps}\nhookcb explain {finding.code}"


def _command(level: str, title: str, text: str, file: str) -> str:
    values = ",".join(f"{key}={_spelled(x, IN_VALUE)}" for key, x in (("file", file), ("title", title)))
    return f"::{level} {values}::{_spelled(text, IN_TEXT)}"


def _spelled(text: str, spelling: tuple[tuple[str, str], ...]) -> str:
    for sign, spelled in spelling:
        text = text.replace(sign, spelled)
    return text
