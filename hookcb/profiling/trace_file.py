"""Chrome traces of torch's profiler, with the backward of each layer added."""

import gzip
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from torch.profiler import profile

from hookcb.core.clock import PHASES
from hookcb.core.console import warn
from hookcb.core.whole import rank_file, write_whole
from hookcb.profiling.attribution import Span
from hookcb.profiling.ranges import STEP

SUFFIXES = (".json", ".json.gz")
CATEGORY = "backward_by_layer"
TITLE = "backward by layer"
OWN_THREAD = 1 << 30  # in the trace; above the numbers of real threads


def take_trace(prof: profile, spans: list[Span], steps: list[int]) -> bytes:
    """Trace of a stopped profiler as gzipped JSON; a profiler writes its trace only once.

    Args:
        prof: the profiler.
        spans: spans of the backward, by layer.
        steps: the steps that count; ranges of other steps, which were cut short, are left out.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        prof.export_chrome_trace(str(file))
        written = file.read_bytes()
    try:
        trace = json.loads(written)
    except ValueError:  # torch does not escape names; some viewers are lenient
        invalid = "torch wrote a trace that is not valid JSON; it has no backward by layer"
        warn(invalid, stacklevel=2, is_of_rank=True)
        return gzip.compress(written, compresslevel=1)
    added = backward_events(spans, trace.get("baseTimeNanoseconds", 0))
    trace["traceEvents"] = [*_without_broken_steps(trace["traceEvents"], steps), *added]
    return gzip.compress(json.dumps(trace).encode(), compresslevel=1)


def _without_broken_steps(events: list[dict[str, Any]], steps: list[int]) -> Iterator[dict[str, Any]]:
    """Events without the ranges of unfinished steps; if a step was repeated, its last range stays."""
    ranges = [e for e in events if e.get("cat") == "user_annotation" and _is_ours(e["name"])]
    last = {e["name"]: e for e in sorted(ranges, key=lambda e: e["ts"])}
    whole = [last[name] for step in steps if (name := f"{STEP}{step}") in last]
    broken = {id(e) for e in ranges if not any(_is_inside(e, step) for step in whole)}
    return (e for e in events if id(e) not in broken)


def _is_ours(name: str) -> bool:
    return name in PHASES or name.startswith(STEP)


def _is_inside(event: Mapping[str, Any], step: Mapping[str, Any]) -> bool:
    """Whether `event` is `step` or inside it."""
    return bool(step["ts"] <= event["ts"] <= event["ts"] + event["dur"] <= step["ts"] + step["dur"])


def backward_events(spans: Iterable[Span], base: int) -> list[dict[str, Any]]:
    """Spans of the backward as events of a Chrome trace, in a separate row, nested like the layers.

    Args:
        spans: spans sorted by start.
        base: the time, in nanoseconds, at which the microseconds of the trace are 0.
    """
    pid = os.getpid()
    events: list[dict[str, Any]] = []
    open_ones: list[tuple[tuple[str, int], dict[str, Any]]] = []
    for span in spans:
        start, end = (span.start - base) / 1000, (span.end - base) / 1000  # microseconds
        same = takewhile(lambda pair: pair[0][0] == pair[1], zip(open_ones, span.path, strict=False))
        del open_ones[len(list(same)) :]
        for call in span.path[len(open_ones) :]:
            event: dict[str, Any] = {"ph": "X", "cat": CATEGORY, "name": call[0], "ts": start}
            event |= {"pid": pid, "tid": OWN_THREAD}
            open_ones.append((call, event))
            events.append(event)
        for _, event in open_ones:
            event["dur"] = end - event["ts"]
    return [*_names_of_row(pid), *events] if events else []


def _names_of_row(pid: int) -> list[dict[str, Any]]:
    row = {"ph": "M", "pid": pid, "tid": OWN_THREAD, "ts": 0}
    return [
        row | {"name": "thread_name", "args": {"name": TITLE}},
        row | {"name": "thread_sort_index", "args": {"sort_index": OWN_THREAD}},
    ]


def check_trace(trace: str | Path | None) -> Path | None:
    """Path for traces: a file if it ends in .json or .json.gz, else a folder.

    Raises:
        TypeError: If it is not a path.
        ValueError: If it has another suffix, or a folder is at the path of the file.
    """
    if trace is None:
        return None
    if not isinstance(trace, str | Path):
        raise TypeError(f"trace is {trace!r:.80}; give a file, trace.json or trace.json.gz, or a folder")
    path = Path(trace)
    if is_file(path) and path.is_dir():
        raise ValueError(f"trace is {str(path)!r}, which is a folder; give a file, or a folder without .json")
    if not is_file(path) and (path.is_file() or (path.suffix and not path.is_dir())):
        raise ValueError(
            f"trace is {str(path)!r}; give a file, .json or .json.gz, or a folder without a suffix"
        )
    return path.absolute()


def is_file(path: Path) -> bool:
    """Whether the name is that of a trace file, rather than of a folder for traces."""
    return path.name.endswith(SUFFIXES)


def cycle_file(trace: Path, cycle: int, rank: int = 0) -> Path:
    """File for the trace of a cycle, `trace-2.rank1.json`, where the first and rank 0 are left out.

    In a folder, its name is one that TensorBoard's plugin finds.
    """
    if not is_file(trace):
        worker = f"{socket.gethostname()}_{os.getpid()}" + (f"_rank{rank}" if rank else "")
        return trace / f"{worker}.{time.time_ns()}.pt.trace.json.gz"
    stem, dot, suffix = trace.name.partition(".json")
    named = f"{stem}-{cycle + 1}" if cycle else stem
    return rank_file(trace.with_name(f"{named}{dot}{suffix}"), rank)


def write_trace(trace: bytes, path: Path) -> Path:
    """Writes a gzipped trace, unpacked unless `path` ends in .gz; never leaves a partial file.

    Returns:
        The path written; its folder is created if missing.
    """
    content = trace if path.suffix == ".gz" else gzip.decompress(trace)
    return write_whole(path, lambda opened: opened.write(content))
