"""Reads the Chrome traces that ProfilerCallback writes, by the format alone; and what its tests share."""

import gzip
import itertools
import json
import re
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule

from hookcb import ProfilerCallback, assert_no_hooks
from tests.ranks.support import launched, shared
from tests.support import fit

PHASES = ["data", "forward", "loss", "backward", "optimizer", "callbacks"]
SLACK = 0.01  # microseconds: what is lost of a nanosecond in a float that counts from the boot
LAYER = re.compile(r"(?P<name>(?!backward ).+) \((?P<type>[A-Za-z_]\w*)\)(?: #(?P<call>[1-9]\d*))?")
BACKWARD = re.compile(r"backward (?P<name>.+?)(?: \((?P<type>[A-Za-z_]\w*)\))?(?: #(?P<call>[1-9]\d*))?")


class Range(NamedTuple):
    name: str
    start: float
    end: float
    row: tuple
    cat: str

    def holds(self, other):
        return self.start <= other.start + SLACK and other.end <= self.end + SLACK

    @property
    def seconds(self):
        return (self.end - self.start) / 1e6


def read(path):
    data = Path(path).read_bytes()
    assert (data[:2] == b"\x1f\x8b") == str(path).endswith(".gz"), path
    return json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)


class Trace:
    """The whole ranges of a trace, and the names of its rows."""

    def __init__(self, path):
        events = read(path)["traceEvents"]
        self.ranges = [
            Range(e["name"], e["ts"], e["ts"] + e["dur"], (e["pid"], e["tid"]), e.get("cat", ""))
            for e in events
            if e.get("ph") == "X"
        ]
        self.row_names = {
            (e["pid"], e["tid"]): e["args"]["name"]
            for e in events
            if e.get("ph") == "M" and e["name"] == "thread_name"
        }

    def named(self, *names):
        return sorted((r for r in self.ranges if r.name in names), key=lambda r: (r.start, -r.end))

    def matching(self, pattern):
        found = [r for r in self.ranges if re.fullmatch(pattern, r.name) and r.cat != "Trace"]
        return sorted(found, key=lambda r: (r.start, -r.end))

    @property
    def steps(self):
        """Steps by number; each is present once."""
        found = [(int(r.name.split("#")[1]), r) for r in self.matching(r"ProfilerStep#\d+")]
        assert len(dict(found)) == len(found), [n for n, _ in found]
        return dict(sorted(found))

    def layers(self, root):
        """Ranges of the forwards of layers, including the model itself."""
        return self.matching(f"{LAYER.pattern}|{root}(?: #[1-9][0-9]*)?")

    @property
    def backwards(self):
        return self.matching(BACKWARD)

    def count(self, name, within=None):
        return sum(within is None or within.holds(r) for r in self.named(name))


def tree(ranges):
    """Nested lists `[name, *children]` of what holds what, in the order of time."""
    top, stack = [], []
    for r in ranges:
        while stack and not stack[-1][0].holds(r):
            stack.pop()
        node = [r.name]
        (stack[-1][1] if stack else top).append(node)
        stack.append((r, node))
    return top


def assert_nested(trace):
    """Ranges of a row are nested or disjoint, except for those of Python functions that torch cuts short."""
    rows = {}
    for r in trace.ranges:
        if r.cat == "python_function":
            continue
        rows.setdefault(r.row, []).append(r)
    for row, ranges in rows.items():
        stack = []
        for r in sorted(ranges, key=lambda r: (r.start, -r.end)):
            while stack and stack[-1].end <= r.start + SLACK:
                stack.pop()
            assert not stack or stack[-1].holds(r), (row, stack[-1], r)
            stack.append(r)


def assert_phases_in_steps(trace):
    """Each phase lies in a step, and they follow one another."""
    steps = trace.steps.values()
    phases = trace.named(*PHASES)
    for phase in phases:
        assert any(step.holds(phase) for step in steps), phase
    for one, other in itertools.pairwise(phases):
        assert one.end <= other.start + SLACK, (one, other)


def whole(path):
    """The trace at `path`, after all has been checked that every trace keeps."""
    trace = Trace(path)
    assert_nested(trace)
    assert_phases_in_steps(trace)
    return trace


def chosen(n, wait=1, warmup=1, active=3, repeat=1):
    """The steps of `n` that torch's own schedule profiles."""
    with warnings.catch_warnings(action="ignore"):  # torch warns if there is no warmup
        plan = schedule(wait=wait, warmup=warmup, active=active, repeat=repeat)
    return [k for k in range(n) if plan(k) in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)]


def profiled(learn, n_epoch=1, *, cbs=(), **options):
    """Fits with a ProfilerCallback, which it returns, and checks that nothing stays behind."""
    profiler = ProfilerCallback(**options)
    with nothing_left(learn):
        fit(learn, n_epoch, cbs=[profiler, *cbs])
    return profiler


@contextmanager
def nothing_left(learn):
    """Checks after the block that neither hooks nor callbacks nor a profiler are left, and one can start."""
    names = [cb.name for cb in learn.cbs]
    yield
    assert_clean(learn)
    assert [cb.name for cb in learn.cbs] == names


def assert_clean(learn):
    assert_no_hooks(learn.model)
    assert not torch.autograd._profiler_enabled()
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        torch.ones(2).add(1)
    assert "aten::add" in {e.key for e in prof.key_averages()}


def exported(profiler, folder, name="exported.json", **options):
    """The trace that `profiler` exports into `folder`."""
    profiler.export_chrome_trace(folder / name, **options)
    return whole(folder / name)


def facts_of_ranks(tmp_path_factory):
    """What two ranks saw of their timers, profilers and logs, by case; for all tests of a session."""
    worker = Path(__file__).with_name("ranks_worker.py")
    facts = shared(tmp_path_factory, "profiling", lambda folder: launched(worker, folder, timeout=180.0))
    assert [rank["exit"] for rank in facts] == [0, 0], [rank["log"][-2000:] for rank in facts]
    return facts
