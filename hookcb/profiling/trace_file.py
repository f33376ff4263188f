"""Chrome traces: what torch's profiler writes, with the backward of each layer added."""

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

from hookcb.core.console import warn
from hookcb.core.files import write_whole
from hookcb.profiling.attribution import Span
from hookcb.profiling.phases import PHASES
from hookcb.profiling.ranges import STEP

SUFFIXES = (".json", ".json.gz")
CATEGORY = "backward_by_layer"
TITLE = "backward by layer"
OWN_THREAD = 1 << 30  # in the trace, beside the numbers of real threads


def take_trace(
    prof: profile,
    spans: list[Span],
    steps: list[int],
) -> bytes:
    """The trace of a profiler that has stopped, as gzipped JSON; it gives it once only.

    Args:
        prof: the profiler.
        spans: the backward of layers.
        steps: those that count; of others, which were cut short, the range is left out.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        prof.export_chrome_trace(str(file))
        written = file.read_bytes()
    try:
        trace = json.loads(written)
    except ValueError:  # torch does not escape what it writes; some viewers are more lenient
        warn("torch has written a trace that is no JSON, and the backward is missing in it", stacklevel=2)
        return gzip.compress(written, compresslevel=1)
    added = backward_events(spans, trace.get("baseTimeNanoseconds", 0))
    trace["traceEvents"] = [*_without_broken_steps(trace["traceEvents"], steps), *added]
    return gzip.compress(json.dumps(trace).encode(), compresslevel=1)


def _without_broken_steps(events: list[dict[str, Any]], steps: list[int]) -> Iterator[dict[str, Any]]:
    """Leaves out the ranges of steps that did not come to their end; of one tried again, the last stays."""
    ranges = [e for e in events if e.get("cat") == "user_annotation" and _is_ours(e["name"])]
    last = {e["name"]: e for e in sorted(ranges, key=lambda e: e["ts"])}
    whole = [last[name] for step in steps if (name := f"{STEP}{step}") in last]
    broken = {id(e) for e in ranges if not any(_is_inside(e, step) for step in whole)}
    return (e for e in events if id(e) not in broken)


def _is_ours(name: str) -> bool:
    return name in PHASES or name.startswith(STEP)


def _is_inside(event: Mapping[str, Any], step: Mapping[str, Any]) -> bool:
    """Whether it is the step, or in it."""
    return bool(step["ts"] <= event["ts"] <= event["ts"] + event["dur"] <= step["ts"] + step["dur"])


def backward_events(spans: Iterable[Span], base: int) -> list[dict[str, Any]]:
    """The backward of layers as events of a Chrome trace, in a row of their own, nested as the layers are.

    Args:
        spans: in order of time.
        base: the time, in nanoseconds, that a trace counts its microseconds from.
    """
    pid = os.getpid()
    events: list[dict[str, Any]] = []
    open_ones: list[tuple[tuple[str, int], dict[str, Any]]] = []
    for span in spans:
        start, end = (span.start - base) / 1000, (span.end - base) / 1000  # the events' unit
        same = takewhile(lambda pair: pair[0][0] == pair[1], zip(open_ones, span.path, strict=False))
        del open_ones[len(list(same)) :]
        for call in span.path[len(open_ones) :]:
            event: dict[str, Any] = {
                "ph": "X",
                "cat": CATEGORY,
                "name": call[0],
                "pid": pid,
                "tid": OWN_THREAD,
            }
            open_ones.append((call, event | {"ts": start}))
            events.append(open_ones[-1][1])
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
    """Where traces go: a file by its suffix, or a folder.

    Raises:
        TypeError: where it is no path.
        ValueError: where its suffix is of another kind of file, or a folder is where the file shall be.
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
    """Whether the name is that of a trace, and not of a folder for some."""
    return path.name.endswith(SUFFIXES)


def cycle_file(trace: Path, cycle: int) -> Path:
    """The file for the trace of a cycle: in a folder, one that TensorBoard's plugin finds."""
    if not is_file(trace):
        return trace / f"{socket.gethostname()}_{os.getpid()}.{time.time_ns()}.pt.trace.json.gz"
    stem, dot, suffix = trace.name.partition(".json")
    return trace.with_name(f"{stem}-{cycle + 1}{dot}{suffix}") if cycle else trace


def write_trace(trace: bytes, path: Path) -> Path:
    """Writes a gzipped trace, unpacked unless `path` ends in .gz; it is there whole or not at all.

    Returns:
        The path written; its folder is made where it is missing.
    """
    content = trace if path.suffix == ".gz" else gzip.decompress(trace)
    return write_whole(path, lambda opened: opened.write(content))
