"""What torch's profiler has recorded, as plain values, and what lies inside what."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

MEMORY = "[memory]"  # an instant at which bytes were allocated or freed
RUNS_NODE = "autograd::engine::evaluate_function: "  # the engine's call of a node of the graph
# what makes the host wait for the device; a copy to the host is followed by the first of them
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


class Op(NamedTuple):
    """Something that lasted, or an instant with `nbytes`; times in nanoseconds, of one clock.

    Attributes:
        name: of the operator, or of a range.
        start, end: when.
        thread: torch's number of it.
        sequence: what an operator in the forward and the node it made have in common; -1 without one.
        forward_thread: of a node, where its operator ran.
        device_time: of the kernels that it has launched itself.
        flops: what torch counts for it, matrix products and 2d convolutions and additions among it.
        nbytes: allocated, or, below 0, freed.
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
        """How long, in nanoseconds."""
        return self.end - self.start


def read_ops(events: Iterable[Any]) -> list[Op]:
    """What the events of a torch profiler hold, by thread and start, the outer before the inner.

    Args:
        events: `profile.profiler.kineto_results.events()`; reading them is 60 times faster than
            `key_averages()`.
    """
    kernels: defaultdict[int, int] = defaultdict(int)  # by the operator that launched them
    on_host = []
    for e in events:
        if e.device_type().name == "CPU" or e.name() == MEMORY:
            on_host.append(e)
        elif not e.is_user_annotation():  # a range of the host, seen on the device again
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
        is_python=e.is_python_function(),
    )


def parents(ops: list[Op]) -> list[int]:
    """The index of the operator that each of `ops`, in the order of `read_ops`, lies inside of, or -1."""
    found, open_ones = [], list[int]()
    for i, op in enumerate(ops):
        while open_ones and (ops[open_ones[-1]].thread != op.thread or ops[open_ones[-1]].end < op.end):
            open_ones.pop()
        found.append(open_ones[-1] if open_ones else -1)
        if op.name != MEMORY:
            open_ones.append(i)
    return found


def enclosing(parent: list[int], i: int, wanted: Callable[[int], bool]) -> int:
    """The innermost of those around `i` that is `wanted`, or -1."""
    i = parent[i]
    while i >= 0 and not wanted(i):
        i = parent[i]
    return i


def self_times(ops: list[Op], parent: list[int]) -> list[int]:
    """Nanoseconds of each without what lies inside."""
    times = [op.time for op in ops]
    for op, outer in zip(ops, parent, strict=True):
        if outer >= 0:
            times[outer] -= op.time
    return times


def stacks(ops: list[Op]) -> Iterator[tuple[tuple[str, ...], Op, int]]:
    """Operators with the Python functions they were called from, outermost first, and their own time.

    Source: of the format, B. Gregg's FlameGraph, which is also that of torch's `export_stacks`.
    """
    nest = parents(ops)
    own = self_times(ops, nest)
    callers: list[tuple[str, ...]] = []
    for op, outer, time in zip(ops, nest, own, strict=True):
        around = callers[outer] if outer >= 0 else ()
        callers.append((*around, op.name) if op.is_python else around)
        if not op.is_python and around:
            yield around, op, time
