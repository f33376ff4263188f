"""The table `[tool.hookcb]` of a pyproject.toml: what a project ignores and why, and how strict it is."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hookcb.core.arguments import check_number
from hookcb.diagnosis.explain import check_codes

NAME = "pyproject.toml"
KEYS = {
    "budget": "the share of batches to inspect, 0 to 1",
    "ignore": 'codes with reasons, {"time.*" = "a shared machine"}, or a list of codes',
    "strict": "true or false",
}


@dataclass(frozen=True)
class Config:
    """Habits of a project.

    Attributes:
        budget: share of the batches to inspect, 0..1; None for the default of `Diagnose`.
        strict: whether any warning counts as a failure.
        ignore: reasons why findings are left out, "" if none is given, by their code or `fnmatch` pattern.
    """

    budget: float | None = None
    strict: bool = False
    ignore: Mapping[str, str] = field(default_factory=dict)

    def note_of(self, patterns: Iterable[str]) -> str:
        """A sentence on those of its patterns by which a finding was left out; "" without any."""
        reasons = [f"{x} ({self.ignore[x]})" if self.ignore[x] else x for x in patterns]
        return f"ignored by {NAME}: {', '.join(reasons)}" if reasons else ""


def find_config(*folders: Path) -> Config:
    """Reads the nearest pyproject.toml with `[tool.hookcb]`: upward from the first folder, or else the next.

    Without one it is an empty `Config`.

    Raises:
        LookupError, TypeError, ValueError: If a file on the way is not TOML or cannot be read, or if its
            table has an unknown key or code, or a wrong type or value; the message names file and key.
    """
    for folder in folders:
        for parent in (folder.resolve(), *folder.resolve().parents):
            table = _table(parent / NAME)
            if table is not None:
                return _checked(parent / NAME, table)
    return Config()


def _table(file: Path) -> Any:
    """The table of a file; None if it has none, or if there is no such file."""
    if not file.is_file():
        return None
    try:
        tools = tomllib.loads(file.read_text(encoding="utf-8")).get("tool")
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    except ValueError as error:
        raise ValueError(f"{file} is not valid TOML: {error}") from error
    return tools.get("hookcb") if isinstance(tools, dict) else None


def _checked(file: Path, table: Any) -> Config:
    at, possible = f"{file}: tool.hookcb", "; ".join(f"{key}: {what}" for key, what in KEYS.items())
    if not isinstance(table, dict):
        raise TypeError(f"{at} must be a table, got {table!r:.80}; possible keys are {possible}")
    for key in table:
        if key not in KEYS:
            similar = get_close_matches(key, KEYS, 1)
            hint = f"did you mean {similar[0]}? " if similar else ""
            raise LookupError(f"{at} has the unknown key {key!r}; {hint}possible are {possible}")
    budget, strict = table.get("budget"), table.get("strict", False)
    if budget is not None:
        check_number(f"{at}.budget", budget, 0, 1, closed=True, hint=", the share of batches to inspect")
    if not isinstance(strict, bool):
        raise TypeError(f"{at}.strict must be true or false, got {strict!r:.80}")
    return Config(budget, strict, _reasons(f"{at}.ignore", table.get("ignore", [])))


def _reasons(at: str, ignore: Any) -> dict[str, str]:
    if not isinstance(ignore, dict | list):
        raise TypeError(f"{at} must be {KEYS['ignore']}, got {ignore!r:.80}")
    reasons = ignore if isinstance(ignore, dict) else {}
    for code in ignore:
        if not isinstance(code, str):
            raise TypeError(f"{at} must be {KEYS['ignore']}, got {code!r:.80} in the list")
        if not isinstance(reasons.get(code, ""), str):
            raise TypeError(
                f"{at}: the reason for {code} must be text, got {reasons[code]!r:.80}; a code with a dot "
                f'needs quotes, "time.data_bound" = "a shared machine"'
            )
        try:
            check_codes(code)
        except LookupError as error:
            raise LookupError(f"{at}: {error.args[0]}") from None
    return {code: reasons.get(code, "") for code in ignore}
