"""The page of all checks, docs/checks.md: `python docs/checks.py` makes it from their registry."""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hookcb.diagnosis.explain import kind, paragraphs
from hookcb.diagnosis.registry import CHECKS, Check, Site

sys.path.append(str(Path(__file__).parents[1] / "benchmarks" / "planted"))
from margin import Margin, read_margins  # found by that path

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

What a diagnosis looks for, in the order of the flow of a training step; what is earlier can cause what is
later. This page is made from the registry of checks, `hookcb/diagnosis/registry.py`, by
`{COMMAND}`; edit the docstring of a check rather than this page.
`hookcb explain unit.dead` prints the section of one of them.

An exact check looks for something that is wrong by itself. A statistical one compares a number with a limit;
it has a margin: how far healthy trainings came, and which numbers planted faults have. Margins are measured
on `benchmarks/planted`, with `python benchmarks/planted --margins`; a limit without such a line has led
to a finding in none of its trainings."""


def document(margins: Iterable[Margin] = ()) -> str:
    """The page in Markdown: all checks by site, with what is known of their margins."""
    of_code: dict[str, list[Margin]] = {}
    for margin in margins:
        of_code.setdefault(margin.code, []).append(margin)
    parts = [INTRODUCTION, _overview()]
    for site, title in SITES.items():
        parts.append(f"## {title}")
        parts += [_section(check, of_code) for check in CHECKS.values() if check.site == site]
    return "\n\n".join(parts) + "\n"


def _overview() -> str:
    rows = ["| code | | what it looks for |", "|---|---|---|"]
    for check in sorted(CHECKS.values(), key=lambda check: check.site):
        code, what = f"[`{check.code}`](#{check.code})", _first_sentence(check).replace("|", "\\|")
        rows.append(f"| {code} | {kind(check)} | {what} |")
    return "\n".join(rows)


def _first_sentence(check: Check) -> str:
    return " ".join(check.doc.partition("\n\n")[0].split())


def _section(check: Check, margins: dict[str, list[Margin]]) -> str:
    told = "" if check.exact else "\n".join(_margin_lines(check, margins))
    return "\n\n".join([f'<a id="{check.code}"></a>', f"### `{check.code}`", *paragraphs(check, told)])


def _margin_lines(check: Check, margins: dict[str, list[Margin]]) -> Iterator[str]:
    known = margins.get(check.code, [])
    if not known:
        yield "Margin: not measured."
    for margin in known:
        yield f"{'- ' if len(known) > 1 else ''}Margin: {margin}"


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the page, or tells whether it is current: exit code 1 where it is not."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, tell whether it is current")
    args = parser.parse_args(argv)
    text = document(read_margins())
    if not args.check:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(text, "utf-8")
    elif not PAGE.exists() or PAGE.read_text("utf-8") != text:
        sys.stderr.write(f"{PAGE} is not current; run {COMMAND}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
