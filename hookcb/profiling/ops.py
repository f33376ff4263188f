"""Events recorded by torch's profiler as plain values, and how they nest."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

PYTHON_NAME = re.compile(r"\.py\(\d+\): |^<built-in |^nn\.Module: ")  # of an event of a Python function
MEMORY = "[memory]"  # name of an event without duration: bytes were allocated or freed
RUNS_NODE = "autograd::engine::evaluate_function: "  # the autograd engine runs a node of the graph
# calls that make the host wait for the device; a copy to the host is followed by the first of them
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


class Op(NamedTuple):
    """An operator or range, or an instant with `nbytes`; times in nanoseconds of one clock.

    Attributes:
        name: name of the operator or range.
        start, end: when it began and ended.
        thread: torch's number of its thread.
        sequence: number shared by an operator of the forward and the graph node it made; -1 if none.
        forward_thread: for a node, the thread that its operator ran in.
        device_time: time of the kernels that it launched itself.
        flops: as counted by torch, which knows matrix products, 2d convolutions and additions, among others.
        nbytes: bytes allocated, or freed if negative.
        is_python: whether it is a Python function.
    """

    name: str
    start: int
    end: int
    thread: int
    sequence: int
    forward_thread: int
    device_time: int
    flops: int
    nbytes: int
    is_python: bool

    @property
    def time(self) -> int:
        """Duration in nanoseconds."""
        return self.end - self.start


def read_ops(events: Iterable[Any]) -> list[Op]:
    """Events of a torch profiler, sorted by thread and start, outer before inner.

    Args:
        events: `profile.profiler.kineto_results.events()`; reading them is 4 to 9 times faster than
            `key_averages()`.
    """
    kernels: defaultdict[int, int] = defaultdict(int)  # by the operator that launched them
    on_host = []
    for e in events:
        if e.device_type().name == "CPU" or e.name() == MEMORY:
            on_host.append(e)
        elif not e.is_user_annotation():  # else a range of the host, repeated on the device
            kernels[e.linked_correlation_id()] += e.duration_ns()
    ops = [_read(e, kernels) for e in on_host if not e.is_async()]
    return sorted(ops, key=lambda op: (op.thread, op.start, -op.end))


def _read(e: Any, kernels: defaultdict[int, int]) -> Op:
    start = e.start_ns()
    return Op(
        name=e.name(),
        start=start,
        end=start + e.duration_ns(),
        thread=e.start_thread_id(),
        sequence=e.sequence_nr(),
        forward_thread=e.fwd_thread_id(),
        device_time=kernels.get(e.correlation_id(), 0) if e.linked_correlation_id() == 0 else 0,
        flops=e.flops(),
        nbytes=e.nbytes(),
        is_python=is_python_function(e),
    )


def is_python_function(event: Any) -> bool:
    """Whether an event is a call of a Python function; torch 2.6 does not say, so there by its name."""
    known = getattr(event, "is_python_function", None)
    return bool(PYTHON_NAME.search(event.name())) if known is None else bool(known())


def parents(ops: list[Op]) -> list[int]:
    """Index of the innermost operator around each of `ops`, which are sorted as by `read_ops`; -1 if none."""
    outer, open_ones = [], list[int]()
    for i, op in enumerate(ops):
        while open_ones and (ops[open_ones[-1]].thread != op.thread or ops[open_ones[-1]].end < op.end):
            open_ones.pop()
        outer.append(open_ones[-1] if open_ones else -1)
        if op.name != MEMORY:
            open_ones.append(i)
    return outer


def self_times(ops: list[Op], parent: list[int]) -> list[int]:
    """Nanoseconds of each operator without the operators inside it."""
    times = [op.time for op in ops]
    for op, outer in zip(ops, parent, strict=True):
        if outer >= 0:
            times[outer] -= op.time
    return times


def stacks(ops: list[Op]) -> Iterator[tuple[tuple[str, ...], Op, int]]:
    """Operators with the Python functions that called them, outermost first, and their self time.

    Source: the format is that of B. Gregg's FlameGraph and torch's `export_stacks`.
    """
    nest = parents(ops)
    own_times = self_times(ops, nest)
    callers: list[tuple[str, ...]] = []
    for op, outer, time in zip(ops, nest, own_times, strict=True):
        around = callers[outer] if outer >= 0 else ()
        callers.append((*around, op.name) if op.is_python else around)
        if not op.is_python and around:
            yield around, op, time
