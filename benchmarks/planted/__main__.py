"""Run planted faults and healthy controls, and compare hookcb's diagnosis with the rules of other tools.

`python benchmarks/planted --seeds 0 1 2`, `--only 'batch norm*'`, `--mutations`, `--margins`, see `--help`.
"""

import argparse
import contextlib
import io
import json
import math
import multiprocessing
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

import torch
from baselines import BASELINES, RuleRecorder
from case import Case
from controls import CONTROLS
from faults import FAULTS
from margins import Measured, margin_table, margins, measure, write_margins
from more_controls import MORE_CONTROLS
from mutations import MUTATIONS, Mutated, mutate, sample
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text
from score import (
    Flags,
    Outcome,
    Row,
    baseline_score,
    broken,
    misfiring,
    outcome,
    rows,
    rule_counts,
    score,
    share,
)

from hookcb import Diagnose

T = TypeVar("T")
CASES = {case.name: case for case in (*FAULTS, *CONTROLS, *MORE_CONTROLS)}


@dataclass(frozen=True)
class Job:
    """One case with one seed."""

    case: str
    seed: int
    with_baselines: bool


@dataclass(frozen=True)
class Result:
    """Result of a job; `flags` is None if baselines were not requested, or if their training failed."""

    outcome: Outcome
    flags: Flags | None
    error: str = ""


def work(job: Job) -> Result:
    """Train once with `Diagnose`, and once for the baselines."""
    case = CASES[job.case]
    with quiet():
        result = diagnosed(case, job.seed)
        if not job.with_baselines:
            return Result(result, None)
        try:
            return Result(result, flagged(case, job.seed, result.has_learned))
        except Exception as error:  # shown at the end, and in the exit status
            return Result(result, None, one_line(error))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the output and warnings of a diagnosis: its verdict is in the table."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(ERROR|WARNING)  ")
        yield


def diagnosed(case: Case, seed: int) -> Outcome:
    try:
        run = case.train(seed, [Diagnose(show=False)])
        return outcome(case, seed, run.loop.diagnose(), run.losses)
    except Exception as error:  # a failed case is a result, too, shown in its row
        return broken(case, seed, one_line(error))


def flagged(case: Case, seed: int, has_learned: bool) -> Flags:
    recorder = RuleRecorder()
    run = case.train(seed, [recorder])
    recorded = recorder.recorded
    recorded.losses = recorded.losses or run.losses  # a loop may report no loss to its watch
    fired = {baseline.name: tuple(baseline.fired(recorded)) for baseline in BASELINES}
    return Flags(case.name, seed, not case.codes, fired, has_learned)


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def measured(job: Job) -> Measured:
    """The numbers of one training run; see `margins`."""
    case = CASES[job.case]
    with quiet():
        try:
            return measure(case, job.seed)
        except Exception as error:  # shown at the end, and in the exit status
            return Measured(case.name, job.seed, case.codes, error=one_line(error))


def results(jobs: Sequence[Job], n_processes: int, do: Callable[[Job], T]) -> Iterator[T]:
    if n_processes == 1:
        yield from map(do, jobs)
        return
    # fork, because cases are closures, which cannot be pickled for a fresh process
    with multiprocessing.get_context("fork").Pool(n_processes, torch.set_num_threads, (1,)) as pool:
        yield from pool.imap(do, jobs)


# ---- printed tables


def console() -> Console:
    output = Console()
    if not output.is_terminal:
        output.width = 160  # for a file, rich assumes 80 columns and truncates names
    return output


def case_table(title: str, case_rows: Sequence[Row]) -> Table:
    table = Table(title=title)
    for column in ("", "case", "primary", "layer", "first step", "extra findings", "verdict", "right"):
        table.add_column(column, overflow="fold")
    for row in case_rows:
        x = row.shown
        step = "" if x.step is None else str(x.step)
        verdict = x.status if x.has_learned else f"{x.status}, has not learned"
        right, mark = f"{row.n_right}/{row.n_seeds}", "✗" if row.fails else ""
        cells = [mark, x.case, x.primary, x.layer, step, ", ".join(x.extra), verdict, right]
        table.add_row(*map(Text, cells), style="red" if row.fails else "")
    return table


def score_table(outcomes: Sequence[Outcome], flags: Sequence[Flags]) -> Table:
    table = Table(title="by seed")
    seeds = sorted({x.seed for x in outcomes})
    scores = [score(seed, outcomes) for seed in seeds]
    for column in ("", *(f"seed {seed}" for seed in seeds)):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("hookcb: false alarms", *(f"{len(x.false_alarms)}/{x.n_controls}" for x in scores))
    for line in ("recall", "named", "cause_first", "layer_right", "soon"):
        table.add_row(f"hookcb: {line.replace('_', ' ')}", *(part(getattr(x, line)) for x in scores))
    table.add_row("hookcb: wrong errors", *(str(x.wrong) for x in scores), end_section=True)
    for baseline in BASELINES if flags else ():
        noisy = misfiring(baseline.name, flags)
        by_seed = ([f for f in flags if f.seed == seed] for seed in seeds)
        of_seed = [baseline_score(baseline.name, x, noisy) for x in by_seed]
        name = f"{baseline.name} (re-implemented rules)"
        table.add_row(f"{name}: controls flagged", *(f"{x.controls}/{x.n_controls}" for x in of_seed))
        table.add_row("  faults flagged", *(part(x.faults / max(1, x.n_faults)) for x in of_seed))
        silent = (part(x.silent / max(1, x.n_faults)) for x in of_seed)
        table.add_row("  … by rules that flag no control", *silent, end_section=True)
    return table


def part(x: float) -> str:
    return "" if math.isnan(x) else f"{x:.2f}"


