"""Diagnose faulty programs of the kinds that people ask about, and the same programs repaired.

`python benchmarks/real --seeds 0 1`, `--only 'ReLU*'` (a program or a fault), `--verbose`, see `--help`.
"""

import argparse
import json
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path

import torch
from program import Outcome, outcome
from programs import PROGRAMS
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

BY_NAME = {program.name: program for program in PROGRAMS}
Job = tuple[str, int, bool]  # program, seed, whether repaired
PUBLISHED = {  # of 28 programs of DeepFD: found, named
    "UMLAUT": (28, 11),
    "DeepFD, a trained classifier": (27, 17),
    "DeepLocalize": (22, 4),
    "hookcb before its checks of heads": (17, 8),
    "AutoTrainer": (5, 5),
}
LOCALIZED = "deepmufl 21 to 40, DeepDiagnosis 20, DeepLocalize 14, NeuraLint 10, UMLAUT 9"


def work(job: Job) -> Outcome:
    name, seed, is_repaired = job
    return outcome(BY_NAME[name], seed, is_repaired)


def results(jobs: Sequence[Job], n_processes: int) -> Iterator[Outcome]:
    """Yield the outcomes in the order of the jobs, with a progress bar on a terminal."""
    bar = Console(stderr=True)
    # fork, because programs are closures, which cannot be pickled for a fresh process
    with multiprocessing.get_context("fork").Pool(n_processes, torch.set_num_threads, (1,)) as pool:
        outcomes = pool.imap(work, jobs)
        yield from track(outcomes, "training", len(jobs), console=bar, disable=not bar.is_terminal)


# ---- printed tables


def program_table(outcomes: Sequence[Outcome]) -> Table:
    """One row per faulty program and seed."""
    table = Table(title="faulty programs: primary finding, before and after the training")
    for column in ("fault", "program", "seed", "before", "after", "other findings", "named first"):
        table.add_column(column, overflow="fold")
    for x in outcomes:
        if x.is_repaired:
            continue
        others = ", ".join(finding for finding in x.findings if finding.split()[1] != x.primary)
        mark = "yes" if x.is_first else "found" if x.is_found else "missed"
        cells = (x.fault, x.program, str(x.seed), x.before, x.primary, others, mark)
        table.add_row(*map(Text, cells), style="" if x.is_first else "yellow" if x.is_found else "red")
    return table


def fault_table(outcomes: Sequence[Outcome]) -> Table:
    """One row per class of faults, and the total."""
    table = Table(title="real programs, by fault", show_footer=True)
    faults = dict.fromkeys(x.fault for x in outcomes)
    rows = [counts([x for x in outcomes if x.fault == fault]) for fault in faults]
    total = counts(outcomes)
    table.add_column("fault", "all")
    for column, footer in zip(
        ("runs", "found", "named first", "found before training", "alarms on repaired"),
        total,
        strict=True,
    ):
        table.add_column(column, footer, justify="right")
    for fault, row in zip(faults, rows, strict=True):
        table.add_row(fault, *row)
    table.caption = "found: by an error or a warning, or by a note that names the fault"
    return table


def counts(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """Cells of a row: faulty runs, found, named first, found before training, and alarms on repaired ones."""
    faulty = [x for x in outcomes if not x.is_repaired]
    repaired = [x for x in outcomes if x.is_repaired]
    found, first = sum(x.is_found for x in faulty), sum(x.is_first for x in faulty)
    before, alarms = sum(x.is_found_before for x in faulty), sum(x.is_alarm for x in repaired)
    return str(len(faulty)), str(found), str(first), str(before), f"{alarms} of {len(repaired)}"


def published_table() -> Table:
    """Results that others published on other programs."""
    table = Table(title="not these programs: 28 programs of DeepFD")
    for column in ("tool", "found", "named"):
        table.add_column(column, justify="left" if column == "tool" else "right")
    for tool, numbers in PUBLISHED.items():
        table.add_row(tool, *map(str, numbers))
    table.caption = f"localized of 52 programs of deepmufl: {LOCALIZED}"
    return table


# ---- the command


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/real", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", default="*", metavar="GLOB", help="programs or faults whose names match")
    parser.add_argument("--verbose", action="store_true", help="print the verdicts, too")
    parser.add_argument("--jobs", type=int, default=2, help="processes, each with one thread")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file to write all outcomes to")
    return parser.parse_args()


def main() -> int:
    """Run the requested programs and print the results; the exit code is 0 if all behave as meant."""
    args, to = arguments(), Console()
    if not to.is_terminal:
        to.width = 160  # for a file, rich assumes 80 columns and truncates names
    programs = [p for p in PROGRAMS if fnmatch(p.name, args.only) or fnmatch(p.fault, args.only)]
    if not programs:
        print(f"no program matches {args.only!r}; available: {', '.join(BY_NAME)}")
        return 2
    jobs = [(p.name, seed, fixed) for p in programs for seed in args.seeds for fixed in (False, True)]
    done = list(results(jobs, args.jobs))
    if args.verbose:
        for x in done:
            which = f"{x.program} ({'repaired' if x.is_repaired else x.fault}), seed {x.seed}"
            to.rule(Text(f"{which}: score {x.score:.2f} {x.error}"))
            to.print(Text(x.text))
    to.print(program_table(done))
    to.print(fault_table(done))
    to.print(published_table())
    for x in done:
        if x.is_repaired and x.is_alarm:
            to.print(Text(f"alarm on repaired: {x.program} (seed {x.seed}): {x.primary}", style="red"))
        if not x.is_as_meant:
            what = "does not learn" if x.is_repaired else "learns in spite of its fault"
            to.print(
                Text(f"not as meant: {x.program} (seed {x.seed}) {what}, score {x.score:.2f}", style="red")
            )
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(x) for x in done], indent=1), encoding="utf-8")
    return 0 if all(x.is_as_meant for x in done) else 1


if __name__ == "__main__":
    sys.exit(main())
