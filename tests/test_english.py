"""Plain English: docstrings that begin with a noun or a verb, common words, American spelling."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support import in_turn

ROOT = Path(__file__).parent.parent
PACKAGE = sorted((ROOT / "hookcb").rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "nbs").glob("*.ipynb")])
# "Of the last n values the median" is "Median of the last n values"
OPENINGS = ("Of", "What", "Those", "That", "Where", "Whose", "Which")
NAMES = re.compile(r"^(MOST|FEWEST|ENOUGH|HARDLY|LEAST)_?[A-Z]* *[:=]", re.M)  # MAX_ and MIN_ say it
PHRASES = re.compile(
    r"\bthat cannot be[;,.]|(?<!there )\bis no [nt]|, no nn\.|\bhardly\b|\bby heart\b|\bto the bit\b"
    r"|\bnot ours\b"
)
BRITISH = re.compile(
    r"\b(?:colour|favour|behaviour|neighbour|catalogue|grey|labelled|modelled|learnt)"
    r"|(?:initial|normal|optim|synchron|recogn|serial|general|summar|visual)is(?:e|ing|ation)",
    re.I,
)


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            text := ast.get_docstring(node)
        ):
            yield node.body[0].lineno, text


def objections(source: str) -> list[str]:
    """Line and text of what is not plain English in a Python file."""
    openings = [
        f"{line}: {text.splitlines()[0]}"
        for line, text in docstrings(source)
        if re.match(rf"({'|'.join(OPENINGS)})\b", text)
    ]
    lines = enumerate(source.splitlines(), 1)
    return openings + [
        f"{i}: {line.strip()}"
        for i, line in lines
        if NAMES.search(line) or PHRASES.search(line) or BRITISH.search(line)
    ]


def test_the_package_speaks_plain_english() -> None:
    texts = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in PACKAGE}
    assert [f"{path}:{found}" for path, text in texts.items() for found in objections(text)] == []


def test_pages_speak_american_english() -> None:
    lines = [(path.name, line) for path in PAGES for line in path.read_text(encoding="utf-8").splitlines()]
    lines = [(name, line) for name, line in lines if '"image/png": ' not in line]
    assert [(name, line) for name, line in lines if BRITISH.search(line) or PHRASES.search(line)] == []


@in_turn(
    "line",
    [
        '"""What is left of a fit."""',
        '"""Of one weight the share without a gradient."""',
        "MOST_ROWS = 5",
        "FEWEST: int = 5",
        "raise TypeError(f'model is {model!r}, no nn.Module')",
        "# initialises the weights",
        "# weights are the same to the bit",
        'raise ValueError("for arguments that cannot be.")',
    ],
)
def test_planted_sentences_are_found(line: str) -> None:
    assert len(objections(f"{line}\n")) == 1


def test_plain_sentences_are_not() -> None:
    source = '"""Median of the last n values; NaN if empty."""\n\nMAX_ROWS = 5  # whatever the size\n'
    assert objections(source) == []
