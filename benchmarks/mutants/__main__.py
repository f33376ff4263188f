"""Put small faults into the package, one at a time, and count how many of them the tests notice.

`record` runs the tests once and keeps which lines each executes; `choose` draws the mutants; `run` tries
them, and goes on where it was interrupted; `show` prints the results of all runs. See `--help`.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, fields
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from executed import Executed, record, sources
from mutant import Mutant, Place, choose, find, possible, quotas
from rich.console import Console
from rich.table import Table
from rich.text import Text
from trial import Trials

ROOT = Path(__file__).parents[2]
RESULTS = ("dead", "alive", "time over", "to be carried over by hand")
Entry = dict[str, Any]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/mutants", description=__doc__)
    parser.add_argument("--list", type=Path, default=Path(__file__).with_name("mutants.json"), metavar="FILE")
    parser.add_argument("--record", type=Path, default=ROOT / "build/mutants/executed.sqlite", metavar="FILE")
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="keep which lines each test executes; needs coverage")
    recording.add_argument("tests", nargs="*", help="files or folders; by default, all tests")
    choosing = commands.add_parser("choose", help="draw mutants of lines that tests execute, into a new list")
    choosing.add_argument("--seed", type=int, default=0)
    choosing.add_argument("-n", type=int, default=60, metavar="N", help="number of mutants")
    running = commands.add_parser("run", help="run the tests of each mutant, except those already run")
    running.add_argument("--label", default=commit(), help="name of this run; by default, a commit")
    running.add_argument("--limit", type=float, default=120.0, metavar="SECONDS", help="for each mutant")
    showing = commands.add_parser("show", help="print the results of all runs")
    listing = commands.add_parser("possible", help="print mutants, from which to carry one over by hand")
    for command in (recording, running):
        command.add_argument("--jobs", type=int, default=2, help="processes")
    for command in (running, showing, listing):
        command.add_argument("--only", default="*", metavar="GLOB", help="such as core/loop.py::Loop.*")
    return parser.parse_args()


def commit() -> str:
    """The last commit that has changed the package or its tests."""
    command = ["git", "log", "-1", "--format=%h", "--", "hookcb", "tests"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def all_places() -> list[Place]:
    return [place for file, source in sources(ROOT).items() for place in possible(file, source)]


def mutant_of(entry: Entry) -> Mutant:
    return Mutant(**{field.name: entry[field.name] for field in fields(Mutant)})


def load(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}; run `python benchmarks/mutants choose` first")
    kept: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return kept


def save(path: Path, kept: dict[str, Any]) -> None:
    """Write the list; if this is interrupted, the old one stays."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(kept, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    os.replace(new, path)


def choose_all(args: argparse.Namespace) -> int:
    if args.list.exists():
        print(f"{args.list} is there already; remove it to draw other mutants")
        return 2
    executed = Executed(args.record, ROOT)
    n_lines = Counter[str]()
    for file, source in sources(ROOT).items():
        n_lines[file.split("/")[0]] += sum(map(bool, map(bytes.strip, source.splitlines())))
    quota = quotas(n_lines, args.n)
    chosen, unexecuted = choose(all_places(), quota, lambda x: bool(executed.tests(x)), args.seed)
    kept = {
        "seed": args.seed,
        "commit": commit(),
        "drawn_on_lines_that_no_test_executes": unexecuted,
        "mutants": [{**asdict(place.mutant), "runs": {}} for place in chosen],
    }
    save(args.list, kept)
    print(f"{len(chosen)} mutants; {sum(unexecuted.values())} more were drawn on lines that no test executes")
    return 0