def rule_table(flags: Sequence[Flags]) -> Table:
    table = Table(title="re-implemented rules: number of training runs that each flags, over all seeds")
    for column in ("tool", "rule", "faults", "controls"):
        table.add_column(column, justify="left" if column in ("tool", "rule") else "right")
    for baseline in BASELINES:
        total = baseline_score(baseline.name, flags, ())
        table.add_row(baseline.name, "total", str(total.n_faults), str(total.n_controls), style="bold")
        for rule, n_faults, n_controls in rule_counts(baseline.name, flags):
            table.add_row("", rule, str(n_faults), str(n_controls))
    return table


def mutation_table(mutated: Sequence[Mutated]) -> Table:
    table = Table(title="verdict if the same case is trained in a different way; = means unchanged")
    for column in ("case", "unchanged", *MUTATIONS):
        table.add_column(column, overflow="fold")
    for row in mutated:
        cells = ["=" if judgment == row.plain else str(judgment) for judgment in row.mutations.values()]
        table.add_row(row.case, str(row.plain), *cells)
    stay = [share(row.mutations[name] == row.plain for row in mutated) for name in MUTATIONS]
    table.add_row("share unchanged", "", *map(part, stay), style="bold")
    return table


def as_json(outcomes: Sequence[Outcome], flags: Sequence[Flags]) -> str:
    seeds = sorted({x.seed for x in outcomes})
    state: dict[str, Any] = {
        "outcomes": [asdict(x) for x in outcomes],
        "scores": [asdict(score(seed, outcomes)) for seed in seeds],
        "flags": [asdict(x) for x in flags],
        "baselines": [
            asdict(baseline_score(b.name, flags, misfiring(b.name, flags))) for b in BASELINES if flags
        ],
    }
    for row in state["scores"]:
        row.update({key: None for key, x in row.items() if isinstance(x, float) and math.isnan(x)})
    return json.dumps(state, ensure_ascii=False, indent=1)


# ---- the command


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/planted", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--only", default="*", metavar="GLOB", help="cases whose names match")
    parser.add_argument("--no-baselines", action="store_true", help="skip the rules of other tools")
    parser.add_argument("--jobs", type=int, default=2, help="processes, each with one thread")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file to write all results to")
    parser.add_argument("--mutations", action="store_true", help="instead, train a sample in different ways")
    text = "instead, compare numbers with limits; written to margins.json if all cases run"
    parser.add_argument("--margins", action="store_true", help=text)
    return parser.parse_args()


def chosen(cases: Sequence[Case], only: str) -> list[Case]:
    return [case for case in cases if fnmatch(case.name, only)]


def main() -> int:
    """Run the requested cases and print the results; the exit code is 0 if all could be run."""
    torch.set_num_threads(1)
    args, to = arguments(), console()
    faults, controls = chosen(FAULTS, args.only), chosen([*CONTROLS, *MORE_CONTROLS], args.only)
    if not faults and not controls:
        print(f"no case matches {args.only!r}; available: {', '.join(CASES)}")
        return 2
    if args.mutations:
        cases = sample(faults, controls) if args.only == "*" else [*faults, *controls]
        with quiet():
            mutated = list(mutate(cases, args.seeds[0]))
        to.print(mutation_table(mutated))
        return 0
    if args.margins:
        return measure_all([*faults, *controls], args, to)
    return run_all(faults, controls, args, to)


def measure_all(cases: list[Case], args: argparse.Namespace, to: Console) -> int:
    jobs = [Job(case.name, seed, with_baselines=False) for case in cases for seed in args.seeds]
    done = list(in_progress(jobs, args.jobs, measured))
    measured_margins = margins(done)
    to.print(margin_table(measured_margins))
    failed = [x for x in done if x.error]
    for x in failed:
        to.print(Text(f"failed: {x.case} (seed {x.seed}): {x.error}", style="red"))
    if args.only == "*" and not failed:
        write_margins(measured_margins, args.seeds)
    return 1 if failed else 0


def in_progress(jobs: Sequence[Job], n_processes: int, do: Callable[[Job], T]) -> Iterator[T]:
    """Yield the results, with a progress bar on a terminal."""
    bar = Console(stderr=True)
    outputs = results(jobs, n_processes, do)
    yield from track(outputs, "training", len(jobs), console=bar, disable=not bar.is_terminal)


def run_all(faults: list[Case], controls: list[Case], args: argparse.Namespace, to: Console) -> int:
    jobs = [Job(c.name, seed, not args.no_baselines) for c in (*faults, *controls) for seed in args.seeds]
    done = list(in_progress(jobs, args.jobs, work))
    outcomes, flags = (
        [result.outcome for result in done],
        [result.flags for result in done if result.flags is not None],
    )
    for title, is_control in (("faults", False), ("controls", True)):
        if shown := rows(x for x in outcomes if x.is_control == is_control):
            to.print(case_table(title, shown))
    to.print(score_table(outcomes, flags))
    if flags:
        to.print(rule_table(flags))
        for baseline in BASELINES:
            to.print(f"{baseline.name}, rules re-implemented from {baseline.source}")
    errors: dict[str, list[str]] = {}
    for result in done:
        for what, error in (("", result.outcome.error), (", baselines", result.error)):
            if error:
                errors.setdefault(error, []).append(
                    f"{result.outcome.case} (seed {result.outcome.seed}{what})"
                )
    for error, of_cases in errors.items():
        others = f" and {len(of_cases) - 5} more" if len(of_cases) > 5 else ""
        to.print(Text(f"failed: {error}\n  {', '.join(of_cases[:5])}{others}", style="red"))
    if args.json is not None:
        args.json.write_text(as_json(outcomes, flags), encoding="utf-8")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
