"""Step, phase and layer of each operator that torch's profiler recorded."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from hookcb.core.clock import PHASES
from hookcb.profiling.ops import RUNS_NODE, Op, parents
from hookcb.profiling.ranges import FORWARD, RECOMPUTED, STEP

COMPILED = "Torch-Compiled Region: "  # torch's name for the range of a call of a compiled graph


class Span(NamedTuple):
    """A part of a backward pass that belongs to a layer."""

    path: tuple[tuple[str, int], ...]  # calls, outermost first: label, and a number unique to the call
    start: int
    end: int


class _Place(NamedTuple):
    step: int | None = None
    phase: str = ""


class Attribution:
    """Step, phase and layer of each operator of a window.

    An operator of the forward belongs to the innermost layer whose range is around it. A node of the graph
    belongs to the layer in which the operator ran that made it; both have the same sequence number. The node
    that accumulates a gradient into `.grad` has no such number; it runs right after the one that computes it.

    The arguments are those of `summarize`.
    """

    def __init__(self, ops: list[Op], range_layers: Mapping[str, str], steps: Iterable[int]) -> None:
        self.ops = [op for op in ops if not op.is_python]
        self.range_layers = range_layers
        self.parent = parents(self.ops)
        names = {f"{STEP}{step}": step for step in steps}
        # a fetch without a batch has a range too, with the same number as the step that came later
        last = {op.name: i for i, op in sorted(enumerate(self.ops), key=lambda item: item[1].start)}
        self.steps = {last[name]: step for name, step in names.items() if name in last}
        self.places = self._places()
        self.calls = self._calls({})
        self.calls = self._calls(self._makers())
        self.owners = [None if call < 0 else self._layer(call) for call in self.calls]

    def starts_range(self, i: int) -> bool:
        """Whether a span of a layer begins with `ops[i]`."""
        name = self.ops[i].name
        return name in self.range_layers or name.startswith((RUNS_NODE, COMPILED))

    def range_starts(self) -> Iterator[tuple[int, int]]:
        """Indices of operators that begin a span, each with that of the span around it, or -1."""
        around: list[int] = []
        for i, outer in enumerate(self.parent):
            inside = around[outer] if outer >= 0 else -1
            if self.starts_range(i):
                yield i, inside
                inside = i
            around.append(inside)

    def spans(self) -> list[Span]:
        """Spans of the backward in the steps that count, sorted by start."""
        inner = defaultdict[int, list[int]](list)
        for i, inside in self.range_starts():
            if self.places[i].phase == "backward":
                inner[inside].append(i)
        spans = [span for i in inner[-1] for span in self._spans(i, inner, ())]
        return sorted(spans, key=lambda span: span.start)

    def _spans(
        self, i: int, inner: Mapping[int, list[int]], around: tuple[tuple[str, int], ...]
    ) -> Iterator[Span]:
        """Spans of `ops[i]` itself, and between them those inside it, of layers that are recomputed."""
        calls = self._path(i) if self.calls[i] >= 0 else ()
        path = (*around, *(call for call in calls if call not in around))
        start = self.ops[i].start
        for j in inner.get(i, ()):
            yield from [Span(path, start, self.ops[j].start)] if path else []
            yield from self._spans(j, inner, path)
            start = self.ops[j].end
        yield from [Span(path, start, self.ops[i].end)] if path else []

    def _path(self, i: int) -> tuple[tuple[str, int], ...]:
        """Calls that made the node, or that are recomputed."""
        around = [call := self.calls[i]]
        while (call := self.parent[call]) >= 0:
            around += [call] if self.calls[call] == call else []
        return tuple((self._label(call, of_node=self.calls[i] != i), call) for call in reversed(around))

    def _label(self, call: int, of_node: bool) -> str:
        name = self.ops[call].name
        return f"backward {name.removeprefix(RECOMPUTED)}" if of_node else name

    def _places(self) -> list[_Place]:
        places: list[_Place] = []
        for i, (op, outer) in enumerate(zip(self.ops, self.parent, strict=True)):
            place = places[outer] if outer >= 0 else _Place()
            if i in self.steps:
                place = _Place(self.steps[i])
            elif outer in self.steps and op.name in PHASES:
                place = place._replace(phase=op.name)
            places.append(place)
        return self._of_other_threads(places)

    def _of_other_threads(self, places: list[_Place]) -> list[_Place]:
        """Adds places of operators outside the ranges: the autograd engine has a thread for each device."""
        phases = sorted(
            (self.ops[i].start, self.ops[i].end, place)
            for i, place in enumerate(places)
            if place.phase and self.parent[i] in self.steps
        )
        starts = [start for start, _, _ in phases]

        def at(time: int) -> _Place:
            before = bisect_right(starts, time) - 1
            return phases[before][2] if before >= 0 and time < phases[before][1] else _Place()

        for i, outer in enumerate(self.parent):
            if places[i].step is None:
                places[i] = places[outer] if outer >= 0 else at(self.ops[i].start)
        return places

    def _layer(self, call: int) -> str:
        name = self.ops[call].name
        return self.range_layers.get(name, name)

    def _calls(self, makers: Mapping[tuple[int, int], int]) -> list[int]:
        """Index of the range that each operator belongs to, or -1."""
        calls: list[int] = []
        last: dict[int, int] = {}  # range of the node that ran last, by thread
        for i, (op, outer) in enumerate(zip(self.ops, self.parent, strict=True)):
            call = calls[outer] if outer >= 0 else -1
            if op.name in self.range_layers or op.name.startswith(COMPILED):
                call = i
            elif op.name.startswith(RUNS_NODE):
                made_in = makers.get((op.forward_thread, op.sequence), -1)
                call = last[op.thread] = made_in if op.sequence >= 0 else last.get(op.thread, -1)
            calls.append(call if self.places[i].phase in (*FORWARD, "backward") else -1)
        return calls

    def _makers(self) -> dict[tuple[int, int], int]:
        """Range in which each node was made, by thread and sequence number.

        An operator that makes no node also has the number of the next one, so the last with a number counts.
        """
        ran = sorted(
            (op.start, (op.thread, op.sequence), i)
            for i, op in enumerate(self.ops)
            if op.sequence >= 0 and not op.forward_thread
        )
        return {key: self.calls[i] for _, key, i in ran}