def run_all(args: argparse.Namespace) -> int:
    """Try each mutant that has no result under this label; the exit code is 1 if some could not be found."""
    executed, places, files = Executed(args.record, ROOT), all_places(), sources(ROOT)
    kept = load(args.list)
    there = [entry for entry in matching(kept, args.only) if "gone" not in entry]
    todo = []
    for entry in there:
        if entry["runs"].get(args.label, {}).get("sources") == executed.sources:
            continue
        place = find(mutant_of(entry), places)
        if place is None:
            entry["runs"][args.label] = {"result": RESULTS[3]}
        else:
            todo.append((entry, place))
    save(args.list, kept)
    with tempfile.TemporaryDirectory(prefix="mutants", ignore_cleanup_errors=True) as folder:
        trials = Trials(ROOT, Path(folder), args.jobs, args.limit)
        with ThreadPoolExecutor(args.jobs) as pool:
            jobs = {}
            for entry, place in todo:
                job = pool.submit(trials.run, place, files[place.mutant.file], executed.tests(place))
                jobs[job] = entry, place
            try:
                for job in as_completed(jobs):
                    entry, place = jobs[job]
                    at = f"{place.mutant.file}:{place.lines.start}"
                    result = {**asdict(job.result()), "at": at, "sources": executed.sources}
                    entry["runs"][args.label] = result
                    save(args.list, kept)
                    print(f"{result['result']}: {at} {place.mutant.function}", flush=True)
            except BaseException:
                trials.stop()
                pool.shutdown(cancel_futures=True)
                raise
    show(kept, args.only, args.label)
    return int(any(entry["runs"][args.label]["result"] == RESULTS[3] for entry in there))


def matching(kept: dict[str, Any], only: str) -> list[Entry]:
    found = [entry for entry in kept["mutants"] if fnmatch(mutant_of(entry).name, only)]
    if not found:
        raise ValueError(f"no mutant of the list matches {only!r}; try 'core/*'")
    return found


def show(kept: dict[str, Any], only: str, only_label: str = "*") -> None:
    """Print, for each run, a table by room and the mutants that no test noticed; then those that are gone."""
    entries = matching(kept, only)
    to = Console()
    if not to.is_terminal:
        to.width = 160
    labels = dict.fromkeys(label for entry in entries for label in entry["runs"])
    for label in labels if only_label == "*" else [only_label]:
        done = [(mutant_of(entry), entry["runs"][label]) for entry in entries if label in entry["runs"]]
        table = Table("room", "mutants", *RESULTS, "share dead", title=label)
        for room in [*sorted({mutant.room for mutant, _ in done}), "all"]:
            counts = Counter(run["result"] for mutant, run in done if room in (mutant.room, "all"))
            tried = counts.total() - counts[RESULTS[3]]
            share = f"{counts['dead'] / tried:.2f}" if tried else ""
            table.add_row(room, str(counts.total()), *(str(counts[x]) for x in RESULTS), share)
        to.print(table)
        for mutant, run in done:
            if run["result"] != "dead":
                at = f"{run['result']}: {run.get('at', mutant.file)} {mutant.function}"
                tests = f"{run.get('n_run', 0)} of {run.get('n_tests', 0)} tests {run.get('test', '')}"
                to.print(Text(f"{at}, {tests}\n- {mutant.before}\n+ {mutant.after}"))
    for entry in entries:
        if "gone" in entry:
            to.print(Text(f"gone, in no later run: {entry['file']} {entry['function']}, {entry['gone']}"))


def main() -> int:
    """Run a command; the exit code of `run` is 1 if mutants are to be carried over by hand."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background job ignores the first
        signal.signal(number, signal.default_int_handler)
    args = arguments()
    if args.command == "record":
        return record(ROOT, args.record, args.tests, args.jobs)
    if args.command == "choose":
        return choose_all(args)
    if args.command == "run":
        return run_all(args)
    if args.command == "show":
        show(load(args.list), args.only)
        return 0
    for place in all_places():
        if fnmatch(place.mutant.name, args.only):
            print(json.dumps(asdict(place.mutant), ensure_ascii=False, indent=1))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on from here")
    except (ImportError, OSError, ValueError) as error:
        sys.exit(str(error))
