"""Generates the page of all checks, and what `hookcb explain` prints, from their registry.

`python docs/checks.py` writes docs/checks.md and hookcb/diagnosis/explained.json.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import hookcb.diagnosis.faults  # noqa: F401  # which registers them
from hookcb.diagnosis.explain import FILE
from hookcb.diagnosis.fault import FAULTS, Fault, Site, doc_of
from hookcb.diagnosis.reader import SOURCES
from hookcb.diagnosis.verdict import link_to

sys.path.append(str(Path(__file__).parents[1] / "benchmarks" / "planted"))
from margin import Margin, read_margins  # importable by that path

PAGE = Path(__file__).with_name("checks.md")
COMMAND = "python docs/checks.py"

SITES = {
    Site.INPUT: "Inputs and targets",
    Site.MODULES: "Modules, in the forward",
    Site.LOSS: "Loss",
    Site.BACKWARD: "Backward",
    Site.GRADIENTS: "Gradients, before the step",
    Site.OPTIMIZER: "Optimizer",
    Site.RUN: "Course of the run: loss, time, memory",
}
INTRODUCTION = f"""# Checks

All checks of a diagnosis, in the order of a training step; an earlier fault can cause a later one. This page
is generated from the faults in `hookcb/diagnosis/faults`, by `{COMMAND}`; edit the docstring of a fault
rather than this page. `hookcb explain unit.dead` prints the section of one check.

An exact check looks for something that is always wrong. A statistical check compares a number with a limit;
its margin shows which numbers healthy trainings reach and which numbers planted faults have. Margins are
measured on `benchmarks/planted`, with `python benchmarks/planted --margins`; a limit without a margin has led
to a finding in none of these trainings."""


def document(margins: Iterable[Margin] = ()) -> str:
    """The page in Markdown: all checks by site, with their margins."""
    by_code: dict[str, list[Margin]] = {}
    for margin in margins:
        by_code.setdefault(margin.code, []).append(margin)
    parts = [INTRODUCTION, _overview()]
    for site, title in SITES.items():
        parts.append(f"## {title}")
        parts += [_section(check, by_code) for check in FAULTS.values() if check.site == site]
    return "\n\n".join(parts) + "\n"


def _overview() -> str:
    rows = ["| code | | what it looks for |", "|---|---|---|"]
    for check in sorted(FAULTS.values(), key=lambda check: check.site):
        code, summary = f"[`{check.code}`](#{check.code})", _first_sentence(check).replace("|", "\\|")
        rows.append(f"| {code} | {kind(check)} | {summary} |")
    return "\n".join(rows)


def _first_sentence(check: type[Fault]) -> str:
    return " ".join(doc_of(check).partition("\n\n")[0].split())


def _section(check: type[Fault], margins: dict[str, list[Margin]]) -> str:
    lines = "" if check.exact else "\n".join(_margin_lines(check, margins))
    return "\n\n".join([f'<a id="{check.code}"></a>', f"### `{check.code}`", *paragraphs(check, lines)])


def paragraphs(check: type[Fault], margins: str = "") -> Iterator[str]:
    """Paragraphs that describe a check, with its measured margins if given."""
    needs = " and ".join(dict.fromkeys(SOURCES[x] for x in check.needs)) or "Diagnose or GradientHealth"
    yield f"{kind(check).capitalize()}. Needs {needs}."
    yield doc_of(check)
    if margins:
        yield margins
    if check.leads_to:
        yield f"May lead to: {', '.join(f'`{code}`' for code in check.leads_to)}."


def kind(check: type[Fault]) -> str:
    """Whether the check is "exact", without a threshold, or "statistical"."""
    return "exact" if check.exact else "statistical"


def explanations() -> str:
    """Section of each check by its code, as JSON; without margins, which are not in the package."""
    texts = {
        code: "\n\n".join([code, *paragraphs(check), f"See also: {link_to(code)}"])
        for code, check in FAULTS.items()
    }
    return json.dumps(texts, ensure_ascii=False, indent=1) + "\n"


def _margin_lines(check: type[Fault], margins: dict[str, list[Margin]]) -> Iterator[str]:
    known = margins.get(check.code, [])
    if not known:
        yield "Margin: not measured."
    for margin in known:
        yield f"{'- ' if len(known) > 1 else ''}Margin: {margin}"


def main(argv: Sequence[str] | None = None) -> int:
    """Writes both files; with `--check` returns exit code 1 if one is out of date."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if one is out of date")
    args = parser.parse_args(argv)
    old = []
    for file, text in {PAGE: document(read_margins()), FILE: explanations()}.items():
        if not args.check:
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, "utf-8")
        elif not file.exists() or file.read_text("utf-8") != text:
            old.append(file)
            sys.stderr.write(f"{file} is out of date; run {COMMAND}\n")
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
